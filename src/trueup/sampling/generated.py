"""A model's own samples as calibration images, for those who have no data (paper, section 4.3)."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueup.hf import as_denoiser
from trueup.noise import mix
from trueup.sampling.draw import as_solver, check_labels, count_evaluations, pictures, sample_batches
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
    nfe: int = 50,
    solver: Any = "dpm-solver-3",
    labels: Any = None,
    seed: int = 0,
    batch_size: int | None = None,
    scheduler: Any = None,
    device: torch.device | str | None = None,
    folder: str | PathLike[str] | None = None,
    force: bool = False,
    progress: bool | None = None,
) -> Generated:
    """Draw images from a model to calibrate it with: `calibrate(model, generate(model, 2000), images=None)`.

    They stand in for training images, 8-bit like those, or latents as they are. What the model gets wrong in
    them it cannot be corrected for; the calibration says that it was made so. They are never those that
    `sample` draws with the same seed. folder: keeps them, to go on from after an interruption; force replaces
    others that are there.
    """
    denoiser = as_denoiser(model, scheduler=scheduler, device=device)
    chosen = as_solver(solver, denoiser)
    count_evaluations(chosen, nfe, denoiser, check_labels(denoiser, labels))
    origin = {"solver": repr(chosen), "nfe": nfe, "seed": seed}
    batches = []
    settings = {**denoiser.identity(), **origin, "set of labels": labels}
    kept = Kept(Path(folder), settings, force=force) if folder is not None else None
    for index, x in sample_batches(
        denoiser,
        count,
        start=min(kept.done, count) if kept is not None else 0,
        solver=chosen,
        nfe=nfe,
        labels=labels,
        seed=mix(seed ^ _OWN_STREAM),
        batch_size=batch_size,
        progress=progress,
        description="generating",
    ):
        images = pictures(x, denoiser.data_range) if denoiser.data_range is not None else x.cpu()
        if kept is not None:
            kept.add(index, images=images)
        else:
            batches.append(images)
    images = kept.tensors(count)["images"] if kept is not None else torch.cat(batches)
    values = None if labels is None else torch.as_tensor(labels).reshape(-1)
    return Generated(images, values, origin)
