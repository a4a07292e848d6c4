"""A text-to-image directory from the command line: photographs with captions in, samples of prompts out."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

import trueup

import pipelines
from commandline import refused, trueup_command
from tiny import save, tiny_unet


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A small Stable Diffusion, photographs of many sizes with captions, and prompts."""
    folder = tmp_path_factory.mktemp("text")
    pipelines.sd().save_pretrained(folder / "sd")
    (folder / "photos").mkdir()
    rows, rng = ["file_name,text"], np.random.default_rng(0)
    for k in range(24):
        small = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
        small.resize((30 + k, 40)).save(folder / "photos" / f"{k}.png")
        rows.append(f"{k}.png,{('a cat', 'the dog', 'a red house')[k % 3]}")
    (folder / "photos" / "metadata.csv").write_text("\n".join(rows))
    (folder / "prompts.txt").write_text("a cat\n\nthe small house\n")
    return folder


def test_photographs_with_captions_make_a_calibration_and_a_solver_for_prompts(here):
    out = here / "sd.safetensors"
    common = ("--prompts", here / "prompts.txt", "--guidance", 7.5, "--nfe", 3)
    how = ("--data", here / "photos", "--trust", "--no-samples", "--trajectories", 32, "-o", out)
    done = trueup_command("calibrate", here / "sd", *how, *common)
    assert done.returncode == 0, done.stderr
    assert "resized by their shorter side and cropped to 16x16" in done.stderr
    assert "Loading" not in done.stderr
    assert "transformers" not in done.stderr
    made = trueup.load(out)
    assert made.shape == (4, 8, 8)
    assert made.evidence.images == 24
    assert made.solver(3, 7.5).provenance["labels"] == "2 prompts"
    assert made.provenance["size"] == [16, 16]
    drawn = trueup_command(
        "sample", here / "sd", "--calibration", out, *common, "-n", 3, "-o", here / "x.png"
    )
    assert drawn.returncode == 0, drawn.stderr
    assert "fitted in 3 evaluations" in drawn.stderr
    assert Image.open(here / "x.png").size[1] >= 16
    unguided = trueup_command("sample", here / "sd", "--calibration", out, *common[:2], "--solver", "fitted")
    refused(trueup_command("sample", here / "sd", "--labels", "0-3", "-o", here / "y.png"), "pass --prompts")
    assert unguided.returncode == 2
    save(tiny_unet(), here / "unet")
    other = trueup_command("sample", here / "unet", "--calibration", out, "-o", here / "y.png")
    refused(other, "and this one has one size: calibrate this model, or name its own calibration")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sample", "-o", "y.png"), "say which prompts to sample as --prompts"),
        (("sample", "-o", "y.png", "--prompts", "none.txt"), "'none.txt' cannot be read: a text file"),
        (("sample", "-o", "y.png", "--size", "9"), "'9' is not HEIGHTxWIDTH, for instance 512x768"),
        (
            ("calibrate", "-o", "y.safetensors", "--per-class", "--quiet", "--data", "photos"),
            "prompts, which are no classes",
        ),
    ],
)
def test_mistakes_are_said_in_a_line(here, monkeypatch, arguments, message):
    monkeypatch.chdir(here)
    command, *more = arguments
    refused(trueup_command(command, "sd", *more), message)


def test_the_likelihood_of_latents_is_a_density(here):
    how = ("--data", here / "photos", "--images", 4, "--trust", "--json")
    done = trueup_command("likelihood", here / "sd", *how)
    assert done.returncode == 0, done.stderr
