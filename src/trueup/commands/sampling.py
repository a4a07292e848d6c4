"""`trueup sample` and `evaluate`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from trueup.artifact import load
from trueup.attachment import attach
from trueup.commands.shared import check_output, open_model, progress, say
from trueup.data import Samples, Transform
from trueup.denoiser import Denoiser
from trueup.errors import DataError, TrueupError
from trueup.evaluation import build_reference, image_maker
from trueup.evaluation import evaluate as compare
from trueup.files import bundled, write
from trueup.hf import Decoder, as_decoder, find_decoder
from trueup.metrics import Reference, load_features
from trueup.sampling import DPMSolver, as_solver, sample_batches
from trueup.sampling.draw import Solver, check_labels, count_evaluations, find_trajectory, without_trajectory
from trueup.sampling.store import Output


def sample(options: argparse.Namespace) -> int:
    """`trueup sample`."""
    denoiser = open_model(options)
    solver = _solver(options.solver, denoiser, options)
    labels = check_labels(denoiser, options.labels, options.guidance)
    evaluations = count_evaluations(solver, options.nfe, denoiser, labels)
    calibration = load(options.calibration) if options.calibration is not None else None
    if calibration is not None:
        attach(denoiser, calibration).remove()  # or say now that it does not fit
    trajectory = find_trajectory(calibration, solver, options.nfe, options.guidance, options.trajectory)
    if (
        calibration is not None
        and calibration.trajectories
        and not (trajectory or options.trajectory is False)
    ):
        say(options, f"note: {without_trajectory(calibration)}")
    if trajectory is not None and trajectory.empty:
        say(options, f"note: {trajectory.summary()}")
        trajectory = None
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
    if trajectory is not None:
        settings["trajectory"] = trajectory.identity
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
        trajectory=trajectory is not None,
        seed=options.seed,
        batch_size=options.batch_size,
        progress=progress(options),
    ):
        output.add(index, to_images(x))
    output.finish()
    made = "its own number of" if evaluations is None else str(evaluations)
    how = "uncalibrated" if calibration is None else f"calibrated ({options.calibration})"
    how += " and kept on its trajectory" if trajectory is not None else ""
    if options.json:
        more = {"output": str(options.output), "samples": options.samples, "evaluations": evaluations}
        print(json.dumps({**settings, **more}, indent=2))
    say(options, f"{options.samples} samples, {how}, {solver.name} in {made} evaluations: {options.output}")
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """`trueup evaluate`."""
    output = options.output
    if output is not None:
        check_output(output, options.force)
    if options.save_reference is not None:
        check_output(options.save_reference, options.force)
    if options.data is None and options.reference is None:
        raise DataError("say what to compare with: --data, or a --reference saved before")
    denoiser = open_model(options)
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
            progress=progress(options),
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
        trajectory=options.trajectory,
        decode=decode,
        seed=options.seed,
        batch_size=options.batch_size,
        resize=options.resize,
        crop=options.crop,
        flip=options.flip,
        data_range=options.data_range,
        images=options.images,
        skip_bad=options.skip_bad,
        run=run,
        force=options.force,
        progress=progress(options),
    )
    text = json.dumps(comparison.as_json(), indent=2)
    if output is not None:
        write(output, f"{text}\n".encode())
    print(text if options.json else comparison.table())
    if output is not None:
        say(options, f"wrote {output}; {run} keeps the features of the samples (delete it when you are done)")
    return 0


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
