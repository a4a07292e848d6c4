"""What the commands of the command line do: call the library, print what it says."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trueup.artifact import load
from trueup.attachment import attach
from trueup.calibration import Calibration
from trueup.data import Samples, Transform
from trueup.demo import run as run_demo
from trueup.demo import run_directory
from trueup.denoiser import Denoiser
from trueup.diagnose import IMAGES, diagnose
from trueup.errors import DataError, ModelError, TrueupError
from trueup.estimate import Moments, fit, measure
from trueup.evaluation import build_reference, image_maker
from trueup.evaluation import evaluate as compare
from trueup.files import write
from trueup.hf import Decoder, as_decoder, as_denoiser, find_decoder
from trueup.metrics import Reference, load_features
from trueup.report import as_json, plain_output, show
from trueup.sampling import DPMSolver, as_solver, generate, sample_batches
from trueup.sampling.draw import Solver, check_labels, count_evaluations
from trueup.sampling.store import Output


def calibrate(options: argparse.Namespace) -> int:
    """`trueup calibrate`."""
    output, run = options.output, options.run or Path(f"{options.output}.run")
    _check_output(output, options.force)
    if (options.data is None) == (options.generated is None):
        raise DataError("say what to measure on: --data, or --generated N for samples of the model itself")
    denoiser = _denoiser(options)
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
            progress=_progress(options),
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
    _say(
        options,
        f"wrote {output}; {run} keeps the measurements (delete it, or add images with a larger --images)",
    )
    return 0


def check(options: argparse.Namespace) -> int:
    """`trueup check`."""
    if options.data is None:
        raise DataError("say what to measure on: --data")
    denoiser = _denoiser(options)
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


def sample(options: argparse.Namespace) -> int:
    """`trueup sample`."""
    denoiser = _denoiser(options)
    solver = _solver(options.solver, denoiser, options)
    labels = check_labels(denoiser, options.labels, options.guidance)
    evaluations = count_evaluations(solver, options.nfe, denoiser, labels)
    calibration = load(options.calibration) if options.calibration is not None else None
    if calibration is not None:
        attach(denoiser, calibration).remove()  # or say now that it does not fit
    decode = _decoder(options, denoiser)
    settings = {
        **denoiser.identity(),
        "solver": repr(solver),
        "number of evaluations": None if evaluations is None else options.nfe,
        "seed": options.seed,
        "set of labels": options.labels,
        "guidance": [options.guidance, options.null_label],
        "decoder": None if decode is None else decode.identity,
        "calibration": None if calibration is None else calibration.identity,
    }
    if decode is None and denoiser.data_range is None and options.output.suffix != ".npz":
        raise TrueupError(
            "these samples are latents: write them to a .npz file, or pass the --vae they are of"
        )
    output = Output(options.output, options.samples, settings, force=options.force)
    options.run = output.kept.folder
    to_images = image_maker(denoiser, decode)
    for index, x in sample_batches(
        denoiser,
        options.samples,
        start=min(output.kept.done, options.samples),
        solver=solver,
        nfe=options.nfe,
        calibration=calibration,
        labels=options.labels,
        guidance=options.guidance,
        null_label=options.null_label,
        seed=options.seed,
        batch_size=options.batch_size,
        progress=_progress(options),
    ):
        output.add(index, to_images(x))
    output.finish()
    made = "its own number of" if evaluations is None else str(evaluations)
    how = "uncalibrated" if calibration is None else f"calibrated ({options.calibration})"
    if options.json:
        more = {"output": str(options.output), "samples": options.samples, "evaluations": evaluations}
        print(json.dumps({**settings, **more}, indent=2))
    _say(options, f"{options.samples} samples, {how}, {solver.name} in {made} evaluations: {options.output}")
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """`trueup evaluate`."""
    output = options.output
    if output is not None:
        _check_output(output, options.force)
    if options.save_reference is not None:
        _check_output(options.save_reference, options.force)
    if options.data is None and options.reference is None:
        raise DataError("say what to compare with: --data, or a --reference saved before")
    denoiser = _denoiser(options)
    run = options.run or (Path(f"{output}.run") if output is not None else None)
    options.run = run
    data = None if options.data is None else bundled(options.data)
    transform = Transform(options.resize, options.crop, options.flip, options.data_range)
    decode = _decoder(options, denoiser)
    if ":" in options.features:
        sys.path.insert(0, "")  # package.module:name may lie here
    features = load_features(options.features, weights=options.weights, device=denoiser.device)
    reference = None if options.reference is None else Reference.load(options.reference)
    if reference is None:
        source = Samples(data, denoiser.shape, denoiser.data_range, transform, options.skip_bad)
        reference = build_reference(
            source,
            features,
            image_maker(denoiser, decode),
            images=options.images,
            progress=_progress(options),
        )
    if options.save_reference is not None:
        reference.save(options.save_reference)
    comparison = compare(
        denoiser,
        options.calibration,
        data,
        solvers=[_solver(name, denoiser, options) for name in options.solver],
        nfe=options.nfe,
        samples=options.samples,
        features=features,
        reference=reference,
        labels=options.labels,
        guidance=options.guidance,
        null_label=options.null_label,
        decode=decode,
        seed=options.seed,
        batch_size=options.batch_size,
        transform=transform,
        skip_bad=options.skip_bad,
        run=run,
        force=options.force,
        progress=_progress(options),
    )
    text = json.dumps(comparison.as_json(), indent=2)
    if output is not None:
        write(output, f"{text}\n".encode())
    print(text if options.json else comparison.table())
    if output is not None:
        _say(
            options, f"wrote {output}; {run} keeps the features of the samples (delete it when you are done)"
        )
    return 0


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


def _check_output(output: Path, force: bool) -> None:
    """Say what is wrong with the file to write before any work is done for it."""
    if output.is_dir():
        raise TrueupError(f"{output} is a directory: name the file to write with -o")
    if output.exists() and not output.is_file():
        raise TrueupError(f"{output} is not a file that can be replaced: name another with -o")
    if output.exists() and not force:
        raise TrueupError(f"{output} exists: pass --force to replace it, or name another file with -o")
    if not output.parent.is_dir():
        raise TrueupError(f"{output.parent} is not a directory: make it first")
    if not os.access(output.parent, os.W_OK):
        raise TrueupError(f"cannot write in {output.parent}")


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


def _solver(name: str, denoiser: Denoiser, options: argparse.Namespace) -> Solver:
    solver = as_solver(name, denoiser, options.grid)
    tolerances = {key: v for key in ("atol", "rtol") if (v := getattr(options, key)) is not None}
    if not tolerances:
        return solver
    if not isinstance(solver, DPMSolver) or not solver.adaptive:
        raise TrueupError(f"--atol and --rtol belong to an adaptive DPM-Solver, not to {name}")
    return replace(solver, **tolerances)


def _decoder(options: argparse.Namespace, denoiser: Denoiser) -> Decoder | None:
    """What makes images of a latent model's samples: what --vae names, or what lies beside the model."""
    if options.vae is not None:
        return as_decoder(options.vae, denoiser.device)
    found = find_decoder(bundled(options.model)) if denoiser.data_range is None else None
    return as_decoder(found, denoiser.device) if found is not None else None


def _say(options: argparse.Namespace, line: str) -> None:
    if not options.quiet:
        print(line, file=sys.stderr)


def _progress(options: argparse.Namespace) -> bool | None:
    return False if options.quiet else None
