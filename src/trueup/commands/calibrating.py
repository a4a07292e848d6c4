"""`trueup calibrate`, `check`, `inspect` and `demo`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from trueup.artifact import load
from trueup.calibration import Calibration
from trueup.commands.shared import bundled, check_output, find_device, open_model, progress, say
from trueup.data import Samples, Transform
from trueup.demo import run as run_demo
from trueup.demo import run_directory
from trueup.denoiser import Denoiser
from trueup.diagnose import IMAGES, diagnose
from trueup.errors import DataError, TrueupError
from trueup.estimate import Moments, fit, measure
from trueup.report import as_json, plain_output, show
from trueup.sampling import generate


def calibrate(options: argparse.Namespace) -> int:
    """`trueup calibrate`."""
    output, run = options.output, options.run or Path(f"{options.output}.run")
    check_output(output, options.force)
    if (options.data is None) == (options.generated is None):
        raise DataError(
            "say what to measure on, one of --data and --generated N (samples of the model itself)"
        )
    denoiser = open_model(options)
    begun = (run / "checkpoint.safetensors").exists()  # then it was looked at
    options.run = run
    if options.generated is not None:
        data: Any = generate(
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
    else:
        data = bundled(options.data)
        problem = None if begun or options.trust else _diagnose(denoiser, options)
        if problem:
            raise TrueupError(f"{problem} (or pass --trust to calibrate as it is)")
    moments = _moments(denoiser, data, options, run)
    calibration = fit(moments, family=options.family, estimator=options.estimator)
    calibration.save(output)
    _report(calibration, options, {"output": str(output), "run": str(run), "skipped": moments.skipped})
    say(
        options,
        f"wrote {output}; {run} keeps the measurements (delete it, or add images with a larger "
        f"{'--images' if options.generated is None else '--generated'})",
    )
    return 0


def check(options: argparse.Namespace) -> int:
    """`trueup check`."""
    if options.data is None:
        raise DataError("say what to measure on: --data")
    denoiser = open_model(options)
    problem = _diagnose(denoiser, options)
    moments = _moments(denoiser, bundled(options.data), options, None)
    calibration = fit(moments, family=options.family, estimator=options.estimator)
    nats, error = calibration.evidence.bound_gain
    low = calibration.evidence.bits_per_dim(nats - calibration.evidence.quantile * error)
    failed = options.fail_above is not None and low > options.fail_above
    _report(calibration, options, {"problem": problem, "failed": failed, "skipped": moments.skipped})
    if problem:
        print(f"trueup: {problem}", file=sys.stderr)
        return 2
    if failed:
        print(
            f"trueup: miscalibrated by at least {low:.2g} bits/dim, above {options.fail_above:g}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def inspect(options: argparse.Namespace) -> int:
    """`trueup inspect`."""
    calibration = load(options.file)
    _report(calibration, options, {"file": options.file})
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


def _diagnose(denoiser: Denoiser, options: argparse.Namespace) -> str | None:
    transform = Transform(options.resize, options.crop, options.flip, options.data_range)
    samples = Samples(bundled(options.data), denoiser.shape, denoiser.data_range, transform, options.skip_bad)
    batch = next(samples.batches(min(IMAGES, options.images), limit=options.images), None)
    if batch is None:
        return None  # measuring says what is wrong
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
        antithetic=options.antithetic,
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
