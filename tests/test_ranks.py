"""Many processes are as good as one: real process groups (gloo), and shares that never meet."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import trueup
from trueup.estimate import Moments, measure
from trueup.estimate.stored import SUMS
from trueup.hf import as_denoiser

from commandline import in_process, refused, trueup_command
from tiny import blobs, save, tiny_unet

HERE = Path(__file__).parent
USED = 31  # images that count: one more occurs twice, and one is broken
# Sums are float64, in another order; what the network says of an image depends, in its last bits, on how many
# are in a batch with it, so that there is one.
EXACT = 1e-9
ALIKE = ("--trust", "--batch-size", 1, "--device", "cpu", "--skip-bad")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tiny_unet(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = blobs(tmp_path_factory.mktemp("images"), USED)
    shutil.copy(folder / "003.png", folder / "twice.png")
    (folder / "broken.png").write_bytes(b"no picture")
    return folder


def torchrun(ranks, *arguments):
    """What a job of so many ranks does, as `subprocess.run` reports it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    how = {"capture_output": True, "text": True, "env": env, "timeout": 300}
    return subprocess.run([*command, *map(str, arguments)], **how)


def assert_same(ours, theirs):
    """Moments of the same images, in the same order."""
    assert torch.equal(ours.indices, theirs.indices)
    assert torch.equal(ours.digests, theirs.digests)
    assert ours.data_digest == theirs.data_digest
    assert ours.mean_only == theirs.mean_only
    assert ours.provenance == theirs.provenance
    assert ours.skipped == theirs.skipped
    for name in SUMS:
        one, other = getattr(ours, name), getattr(theirs, name)
        torch.testing.assert_close(one, other, rtol=0, atol=EXACT * float(other.abs().max()), msg=name)


def assert_same_calibration(ours, theirs):
    for name in ("lam", "b", "a", "d"):
        one, other = getattr(ours.correction, name), getattr(theirs.correction, name)
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT * float(other.abs().max()), msg=name)
    for name in ("loss", "gain"):
        one, other = (getattr(cal.evidence, name) for cal in (ours, theirs))
        for part in ("value", "low", "high"):
            torch.testing.assert_close(getattr(one, part), getattr(other, part), rtol=1e-6, atol=1e-9)
    assert ours.evidence.images == theirs.evidence.images
    assert ours.provenance == theirs.provenance
    assert ours.verdict() == theirs.verdict()


# --- under a launcher


@pytest.fixture(scope="module")
def one(model, images, tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "one.trueup.safetensors"
    done = trueup_command("calibrate", model, "--data", images, "-o", out, "--no-samples", *ALIKE)
    assert done.returncode == 0, done.stderr
    return trueup.load(out), done


def test_ranks_write_what_one_process_writes_and_the_first_alone_speaks(model, images, one, tmp_path):
    out = tmp_path / "x.trueup.safetensors"
    arguments = ("calibrate", model, "--data", images, "-o", out, "--no-samples", *ALIKE)
    done = torchrun(2, "-m", "trueup", *arguments)
    assert done.returncode == 0, done.stderr
    cal, alone = one
    assert cal.evidence.images == USED
    assert_same_calibration(trueup.load(out), cal)
    assert done.stdout == alone.stdout
    said = [line for line in done.stderr.splitlines() if line]
    assert len(said) == len(alone.stderr.splitlines()), done.stderr
    assert sorted(path.name for path in Path(f"{out}.run").iterdir()) == ["share-1-of-2", "share-2-of-2"]


def test_ranks_that_disagree_say_so_once(model, images, tmp_path):
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import os, sys\nfrom trueup.cli import main\n"
        "raise SystemExit(main([*sys.argv[1:], '--seed', os.environ['RANK']]))\n"
    )
    out = tmp_path / "x.trueup.safetensors"
    done = torchrun(2, wrapper, "calibrate", model, "--data", images, "-o", out, *ALIKE)
    said = [line for line in done.stderr.splitlines() if line.startswith("trueup:")]
    assert len(said) == 1, done.stderr
    assert "rank 1 was given another seed" in said[0]
    assert done.returncode != 0
    assert "exitcode  : 2" in done.stderr
    assert done.stdout == ""
    assert not out.exists()


@pytest.fixture(scope="module")
def job(model, images, tmp_path_factory):
    """What three ranks did with the library, see `ranks_library`."""
    out = tmp_path_factory.mktemp("job")
    torch.manual_seed(1)
    changed = tiny_unet()
    with torch.no_grad():
        next(changed.parameters()).add_(1.0)
    other_model = save(changed, tmp_path_factory.mktemp("other-model"))
    other_images = shutil.copytree(images, out / "other-images")
    # Among the few that ranks compare before they begin: of the others each reads its own.
    pixels = np.asarray(Image.open(images / "000.png")).copy()
    pixels[0, 0] ^= 1
    Image.fromarray(pixels).save(other_images / "000.png")
    done = torchrun(3, HERE / "ranks_library.py", model, other_model, images, other_images, out)
    assert done.returncode == 0, done.stderr
    return out


def alone(model, images, count, **settings):
    data = trueup.Images(images, count=count, skip_bad=True)
    denoiser = as_denoiser(str(model), device="cpu", batch_size=1)
    return measure(denoiser, data, trust=True, progress=False, **settings)


@pytest.mark.parametrize(
    ("name", "count", "mean_images"),
    [("all", 100, 0), ("few", 5, 7), ("fewer", 2, 0)],  # of three ranks: uneven, and one with nothing
)
def test_every_rank_has_the_moments_of_all(job, model, images, name, count, mean_images):
    found = [Moments.load(job / f"{name}.{rank}") for rank in range(3)]
    expected = alone(model, images, count, mean_images=mean_images)
    assert expected.images == min(count, USED)
    assert_same(found[0], expected)
    for other in found[1:]:
        assert_same(other, found[0])
        assert all(torch.equal(getattr(other, n), getattr(found[0], n)) for n in SUMS)


def test_a_rank_may_measure_alone(job, model, images):
    assert_same(Moments.load(job / "alone"), alone(model, images, 100))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("seed", "rank 1 was given another seed"),
        ("weights", "rank 1 was given another weights"),
        ("images", "rank 2 was given another set of images"),
        ("labels", "rank 1 was given another set of labels"),
        ("broken", "rank 1 was given another choice of images"),
        ("count", "rank 1 was given another choice of images"),
        ("died", "rank 1: "),
    ],
)
def test_what_is_wrong_on_one_rank_is_the_same_error_on_all(job, name, words):
    said = [json.loads((job / f"said.{rank}").read_text())[name] for rank in range(3)]
    assert words in said[0]
    assert said == [said[0]] * 3
    assert "\n" not in said[0]


def test_calibrate_returns_the_same_on_every_rank(job, model, images):
    found = [(job / f"calibration.{rank}").read_bytes() for rank in range(3)]
    assert found == [found[0]] * 3
    data = trueup.Images(images, count=20, skip_bad=True)
    denoiser = as_denoiser(str(model), device="cpu", batch_size=1)
    expected = trueup.calibrate(denoiser, data, seed=3, trust=True, progress=False)
    expected.save(job / "expected")
    ours, expected = trueup.load(job / "calibration.0"), trueup.load(job / "expected")
    assert_same_calibration(ours, expected)
    assert ours.gains == expected.gains


@pytest.mark.parametrize(
    ("env", "command", "words"),
    [
        ({"WORLD_SIZE": "2"}, "calibrate", "RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "calibrate", "MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "calibrate", "no sense"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "check", "one process"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "calibrate", "--shard K/N"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "check", "set WORLD_SIZE=1"),
    ],
)
def test_processes_that_cannot_meet_are_refused(env, command, words, monkeypatch, capsys, tmp_path):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    output = ("-o", tmp_path / "x") if command == "calibrate" else ()
    assert words in in_process(capsys, command, "bundled:raw", "--data", "bundled:images", *output)


# --- shares without a launcher


def parts_of(model, images, folder, count, *more):
    parts = [folder / f"{k}.moments.safetensors" for k in range(1, count + 1)]
    for k, part in enumerate(parts, 1):
        arguments = ("calibrate", model, "--data", images, "-o", part, "--shard", f"{k}/{count}")
        done = trueup_command(*arguments, *ALIKE, *more)
        assert done.returncode == 0, done.stderr
    return parts


def test_shards_merged_are_what_one_process_writes(model, images, one, tmp_path):
    parts = parts_of(model, images, tmp_path, 3)
    assert [Moments.load(part).images for part in parts] == [11, 10, 10]
    out = tmp_path / "x.trueup.safetensors"
    done = trueup_command("merge", *parts, "-o", out)
    assert done.returncode == 0, done.stderr
    assert "no samples were drawn" in done.stderr
    assert_same_calibration(trueup.load(out), one[0])
    assert done.stdout == one[1].stdout

    refused(trueup_command("merge", parts[0], parts[0], "-o", tmp_path / "y"), "both hold sample")
    refused(trueup_command("merge", parts[0], out, "-o", tmp_path / "y"), str(out))
    refused(trueup_command("merge", out, "-o", out), "exists")


def test_a_share_goes_on_from_its_run_directory(model, images, tmp_path):
    for folder in ("grown", "direct"):
        (tmp_path / folder).mkdir()
    parts_of(model, images, tmp_path / "grown", 2, "--images", 9)
    grown = parts_of(model, images, tmp_path / "grown", 2, "--images", 20, "--force")
    direct = parts_of(model, images, tmp_path / "direct", 2, "--images", 20)
    for ours, theirs in zip(grown, direct, strict=True):
        assert_same(Moments.load(ours), Moments.load(theirs))


def test_shards_of_other_settings_are_not_merged(model, images, tmp_path):
    (tmp_path / "other").mkdir()
    mine = parts_of(model, images, tmp_path, 2)[0]
    other = parts_of(model, images, tmp_path / "other", 2, "--seed", 1)[1]
    refused(trueup_command("merge", mine, other, "-o", tmp_path / "y"), "other settings")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--shard", "4/3"), "K/N"),
        (("--shard", "0/3"), "K/N"),
        (("--shard", "1/2", "--nfe", 8), "leave out --nfe"),
    ],
)
def test_a_shard_that_makes_no_sense_is_refused(more, words, capsys, tmp_path):
    arguments = ("calibrate", "bundled:raw", "--data", "bundled:images", "-o", tmp_path / "x", *more)
    assert words in in_process(capsys, *arguments)


def test_a_share_without_images_is_refused(model, images):
    with pytest.raises(trueup.TrueupError, match="share 3 of 3"):
        alone(model, images, 2, share=(3, 3))
