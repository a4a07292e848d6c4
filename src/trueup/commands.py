"""What the commands of the command line do: call the library, print what it says."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch

from trueup.artifact import load
from trueup.calibration import Calibration
from trueup.data import Samples, Transform
from trueup.demo import run as run_demo
from trueup.demo import run_directory
from trueup.denoiser import Denoiser
from trueup.diagnose import IMAGES, diagnose
from trueup.errors import ModelError, TrueupError
from trueup.estimate import Moments, fit, measure
from trueup.hf import as_denoiser
from trueup.report import as_json, plain_output, show


def calibrate(options: argparse.Namespace) -> int:
    """`trueup calibrate`."""
    output, run = options.output, options.run or Path(f"{options.output}.run")
    if output.is_dir():
        raise TrueupError(f"{output} is a directory: name the file to write with -o")
    if output.exists() and not output.is_file():
        raise TrueupError(f"{output} is not a file that can be replaced: name another with -o")
    if output.exists() and not options.force:
        raise TrueupError(f"{output} exists: pass --force to replace it, or name another file with -o")
    if not output.parent.is_dir():
        raise TrueupError(f"{output.parent} is not a directory: make it first")
    if not os.access(output.parent, os.W_OK):
        raise TrueupError(f"cannot write in {output.parent}")
    denoiser = _denoiser(options)
    begun = (run / "checkpoint.safetensors").exists()  # then it was looked at
    problem = None if begun or options.trust else _diagnose(denoiser, options)
    if problem:
        raise TrueupError(f"{problem} (or pass --trust to calibrate as it is)")
    options.run = run
    moments = _moments(denoiser, options, run)
    calibration = fit(moments, family=options.family, estimator=options.estimator)
    calibration.save(output)
    _report(calibration, options, {"output": str(output), "run": str(run), "skipped": moments.skipped})
    _say(
        options,
        f"wrote {output}; {run} keeps the measurements (delete it, or add images with a larger --images)",
    )
    return 0


def check(options: argparse.Namespace) -> int:
    """`trueup check`."""
    denoiser = _denoiser(options)
    problem = _diagnose(denoiser, options)
    moments = _moments(denoiser, options, None)
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
    run_demo(options.out, seed=options.seed, device=_device(options.device), progress=_progress(options))
    return 0


def _denoiser(options: argparse.Namespace) -> Denoiser:
    _quieten_libraries()
    try:
        return as_denoiser(
            bundled(options.model),
            scheduler=options.scheduler,
            parametrization=options.prediction,
            model_range=options.model_range,
            device=_device(options.device),
        )
    except ModelError as error:
        words = str(error)
        if "has no scheduler" in words:
            words = (
                f"{options.model} has no scheduler_config.json: pass the one it was trained with: --scheduler"
            )
        raise ModelError(words) from None


def bundled(name: str) -> Path:
    """A path, or something that comes with trueup."""
    known = {"bundled:raw": "raw", "bundled:ema": "ema", "bundled:images": "images.npy"}
    if name.startswith("bundled:") and name not in known:
        raise TrueupError(f"nothing named {name} comes with trueup: there are {', '.join(known)}")
    return Path(__file__).parent / "bundled" / known[name] if name in known else Path(name)


def _device(name: str) -> str:
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device in available if available[device])
    if not available[name]:
        raise ModelError(f"this machine has no {name} device that PyTorch can use: pass --device cpu")
    return name


def _quieten_libraries() -> None:
    """diffusers warns about what we check ourselves."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)


def _diagnose(denoiser: Denoiser, options: argparse.Namespace) -> str | None:
    transform = Transform(options.resize, options.crop, options.flip, options.data_range)
    samples = Samples(bundled(options.data), denoiser.shape, denoiser.data_range, transform, options.skip_bad)
    batch = next(samples.batches(min(IMAGES, options.images), limit=options.images), None)
    if batch is None:
        return None  # measuring says what is wrong
    _say(options, f"looking for the usual mistakes on {len(batch.index)} images")
    found = diagnose(denoiser, batch, flip=options.flip, batch_size=options.batch_size)
    for hint in found.hints:
        _say(options, f"note: {hint}")
    return found.problem


def _moments(denoiser: Denoiser, options: argparse.Namespace, run: Path | None) -> Moments:
    moments = measure(
        denoiser,
        bundled(options.data),
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
        progress=_progress(options),
    )
    for reason in moments.skipped[:5]:
        _say(options, f"skipped: {reason}")
    if moments.skipped:
        _say(options, f"{len(moments.skipped)} image{'s' * (len(moments.skipped) > 1)} skipped")
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


def _say(options: argparse.Namespace, line: str) -> None:
    if not options.quiet:
        print(line, file=sys.stderr)


def _progress(options: argparse.Namespace) -> bool | None:
    return False if options.quiet else None
