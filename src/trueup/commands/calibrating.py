"""`trueup calibrate`, `check`, `inspect` and `demo`."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trueup.calibration import Calibration, Trajectory, load
from trueup.calibration.trajectory import find
from trueup.commands import shared
from trueup.commands.shared import given, say, show, warn
from trueup.demo import run as run_demo
from trueup.denoiser import Denoiser
from trueup.errors import Argument
from trueup.estimate import Moments, fit, measure
from trueup.estimate.diagnose import look
from trueup.figure import check_figure, draw
from trueup.images import open_images
from trueup.report import as_json, as_text, plain_output
from trueup.sampling import generate
from trueup.sampling.draw import sampler_of
from trueup.trajectory import calibrate_sampler, check_sampler
from trueup.trajectory.walk import TRAJECTORIES, Walk

_PARTLY = "samplers.trueup.safetensors"  # in the run directory: samplers made so far


def calibrate(options: argparse.Namespace) -> int:
    """`trueup calibrate`."""
    output, run = options.output, options.run or Path(f"{options.output}.run")
    denoiser = shared.open_model(options)
    options.run = run
    solvers = _solvers(denoiser, options)
    more: dict[str, Any] = {"output": str(output), "run": str(run)}
    calibration = shared.open_calibration(options, denoiser)
    if calibration is None:
        moments = _measure(denoiser, options, run)
        calibration = fit(moments, family=options.family, estimator=options.estimator)
        more["skipped"] = moments.skipped
    calibration = _add_samplers(denoiser, calibration, solvers, options)
    calibration.save(output)
    (run / _PARTLY).unlink(missing_ok=True)
    if run.is_dir() and not any(run.iterdir()):
        run.rmdir()
    _report(calibration, options, more)
    what = "images with a larger " + ("--images" if options.generated is None else "--generated")
    kept = f"; {run} keeps the measurements (delete it, or add {what})" if options.calibration is None else ""
    say(options, f"wrote {output}{kept}")
    return 0


def _measure(denoiser: Denoiser, options: argparse.Namespace, run: Path | None) -> Moments:
    """The network measured on data, or on its own samples."""
    data: Any
    common = given(options, "seed", "progress")
    if run is not None and options.generated is not None:
        how = {"nfe": options.generate_nfe, "labels": options.labels, "folder": run / "generated"}
        data = generate(denoiser, options.generated, **how, **common)
        trust = True  # its own samples are what it was trained on, as far as it knows
    else:
        data = shared.images_of(options)
        trust = run is None or options.trust  # `check` looks for itself
    moments = measure(denoiser, data, run=run, trust=trust, **common)
    for reason in moments.skipped[:5]:
        say(options, f"skipped: {reason}")
    if moments.skipped:
        say(options, f"{len(moments.skipped)} image{'s' * (len(moments.skipped) > 1)} skipped")
    if moments.duplicates:
        say(options, f"images that occurred before and count once: {moments.duplicates}")
    return moments


def _add_samplers(
    denoiser: Denoiser, calibration: Calibration, solvers: list[tuple[Any, int]], options: argparse.Namespace
) -> Calibration:
    """The calibration with a trajectory for every sampler; those finished before an interruption are kept."""
    partly = options.run / _PARTLY
    made = _finished(partly, calibration, options)
    asked = [sampler_of(solver, nfe, options.guidance) for solver, nfe in solvers]
    for sampler, (solver, nfe) in zip(asked, solvers, strict=True):
        if find(made, sampler) is None:
            calibrated = calibrate_sampler(denoiser, calibration, solver=solver, nfe=nfe, **_walk(options))
            made.append(calibrated.trajectories[-1])
            if len(solvers) > 1:
                options.run.mkdir(parents=True, exist_ok=True)
                replace(calibration, trajectories=tuple(made)).save(partly)
    made = [trajectory for trajectory in made if any(not trajectory.sampler.differences(s) for s in asked)]
    kept = [old for old in calibration.trajectories if find(made, old.sampler) is None]
    return replace(calibration, trajectories=(*kept, *made))


def _finished(partly: Path, calibration: Calibration, options: argparse.Namespace) -> list[Trajectory]:
    """What an interrupted command has made of the same things."""
    if not partly.exists():
        return []
    before = load(partly)
    same_data = torch.equal(before.data_digests, calibration.data_digests)
    if before.identity != calibration.identity or not same_data:
        return []
    wanted = _walk(options)["trajectories"], {"seed": options.seed, "labels": options.labels}
    return [made for made in before.trajectories if (made.trajectories, made.provenance) == wanted]


def _walk(options: argparse.Namespace) -> dict[str, Any]:
    """What says how trajectories are drawn."""
    how = given(options, "labels", "guidance", "seed", "progress")
    return {"trajectories": options.trajectories or TRAJECTORIES, **how}


def _solvers(denoiser: Denoiser, options: argparse.Namespace) -> list[tuple[Any, int]]:
    """Every sampler that was asked for; what cannot be is said before anything is measured."""
    solvers = [shared.open_solver(name, denoiser, options.grid) for name in options.solver or ()]
    pairs = [(solver, nfe) for solver in solvers for nfe in options.nfe or [20]]
    for solver, nfe in pairs:
        how = {name: value for name, value in _walk(options).items() if name != "seed"}
        Walk(denoiser, solver, nfe, None, **how)  # type: ignore[arg-type]  # it is not taken
    return pairs


def check(options: argparse.Namespace) -> int:
    """`trueup check`."""
    if options.solver is not None:
        return _check_samplers(options)
    if options.figure is not None:
        check_figure(options.figure)
    denoiser = shared.open_model(options)
    problem = _look_for_mistakes(denoiser, options)
    moments = _measure(denoiser, options, None)
    calibration = fit(moments, family=options.family, estimator=options.estimator)
    if options.figure is not None:
        draw(calibration, options.figure)
    low = calibration.uncalibration.low
    unknown = options.fail_above is not None and math.isnan(low)
    failed = options.fail_above is not None and low > options.fail_above
    _report(calibration, options, {"problem": problem, "failed": failed, "skipped": moments.skipped})
    if problem is not None:
        warn(problem)
    elif unknown:
        warn("too few images to say whether it is miscalibrated: use more --images")
    elif failed:
        warn(f"miscalibrated by at least {low:.2g} bits/dim, above {options.fail_above:g}")
    return 2 if problem is not None or unknown else int(failed)


def _check_samplers(options: argparse.Namespace) -> int:
    """`trueup check --solver`: how far states drift."""
    denoiser = shared.open_model(options)
    solvers = _solvers(denoiser, options)
    source: Any = shared.open_calibration(options, denoiser)
    problem = None
    if source is None:
        source, problem = shared.images_of(options), _look_for_mistakes(denoiser, options)
    drifts = []
    for solver, nfe in solvers:
        drift = check_sampler(denoiser, source, solver=solver, nfe=nfe, **_walk(options))
        drifts.append(drift)
        if not options.json:
            brief = f"{drift.sampler}: {drift.verdict()}"
            text = brief if options.quiet else drift.summary(plain=plain_output())
            show(options, {}, text if len(drifts) == 1 or options.quiet else f"\n{text}")
    if options.json:
        show(options, {"problem": problem, "samplers": [drift.as_json() for drift in drifts]}, "")
    if problem is not None:
        warn(problem)
    return 2 if problem is not None else 0


def _look_for_mistakes(denoiser: Denoiser, options: argparse.Namespace) -> str | None:
    """The likeliest way in which the model is used wrongly, or None."""
    say(options, "looking for the usual mistakes")
    found = look(denoiser, open_images(shared.images_of(options), denoiser))
    for hint in found.hints:
        say(options, f"note: {hint}")
    return None if found.problem is None else found.problem.phrased(Argument.option)


def inspect(options: argparse.Namespace) -> int:
    """`trueup inspect`."""
    calibration = load(options.file)
    if options.figure is not None:
        draw(calibration, options.figure)
        say(options, f"wrote {options.figure}")
    _report(calibration, options, {"file": str(options.file)})
    return 0


def demo(options: argparse.Namespace) -> int:
    """`trueup demo`."""
    options.run = options.out / f"seed-{options.seed}.run"
    device = shared.find_device(options.device)
    run_demo(options.out, options.run, device=device, **given(options, "seed", "progress"))
    return 0


def _report(calibration: Calibration, options: argparse.Namespace, more: dict[str, Any]) -> None:
    """The table, the chart and the verdict; or JSON."""
    brief = f"verdict: {calibration.verdict()}"
    text = brief if options.quiet else as_text(calibration, plain=plain_output())
    if options.command == "inspect":
        origin = calibration.provenance
        weights = next(iter((origin.get("weights") or {}).values()), "none")
        predicts, noise = calibration.parametrization.name, calibration.process.kind
        text += f"\nmade for: samples of shape {calibration.shape}, {predicts} prediction, {noise} noise, "
        seed, images = origin.get("seed"), calibration.data_images
        text += f"weights {weights[:8]}; seed {seed}, {images:,} images"
    show(options, {**as_json(calibration), **more}, text)
