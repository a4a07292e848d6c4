"""What every command needs: the model, images and solvers it was given, and how to speak."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trueup import distributed, typed
from trueup.calibration import Attachment, Calibration, load
from trueup.calibration.mismatch import ADVICE, FORCE
from trueup.commands.code import run_code
from trueup.denoiser import Denoiser
from trueup.errors import Argument, MismatchError, ModelError
from trueup.estimate.run import SHARDS
from trueup.files import printable, write
from trueup.hf import as_denoiser
from trueup.images import Images, open_images
from trueup.report import plain_output
from trueup.sampling import as_solver
from trueup.sampling.draw import DEFAULT
from trueup.solvers import FITTED


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Options that the library calls by the same name."""
    return {name: getattr(options, name) for name in names}


def open_model(options: argparse.Namespace) -> Denoiser:
    """The model named on the command line."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)  # it warns about what we check ourselves
    how = given(options, "scheduler", "prediction", "model_range", "vae", "batch_size")
    made = getattr(options, "calibration", None)
    size = options.size or (None if made is None else load(made).provenance.get("size"))  # as it was made
    if size is not None:
        how["arguments"] = dict(zip(("height", "width"), size, strict=True))
    code = typed.code(options.model)
    if code is not None:
        say(options, f"running {code[0]}")
    model = options.model if code is None else run_code(*code)
    try:
        denoiser = as_denoiser(model, device=find_device(options.device), **how)
    except ModelError as error:
        if options.size or not any(argument.name == "size" for argument in error.arguments):
            raise
        problem = "this calibration was made for a model of pictures of any size, and this one has one size"
        raise MismatchError(problem, ADVICE, FORCE) from None
    if getattr(options, "null_label", None) is not None:
        denoiser.null_label = options.null_label
    return denoiser


def open_calibration(options: argparse.Namespace, denoiser: Denoiser) -> Calibration | None:
    """The calibration named on the command line, if any; or say now that it does not fit."""
    if options.calibration is None:
        return None
    return Attachment(denoiser, load(options.calibration)).calibration


def find_device(name: str) -> str:
    """The device of that name, or the best there is."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device in available if available[device])
    if not available[name]:
        raise ModelError(f"this machine has no {name} device that PyTorch can use: pass --device cpu")
    return name


def open_solver(name: str | None, denoiser: Denoiser, grid: str | None) -> Any:
    """The solver of that name, with its levels where --grid says; none, or the fitted one, stays a name."""
    if grid is None and name in (None, FITTED):
        return name
    solver: Any = as_solver(name or DEFAULT, denoiser)
    return solver if grid is None else replace(solver, grid=grid)


def no_solver(options: argparse.Namespace, calibration: Calibration, nfe: int) -> MismatchError | None:
    """That a calibration has no solver for so many evaluations, and how to fit one; None if it has."""
    try:
        calibration.solver(nfe, options.guidance)
    except MismatchError as error:
        if error.arguments:  # that of another guidance
            return error
        how = [Argument("calibration", options.calibration), Argument("nfe", nfe)]
        how += [Argument("guidance", f"{options.guidance:g}")] if options.guidance != 1.0 else []
        places = " ".join("{}" for _ in how)
        return MismatchError(error.problem, f"to fit one, trueup calibrate MODEL {places} -o FILE", *how)
    return None


def images_of(options: argparse.Namespace, denoiser: Denoiser, count: int | None = None) -> Images:
    """The images named on the command line; those that will be made to fit are mentioned, once."""
    how = given(options, "captions", "resize", "crop", "flip", "data_range", "seed", "skip_bad")
    how |= given(options, "image_column", "label_column")
    run = run_directory(options) if hasattr(options, "run") else None
    how["index"] = None if run is None else run / SHARDS
    images = Images(options.data, count=count or options.images, **how)
    asked = getattr(options, "said_fitted", False) or options.resize or options.crop
    look = denoiser.autoencoder is not None and not asked
    size = open_images(images, denoiser).other_size() if look else None
    if size is not None:
        made = f"resized by their shorter side and cropped to {size[0]}x{size[1]}"
        say(options, f"pictures of another size are {made} for the autoencoder (--resize, --crop: otherwise)")
        options.said_fitted = True
    return images


def first() -> bool:
    """Whether this process writes and speaks: the only one, or the first of a job's ranks."""
    return distributed.rank() == 0


def say(options: argparse.Namespace, line: str) -> None:
    """A line for people, on standard error."""
    if not options.quiet and first():
        print(printable(line), file=sys.stderr)


def warn(words: str) -> None:
    """What explains an exit code, on standard error, also with --quiet."""
    if first():
        print(printable(f"trueup: {words}"), file=sys.stderr)


def show(options: argparse.Namespace, values: dict[str, Any], text: str) -> None:
    """The answer on standard output: the values as JSON, or the text."""
    if not first():
        return
    if options.json:
        print(json.dumps(values, indent=2))
        return
    text = "\n".join(map(printable, text.split("\n")))  # some lines name files
    print(text.replace("±", "+-") if plain_output() else text, flush=True)


def run_directory(options: argparse.Namespace) -> Path | None:
    """Where work is kept: as asked, or beside the output there may be."""
    return options.run or (None if options.output is None else Path(f"{options.output}.run"))


def write_json(options: argparse.Namespace, values: dict[str, Any]) -> bool:
    """Write values to the output that was asked for, if any; whether it was."""
    if options.output is not None and first():
        write(options.output, f"{json.dumps(values, indent=2)}\n".encode())
    return options.output is not None


def conclude(options: argparse.Namespace, found: Any, kept: str) -> int:
    """Show a measurement, and write it to the output there may be; kept: what the run directory holds."""
    values = found.as_json()
    written = write_json(options, values)
    show(options, values, found.table())
    if written:
        run = f"; {options.run} keeps {kept} (delete it when you are done)" if options.run else ""
        say(options, f"wrote {options.output}{run}")
    return 0
