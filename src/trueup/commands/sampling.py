"""`trueup sample` and `evaluate`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from trueup.calibration import load
from trueup.commands import shared
from trueup.commands.shared import given, say, show
from trueup.errors import Argument
from trueup.evaluation import build_reference
from trueup.evaluation import evaluate as compare
from trueup.fitting import labels_of
from trueup.metrics import Reference, load_features
from trueup.sampling import image_maker, sample_batches
from trueup.sampling.draw import check_labels, choose_solver
from trueup.sampling.store import Output, check_pictures
from trueup.solvers import FITTED


def sample(options: argparse.Namespace) -> int:
    """`trueup sample`."""
    denoiser = shared.open_model(options)
    if options.output.suffix.lower() != ".npz":
        check_pictures(denoiser)
    calibration = shared.open_calibration(options, denoiser)
    asked = shared.open_solver(options.solver, denoiser, options.grid)
    lacks = None if calibration is None else shared.no_solver(options, calibration, options.nfe)
    if asked == FITTED and lacks is not None:
        raise lacks
    solver = choose_solver(asked, denoiser, calibration, options.nfe, options.guidance)
    if asked is None and lacks is not None and calibration is not None and calibration.solvers:
        say(options, f"drawing with {solver.name}: {lacks.phrased(Argument.option)}")
    how = given(options, "nfe", "labels", "guidance", "seed", "progress")
    how |= {"solver": solver, "calibration": calibration}
    sample_batches(denoiser, options.samples, **how)  # or say what is wrong before there is a folder
    y = check_labels(denoiser, options.labels, options.guidance)
    evaluations = solver.evaluations(options.nfe, denoiser, None if y is None else y.to(denoiser.device))
    autoencoder = denoiser.autoencoder if denoiser.data_range is None else None
    settings = {
        **denoiser.identity(),
        "solver": repr(solver),
        "number of evaluations": None if evaluations is None else options.nfe,
        "seed": options.seed,
        "set of labels": options.labels,
        "guidance": [options.guidance, denoiser.null_label],
        "decoder": None if autoencoder is None else autoencoder.identity,
        "calibration": None if calibration is None else calibration.identity,
    }
    output = Output(options.output, options.samples, settings, force=options.force)
    options.run = output.kept.folder
    to_images = image_maker(denoiser)
    how |= {"start": min(output.kept.done, options.samples), "make": lambda x: output.prepared(to_images(x))}
    for index, made in sample_batches(denoiser, options.samples, **how):
        output.add(index, made)
    output.finish()
    if options.json:
        more = {"output": str(options.output), "samples": options.samples, "evaluations": evaluations}
        show(options, {**settings, **more}, "")
    made = "its own number of" if evaluations is None else str(evaluations)
    calibrated = "uncalibrated" if calibration is None else f"calibrated ({options.calibration})"
    if calibration is not None and (calibration.empty or calibration.gains == "none"):
        calibrated = f"uncalibrated ({options.calibration} corrects nothing)"
    drawn = f"{options.samples} samples, {calibrated}, {solver.name} in {made} evaluations"
    say(options, f"{drawn}: {options.output}")
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """`trueup evaluate`."""
    options.run = shared.run_directory(options)
    denoiser = shared.open_model(options)
    if ":" in options.features:
        sys.path.insert(0, "")  # package.module:name may lie here
    features = load_features(options.features, weights=options.weights, device=denoiser.device)
    compared = options.reference
    data: Any = shared.images_of(options, denoiser) if compared is None else Reference.load(compared)
    if options.save_reference is not None:
        data = build_reference(data, denoiser, features, progress=options.progress)
        if shared.first():
            data.save(options.save_reference)
    calibration = load(options.calibration)
    for number in options.nfe if FITTED in options.solver else ():
        if (lacks := shared.no_solver(options, calibration, number)) is not None:
            raise lacks
    unused = [n for n in options.nfe if shared.no_solver(options, calibration, n) is None]
    if unused and FITTED not in options.solver:
        many = ", ".join(map(str, unused))
        say(options, f"note: this calibration has a solver for {many} evaluations: --solver fitted")
    solvers = [shared.open_solver(name, denoiser, options.grid) for name in options.solver]
    if options.labels is None and options.data is not None:
        options.labels = labels_of(shared.images_of(options, denoiser), denoiser)
    how = given(options, "nfe", "samples", "labels", "guidance", "loss", "seed", "run", "force")
    how |= {"solvers": solvers, "features": features, "progress": options.progress}
    comparison = compare(denoiser, calibration, data, **how)
    return shared.conclude(options, comparison, "the features of the samples")
