"""What every command needs: the model, images and solvers it was given, and how to speak."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import replace
from typing import Any

import torch

from trueup.denoiser import Denoiser
from trueup.errors import ModelError
from trueup.files import printable
from trueup.hf import as_denoiser
from trueup.images import Images
from trueup.report import plain_output
from trueup.sampling import as_solver


def open_model(options: argparse.Namespace) -> Denoiser:
    """The model named on the command line."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)  # it warns about what we check ourselves
    denoiser = as_denoiser(
        options.model,
        scheduler=options.scheduler,
        prediction=options.prediction,
        model_range=options.model_range,
        vae=options.vae,
        device=find_device(options.device),
        batch_size=options.batch_size,
    )
    if getattr(options, "null_label", None) is not None:
        denoiser.null_label = options.null_label
    return denoiser


def find_device(name: str) -> str:
    """The device of that name, or the best there is."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device in available if available[device])
    if not available[name]:
        raise ModelError(f"this machine has no {name} device that PyTorch can use: pass --device cpu")
    return name


def open_solver(name: str, denoiser: Denoiser, grid: str | None) -> Any:
    """The solver of that name, with its levels where --grid says."""
    solver: Any = as_solver(name, denoiser)
    return solver if grid is None else replace(solver, grid=grid)


def images_of(options: argparse.Namespace, count: int | None = None) -> Images:
    """The images named on the command line."""
    return Images(
        options.data,
        count=count or options.images,
        resize=options.resize,
        crop=options.crop,
        flip=options.flip,
        data_range=options.data_range,
        seed=options.seed,
        skip_bad=options.skip_bad,
    )


def say(options: argparse.Namespace, line: str) -> None:
    """A line for people, on standard error."""
    if not options.quiet:
        print(printable(line), file=sys.stderr)


def warn(words: str) -> None:
    """What explains an exit code, on standard error, also with --quiet."""
    print(printable(f"trueup: {words}"), file=sys.stderr)


def show(options: argparse.Namespace, values: dict[str, Any], text: str) -> None:
    """The answer on standard output: the values as JSON, or the text."""
    if options.json:
        print(json.dumps(values, indent=2))
        return
    lines = map(printable, text.split("\n"))  # some name files
    print("\n".join(lines).replace("±", "+-") if plain_output() else "\n".join(lines), flush=True)


def progress(options: argparse.Namespace) -> bool | None:
    """Whether to show progress; None: a bar if somebody is looking, else a line every half minute."""
    return False if options.quiet else None
