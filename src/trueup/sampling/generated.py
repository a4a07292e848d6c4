"""A model's own samples as calibration images, for those who have no data (paper, section 4.3)."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueup.hf import as_denoiser
from trueup.noise import checked_seed, mix
from trueup.sampling.draw import as_solver, check_labels, pictures, sample_batches
from trueup.sampling.store import Kept

_OWN_STREAM = 0x67656E  # so that nothing is calibrated on the very samples it is then judged by


class Generated:
    """What `generate` returns: images, with labels for a conditional network, and where they come from."""

    def __init__(self, images: Tensor, labels: Tensor | None, origin: dict[str, Any]):
        self.images, self.labels, self.origin = images, labels, origin

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        if self.labels is None:
            return self.images[index]
        return self.images[index], self.labels[index % len(self.labels)]


def generate(
    model: Any,
    count: int,
    *,
    solver: Any = "dpm-solver-3",
    nfe: int = 50,
    labels: Any = None,
    seed: int = 0,
    folder: str | PathLike[str] | None = None,
    progress: bool | None = None,
) -> Generated:
    """Draw images from a model to calibrate it with: `calibrate(model, generate(model, 2000))`.

    They stand in for training images, 8-bit like those, or latents as they are. What the model gets wrong in
    them it cannot be corrected for; the calibration says that it was made so. They are never those that
    `sample` draws with the same seed. folder: keeps them, to go on from after an interruption.
    """
    seed = checked_seed(seed)
    denoiser = as_denoiser(model)
    denoiser.check_bare()
    chosen, classes = as_solver(solver, denoiser), check_labels(denoiser, labels)
    origin = {"solver": repr(chosen), "nfe": nfe, "seed": seed}
    settings = {**denoiser.identity(), **origin, "set of labels": classes}

    def batches(start: int) -> Any:
        own = mix(seed ^ _OWN_STREAM) >> 11  # a seed again
        how: dict[str, Any] = {"solver": chosen, "nfe": nfe, "labels": classes, "progress": progress}
        how |= {"description": "generating", "make": picture}
        return sample_batches(denoiser, count, start=start, seed=own, **how)

    def picture(x: Tensor) -> Tensor:
        return pictures(x, denoiser.data_range) if denoiser.data_range is not None else x.cpu()

    if folder is None:
        return Generated(torch.cat([made for _, made in batches(0)]), classes, origin)
    batches(0)  # mistakes are said before there is a folder
    kept = Kept(Path(folder), settings)
    for index, made in batches(min(kept.done, count)):
        kept.add(index, images=made)
    return Generated(kept.tensors(count, "images")["images"], classes, origin)
