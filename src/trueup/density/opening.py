"""What likelihoods and objectives begin with: a model, a calibration that fits it, and fresh images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from os import PathLike
from typing import Any

import torch

from trueup.calibration import Attachment, Calibration, as_calibration
from trueup.denoiser import Denoiser
from trueup.errors import Argument, DataError, ModelError
from trueup.estimate.measuring import NEEDS_LABELS
from trueup.hf import as_denoiser
from trueup.images import Batch, Samples

SIDES = ("before", "after")


class Sides:
    """A network as it is and with a calibration on it: each side is the network itself, really run.

    The calibration is put on once, for the length of a `with` block; `on("before")` lifts it for a while.
    """

    def __init__(self, model: Any, calibration: Calibration | str | PathLike[str] | None):
        with torch.inference_mode(False):  # its weights take part in derivatives
            self.denoiser: Denoiser = as_denoiser(model)
        if self.denoiser.device.type == "mps":
            raise ModelError(
                "likelihoods need double precision, which mps lacks", "pass {}", Argument("device", "cpu")
            )
        if self.denoiser.corrected:
            raise ModelError("a calibration is attached to this model: remove it first, and pass it here")
        self.calibration = None if calibration is None else as_calibration(calibration)
        self.names = SIDES[: 1 if calibration is None else 2]
        self._attachment = None
        if self.calibration is not None:
            self._attachment = Attachment(self.denoiser, self.calibration)  # or say now that it does not fit

    def __enter__(self) -> Sides:
        if self._attachment is not None:
            self._attachment.put_on()
        return self

    def __exit__(self, *_: object) -> None:
        if self._attachment is not None:
            self._attachment.remove()

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """The network as this side has it."""
        with nullcontext() if name == "after" else self.denoiser.bare():
            yield


def unused(calibration: Calibration | None, samples: Samples, notes: list[str]) -> set[int]:
    """Digests of images that a calibration was made from, to be left out; none if nothing else is left."""
    if calibration is None or calibration.generated:
        return set()
    made_from = set(calibration.data_digests.tolist())
    if not made_from:
        notes.append("the calibration does not say which images it was made from: some may be among these")
    elif samples.indexed and next(samples.batches(1, without=made_from), None) is None:
        notes.append("the calibration was made from these very images: use others for an honest difference")
        made_from = set()
    samples.held_back = 0  # they are met again
    samples.skipped.clear()
    return made_from


def passed_over(samples: Samples, notes: list[str]) -> None:
    """Say which images were not looked at."""
    if samples.held_back:
        notes.append(f"{samples.held_back} images made the calibration and are passed over")
    if samples.skipped:
        notes.append(f"{len(samples.skipped)} images left out: {'; '.join(samples.skipped[:3])}")


def check_labelled(denoiser: Denoiser, batch: Batch) -> None:
    """Raise unless a conditional network gets its labels."""
    if denoiser.conditional and batch.y is None:
        raise DataError(NEEDS_LABELS)
