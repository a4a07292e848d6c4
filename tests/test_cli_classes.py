"""`trueup calibrate --per-class`: one file, its classes in words and in JSON; what cannot work, in a line."""

import json

import numpy as np
import pytest
import torch
from diffusers import UNet2DModel
from PIL import Image

import trueup
from trueup.estimate.run import Run

from commandline import refused, trueup_command
from tiny import save, tiny_unet

QUICK = ("--trust", "--no-samples", "--batch-size", 20)
NULL = 3


def pictures(path, labels):
    """Smooth pictures, one a label, brighter the higher it is; a folder of them where there are none."""
    rng = np.random.default_rng(0)
    labels = np.asarray(labels)
    noise = rng.integers(0, 40, (len(labels), 8, 8, 1))
    images = (60 + 50 * labels[:, None, None, None] + noise).astype(np.uint8)
    np.savez(path, image=images, label=labels)
    return path


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    return save(tiny_unet(num_class_embeds=4), tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """40 pictures of label 0, 25 of 1, 5 of 2."""
    labels = np.random.default_rng(1).permutation([0] * 40 + [1] * 25 + [2] * 5)
    return pictures(tmp_path_factory.mktemp("data") / "data.npz", labels)


@pytest.fixture(scope="module")
def made(net, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "a.safetensors"
    command = ("calibrate", net, "--data", data, "--per-class", "--null-label", NULL, *QUICK)
    done = trueup_command(*command, "-o", out, "--json")
    assert done.returncode == 0, done.stderr
    return command, out, json.loads(done.stdout)


def test_one_file_has_every_class(made):
    _, out, said = made
    cal = trueup.load(out)
    assert [(of.label, of.images) for of in cal.classes] == [(0, 40), (1, 25), (2, 5), (NULL, 70)]
    assert cal.for_class(2) is cal.correction  # five images
    assert any(of.correction is not None for of in cal.classes)  # random weights: classes do differ
    assert [row["label"] for row in said["classes"]] == [0, 1, 2, NULL]
    for row, of in zip(said["classes"], cal.classes, strict=True):
        assert row["images"] == of.images
        assert row["own"] == (of.correction is not None)
        assert set(row["bound_gain"]["nats"]) >= {"value", "low", "high"}
        if row["own"]:
            nats = row["bound_gain"]["nats"]
            assert nats["low"] < nats["value"] < nats["high"]


def test_inspect_lists_classes_with_intervals(made):
    _, out, said = made
    done = trueup_command("inspect", out)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert "gain of a class's own correction over that of all classes, nats of the likelihood bound:" in lines
    assert "  label 2, 5 images: none of its own" in lines
    for row in said["classes"]:
        (line,) = (line for line in lines if line.startswith(f"  label {row['label']}"))
        assert (" ± " in line) == row["own"]
        assert ("(null)" in line) == (row["label"] == NULL)
    assert json.loads(trueup_command("inspect", out, "--json").stdout)["classes"] == said["classes"]


def test_the_file_is_attached_by_label(made, net):
    _, out, _ = made
    unet, cal = UNet2DModel.from_pretrained(net), trueup.load(out)
    x_t, y = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, NULL])
    noise = cal.process
    with torch.inference_mode():
        before = unet(x_t, 300, class_labels=y).sample
        with trueup.attach(unet, cal):
            after = unet(x_t, 300, class_labels=y).sample
    t = torch.full((1,), 300.0, dtype=torch.float64)
    for i, label in enumerate(y.tolist()):
        row, sigma = x_t[i : i + 1].double(), noise.sigma(t)
        correction = cal.for_class(label).with_gains(cal.gains)
        expected = correction.apply(before[i : i + 1].double(), row / sigma, noise.lam(t))
        # times are tabulated: as in test_attachment.py
        assert torch.allclose(after[i : i + 1].double(), expected, atol=3e-3 * float(expected.abs().max()))


def test_samples_are_drawn_with_it(made, net, tmp_path):
    _, out, _ = made
    draw = ("sample", net, "--calibration", out, "-n", 4, "--nfe", 3, "--labels", "0-2")
    guided = (*draw, "--guidance", 2, "--null-label", NULL, "-o", tmp_path / "a.png")
    for command in ((*draw, "-o", tmp_path / "b.png"), guided):
        done = trueup_command(*command)
        assert done.returncode == 0, done.stderr
    assert Image.open(tmp_path / "a.png").size == Image.open(tmp_path / "b.png").size
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


def test_an_interrupted_run_goes_on_and_ends_the_same(made, tmp_path, monkeypatch):
    command, whole, _ = made
    out, saved = tmp_path / "a.safetensors", Run.save

    def interrupted(self, *args):
        saved(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", interrupted)
        done = trueup_command(*command, "-o", out)
    assert done.returncode == 130
    assert not out.exists()
    assert trueup_command(*command, "-o", out).returncode == 0
    assert out.read_bytes() == whole.read_bytes()
    out.unlink()
    again = trueup_command(*(part for part in command if part != "--per-class"), "-o", out)
    refused(again, "was begun with another", "set of classes", "new run directory")


def test_a_run_begun_without_classes_is_refused(net, data, tmp_path):
    base = ("calibrate", net, "--data", data, *QUICK, "-o", tmp_path / "a.safetensors")
    assert trueup_command(*base).returncode == 0
    refused(trueup_command(*base, "--force", "--per-class"), "was begun with another set of classes")


def test_what_has_no_classes_is_refused_in_a_line(net, model, images, data, tmp_path):
    out = ("-o", tmp_path / "a.safetensors", "--per-class", *QUICK)
    refused(trueup_command("calibrate", model, "--data", data, *out), "takes no labels")
    refused(trueup_command("calibrate", net, "--data", images, *out), "labels")
    one = pictures(tmp_path / "one.npz", [2] * 20)
    refused(trueup_command("calibrate", net, "--data", one, *out), "all images have the label 2")
    assert not (tmp_path / "a.safetensors").exists()


def test_check_looks_at_classes_too(net, data):
    done = trueup_command("check", net, "--data", data, "--per-class", "--no-samples", "--trust", "--json")
    assert [row["label"] for row in json.loads(done.stdout)["classes"]] == [0, 1, 2]
