"""What likelihoods and objectives begin with: a model, a calibration that fits it, and fresh images."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch

from trueup.artifact import load
from trueup.attachment import attach
from trueup.calibration import Calibration
from trueup.data import Samples
from trueup.denoiser import Denoiser, carries_correction
from trueup.errors import ModelError
from trueup.held_out import first_unused
from trueup.hf import as_denoiser


def open_both(
    model: Any,
    calibration: Calibration | str | PathLike[str] | None,
    scheduler: Any,
    device: torch.device | str | None,
) -> tuple[Denoiser, Calibration | None]:
    """A model without a calibration on it, and one that fits it."""
    with torch.inference_mode(False):  # its weights take part in derivatives
        denoiser = as_denoiser(model, scheduler=scheduler, device=device)
    if denoiser.device.type == "mps":
        raise ModelError("likelihoods need double precision, which mps lacks: pass --device cpu")
    if carries_correction(denoiser.network) or carries_correction(denoiser._call):
        raise ModelError("a calibration is attached to this model: remove it first, and pass it here")
    if calibration is None:
        return denoiser, None
    calibration = calibration if isinstance(calibration, Calibration) else load(calibration)
    attach(denoiser, calibration).remove()  # or say now that it does not fit
    return denoiser, calibration


def first_image(calibration: Calibration | None, samples: Samples, notes: list[str]) -> int:
    """The first image to look at: not one that the calibration was made from."""
    if calibration is None or calibration.generated:
        return 0
    if not samples.indexed:
        notes.append("the data is a stream: it may hold images that the calibration was made from")
        return 0
    first = first_unused(calibration, samples)
    samples.skipped.clear()  # they are met again
    if first is None:
        return 0
    if first >= len(samples):
        notes.append("the calibration was made from these very images: use others for an honest difference")
        return 0
    notes.append(f"the first {first} images made the calibration and are passed over")
    return first
