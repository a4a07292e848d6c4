"""What likelihoods and objectives begin with: a model, a calibration that fits it, and fresh images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from typing import Any

import torch

from trueup import distributed
from trueup.calibration import Attachment, Calibration, as_calibration
from trueup.denoiser import Denoiser
from trueup.errors import Argument, DataError, ModelError
from trueup.estimate.diagnose import check_use
from trueup.estimate.measuring import NEEDS_LABELS
from trueup.estimate.shares import dealing, told_of
from trueup.hf import as_denoiser
from trueup.images import Batch, Ranks, Samples, open_images

SIDES = ("before", "after")


class Sides:
    """A network as it is and with a calibration on it: each side is the network itself, really run.

    The calibration is put on once, within `with sides.attached:`; `on("before")` lifts it for a while. gains:
    the form of its correction, by default that of the lowest loss, which is what is measured here.
    """

    def __init__(
        self,
        model: Any,
        calibration: Calibration | str | PathLike[str] | None,
        gains: str = "least-squares",
    ):
        with torch.inference_mode(False):  # its weights take part in derivatives
            self.denoiser: Denoiser = as_denoiser(model)
        if self.denoiser.device.type == "mps":
            problem = "likelihoods need double precision, which mps lacks"
            raise ModelError(problem, "pass {}", Argument("device", "cpu"))
        self.denoiser.check_bare()
        self.calibration = None if calibration is None else as_calibration(calibration)
        self.names = SIDES[: 1 if calibration is None else 2]
        self.attached: Attachment | nullcontext[None] = nullcontext()
        if self.calibration is not None:
            # Or say now that it does not fit.
            self.attached = Attachment(self.denoiser, self.calibration, gains=gains)
            self.calibration = self.calibration.resized(self.denoiser.shape[1:])
        self.notes: list[str] = []
        self.without: set[int] = set()  # digests of images to be left out

    def on(self, name: str) -> AbstractContextManager[None]:
        """The network as this side has it."""
        return nullcontext() if name == "after" else self.denoiser.bare()

    def open(self, data: Any, count: int, *, trust: bool, exact: bool = False) -> Samples:
        """Images, less those that the calibration was made from; all of them if nothing else is left.

        A network that seems to be used wrongly on them is refused, unless `trust`.
        """
        self.samples = samples = open_images(data, self.denoiser, count=count, exact=exact)
        if distributed.size() > 1:
            distributed.agree(told_of(samples))
        if not trust:
            self.notes += check_use(self.denoiser, samples).hints
        if self.calibration is None or self.calibration.generated:
            return samples
        self.without, note = set(self.calibration.data_digests.tolist()), None
        if not self.without:
            note = "the calibration does not say which images it was made from: some may be among these"
        elif samples.indexed and next(samples.batches(1, without=self.without), None) is None:
            note = "the calibration was made from these very images: use others for an honest difference"
            self.without = set()
        self.notes += [] if note is None else [note]
        samples.held_back = 0  # they are met again
        samples.skipped.clear()
        return samples

    def batches(self, size: int, *, own: bool = False) -> Iterator[Batch]:
        """The images, each once, with labels where the network needs them; notes what was passed over.

        own: of ranks that work together each reads and has every n-th batch, see `distributed.in_turn`.
        """
        samples, how = self.samples, dict[str, Any]()
        if own and distributed.size() > 1:
            ranks = Ranks(distributed.rank(), distributed.size(), distributed.gather)
            how = {"skip": {}, "mine": dealing((1, 1)), "ranks": ranks}
        for batch in samples.batches(size, without=self.without, unique=True, **how):
            if self.denoiser.conditional and batch.y is None:
                raise DataError(NEEDS_LABELS)
            yield batch
        if not samples.walked:  # by nobody
            raise DataError(f"{samples.name} holds no samples that can be used")
        if samples.held_back:
            self.notes.append(f"{samples.held_back} images made the calibration and are passed over")
        if samples.duplicates:
            self.notes.append(f"{samples.duplicates} images are there more than once, and count once")
        if samples.skipped:
            self.notes.append(f"{len(samples.skipped)} images left out: {'; '.join(samples.skipped[:3])}")
