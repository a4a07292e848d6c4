"""What every command needs: the model and device it was given, and how to speak."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import torch

from trueup.denoiser import Denoiser
from trueup.errors import ModelError, TrueupError
from trueup.files import bundled
from trueup.hf import as_denoiser


def open_model(options: argparse.Namespace) -> Denoiser:
    """The model named on the command line."""
    _quieten_libraries()
    try:
        return as_denoiser(
            bundled(options.model),
            scheduler=options.scheduler,
            parametrization=options.prediction,
            model_range=options.model_range,
            device=find_device(options.device),
        )
    except ModelError as error:
        words = str(error)
        if "has no scheduler" in words:
            words = (
                f"{options.model} has no scheduler_config.json: pass the one it was trained with: --scheduler"
            )
        raise ModelError(words) from None


def find_device(name: str) -> str:
    """The device of that name, or the best there is."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device in available if available[device])
    if not available[name]:
        raise ModelError(f"this machine has no {name} device that PyTorch can use: pass --device cpu")
    return name


def _quieten_libraries() -> None:
    """diffusers warns about what we check ourselves."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)


def check_output(output: Path, force: bool) -> None:
    """Say what is wrong with the file to write before any work is done for it."""
    if output.is_dir():
        raise TrueupError(f"{output} is a directory: name the file to write with -o")
    if output.exists() and not output.is_file():
        raise TrueupError(f"{output} is not a file that can be replaced: name another with -o")
    if output.exists() and not force:
        raise TrueupError(f"{output} exists: pass --force to replace it, or name another file")
    if not output.parent.is_dir():
        raise TrueupError(f"{output.parent} is not a directory: make it first")
    if not os.access(output.parent, os.W_OK):
        raise TrueupError(f"cannot write in {output.parent}")


def say(options: argparse.Namespace, line: str) -> None:
    """A line for people, on standard error."""
    if not options.quiet:
        print(line, file=sys.stderr)


def progress(options: argparse.Namespace) -> bool | None:
    """Whether to show progress; None: if somebody is looking."""
    return False if options.quiet else None
