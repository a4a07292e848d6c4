"""Fitted solvers on the command line: `calibrate --nfe`, `sample` with them, and `samplers`."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import trueup
from trueup.calibration import Calibration
from trueup.commands import calibrating
from trueup.errors import TrueupError
from trueup.fitting import solve
from trueup.fitting.teacher import Teacher

from commandline import in_process, refused, trueup_command
from tiny import save, tiny_unet

FEW = ("--trajectories", 32, "--batch-size", 64)


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """Solvers for 3 and 4 evaluations without data, and what the command said."""
    out = tmp_path_factory.mktemp("alone") / "a.safetensors"
    return out, trueup_command("calibrate", model, "--nfe", "3,4", *FEW, "-o", out)


@pytest.fixture(scope="module")
def measured(model, images, tmp_path_factory):
    """A calibration on images, with a solver for 3 evaluations."""
    out = tmp_path_factory.mktemp("measured") / "b.safetensors"
    base = ("calibrate", model, "--data", images, "--trust", "--nfe", 3, "--json")
    return out, trueup_command(*base, *FEW, "-o", out)


def test_solvers_are_fitted_without_data(alone, model):
    out, done = alone
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == f"wrote {out}"
    cal = trueup.load(out)
    assert [(made.nfe, made.guidance) for made in cal.solvers] == [(3, 1.0), (4, 1.0)]
    assert all(made.provenance["trajectories"] == 32 for made in cal.solvers)
    assert (cal.measured, cal.empty, cal.gains) == (False, True, "none")
    for made in cal.solvers:
        assert made.summary() in done.stdout
    assert "verdict: nothing was measured: the network is left as it is, with 2 solvers" in done.stdout
    assert sorted(path.name for path in out.parent.iterdir()) == [out.name]  # no run directory is left


def test_solvers_of_the_command_are_those_of_the_library(alone, model):
    out, _ = alone
    denoiser = trueup.hf.as_denoiser(str(model)).with_batch_size(64)
    cal = trueup.fit_solver(denoiser, nfe=3, trajectories=32, progress=False)
    assert cal.solver(3).identity == trueup.load(out).solver(3).identity


def test_solvers_are_fitted_to_the_corrected_network(measured):
    out, done = measured
    assert done.returncode == 0, done.stderr
    cal, said = trueup.load(out), json.loads(done.stdout)
    assert not cal.empty
    assert [(made.nfe, made.gains) for made in cal.solvers] == [(3, cal.gains)]
    assert [made["nfe"] for made in said["solvers"]] == [3]
    assert said["solvers"][0]["evidence"] == cal.solver(3).evidence
    assert {"miss", "limit_miss", "error", "error_base"} <= {*cal.solver(3).evidence}
    run = out.parent / f"{out.name}.run"
    assert f"{run} keeps the measurements" in done.stderr
    assert not (run / "solvers").exists()
    assert cal.provenance["samples"]["miss"]["none"]


def test_solvers_are_added_to_a_calibration(model, measured, tmp_path):
    before, out = trueup.load(measured[0]), tmp_path / "c.safetensors"
    done = trueup_command(
        "calibrate", model, "--calibration", measured[0], "--nfe", 2, *FEW, "-o", out, "--quiet"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("verdict: ")
    assert len(done.stdout.strip().splitlines()) == 1
    after = trueup.load(out)
    assert [made.nfe for made in after.solvers] == [3, 2]
    assert after.solver(3).identity == before.solver(3).identity
    assert after.identity == before.identity
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name]


def test_samples_are_drawn_with_the_fitted_solver_and_it_is_said(model, alone, tmp_path):
    base = ("sample", model, "--calibration", alone[0], "-n", 3, "--seed", 2)
    done = trueup_command(*base, "--nfe", 4, "-o", tmp_path / "x.npz")
    assert done.returncode == 0, done.stderr
    nothing = f"uncalibrated ({alone[0]} corrects nothing)"  # it has solvers alone
    assert f"3 samples, {nothing}, fitted in 4 evaluations" in done.stderr
    assert "no solver" not in done.stderr
    denoiser = trueup.hf.as_denoiser(str(model))
    x = trueup.sample(denoiser, 3, nfe=4, seed=2, solver="fitted", calibration=alone[0], progress=False)
    expected = trueup.sampling.pictures(x, (-1.0, 1.0)).permute(0, 2, 3, 1).numpy()
    found = np.load(tmp_path / "x.npz")["images"]
    assert np.abs(found.astype(int) - expected).max() <= 1
    asked = trueup_command(*base, "--nfe", 4, "--solver", "fitted", "-o", tmp_path / "y.npz")
    assert asked.returncode == 0, asked.stderr
    assert np.array_equal(np.load(tmp_path / "y.npz")["images"], found)


def test_another_number_of_evaluations_has_no_solver(model, alone, tmp_path):
    base = ("sample", model, "--calibration", alone[0], "-n", 1, "--nfe", 5, "-o", tmp_path / "x.npz")
    done = trueup_command(*base)
    assert done.returncode == 0, done.stderr
    assert "dpm-solver-3 in 5 evaluations" in done.stderr
    there = "no solver for 5 evaluations: this calibration has those for 3 evaluations, 4 evaluations"
    fit = f": to fit one, trueup calibrate MODEL --calibration {alone[0]} --nfe 5 -o FILE"
    assert done.stderr.splitlines()[0] == f"drawing with dpm-solver-3: {there}{fit}"
    refused(trueup_command(*base, "--solver", "fitted", "--force"), f"{there}{fit}")
    named = trueup_command(*base, "--solver", "ddim", "--force")
    assert "no solver" not in named.stderr
    none = ("sample", model, "-n", 1, "--nfe", 3, "--solver", "fitted", "-o", tmp_path / "y.npz")
    refused(trueup_command(*none), "a fitted solver is part of a calibration: name it with --calibration")
    assert not (tmp_path / "y.npz").exists()


def test_an_evaluation_says_how_to_fit_the_solver_it_lacks(model, images, alone):
    base = ("evaluate", model, "--calibration", alone[0], "--data", images, "--features", "pixels", "-n", 8)
    fit = f"to fit one, trueup calibrate MODEL --calibration {alone[0]} --nfe 6 -o FILE"
    refused(trueup_command(*base, "--solver", "ddim,fitted", "--nfe", "4,6"), "no solver for 6", fit)


def test_what_a_replaced_file_had_is_said_before_anything_runs(model, images, alone, measured, tmp_path):
    """--force is for the file; what is in it took minutes to make."""
    there = tmp_path / "there.safetensors"
    data = ("--data", images, "--images", 30, "--trust")
    cases = [
        (alone, ("--nfe", 3), f"its solvers for 4 evaluations (--calibration {there} keeps them)"),
        (alone, data, "its solvers for 3 evaluations, 4 evaluations (--nfe 3,4 fits them again)"),
        (measured, ("--nfe", 3), f"its correction (--calibration {there} keeps it)"),
        (measured, ("--calibration", there, "--nfe", 2), None),
        (measured, (*data, "--nfe", 3), None),
    ]
    for (old, _), given, words in cases:
        there.write_bytes(old.read_bytes())
        # It ends before it measures: there is no such device.
        done = trueup_command("calibrate", model, *given, "--force", "-o", there, "--device", "mps")
        assert done.returncode == 2
        said = [f"{there} is replaced: the new one will not have {words}"] if words else []
        assert done.stderr.splitlines()[:-1] == said
        assert there.read_bytes() == old.read_bytes()


def test_guidance_that_cannot_be_is_refused_before_measuring(model, images, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrating, "_measure", lambda *_: pytest.fail("it measures"))
    net = save(tiny_unet(num_class_embeds=3), tmp_path / "net")
    pictures = np.zeros((8, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "x.npz", image=pictures, label=np.arange(8) % 3)
    more = ("--nfe", 3, "--guidance", 2, "-o", tmp_path / "x.safetensors")
    refused(trueup_command("calibrate", net, "--data", tmp_path / "x.npz", *more), "--null-label")
    refused(trueup_command("calibrate", model, "--data", images, *more), "takes no labels, prompts or")
    assert not (tmp_path / "x.safetensors.run").exists()


def test_what_was_never_measured_is_no_level(alone):
    said = json.loads(trueup_command("inspect", alone[0], "--json").stdout)
    assert said["levels"] == []
    assert said["share_of_loss_removed"] is None


def test_inspect_names_the_solvers(alone):
    done = trueup_command("inspect", alone[0])
    assert done.returncode == 0, done.stderr
    for made in trueup.load(alone[0]).solvers:
        assert made.summary() in done.stdout


@pytest.fixture(scope="module")
def compared(model, alone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    base = ("samplers", model, "--calibration", alone[0], "--nfe", "3,4", "--trajectories", 8)
    drawn = trueup_command(*base, "--figure", folder / "f.png")
    return folder, drawn, trueup_command(*base, "--json")


def test_samplers_are_compared_in_text_and_as_json(compared):
    _, drawn, plain = compared
    assert drawn.returncode == plain.returncode == 0, drawn.stderr + plain.stderr
    said = json.loads(plain.stdout)
    assert said["trajectories"] == 8
    rows = {(row["sampler"], row["grid"], row["nfe"]): row["error"] for row in said["samplers"]}
    assert {("fitted", "its own", 3), ("fitted", "its own", 4), ("DDIM", "Karras", 3)} <= {*rows}
    lines = drawn.stdout.splitlines()
    assert lines[0].startswith("samplers of UNet2DModel, as it is: distance to its own limit, 8 trajectories")
    (line,) = (text for text in lines if text.startswith("fitted"))
    values = [float(cell.split("±")[0]) for cell in (line[34:54], line[54:])]
    assert values == pytest.approx([rows["fitted", "its own", nfe] for nfe in (3, 4)], rel=0.01)
    assert lines[-1] == f"verdict: {said['verdict']}"


def test_samplers_are_drawn(compared):
    folder, drawn, _ = compared
    assert f"wrote {folder / 'f.png'}" in drawn.stderr
    picture = np.asarray(Image.open(folder / "f.png").convert("L"))
    assert picture.shape[0] > 300
    assert picture.std() > 5  # it is not blank


def test_quiet_samplers_say_the_verdict_alone(model):
    done = trueup_command("samplers", model, "--nfe", 2, "--trajectories", 8, "--quiet")
    assert done.returncode == 0
    assert done.stdout.startswith("verdict: 2 evaluations: ")
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


def test_a_conditional_network_is_fitted_with_its_labels_and_guidance(tmp_path):
    net, out = save(tiny_unet(num_class_embeds=3), tmp_path / "net"), tmp_path / "a.safetensors"
    base = ("calibrate", net, "--nfe", 2, *FEW, "-o", out)
    refused(trueup_command(*base), "say which labels to sample as --labels")
    refused(trueup_command(*base, "--labels", "0-1", "--guidance", 2), "--null-label")
    done = trueup_command(*base, "--labels", "0-1", "--guidance", 2, "--null-label", 2)
    assert done.returncode == 0, done.stderr
    assert [(made.nfe, made.guidance) for made in trueup.load(out).solvers] == [(2, 2.0)]
    draw = ("sample", net, "--calibration", out, "-n", 1, "--labels", 0, "--null-label", 2)
    guided = trueup_command(*draw, "--nfe", 2, "--guidance", 2, "-o", tmp_path / "x.npz")
    assert guided.returncode == 0, guided.stderr
    assert "fitted in 2 evaluations" in guided.stderr
    alone = trueup_command(*draw, "--nfe", 2, "--solver", "fitted", "-o", tmp_path / "y.npz")
    refused(alone, "the solver for 2 evaluations is for guidance 2, not 1: pass --guidance 2")


def test_labels_other_than_the_datas_are_fitted_to_the_limit_and_judged_by_the_datas(images, tmp_path):
    net, out = save(tiny_unet(num_class_embeds=3), tmp_path / "net"), tmp_path / "a.safetensors"
    pictures = np.stack([np.asarray(Image.open(path)) for path in sorted(images.glob("*.png"))])
    np.savez(tmp_path / "data.npz", image=pictures, label=np.arange(len(pictures)) % 3)
    base = ("calibrate", net, "--data", tmp_path / "data.npz", "--trust", "--nfe", 2, *FEW, "--force")
    done = trueup_command(*base, "--labels", 1, "-o", out)
    assert done.returncode == 0, done.stderr
    cal = trueup.load(out)
    assert cal.samples is not None
    assert cal.solver(2).provenance["labels"] == [1]
    assert "miss" not in cal.solver(2).evidence
    done = trueup_command(*base, "-o", out)
    assert done.returncode == 0, done.stderr
    cal = trueup.load(out)
    assert cal.solver(2).provenance["labels"] == "as in the data"
    assert "miss" in cal.solver(2).evidence


def test_ctrl_c_keeps_the_trajectories(model, alone, tmp_path, monkeypatch):
    out = tmp_path / "a.safetensors"
    base = ("calibrate", model, "--nfe", "3,4", *FEW, "-o", out)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(solve, "search", interrupted)
        done = trueup_command(*base)
    assert done.returncode == 130
    assert f"kept in {out}.run: run the same command again to go on" in done.stderr
    assert not out.exists()

    def again(*args, **kwargs):
        raise AssertionError("trajectories are computed again")

    monkeypatch.setattr(Teacher, "of", again)
    done = trueup_command(*base)
    assert done.returncode == 0, done.stderr
    found, expected = trueup.load(out), trueup.load(alone[0])
    assert [made.identity for made in found.solvers] == [made.identity for made in expected.solvers]
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name]


def test_what_cannot_be_saved_need_not_be_fitted_again(model, alone, tmp_path, monkeypatch):
    out, save_it = tmp_path / "a.safetensors", Calibration.save
    base = ("calibrate", model, "--nfe", "3,4", *FEW, "-o", out)

    def full(self, path):
        if path == out:
            raise TrueupError("the disk is full")
        save_it(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Calibration, "save", full)
        refused(trueup_command(*base), "the disk is full")

    def again(*args, **kwargs):
        raise AssertionError("solvers are fitted again")

    monkeypatch.setattr(solve.Fitter, "fit", again)
    done = trueup_command(*base)
    assert done.returncode == 0, done.stderr
    found, expected = trueup.load(out), trueup.load(alone[0])
    assert [made.identity for made in found.solvers] == [made.identity for made in expected.solvers]
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("calibrate -o x", "say what to measure on, one of --data and --generated N"),
        ("calibrate --nfe 1 -o x", "2 to 500 evaluations, not 1"),
        ("calibrate --nfe 3,600 -o x", "2 to 500 evaluations, not 600"),
        ("calibrate --nfe some -o x", "'some' is not a whole number"),
        ("calibrate --nfe 3 --trajectories 8 -o x", "32 trajectories or more, not 8"),
        ("calibrate --calibration CAL -o x", "say for how many evaluations with --nfe"),
        ("calibrate --data IMAGES --calibration CAL --nfe 3 -o x", "are two sources: leave one out"),
        ("calibrate --calibration nowhere --nfe 3 -o x", "nowhere does not exist"),
        ("samplers --nfe 1", "samplers are compared with 2 to 500 evaluations, not 1"),
        ("samplers --trajectories 4", "8 trajectories or more, not 4"),
        ("samplers --figure x.txt", "'x.txt' does not end in .png, .svg or .pdf"),
        ("samplers --figure nowhere/x.png", "nowhere is not a directory"),
        ("sample --solver fitted -o x", "name it with --calibration"),
    ],
)
def test_what_cannot_be_is_said_before_torch_is_loaded(
    capsys, monkeypatch, model, images, alone, tmp_path, command, words
):
    monkeypatch.setitem(sys.modules, "trueup.commands", None)
    monkeypatch.delattr(trueup, "commands", raising=False)
    monkeypatch.chdir(tmp_path)
    given = [{"IMAGES": images, "CAL": alone[0]}.get(word, word) for word in command.split()]
    assert words in in_process(capsys, given[0], model, *given[1:])
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command", ["calibrate --nfe 3 --trajectories 32 -o x", "samplers --nfe 3 --trajectories 8"]
)
def test_a_network_that_diverges_is_refused_in_a_line(tmp_path, command):
    net = tiny_unet()
    with torch.no_grad():
        net.conv_out.weight.mul_(1e12)
    first, *rest = command.split()
    refused(
        trueup_command(first, save(net, tmp_path / "net"), *rest, *FEW[2:], "--quiet", cwd=tmp_path),
        "the network diverges even in small steps",
        "trueup check",
    )
    assert not (tmp_path / "x").exists()


def test_a_calibration_of_another_model_is_refused(alone, tmp_path):
    other = save(tiny_unet(block_out_channels=(4, 8)), tmp_path / "net")
    for command in (
        ("calibrate", other, "--nfe", 3, "-o", tmp_path / "x"),
        ("samplers", other, "--nfe", 3),
        ("sample", other, "--nfe", 3, "-n", 1, "-o", tmp_path / "y.npz"),
    ):
        refused(
            trueup_command(*command, "--calibration", alone[0], "--quiet"),
            "made for other weights",
            "calibrate this model",
        )
