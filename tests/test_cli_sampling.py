"""`trueup sample`, `evaluate` and `calibrate --generated` through the real command."""

import json
import sys
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import trueup
from trueup import typed
from trueup.hf import as_denoiser
from trueup.metrics import loading
from trueup.sampling import DPMSolver, pictures, register, solver
from trueup.sampling.store import Output
from trueup.solvers import SCHEDULERS

from commandline import in_process, refused, trueup_command
from tiny import save, tiny_unet


@pytest.fixture(scope="module")
def calibration(model, images, tmp_path_factory):
    out = tmp_path_factory.mktemp("cal") / "x.trueup.safetensors"
    trueup.calibrate(str(model), images, trust=True).save(out)
    return out


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    """A latent model: a U-Net on two channels with its autoencoder beside it."""
    folder = tmp_path_factory.mktemp("latent")
    save(tiny_unet(in_channels=2, out_channels=2), folder / "unet")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=2,
        norm_num_groups=2,
    )
    vae.save_pretrained(folder / "vae")
    return folder


def test_samples_are_those_of_the_library(model, calibration, tmp_path):
    base = ("sample", model, "-n", 5, "--nfe", 6, "--seed", 2)
    for name in ("folder", "x.npz", "x.png"):
        done = trueup_command(*base, "-o", tmp_path / name, "--calibration", calibration)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        assert "5 samples, calibrated" in done.stderr
    x = trueup.sample(as_denoiser(str(model)), 5, nfe=6, seed=2, calibration=calibration)
    expected = pictures(x, (-1.0, 1.0)).permute(0, 2, 3, 1).numpy()
    found = np.load(tmp_path / "x.npz")["images"]
    assert np.abs(found.astype(int) - expected).max() <= 1
    pngs = [np.asarray(Image.open(tmp_path / "folder" / f"{i:06d}.png")) for i in range(5)]
    assert np.array_equal(np.stack(pngs), found[..., 0])
    assert Image.open(tmp_path / "x.png").size == (3 * 10 - 2, 2 * 10 - 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "x.npz", "x.png"]


def test_more_samples_are_added_to_a_folder(model, tmp_path):
    base = ("sample", model, "--nfe", 3, "--solver", "ddim", "-o", tmp_path / "f", "--json")
    assert trueup_command(*base, "-n", 3).returncode == 0
    first = (tmp_path / "f" / "000000.png").stat().st_mtime_ns
    done = trueup_command(*base, "-n", 5)
    said = json.loads(done.stdout)
    assert (said["samples"], said["evaluations"]) == (5, 3)
    assert len(list((tmp_path / "f").glob("*.png"))) == 5
    assert (tmp_path / "f" / "000000.png").stat().st_mtime_ns == first
    refused(trueup_command(*base, "-n", 5, "--seed", 1), "another seed")
    refused(trueup_command(*base, "-n", 5, "--model-range", "0,1"), "another model range")
    assert trueup_command(*base, "-n", 2, "--seed", 1, "--force").returncode == 0
    assert len(list((tmp_path / "f").glob("*.png"))) == 2


def test_ctrl_c_keeps_what_was_drawn(model, tmp_path, monkeypatch):
    base = ("sample", model, "-n", 8, "--nfe", 3, "--batch-size", 2, "-o")
    kept, drawn = Output.add, []

    def add(self, index, images):
        if len(drawn) == 2:
            raise KeyboardInterrupt
        drawn.append(index)
        kept(self, index, images)

    with monkeypatch.context() as patch:
        patch.setattr(Output, "add", add)
        done = trueup_command(*base, tmp_path / "x.npz")
    assert done.returncode == 130
    assert f"kept in {tmp_path / 'x.npz.run'}: run the same command again" in done.stderr
    assert not (tmp_path / "x.npz").exists()
    assert trueup_command(*base, tmp_path / "x.npz").returncode == 0
    assert trueup_command(*base, tmp_path / "whole.npz").returncode == 0
    one, other = (np.load(tmp_path / name)["images"] for name in ("x.npz", "whole.npz"))
    assert np.array_equal(one, other)


def test_evaluate_writes_what_it_prints(model, images, calibration, tmp_path):
    out, reference = tmp_path / "c.json", tmp_path / "r.safetensors"
    base = ("evaluate", model, "--calibration", calibration, "--features", "pixels", "-n", 12)
    base = (*base, "--solver", "dpm-solver-2,ddim", "--nfe", 4)
    done = trueup_command(*base, "--data", images, "--save-reference", reference, "-o", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  Fréchet distance") == 2
    assert "dpm-solver-2, 4 evaluations, 12 samples, seed 0" in done.stdout
    said = json.loads(out.read_text())
    assert [row["solver"] for row in said["rows"]] == ["dpm-solver-2", "ddim"]
    refused(trueup_command(*base, "--data", images, "-o", out), "exists")
    again = trueup_command(*base, "--reference", reference, "--json")
    from_reference = json.loads(again.stdout)
    assert from_reference["loss"] is None  # that needs images
    assert said["loss"] is not None
    assert "evaluations of the network: 96 for samples by dpm-solver-2-4" in done.stdout
    left_out = trueup_command(*base, "--data", images, "--no-loss", "--json")
    assert json.loads(left_out.stdout)["loss"] is None
    assert "the denoising loss" not in json.loads(left_out.stdout)["evaluations"]
    assert "the denoising loss" in said["evaluations"]
    for one, other in zip(from_reference["rows"], said["rows"], strict=True):
        assert one["changes"]["frechet"]["after"]["value"] == pytest.approx(
            other["changes"]["frechet"]["after"]["value"], rel=1e-4
        )
    refused(trueup_command(*base[:-4], "--nfe", 4, "--reference", calibration), "reference")
    other = [word if word != "pixels" else "efficientnet" for word in base]
    refused(trueup_command(*other, "--reference", reference), "made with pixels")


def test_a_fitted_solver_is_evaluated_by_name(model, images, calibration, tmp_path):
    out = tmp_path / "s.trueup.safetensors"
    base = ("calibrate", model, "--trajectories", 32, "--nfe", 4, "--calibration", calibration)
    assert trueup_command(*base, "-o", out, "--quiet").returncode == 0
    measured = ("--data", images, "--features", "pixels", "-n", 8, "--solver", "fitted", "--nfe", 4)
    compared = trueup_command("evaluate", model, "--calibration", out, *measured, "--no-loss", "--json")
    row = json.loads(compared.stdout)["rows"][0]
    assert (row["solver"], row["uncalibrated"]) == ("fitted", "unipc")


def test_samples_judge_unless_they_are_left_out(model, images, tmp_path):
    base = ("check", model, "--data", images, "--images", 30, "--trust", "--json", "--quiet")
    seen, left_out = (json.loads(trueup_command(*base, *more).stdout) for more in ((), ("--no-samples",)))
    assert seen["samples"]["trajectories"] == 64
    assert set(seen["samples"]["miss"]) == {"none", "sqrt", "response"}
    assert left_out["samples"] is None
    assert left_out["gains"] == "sqrt"


def test_generated_images_make_a_calibration(model, tmp_path):
    out = tmp_path / "g.trueup.safetensors"
    base = ("calibrate", model, "--generated", 24, "--generate-nfe", 3, "-o", out)
    done = trueup_command(*base)
    assert done.returncode == 0, done.stderr
    assert "24 generated images" in done.stdout
    assert trueup.load(out).generated["nfe"] == 3
    whole = out.read_bytes()
    assert trueup_command(*base, "--force").returncode == 0
    assert out.read_bytes() == whole
    refused(trueup_command(*base, "--force", "--generate-nfe", 2), "at least 3 evaluations")


def test_latents_are_decoded_or_refused_as_pictures(latent, tmp_path):
    done = trueup_command("sample", latent / "unet", "-n", 2, "--nfe", 3, "-o", tmp_path / "decoded")
    assert done.returncode == 0, done.stderr
    assert Image.open(tmp_path / "decoded" / "000001.png").size == (16, 16)
    (latent / "vae").rename(latent / "elsewhere")
    try:
        alone = tmp_path / "alone"
        save(tiny_unet(in_channels=2, out_channels=2), alone)
        (alone.parent / "vae").mkdir()
        (alone.parent / "vae" / "config.json").write_text("{}")
        refused(trueup_command("sample", alone, "-n", 1, "-o", tmp_path / "x", "--nfe", 3), "vae")
    finally:
        (latent / "elsewhere").rename(latent / "vae")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nfe", "2"], "at least 3 evaluations"),
        (["--nfe", "many"], "'many' is not a whole number"),
        (["--nfe", "0"], "'0' is not a whole number"),
        (["--solver", "magic"], "unknown solver 'magic'"),
        (["--solver", "flow-euler"], "does not work with this network"),
        (["--solver", "ddim", "--grid", "logsnr"], "has its own"),
        (["--labels", "a,b"], "not a list of labels"),
        (["--labels", "5-2"], "empty list of labels"),
        (["--labels", "3"], "takes no labels"),
        (["--guidance", "3"], "takes no labels"),
        (["--calibration", "nowhere"], "does not exist"),
        (["--vae", "nowhere"], "does not exist"),
        (["-n", "0"], "'0' is not a whole number"),
    ],
)
def test_samplers_that_cannot_be(capsys, monkeypatch, model, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert words in in_process(capsys, "sample", model, "-o", "out", *arguments)
    assert not any(Path("out").glob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "say what to compare with"),
        (["--data", "IMAGES", "--features", "magic"], "no features are called 'magic'"),
        (["--data", "IMAGES", "--features", "mine:thing"], "cannot import"),
        (["--data", "IMAGES", "--features", "inception", "--weights", "IMAGES"], "Is a directory"),
        (["--data", "IMAGES", "--nfe", "10,x"], "'x' is not a whole number"),
        (["--data", "IMAGES", "--solver", ","], "names no solver"),
        (["--reference", "nowhere"], "does not exist"),
        (["--reference", "IMAGES", "--data", "IMAGES"], "say what to compare with"),
        (["--reference", "IMAGES", "--save-reference", "x"], "leave out --reference"),
        (["--data", "nowhere"], "not there"),
    ],
)
def test_comparisons_that_cannot_be(
    capsys, monkeypatch, model, images, calibration, tmp_path, arguments, words
):
    monkeypatch.chdir(tmp_path)
    given = [str(images) if word == "IMAGES" else word for word in arguments]
    features = [] if "--features" in given else ["--features", "pixels"]
    assert words in in_process(capsys, "evaluate", model, "--calibration", calibration, *features, *given)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sample --solver fooScheduler -o x", "diffusers has no scheduler fooScheduler"),
        ("sample --solver DDIMSchedulr -o x", "unknown solver"),
        ("sample --solver DDDIMScheduler -o x", "did you mean DDIMScheduler?"),
        ("sample --nfe 2 -o x", "dpm-solver-3 needs at least 3 evaluations, not 2"),
        ("sample --solver dpm-solver-2-fixed --nfe 1 -o x", "at least 2 evaluations"),
        ("sample --guidance nan -o x", "'nan' is not a number"),
        ("sample --guidance=-inf -o x", "'-inf' is not a number"),
        ("sample --guidance strong -o x", "'strong' is not a number"),
        ("sample --labels 0-99999999999 -o x", "not a list of labels below a million"),
        ("sample --labels 9999999 -o x", "not a list of labels below a million"),
        ("evaluate --data IMAGES --calibration CAL --features nonsense", "no features are called 'nonsense'"),
        ("evaluate --data IMAGES --calibration CAL --features :x", "no features are called ':x'"),
        ("evaluate --data IMAGES --calibration CAL --weights CAL", "--weights are those of inception"),
        ("evaluate --data IMAGES --calibration CAL --nfe 20,1", "at least 3 evaluations, not 1"),
        ("calibrate --generated 10 --generate-nfe 2 -o x", "at least 3 evaluations, not 2"),
    ],
)
def test_what_needs_no_torch_is_said_before_it_is_loaded(
    capsys, monkeypatch, model, images, calibration, tmp_path, command, words
):
    monkeypatch.setitem(sys.modules, "trueup.commands", None)
    monkeypatch.delattr(trueup, "commands", raising=False)
    monkeypatch.chdir(tmp_path)
    given = [{"IMAGES": images, "CAL": calibration}.get(word, word) for word in command.split()]
    assert words in in_process(capsys, given[0], model, *given[1:])


def test_names_of_features_are_known_without_loading_them():
    assert {*typed.FEATURES} == {*loading.NAMES}
    for name in (*SCHEDULERS, *(kind for kind, _ in SCHEDULERS.values())):
        assert typed.solver(name) == name


def test_labels_are_asked_for_by_their_options(capsys, tmp_path):
    net = save(tiny_unet(num_class_embeds=11), tmp_path / "net")
    base = ("sample", net, "-n", 2, "--nfe", 3, "-o", tmp_path / "x")
    assert "say which labels to sample as --labels" in in_process(capsys, *base)
    guided = (*base, "--labels", "0-9", "--guidance", 2)
    assert "--null-label" in in_process(capsys, *guided)
    assert not (tmp_path / "x").exists()
    assert trueup_command(*guided, "--null-label", 10).returncode == 0
    refused(trueup_command(*guided, "--null-label", 9), "another guidance")


def test_outsiders_solvers_work_by_name(model, tmp_path, monkeypatch):
    """In a process that has registered one."""
    monkeypatch.setattr(solver, "_KNOWN", {**solver._KNOWN})
    register("mine", lambda denoiser: DPMSolver(2, grid="quadratic"))
    done = trueup_command("sample", model, "-n", 1, "--nfe", 4, "--solver", "mine", "-o", tmp_path / "x.npz")
    assert done.returncode == 0, done.stderr


def test_a_folder_of_others_is_not_touched(model, images):
    before = {p: p.read_bytes() for p in images.iterdir()}
    refused(trueup_command("sample", model, "-n", 1, "-o", images), "is not empty")
    assert {p: p.read_bytes() for p in images.iterdir()} == before


def test_a_calibration_of_other_weights_is_refused(calibration, images, tmp_path):
    other = save(tiny_unet(block_out_channels=(16, 16)), tmp_path / "other")
    done = trueup_command("sample", other, "--calibration", calibration, "-o", tmp_path / "x", "-n", 1)
    refused(done, "made for other weights")


def test_data_or_generated_and_not_both(model, images, tmp_path):
    out = tmp_path / "x"
    refused(trueup_command("calibrate", model, "-o", out), "--generated")
    refused(trueup_command("calibrate", model, "-o", out, "--data", images, "--generated", 5), "--generated")
