"""`trueup likelihood`, and the figure and score of `check` and `inspect`, through the command line."""

import json
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

import trueup
from trueup.images import Images, Samples

from commandline import in_process, refused, trueup_command
from tiny import save, tiny_unet


@pytest.fixture(scope="module")
def calibration(model, images, tmp_path_factory):
    """A calibration of 20 of the pictures."""
    out = tmp_path_factory.mktemp("calibration") / "x.trueup.safetensors"
    some = Images(images, count=20)
    trueup.calibrate(str(model), some, estimator="paired", trust=True, progress=False).save(out)
    return out


@pytest.fixture(scope="module")
def unseen(images, calibration):
    """The indices of the other 20."""
    seen = set(trueup.load(calibration).data_digests.tolist())
    batch = next(Samples(images, (1, 8, 8), (-1.0, 1.0)).batches(40))
    return {int(i) for i, digest in zip(batch.index, batch.digests, strict=True) if int(digest) not in seen}


def test_the_bound_in_json_is_what_the_library_says(model, images, calibration, unseen, tmp_path):
    out = tmp_path / "x.json"
    done = trueup_command(
        *("likelihood", model, "--data", images, "--calibration", calibration, "--trust", "--json"),
        *("--draws", 3, "--seed", 2, "-o", out),
        real=True,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said == json.loads(out.read_text())
    data = Images(images, count=200, seed=2)
    found = trueup.likelihood(str(model), data, calibration, draws=3, seed=2, trust=True, progress=False)
    assert said["total"]["before"]["value"] == pytest.approx(found.mean().value, rel=1e-6)
    assert said["total"]["difference"]["low"] == pytest.approx(found.difference().low, rel=1e-4)
    assert said["of"] == "probability of 8-bit values"
    assert {row["index"] for row in said["per_image"]} == unseen
    total = sum(said["terms"][name]["before"]["value"] for name in ("prior", "diffusion", "decoder"))
    assert total == pytest.approx(said["total"]["before"]["value"])
    assert str(out) in done.stderr
    again = trueup_command("likelihood", model, "--data", images, "--trust", "-o", out)
    refused(again, "exists", "--force")


def test_tables_are_for_people(model, images, calibration):
    base = ("likelihood", model, "--data", images, "--calibration", calibration, "--trust", "--quiet")
    bound = trueup_command(*base, "--draws", 2)
    assert bound.returncode == 0, bound.stderr
    assert "bits/dim" in bound.stdout
    assert "difference, 95% interval" in bound.stdout
    assert bound.stderr == ""
    ode = trueup_command(*base, "--ode", "--images", 2, "--tolerance", 1e-2)
    assert "probability flow" in ode.stdout
    assert "rademacher" in ode.stdout
    assert "tolerance 0.01" in ode.stdout
    assert "evaluations of the network per image" in ode.stdout
    start = trueup_command(*base, "--ode", "--images", 1, "--tolerance", 1e-2, "--start", "data")
    assert "left out, to first order" in start.stdout
    dsm = trueup_command(*base, "--dsm", "--images", 4)
    assert "total, min-snr" in dsm.stdout
    assert "predicted by" in dsm.stdout
    steps = trueup_command(*base, "--steps", 20, "--draws", 20, "--images", 2, "--variance", "large")
    assert "all of 20 steps, large variance" in steps.stdout


def test_interrupted_work_is_kept_and_gone_on_with(model, images, tmp_path, monkeypatch):
    from trueup.density.bound import Bound

    out = tmp_path / "x.json"
    base = ("likelihood", model, "--data", images, "--trust", "--draws", 2, "--images", 40, "--quiet")
    calls = []
    whole = Bound.__call__

    def stop(self, *args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(self, *args)

    monkeypatch.setattr(Bound, "__call__", stop)
    stopped = trueup_command(*base, "-o", out)
    assert stopped.returncode == 130
    assert "run the same command again" in stopped.stderr
    assert not out.exists()
    assert trueup_command(*base, "-o", out).returncode == 0
    assert len(calls) == 6  # 8 images, the interruption, the other four times 8
    monkeypatch.undo()
    fresh = trueup_command(*base, "-o", tmp_path / "y.json")
    assert fresh.returncode == 0
    one, other = (json.loads((tmp_path / name).read_text())["per_image"] for name in ("x.json", "y.json"))
    assert one == other


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--steps", 5, "--ode"), ("--steps belongs to --bound",)),
        (("--probes", 2), ("--probes belongs to --ode",)),
        (("--uniform", "--dsm"), ("--uniform belongs to --bound",)),
        (("--bound", "--ode"), ("not allowed with",)),
        (("--dsm", "--run", "x"), ("leave out --run",)),
        (("--tolerance", "x"), ("not a number",)),
        (("--ode", "--tolerance", 0), ("tolerance",)),
        (("--steps", 5000), ("2 to 1000",)),
        (("--variance", "large"), ("--steps T",)),
        (("--ode", "--trace", "exact", "--probes", 3), ("no probes",)),
    ],
)
def test_options_that_make_no_sense(model, images, capsys, options, words):
    said = in_process(capsys, "likelihood", model, "--data", images, "--trust", "--quiet", *options)
    for word in words:
        assert word in said


def test_data_without_which_there_is_nothing(model, capsys):
    assert "--data" in in_process(capsys, "likelihood", model)


def test_palette_and_sixteen_bit_pictures_are_refused_by_name(model, some, tmp_path):
    base = ("likelihood", model, "--data", some, "--trust", "--quiet")
    first = sorted(some.iterdir())[0]
    picture = Image.open(first)
    picture.convert("P").save(first)
    # the model takes one channel: a palette picture is refused for its palette, not for its colours
    refused(trueup_command(*base), first.name, "palette", "(--skip-bad")
    picture.convert("1").save(first)
    refused(trueup_command(*base), first.name, "one-bit")
    Image.fromarray(np.asarray(picture).astype(np.uint16) * 256).save(first)
    refused(trueup_command(*base), first.name, "8 bits")
    skipped = trueup_command(*base, "--skip-bad")
    assert skipped.returncode == 0, skipped.stderr
    assert "1 images left out" in skipped.stdout


def test_pictures_of_other_depths_that_look_like_rgb(tmp_path):
    """Pillow reads 16 bits per channel as 8, and CMYK as what it converts to."""
    deep = tmp_path / "deep.png"
    deep.write_bytes(png_of_16_bits())
    assert Image.open(deep).mode == "RGB"
    with pytest.raises(trueup.TrueupError, match="16 bits per channel"):
        next(Samples(tmp_path, (3, 4, 4), (-1.0, 1.0), exact=True).batches(1))
    assert next(Samples(tmp_path, (3, 4, 4), (-1.0, 1.0)).batches(1)).x0.shape == (
        1,
        3,
        4,
        4,
    )  # to calibrate with
    deep.unlink()
    Image.new("CMYK", (4, 4)).save(tmp_path / "print.jpg")
    with pytest.raises(trueup.TrueupError, match="CMYK"):
        next(Samples(tmp_path, (3, 4, 4), (-1.0, 1.0), exact=True).batches(1))


def png_of_16_bits() -> bytes:
    """A 4x4 RGB picture, written out by hand: Pillow writes none."""
    rows = b"".join(b"\0" + bytes(range(24)) for _ in range(4))

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def test_images_left_out_are_counted_once(model, some, tmp_path):
    last = sorted(some.iterdir())[4]
    Image.open(last).convert("P").save(last)
    data = Images(some, count=4, skip_bad=True)
    calibration = trueup.calibrate(str(model), data, estimator="paired", trust=True, progress=False)
    data = Images(some, skip_bad=True)
    found = trueup.likelihood(str(model), data, calibration, draws=1, trust=True, progress=False)
    assert any("1 images left out" in note for note in found.notes)


def test_arrays_out_of_range_and_of_other_kinds(model, tmp_path):
    for name, array, word in (
        ("a", np.linspace(0, 255, 576, dtype=np.float32).reshape(9, 1, 8, 8), "outside"),
        ("b", np.full((9, 1, 8, 8), 0.5, dtype=np.float32), "--data-range"),
        ("c", np.zeros((9, 1, 8, 8), dtype=np.uint16), "8-bit or floating point"),
        ("d", np.full((9, 1, 8, 8), np.nan, dtype=np.float32), "finite"),
    ):
        file = tmp_path / f"{name}.npy"
        np.save(file, array)
        refused(trueup_command("likelihood", model, "--data", file, "--trust", "--quiet"), word)


def test_floating_point_data_have_a_density_and_are_not_mixed(model):
    x = torch.rand(4, 1, 8, 8) * 2 - 1
    found = trueup.likelihood(str(model), Images(x, data_range=(-1.0, 1.0)), draws=2, progress=False)
    assert not found.discrete
    assert "density" in found.table()
    mixed = [x[0], (x[1] * 127 + 128).to(torch.uint8)]
    with pytest.raises(trueup.TrueupError, match="8-bit, the samples before it are floating point"):
        trueup.likelihood(str(model), Images(mixed, data_range=(-1.0, 1.0)), draws=2, progress=False)


@pytest.mark.parametrize("option", [(), ("--flip",)])
def test_a_calibration_s_own_images_are_known_however_they_are_read(
    model, images, calibration, unseen, option
):
    base = (
        "likelihood",
        model,
        "--data",
        images,
        "--calibration",
        calibration,
        "--trust",
        "--json",
        "--quiet",
    )
    done = trueup_command(*base, "--draws", 1, "--images", 5, *option)
    measured = [row["index"] for row in json.loads(done.stdout)["per_image"]]
    assert len(measured) == 5
    assert set(measured) <= unseen


def test_what_runs_short_and_what_was_resized_is_said(model, images, tmp_path):
    found = trueup.likelihood(str(model), Images(images, count=99), draws=1, trust=True, progress=False)
    assert any("no more than 40 images" in note for note in found.notes)
    Image.open(sorted(images.iterdir())[0]).resize((16, 16)).save(tmp_path / "large.png")
    found = trueup.likelihood(str(model), Images(tmp_path, resize="exact"), draws=1, progress=False)
    assert any("as they were resized" in note for note in found.notes)
    assert "bits/dim" in repr(found)
    assert "nan" not in found.table()


def test_too_few_images_are_not_called_calibrated(model, images):
    done = trueup_command("check", model, "--data", images, "--images", 6, "--fail-above", 0.001, "--quiet")
    assert done.returncode == 2
    assert "use more --images" in done.stderr
    said = trueup_command("check", model, "--data", images, "--images", 6, "--json", "--quiet")
    assert json.loads(said.stdout)["uncalibration"]["bits_per_dim"]["value"] is None


def test_bundled_names_work_in_python():
    found = trueup.likelihood("bundled:ema", Images("bundled:images", count=1), draws=1, progress=False)
    assert found.dimensions == 784
    with pytest.raises(trueup.TrueupError, match="nothing named bundled:x"):
        trueup.likelihood("bundled:x", "bundled:images")


def test_mistakes_are_found_before_anything_is_measured(images, tmp_path, calibration, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("something was measured")

    monkeypatch.setattr("trueup.density.opening.check_use", never)
    base = ("likelihood", "bundled:ema", "--data", images, "--quiet")
    refused(trueup_command(*base, "--calibration", tmp_path / "none"), "none")
    refused(trueup_command(*base, "--calibration", calibration), "other")
    base = ("check", "bundled:ema", "--data", images, "--figure", tmp_path / "none" / "f.png")
    refused(trueup_command(*base), "not a directory")


def test_distilled_models_have_no_likelihood(images, tmp_path):
    from diffusers import LCMScheduler

    net = tiny_unet()
    net.save_pretrained(tmp_path)
    LCMScheduler().save_pretrained(tmp_path)
    refused(trueup_command("likelihood", tmp_path, "--data", images, "--quiet"), "consistency")


def test_nonsense_from_the_network_and_tolerances_out_of_reach(images, tmp_path, monkeypatch):
    monkeypatch.setattr("trueup.density.ode._LOOK", 20)  # sooner, for a test
    monkeypatch.setattr("trueup.density.ode._MOST", 100)
    net = tiny_unet()
    base = ("--data", images, "--trust", "--quiet", "--images", 2)
    folder = save(net, tmp_path / "fine")
    tight = trueup_command("likelihood", folder, *base[:-1], 1, "--ode", "--tolerance", 1e-12)
    refused(tight, "1e-12 cannot be met", "best reached", "ask for")
    with torch.no_grad():
        next(net.parameters()).fill_(float("nan"))
    folder = save(net, tmp_path / "nan")
    refused(trueup_command("likelihood", folder, *base, "--ode"), "not finite")
    refused(trueup_command("likelihood", folder, *base), "not finite")
    refused(trueup_command("likelihood", folder, *base, "--dsm"), "not finite")


def test_a_misused_model_is_not_measured(tmp_path):
    """BGR, inverted and the like: as for `calibrate`, the cause is named."""
    from trueup.files import bundled

    images = 255 - np.load(bundled("bundled:images"))[:40]
    np.save(tmp_path / "x.npy", images)
    base = ("likelihood", "bundled:ema", "--data", tmp_path / "x.npy", "--quiet")
    done = trueup_command(*base, "--images", 32)
    assert done.returncode == 2
    assert "--trust" in done.stderr


def test_a_calibration_of_other_weights_is_refused(images, calibration, tmp_path):
    net = tiny_unet()
    with torch.no_grad():
        next(net.parameters()).mul_(1.5)
    other = save(net, tmp_path / "other")
    base = ("likelihood", other, "--data", images, "--trust", "--quiet")
    refused(trueup_command(*base, "--calibration", calibration), "and other matrices")


def test_figure_1_and_the_score_from_a_file(model, images, calibration, tmp_path):
    done = trueup_command("inspect", calibration, "--figure", tmp_path / "f.png")
    assert done.returncode == 0, done.stderr
    assert "uncalibration score: " in done.stdout
    assert Image.open(tmp_path / "f.png").size[0] > 300
    said = json.loads(trueup_command("inspect", calibration, "--json").stdout)["uncalibration"]
    score = trueup.load(calibration).uncalibration
    assert said["bits_per_dim"]["low"] == pytest.approx(score.low)
    assert 0 < said["share_of_loss"]["value"] < 1
    refused(trueup_command("inspect", calibration, "--figure", tmp_path / "f.gif"), ".png, .svg or .pdf")
    base = ("check", model, "--data", images, "--images", 20, "--trust", "--quiet", "--estimator", "paired")
    done = trueup_command(*base, "--figure", tmp_path / "g.svg")
    assert (tmp_path / "g.svg").exists()
    refused(trueup_command(*base, "--figure", tmp_path / "f.gif"), ".png, .svg or .pdf")
