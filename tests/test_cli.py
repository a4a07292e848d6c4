"""The command line through the real command: what it prints, its exit codes, and that nothing is lost."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import trueup
from trueup import cli, options
from trueup.files import bundled, load_tensors

from commandline import refused, trueup_command
from tiny import save, tiny_unet

SIZE = 8


# --- the main job


def test_calibrate_writes_a_calibration_that_fits_the_model(model, images, tmp_path):
    out = tmp_path / "x.trueup.safetensors"
    done = trueup_command("calibrate", model, "--data", images, "-o", out, "--trust", real=True)
    assert done.returncode == 0, done.stderr
    assert "verdict: " in done.stdout
    assert "share of the loss that calibration removes" in done.stdout or "no noise level" in done.stdout
    assert str(out) in done.stderr
    cal = trueup.load(out)
    assert cal.evidence.images == 40
    net = diffusers.UNet2DModel.from_pretrained(model)
    with trueup.attach(net, cal):
        pass
    inspected = trueup_command("inspect", out)
    assert inspected.returncode == 0
    assert cal.verdict() in inspected.stdout


def test_json_is_alone_on_standard_output_and_says_what_the_library_says(model, images, tmp_path):
    out = tmp_path / "x.trueup.safetensors"
    done = trueup_command(
        "calibrate", model, "--data", images, "-o", out, "--trust", "--json", "--seed", 3, real=True
    )
    said = json.loads(done.stdout)
    data = trueup.Images(images, count=500, seed=3)
    cal = trueup.calibrate(str(model), data, seed=3, trust=True)
    assert said["verdict"] == cal.verdict()
    assert said["seed"] == 3
    assert said["output"] == str(out)
    assert [level["t"] for level in said["levels"]] == cal.t.tolist()
    losses = [level["loss"]["value"] for level in said["levels"]]
    assert losses == pytest.approx(cal.evidence.loss.value.tolist(), rel=1e-6)
    nats = cal.evidence.bound_gain
    assert said["bound_gain"]["nats"] == pytest.approx(
        {"value": nats.value, "low": nats.low, "high": nats.high}, rel=1e-6
    )
    again = json.loads(trueup_command("inspect", out, "--json").stdout)
    for one, other in zip(again["levels"], said["levels"], strict=True):
        assert one["gain"] == pytest.approx(other["gain"], rel=1e-6)


def test_quiet_prints_the_verdict_and_nothing_else(model, images, tmp_path):
    done = trueup_command(
        "calibrate", model, "--data", images, "-o", tmp_path / "x", "--trust", "--quiet", "--images", 20
    )
    assert done.stdout.startswith("verdict: ")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_check_writes_nothing_and_fails_above(model, images, tmp_path):
    before = sorted(tmp_path.iterdir())
    base = ("check", model, "--data", images, "--trust", "--quiet", "--no-samples")
    passed = trueup_command(*base, "--fail-above", 100, cwd=tmp_path)
    assert passed.returncode == 0, passed.stderr
    assert "miscalibrated" in passed.stdout
    failed = trueup_command(*base, "--fail-above", 0, cwd=tmp_path)
    assert failed.returncode == 1
    assert "miscalibrated by at least" in failed.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "command",
    ["", "calibrate", "check", "samplers", "sample", "evaluate", "likelihood", "inspect", "report", "demo"],
)
def test_help_opens_with_two_examples_the_parser_takes(command):
    done = trueup_command(*command.split(), "--help")
    assert done.returncode == 0
    first, *lines = done.stdout.splitlines()
    assert first == "examples:"
    examples = [line.split("   ")[0].strip() for line in lines if line.startswith("  trueup")][:2]
    assert len(examples) == 2
    parser = options.parser()
    for example in examples:
        given = parser.parse_args(shlex.split(example)[1:])
        for name in ("model", "data"):
            if hasattr(given, name):
                assert bundled(getattr(given, name)).exists()


# --- resuming


def test_more_images_are_added_without_redoing_the_first(model, images, tmp_path):
    out, all_at_once = tmp_path / "x", tmp_path / "y"
    base = ("calibrate", model, "--data", images, "--trust", "--quiet", "--batch-size", 10, "--no-samples")
    assert trueup_command(*base, "-o", out, "--images", 20).returncode == 0
    run = Path(f"{out}.run") / "checkpoint.safetensors"
    first = run.stat().st_mtime_ns
    again = trueup_command(*base, "-o", out, "--images", 20, "--force")
    assert again.returncode == 0
    assert run.stat().st_mtime_ns == first  # nothing measured, nothing written
    assert trueup_command(*base, "-o", out, "--images", 40, "--force").returncode == 0
    assert trueup_command(*base, "-o", all_at_once, "--images", 40).returncode == 0
    assert out.read_bytes() == all_at_once.read_bytes()
    refused(trueup_command(*base, "-o", out, "--images", 30, "--force"), "measured 40 images already")


signals = pytest.mark.skipif(os.name == "nt", reason="needs the signals of Unix")
STOPPED = """
import os, signal, sys
from trueup.cli import main
from trueup.estimate.run import Run

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
save = Run.save

def saved(self, *args):
    save(self, *args)
    os.kill(os.getpid(), signal.{signal})

Run.save = saved
sys.exit(main(sys.argv[1:]))
"""


def stopped(name, *arguments):
    """The command in a process of its own, which gets a signal when its first checkpoint is written."""
    return subprocess.run(
        [sys.executable, "-c", STOPPED.format(signal=name), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},  # or bits may differ
        timeout=300,
    )


@signals
def test_a_killed_run_goes_on_and_ends_the_same(model, images, tmp_path):
    out, whole = tmp_path / "x", tmp_path / "whole"
    base = ("calibrate", model, "--data", images, "--trust", "--quiet", "--batch-size", 4, "--no-samples")
    assert trueup_command(*base, "-o", whole).returncode == 0
    checkpoint = Path(f"{out}.run") / "checkpoint.safetensors"
    sizes = []
    for _ in range(3):
        assert stopped("SIGKILL", *base, "-o", out).returncode == -signal.SIGKILL
        sizes.append(len(load_tensors(checkpoint, "a run")[1]["labels"]))
    assert sizes == [4, 8, 12]
    assert not out.exists()
    assert trueup_command(*base, "-o", out).returncode == 0
    assert out.read_bytes() == whole.read_bytes()


@signals
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_whoever_is_stopped_says_how_to_go_on(model, images, tmp_path, name, code):
    """By Ctrl-C, or by a scheduler that wants the machine for another."""
    out = tmp_path / "x"
    command = ["calibrate", model, "--data", images, "--trust", "--batch-size", 4, "--no-samples", "-o", out]
    done = stopped(name, *command)
    assert done.returncode == code
    assert "interrupted" in done.stderr.splitlines()[-1]
    assert "run the same command again" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert trueup_command(*command).returncode == 0


TWICE = """
import os, signal, sys, time
from trueup import cli

def say_it(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)

cli._run = cli._kept = say_it  # in the middle of the work, and while the first is being answered
sys.exit(cli.main(["calibrate", "m", "--data", "x", "--run", "r", "-o", "o"]))
"""


@signals
def test_whoever_is_told_twice_to_end_ends(tmp_path):
    done = subprocess.run([sys.executable, "-c", TWICE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == -signal.SIGTERM
    assert "Traceback" not in done.stderr


def test_a_run_with_other_settings_or_images_is_refused(model, images, some, tmp_path):
    out = tmp_path / "x"
    base = ("calibrate", model, "-o", out, "--trust", "--quiet", "--force")
    assert trueup_command(*base, "--data", some).returncode == 0
    before = out.read_bytes()
    refused(trueup_command(*base, "--data", some, "--seed", 1), "another seed", "new run directory")
    refused(trueup_command(*base, "--data", some, "--flip"), "another transform")
    shutil.copy(sorted(images.iterdir())[20], sorted(some.iterdir())[0])
    refused(trueup_command(*base, "--data", some), "sample 0 of", "not what it was")
    checkpoint = Path(f"{out}.run") / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:500])
    refused(trueup_command(*base, "--data", some), "cannot be trusted", "measured again")
    assert out.read_bytes() == before


# --- bad input: one clear line, exit code 2, nothing lost


@pytest.fixture
def calibrate(model, tmp_path):
    def call(*more, data, net=model, **kwargs):
        return trueup_command(
            "calibrate", net, "--data", data, "-o", tmp_path / "x", "--quiet", "--trust", *more, **kwargs
        )

    return call


def test_folders_that_are_missing_or_empty(calibrate, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(calibrate(data=tmp_path / "nowhere"), "nowhere", "is not there")
    refused(calibrate(data=tmp_path / "empty"), "is empty: name a folder of images")
    (tmp_path / "empty" / "notes.md").write_text("none")
    refused(calibrate(data=tmp_path / "empty"), "holds no image")
    assert not (tmp_path / "x").exists()


def _corrupt(path):
    path.write_bytes(b"not an image")


def _truncate(path):
    noise = np.random.default_rng(0).integers(0, 255, (SIZE, SIZE), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:-40])


def _colour(path):
    Image.new("RGB", (SIZE, SIZE), (255, 0, 0)).save(path)


@pytest.mark.parametrize("spoil", [_corrupt, _truncate, _colour])
def test_a_bad_image_among_good_ones_is_named_or_skipped(calibrate, some, spoil):
    bad = sorted(some.iterdir())[5]
    spoil(bad)
    refused(calibrate(data=some), bad.name, "--skip-bad")
    done = calibrate("--skip-bad", "--json", data=some)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["images"] == 11
    assert len(said["skipped"]) == 1
    assert bad.name in said["skipped"][0]


def test_only_bad_images(calibrate, some):
    for path in some.iterdir():
        _corrupt(path)
    refused(calibrate("--skip-bad", data=some), "holds no samples that can be used")


def test_wrong_size_without_a_resize(calibrate, some):
    Image.new("L", (10, 12)).save(some / "zz.png")
    refused(calibrate(data=some), "zz.png", "12x10", "8x8", "--resize shorter", "--crop center")


def test_a_model_without_a_scheduler(calibrate, images, model, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "scheduler_config.json").unlink()
    refused(calibrate(data=images, net=bare), "has no scheduler", "--scheduler")
    assert calibrate("--scheduler", model, data=images, net=bare).returncode == 0


def test_unknown_prediction_types(calibrate, images, model, tmp_path):
    odd = tmp_path / "odd"
    shutil.copytree(model, odd)
    config = json.loads((odd / "scheduler_config.json").read_text())
    (odd / "scheduler_config.json").write_text(json.dumps({**config, "prediction_type": "banana"}))
    refused(calibrate(data=images, net=odd), "banana")
    refused(calibrate("--prediction", "banana", data=images), "banana", "velocity")
    refused(calibrate("--prediction", "velosity", data=images), "did you mean velocity?")
    refused(calibrate(data="bundled:pictures"), "nothing named bundled:pictures", "bundled:images")


def test_networks_that_return_nonsense(calibrate, images, tmp_path):
    spoiled = tiny_unet()
    with torch.no_grad():
        spoiled.conv_out.weight.fill_(torch.nan)
    refused(calibrate(data=images, net=save(spoiled, tmp_path / "nan")), "not finite")
    with torch.no_grad():
        spoiled.conv_out.weight.zero_()
    refused(calibrate(data=images, net=save(spoiled, tmp_path / "constant")), "same values whatever")
    wrong = save(tiny_unet(out_channels=3), tmp_path / "wrong")
    refused(calibrate(data=images, net=wrong), "takes 1 channels and returns 3")


def test_models_that_are_none(calibrate, images, tmp_path):
    refused(calibrate(data=images, net=tmp_path / "nowhere"), "nowhere", "not a directory", "the Hub")
    refused(calibrate(data=images, net=images), "not a diffusers directory")


def test_damaged_and_newer_artifacts(model, images, tmp_path):
    out = tmp_path / "x.trueup.safetensors"
    assert trueup_command("calibrate", model, "--data", images, "-o", out, "--trust").returncode == 0
    good = out.read_bytes()
    out.write_bytes(good[: len(good) // 2])
    refused(trueup_command("inspect", out), "x.trueup.safetensors")
    out.write_bytes(good[:-9] + bytes([good[-9] ^ 4]) + good[-8:])
    refused(trueup_command("inspect", out), "checksum")
    newer = good.replace(b'\\"format\\": 3', b'\\"format\\": 9')
    assert newer != good
    out.write_bytes(newer)
    refused(trueup_command("inspect", out), "format 9", "upgrade trueup")
    refused(trueup_command("inspect", tmp_path / "nowhere"), "does not exist")


def test_an_existing_output_is_kept(calibrate, images, tmp_path):
    (tmp_path / "x").write_text("precious")
    refused(calibrate(data=images), "exists", "--force")
    assert (tmp_path / "x").read_text() == "precious"


@signals
def test_places_that_cannot_be_written(model, images, tmp_path):
    import resource  # not on Windows

    base = ("calibrate", model, "--data", images, "--trust", "--quiet", "-o")
    refused(trueup_command(*base, "/proc/x"), "/proc/x")
    refused(trueup_command(*base, tmp_path / "nowhere" / "x"), "nowhere", "not a directory")
    refused(trueup_command(*base, tmp_path), "is a directory")
    refused(trueup_command(*base, "/dev/null", "--force"), "not a file that can be replaced")

    def full_disk():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    refused(trueup_command(*base, tmp_path / "x", preexec_fn=full_disk), "cannot write", "checkpoint")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--images", "0"], "at least 1"),
        (["--images", "many"], "'many' is not a whole number"),
        (["--images", "1.5"], "whole number"),
        (["--batch-size", "-3"], "at least 1"),
        (["--seed", "x"], "'x' is not a whole number, at least 0"),
        (["--device", "abacus"], "invalid choice"),
        (["--data-range", "1,0"], "LOW must be below HIGH"),
        (["--data-range", "low"], "is not LOW,HIGH"),
        (["--family", "cubic"], "invalid choice"),
        (["--frobnicate"], "unrecognized arguments"),
        (["--imags", "3"], "did you mean --images?"),
        (["--family", "spectal"], "did you mean spectral?"),
    ],
)
def test_options_that_make_no_sense(capsys, options, words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["calibrate", "m", "--data", "d", "-o", "o", *options])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_no_such_device(calibrate, images):
    missing = "mps" if torch.cuda.is_available() else "cuda"  # no machine has both
    refused(calibrate("--device", missing, data=images), f"no {missing} device")


def test_one_image_is_an_answer(calibrate, images):
    done = calibrate("--images", 1, data=images)
    assert done.returncode == 0
    assert "1 image cannot confirm a correction" in done.stdout


def test_a_calibration_of_other_weights_is_not_attached(model, images, tmp_path):
    assert (
        trueup_command("calibrate", model, "--data", images, "-o", tmp_path / "x", "--trust").returncode == 0
    )
    other = tiny_unet()
    with torch.no_grad():
        other.conv_out.bias += 1
    with pytest.raises(trueup.TrueupError, match="other weights"):
        trueup.attach(other, tmp_path / "x")


def test_ranges_are_typed_as_they_are_recommended(calibrate, tmp_path):
    array = np.random.default_rng(0).uniform(0, 1, (24, 1, SIZE, SIZE)).astype(np.float32)
    np.save(tmp_path / "unit.npy", array)
    refused(calibrate(data=tmp_path / "unit.npy"), "--data-range 0,1", "--data-range -1,1")
    for low_high in ("0,1", "-1,1"):
        done = calibrate(
            "--data-range", low_high, "--force", "--run", tmp_path / low_high, data=tmp_path / "unit.npy"
        )
        assert done.returncode == 0, done.stderr


def test_unknown_options_point_to_the_command_that_lacks_them():
    refused(trueup_command("check", "m", "--data", "d", "--nfe", "8"), "--nfe 8", "trueup check --help")
    refused(trueup_command("chekc", "m"), "did you mean check?")


AT_ONCE = [
    (["report", "there", "-o", "there"], "there: a report is a page, name a file that ends in .html"),
    (["report", "there", "-o", "x.pdf"], "x.pdf: a report is a page"),
    (["report", "there", "--with", "MODEL", "-o", "x.html"], "is not a file"),
    (["report", "there", "--with", "nowhere.json", "-o", "x.html"], "nowhere.json does not exist"),
    (["merge", "there", "-o", "there", "--force"], "there is one of the files to merge: name another"),
    (["sample", "MODEL", "-o", "x", "--solver", "nosuch"], "use dpm-solver-1,"),
    (["sample", "MODEL", "-o", "x", "--solver", "dpm-solver3"], "unknown solver 'dpm-solver3', did you mean"),
    (["sample", "nowhere", "-o", "x"], "nowhere is not a directory"),
    (["sample", "MODEL", "-o", "no/such/x.png"], "not a directory"),
    (["sample", "MODEL", "-o", "x", "--calibration", "nowhere"], "nowhere does not exist"),
    (["sample", "MODEL", "-o", "x", "--solver", "ddim", "--grid", "uniform"], "has its own"),
    (["sample", "bundled:rwa", "-o", "x"], "nothing named bundled:rwa"),
    (["calibrate", "MODEL", "-o", "x"], "say what to measure on"),
    (["calibrate", "MODEL", "-o", "x", "--data", "nowhere"], "nowhere is not there"),
    (["calibrate", "MODEL", "-o", "there", "--data", "MODEL"], "there exists: pass --force"),
    (["calibrate", "MODEL", "-o", "no/such/x", "--data", "MODEL"], "not a directory"),
    (["check", "MODEL"], "say what to measure on: --data"),
    (["check", "MODEL", "--data", "there"], "there holds no images: name a folder of images"),
    (["check", "MODEL", "--data", "nothing"], "nothing is empty: name a folder of images"),
    (["sample", "MODEL", "-o", "x", "--seed", "-1"], "'-1' is not a whole number, at least 0"),
    (["sample", "MODEL", "-o", "x", "--seed", str(2**53)], "at least 0 and below 2**53"),
    (["sample", "MODEL", "-o", "x", "--sampler", "ddim"], "did you mean --solver?"),
    (["check", "MODEL", "--data", "MODEL", "--figure", "x.gif"], ".png, .svg or .pdf"),
    (["evaluate", "MODEL", "--calibration", "there"], "say what to compare with"),
    (["likelihood", "MODEL"], "--data"),
    (["likelihood", "MODEL", "--data", "MODEL", "--steps", "5", "--ode"], "--steps belongs to --bound"),
    (["likelihood", "MODEL", "--data", "MODEL", "--ode", "--tolerance", "2"], "between 0 and 1"),
    (["inspect", "nowhere"], "nowhere does not exist"),
]


def test_what_shows_at_once_is_said_before_torch_is_loaded(model, tmp_path):
    """In one process for all: what counts is what it has loaded in the end."""
    (tmp_path / "there").write_text("precious")
    (tmp_path / "nothing").mkdir()
    commands = [[str(model) if word == "MODEL" else word for word in words] for words, _ in AT_ONCE]
    code = f"""
import sys
from trueup.cli import main
for command in {commands!r}:
    try:
        code = main(command)
    except SystemExit as stop:
        code = stop.code
    assert code == 2, (command, code)
assert "torch" not in sys.modules
assert "diffusers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    for (words, said), line in zip(AT_ONCE, lines, strict=True):
        assert said in line, words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nothing", "there"]


def test_a_misused_model_is_refused_with_the_options_that_mend_it(tmp_path):
    images = np.load(bundled("bundled:images"))[:32]
    np.save(tmp_path / "x.npy", 0.5 + images.astype(np.float32) / 510)  # in 0..1, if squeezed
    base = ("calibrate", "bundled:ema", "-o", tmp_path / "x", "--quiet", "--images", 32, "--no-samples")
    refused(trueup_command(*base, "--data", "bundled:images", "--prediction", "data"), "--prediction noise")
    refused(
        trueup_command(*base, "--data", "bundled:images", "--model-range", "0,1"),
        "--model-range -1,1",
        "--trust",
    )
    assert not (tmp_path / "x").exists()
    check = ("check", "bundled:ema", "--data", "bundled:images", "--images", 32, "--quiet", "--no-samples")
    done = trueup_command(*check, "--prediction", "data")
    assert done.returncode == 2
    assert done.stdout.startswith("verdict: ")
    assert "pass --prediction noise" in done.stderr
    assert "--trust" in done.stderr


def test_names_of_files_do_nothing_to_a_terminal(calibrate, some):
    bad = some / "a\x1b[2J\nverdict: all fine.png"
    bad.write_bytes(b"not an image")
    refused(calibrate(data=some), "a\\x1b[2J\\nverdict")
    done = trueup_command("calibrate", some.parent / "x\x1b[2J", "--data", some, "-o", some.parent / "y")
    refused(done, "x\\x1b[2J")
    refused(trueup_command("inspect", some / "\x1b[2J"), "\\x1b[2J")


def test_every_solver_is_listed_by_help_and_known_by_name():
    from trueup.sampling import solver_names
    from trueup.solvers import NAMES

    assert set(NAMES) <= set(solver_names())
    for command in ("sample", "evaluate"):
        said = trueup_command(command, "--help").stdout
        assert all(name in said for name in NAMES)


def test_a_random_sample_of_the_images_is_taken(calibrate, images, tmp_path):
    """The first ones of a sorted folder may all be alike."""
    seen = []
    for seed in (0, 0, 1):
        run = tmp_path / f"{len(seen)}.run"
        done = calibrate("--images", 10, "--seed", seed, "--force", "--run", run, data=images)
        assert done.returncode == 0, done.stderr
        seen.append(set(trueup.load(tmp_path / "x").data_digests.tolist()))
    assert seen[0] == seen[1] != seen[2]
    assert all(len(digests) == 10 for digests in seen)


def test_nobody_looking_gets_lines_and_quiet_gets_none(calibrate, model, images, tmp_path, monkeypatch):
    monkeypatch.setattr("trueup.progress.SECONDS", 0.0)
    base = ("calibrate", model, "--data", images, "--trust", "-o", tmp_path / "x", "--json")
    done = trueup_command(*base)
    assert "measuring: " in done.stderr
    json.loads(done.stdout)
    done = trueup_command(*base, "--quiet", "--force", "--run", tmp_path / "again")
    assert done.stderr == ""
    json.loads(done.stdout)


def test_the_command_says_how_many_images_occurred_before(model, some, tmp_path):
    for i, path in enumerate(sorted(some.iterdir())[:2]):
        shutil.copy(path, some / f"again{i}.png")
    for command in (("calibrate", "--trust", "-o", tmp_path / "x"), ("check", "--trust")):
        done = trueup_command(command[0], model, "--data", some, *command[1:], "--images", 14)
        assert "images that occurred before and count once: 2" in done.stderr
