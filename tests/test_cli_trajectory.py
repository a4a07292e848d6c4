"""`trueup check --solver`, `calibrate --solver` and what uses them, through the command line."""

import json

import pytest
import torch

import trueup
from trueup import cli
from trueup.commands import calibrating
from trueup.hf import as_denoiser
from trueup.trajectory import check_sampler

from commandline import in_process, refused, trueup_command

FEW = ("--trajectories", 32)


@pytest.fixture(scope="module")
def calibration(model, images, tmp_path_factory):
    """With trajectories for three samplers, made by the command."""
    out = tmp_path_factory.mktemp("cal") / "x.trueup.safetensors"
    sampler = ("--solver", "ddim,dpm-solver-2", "--nfe", "4,6", *FEW)
    done = trueup_command("calibrate", model, "--data", images, "--trust", *sampler, "-o", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trajectory of ") == 4
    assert sorted(p.name for p in out.parent.iterdir()) == [out.name, f"{out.name}.run"]
    return out


def test_check_shows_where_a_sampler_drifts(model, images):
    done = trueup_command("check", model, "--data", images, "--solver", "ddim", "--nfe", 4, *FEW)
    assert done.returncode in (0, 2), done.stderr  # 2: a random network denoises worse than a filter
    lines = done.stdout.splitlines()
    assert lines[0] == "drift of ddim at 4 evaluations, 32 trajectories, moments of 40 images"
    assert len([line for line in lines if line.endswith("│")]) == 5
    assert lines[-1].startswith("verdict: its samples miss the data's moments by")


def test_check_in_json_and_in_a_line(model, images, calibration):
    base = (
        "check",
        model,
        "--calibration",
        calibration,
        "--solver",
        "ddim,dpm-solver-2",
        "--nfe",
        "4",
        *FEW,
    )
    done = trueup_command(*base, "--json")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["samplers"]
    assert (first["sampler"]["solver"], first["sampler"]["nfe"]) == ("ddim", 4)
    assert (len(first["states"]), len(second["states"])) == (4, 2)
    assert first["data_images"] == 40
    drift = check_sampler(
        as_denoiser(str(model)), trueup.load(calibration), solver="ddim", nfe=4, trajectories=32
    )
    assert first["states"][-1]["miss"] == pytest.approx(drift.total(3)[0], rel=1e-3)
    quiet = trueup_command(*base, "--quiet")
    assert [line.split(":")[0] for line in quiet.stdout.splitlines()] == [
        "ddim at 4 evaluations",
        "dpm-solver-2 (logsnr) at 4 evaluations",
    ]


def test_file_holds_every_sampler(calibration):
    made = trueup.load(calibration)
    assert [(t.sampler.name, t.sampler.nfe) for t in made.trajectories] == [
        ("ddim", 4),
        ("ddim", 6),
        ("dpm-solver-2", 4),
        ("dpm-solver-2", 6),
    ]
    assert all(t.trajectories == 32 for t in made.trajectories)
    done = trueup_command("inspect", calibration, "--json")
    assert [t["nfe"] for t in json.loads(done.stdout)["trajectories"]] == [4, 6, 4, 6]
    assert "trajectory of ddim at 4 evaluations: " in trueup_command("inspect", calibration).stdout


def test_samples_use_the_trajectory_where_there_is_one(model, calibration, tmp_path):
    base = ("sample", model, "--calibration", calibration, "-n", 3, "--solver", "ddim")
    for name, nfe, more, words in (
        ("with.npz", 4, (), "and kept on its trajectory"),
        ("without.npz", 4, ("--no-trajectory",), "3 samples, calibrated"),
        (
            "other.npz",
            5,
            (),
            "note: no trajectory for this sampler, only for ddim at 4 evaluations; ddim at 6",
        ),
    ):
        done = trueup_command(*base, "--nfe", nfe, *more, "-o", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert words in done.stderr
        assert ("kept on its trajectory" in done.stderr) == (name == "with.npz")
    refused(
        trueup_command(*base, "--nfe", 5, "--trajectory", "-o", tmp_path / "x.npz"),
        "no trajectory for ddim at 5 evaluations: this calibration has those of ddim at 4 evaluations",
    )
    refused(trueup_command(*base, "--nfe", 4, "--no-trajectory", "-o", tmp_path / "with.npz"), "exists")


def test_folder_of_samples_is_not_mixed(model, calibration, tmp_path):
    base = (
        "sample",
        model,
        "--calibration",
        calibration,
        "--solver",
        "ddim",
        "--nfe",
        4,
        "-o",
        tmp_path / "f",
    )
    assert trueup_command(*base, "-n", 2).returncode == 0
    refused(trueup_command(*base, "-n", 3, "--no-trajectory"), "another trajectory")


def test_evaluate_says_that_the_trajectory_was_applied(model, images, calibration, tmp_path):
    done = trueup_command(
        *("evaluate", model, "--calibration", calibration, "--data", images, "--features", "pixels"),
        *("--solver", "ddim", "--nfe", "4,5", "-n", 16, "-o", tmp_path / "c.json"),
    )
    assert done.returncode == 0, done.stderr
    notes = json.loads((tmp_path / "c.json").read_text())["notes"]
    assert "after: the calibration's trajectory of ddim at 4 evaluations is applied as well" in notes
    assert any(
        note.startswith("ddim-5: no trajectory for this sampler, only for ddim at 4") for note in notes
    )
    assert "Warning" not in done.stderr


def test_samplers_are_added_without_data(model, calibration, tmp_path):
    out = tmp_path / "more.safetensors"
    base = ("calibrate", model, "--calibration", calibration, "--solver", "unipc", "--nfe", 4, *FEW)
    done = trueup_command(*base, "-o", out)
    assert done.returncode == 0, done.stderr
    made, before = trueup.load(out), trueup.load(calibration)
    assert len(made.trajectories) == len(before.trajectories) + 1
    assert made.identity == before.identity
    assert [t.identity for t in made.trajectories[:-1]] == [t.identity for t in before.trajectories]
    done = trueup_command(*base, "-o", out, "--calibration", out, "--force")  # into the same file
    assert done.returncode == 0, done.stderr
    assert len(trueup.load(out).trajectories) == len(made.trajectories)


def test_interrupted_samplers_are_not_made_again(model, images, tmp_path, monkeypatch, capsys):
    out = tmp_path / "x.safetensors"
    command = [
        "calibrate",
        str(model),
        "--data",
        str(images),
        "--trust",
        "--solver",
        "ddim",
        "--nfe",
        "3,4,5",
    ]
    command += ["--trajectories", "16", "-o", str(out)]
    calls = []
    real = calibrating.calibrate_sampler

    def twice(*arguments, **settings):
        calls.append(settings["nfe"])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **settings)

    monkeypatch.setattr(calibrating, "calibrate_sampler", twice)
    assert cli.main(command) == 130
    assert "run the same command again to go on" in capsys.readouterr().err
    assert not out.exists()
    assert cli.main(command) == 0
    assert calls == [3, 4, 5, 5]
    undisturbed = real(
        str(model), trueup.load(out), solver="ddim", nfe=[3, 4, 5], trajectories=16, progress=False
    )
    for found, expected in zip(trueup.load(out).trajectories, undisturbed.trajectories, strict=True):
        assert torch.allclose(found.gain, expected.gain, rtol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--data", "D", "--nfe", "10"), "--nfe is about a sampler: say which with --solver"),
        (("--data", "D", "--guidance", "2"), "--guidance is about a sampler"),
        (("--calibration", "C"), "say which sampler to add"),
        (("--data", "D", "--calibration", "C", "--solver", "ddim"), "one of --data, --generated"),
        (("--data", "D", "--solver", "ddim", "--trajectories", "3"), "16 trajectories or more, not 3"),
        (("--data", "D", "--solver", "dpm-solver-3-adaptive"), "chooses its own steps"),
        (("--data", "D", "--solver", "dim"), "unknown solver 'dim', did you mean ddim?"),
        (("--data", "D", "--solver", "ddim", "--grid", "uniform"), "has its own"),
        (("--data", "D", "--solver", "ddim", "--guidance", "2"), "cannot be guided"),
        (("--data", "D", "--solver", "ddim", "--nfe", "0"), "'0' is not a whole number"),
        (("--calibration", "nowhere", "--solver", "ddim"), "nowhere does not exist"),
    ],
)
def test_bad_requests_to_calibrate(capsys, model, images, calibration, tmp_path, arguments, words):
    known = {"D": images, "C": calibration}
    given = [known.get(a, a) for a in arguments]
    assert words in in_process(capsys, "calibrate", model, *given, "-o", tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--solver", "ddim"), "say what states should be like"),
        (("--data", "D", "--calibration", "C", "--solver", "ddim"), "say what states should be like"),
        (("--data", "D", "--calibration", "C"), "--calibration goes with --solver"),
        (("--data", "D", "--solver", "ddim", "--fail-above", "1"), "--fail-above is about the network"),
        (("--data", "D", "--trajectories", "32"), "--trajectories is about a sampler"),
    ],
)
def test_bad_requests_to_check(capsys, model, images, calibration, arguments, words):
    known = {"D": images, "C": calibration}
    assert words in in_process(capsys, "check", model, *[known.get(a, a) for a in arguments])


def test_calibration_of_another_model_is_refused(capsys, calibration, tmp_path):
    assert "made for other weights" in in_process(
        capsys, "check", "bundled:raw", "--calibration", calibration, "--solver", "ddim"
    )
