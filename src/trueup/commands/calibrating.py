"""`trueup calibrate`, `check`, `inspect` and `demo`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from trueup.artifact import load
from trueup.attachment import attach
from trueup.calibration import Calibration
from trueup.commands.shared import check_output, find_device, open_model, progress, say
from trueup.data import Samples, Transform
from trueup.demo import run as run_demo
from trueup.demo import run_directory
from trueup.denoiser import Denoiser
from trueup.diagnose import FEWEST, IMAGES, diagnose
from trueup.errors import DataError, TrueupError
from trueup.estimate import Moments, fit, measure
from trueup.figure import check_figure, draw
from trueup.files import bundled
from trueup.report import as_json, plain_output, show
from trueup.sampling import as_solver, generate
from trueup.sampling.draw import Solver
from trueup.trajectory.calibrating import calibrate_sampler, check_sampler
from trueup.trajectory.maps import Sampler, Trajectory, choose, find
from trueup.trajectory.marginals import FEWEST_IMAGES, too_few
from trueup.trajectory.walk import TRAJECTORIES, network_and_states

_PARTLY = "samplers.trueup.safetensors"  # in the run directory: samplers made so far


def calibrate(options: argparse.Namespace) -> int:
    """`trueup calibrate`."""
    output, run = options.output, options.run or Path(f"{options.output}.run")
    check_output(output, options.force)
    if sum(given is not None for given in (options.data, options.generated, options.calibration)) != 1:
        raise DataError(
            "say what to measure on, one of --data, --generated N (samples of the model itself) and, to add "
            "samplers to it, --calibration FILE"
        )
    if options.calibration is not None and options.sampler is None:
        raise DataError("say which sampler to add to the calibration: --sampler NAME --nfe N")
    _check_sampler_options(options)
    few = options.images if options.generated is None else options.generated
    if options.sampler is not None and options.calibration is None and few < FEWEST_IMAGES:
        raise DataError(too_few(few))
    denoiser = open_model(options)
    options.run = run
    solvers = _solvers(denoiser, options)
    more: dict[str, Any] = {"output": str(output), "run": str(run)}
    if options.calibration is not None:
        calibration = load(options.calibration)
        attach(denoiser, calibration).remove()  # or say now that it does not fit
    else:
        moments = _measure(denoiser, options, run)
        calibration = fit(moments, family=options.family, estimator=options.estimator)
        more["skipped"] = moments.skipped
    calibration = _add_samplers(denoiser, calibration, solvers, options, run)
    calibration.save(output)
    (run / _PARTLY).unlink(missing_ok=True)
    if run.is_dir() and not any(run.iterdir()):
        run.rmdir()
    _report(calibration, options, more)
    what = "images with a larger " + ("--images" if options.generated is None else "--generated")
    kept = f"; {run} keeps the measurements (delete it, or add {what})" if options.calibration is None else ""
    say(options, f"wrote {output}{kept}")
    return 0


def _measure(denoiser: Denoiser, options: argparse.Namespace, run: Path) -> Moments:
    """The network measured on data, or on its own samples."""
    begun = (run / "checkpoint.safetensors").exists()  # then it was looked at
    if options.generated is None:
        problem = None if begun or options.trust else look_for_mistakes(denoiser, options)
        if problem:
            raise TrueupError(f"{problem} (or pass --trust to calibrate as it is)")
        return _moments(denoiser, bundled(options.data), options, run)
    images = generate(
        denoiser,
        options.generated,
        nfe=options.generate_nfe,
        labels=options.labels,
        seed=options.seed,
        batch_size=options.batch_size,
        folder=run / "generated",
        force=options.force,
        progress=progress(options),
    )
    options.images = options.generated
    return _moments(denoiser, images, options, run)


def _add_samplers(
    denoiser: Denoiser,
    calibration: Calibration,
    solvers: list[tuple[Solver, int]],
    options: argparse.Namespace,
    run: Path,
) -> Calibration:
    """The calibration with a trajectory for every sampler; those finished before an interruption are kept."""
    partly = run / _PARTLY
    made = _finished(partly, calibration, options)
    for solver, nfe in solvers:
        sampler = Sampler.of(solver, solver.budget(nfe), options.guidance)
        if find(made, sampler) is None:
            calibrated = calibrate_sampler(
                denoiser, calibration, solver=solver, nfe=nfe, **_walk(options), progress=progress(options)
            )
            made.append(choose(calibrated.trajectories, sampler))
            if len(solvers) > 1:
                run.mkdir(parents=True, exist_ok=True)
                replace(calibration, trajectories=tuple(made)).save(partly)
    asked = [Sampler.of(solver, solver.budget(nfe), options.guidance) for solver, nfe in solvers]
    made = [trajectory for trajectory in made if any(not trajectory.sampler.differences(s) for s in asked)]
    kept = [old for old in calibration.trajectories if find(made, old.sampler) is None]
    return replace(calibration, trajectories=(*kept, *made))


def _finished(partly: Path, calibration: Calibration, options: argparse.Namespace) -> list[Trajectory]:
    """What an interrupted command has made of the same things."""
    if not partly.exists():
        return []
    before = load(partly)
    settings = {"seed": options.seed, "labels": options.labels}
    ours, theirs = (
        (c.identity, c.data_fingerprint, c.provenance.get("weights")) for c in (calibration, before)
    )
    return [
        made
        for made in before.trajectories
        if ours == theirs
        and made.trajectories == (options.trajectories or TRAJECTORIES)
        and made.provenance == settings
    ]


def _walk(options: argparse.Namespace) -> dict[str, Any]:
    """What says how trajectories are drawn."""
    return {
        "trajectories": options.trajectories or TRAJECTORIES,
        "labels": options.labels,
        "guidance": options.guidance,
        "null_label": options.null_label,
        "seed": options.seed,
        "batch_size": options.batch_size,
    }


def _check_sampler_options(options: argparse.Namespace) -> None:
    if options.sampler is not None:
        return
    given = [f"--{name}" for name in ("nfe", "trajectories", "grid") if getattr(options, name) is not None]
    if given or options.guidance != 1.0:
        raise TrueupError(f"{(given or ['--guidance'])[0]} is about a sampler: say which with --sampler")


def _solvers(denoiser: Denoiser, options: argparse.Namespace) -> list[tuple[Solver, int]]:
    """Every sampler that was asked for; what cannot be is said before anything is measured."""
    solvers = [as_solver(name, denoiser, options.grid) for name in options.sampler or ()]
    pairs = [(solver, nfe) for solver in solvers for nfe in options.nfe or [20]]
    for solver, nfe in pairs:
        network_and_states(denoiser, solver, nfe, **{k: v for k, v in _walk(options).items() if k != "seed"})
    return pairs


def check(options: argparse.Namespace) -> int:
    """`trueup check`."""
    _check_sampler_options(options)
    if options.sampler is not None:
        return _check_samplers(options)
    if options.figure is not None:
        check_figure(options.figure)
    if options.calibration is not None:
        raise TrueupError("--calibration goes with --sampler: how its states drift with the calibration")
    if options.data is None:
        raise DataError("say what to measure on: --data")
    denoiser = open_model(options)
    problem = look_for_mistakes(denoiser, options)
    moments = _moments(denoiser, bundled(options.data), options, None)
    calibration = fit(moments, family=options.family, estimator=options.estimator)
    if options.figure is not None:
        draw(calibration, options.figure)
    low = calibration.uncalibration.low
    unknown = options.fail_above is not None and math.isnan(low)
    failed = options.fail_above is not None and low > options.fail_above
    _report(calibration, options, {"problem": problem, "failed": failed, "skipped": moments.skipped})
    if problem:
        print(f"trueup: {problem}", file=sys.stderr)
        return 2
    if unknown:
        print("trueup: too few images to say whether it is miscalibrated: use more --images", file=sys.stderr)
        return 2
    if failed:
        print(
            f"trueup: miscalibrated by at least {low:.2g} bits/dim, above {options.fail_above:g}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _check_samplers(options: argparse.Namespace) -> int:
    """`trueup check --sampler`: how far states drift."""
    for name in ("fail_above", "figure"):
        if getattr(options, name) is not None:
            raise TrueupError(f"--{name.replace('_', '-')} is about the network: leave out --sampler")
    if (options.data is None) == (options.calibration is None):
        raise DataError("say what states should be like: --data, or a --calibration that knows its moments")
    denoiser = open_model(options)
    solvers = _solvers(denoiser, options)
    how: dict[str, Any] = {}
    problem = None
    if options.calibration is not None:
        source: Any = load(options.calibration)
        attach(denoiser, source).remove()  # or say now that it does not fit
    else:
        source, problem = bundled(options.data), look_for_mistakes(denoiser, options)
        names = ("images", "resize", "crop", "flip", "data_range", "skip_bad")
        how = {name: getattr(options, name) for name in names}
    found = []
    for solver, nfe in solvers:
        drift = check_sampler(
            denoiser, source, solver=solver, nfe=nfe, **_walk(options), **how, progress=progress(options)
        )
        found.append(drift.as_json())
        if not options.json:
            text = (
                f"{drift.sampler}: {drift.verdict()}"
                if options.quiet
                else drift.summary(plain=plain_output())
            )
            print(text if len(found) == 1 or options.quiet else f"\n{text}", flush=True)
    if options.json:
        print(json.dumps({"problem": problem, "samplers": found}, indent=2))
    if problem:
        print(f"trueup: {problem}", file=sys.stderr)
    return 2 if problem else 0


def inspect(options: argparse.Namespace) -> int:
    """`trueup inspect`."""
    calibration = load(options.file)
    if options.figure is not None:
        draw(calibration, options.figure)
    _report(calibration, options, {"file": options.file})
    if options.figure is not None:
        say(options, f"wrote {options.figure}")
    if not options.json:
        origin = calibration.provenance
        weights = next(iter((origin.get("weights") or {}).values()), "none")
        print(
            f"made for: samples of shape {calibration.shape}, {calibration.parametrization.name} prediction, "
            f"{calibration.process.kind} noise, weights {weights[:8]}; seed {origin.get('seed')}, "
            f"data {calibration.data_fingerprint}"
        )
    return 0


def demo(options: argparse.Namespace) -> int:
    """`trueup demo`."""
    options.run = run_directory(options.out, options.seed)
    run_demo(options.out, seed=options.seed, device=find_device(options.device), progress=progress(options))
    return 0


def look_for_mistakes(denoiser: Denoiser, options: argparse.Namespace, *, exact: bool = False) -> str | None:
    """The likeliest way in which the model is used wrongly, or None; exact: see `Samples`."""
    transform = Transform(options.resize, options.crop, options.flip, options.data_range)
    source = bundled(options.data)
    samples = Samples(source, denoiser.shape, denoiser.data_range, transform, options.skip_bad, exact)
    count = min(IMAGES, options.images or IMAGES)
    batch = next(samples.batches(count, limit=count), None)
    if batch is None:
        return None  # measuring says what is wrong
    if len(batch.index) >= FEWEST:
        say(options, f"looking for the usual mistakes on {len(batch.index)} images")
    found = diagnose(denoiser, batch, flip=options.flip, batch_size=options.batch_size)
    for hint in found.hints:
        say(options, f"note: {hint}")
    return found.problem


def _moments(denoiser: Denoiser, data: Any, options: argparse.Namespace, run: Path | None) -> Moments:
    moments = measure(
        denoiser,
        data,
        images=options.images,
        seed=options.seed,
        batch_size=options.batch_size,
        resize=options.resize,
        crop=options.crop,
        flip=options.flip,
        data_range=options.data_range,
        run=run,
        skip_bad=options.skip_bad,
        progress=progress(options),
    )
    for reason in moments.skipped[:5]:
        say(options, f"skipped: {reason}")
    if moments.skipped:
        say(options, f"{len(moments.skipped)} image{'s' * (len(moments.skipped) > 1)} skipped")
    return moments


def _report(calibration: Calibration, options: argparse.Namespace, more: dict[str, Any]) -> None:
    """The table, the chart and the verdict; or JSON."""
    if options.json:
        print(json.dumps({**as_json(calibration), **more}, indent=2))
        return
    if options.quiet:
        print(f"verdict: {calibration.verdict()}")
        return
    print(show(calibration, plain=plain_output()))
