"""Run the network on noised data and collect its moments."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from trueup.correction import LEVEL_SPACING
from trueup.data import Samples, Transform
from trueup.denoiser import Denoiser, carries_correction
from trueup.errors import DataError, ModelError
from trueup.estimate.evaluate import add_batch, check_finite, check_responds, default_batch_size, own_call
from trueup.estimate.moments import Moments
from trueup.estimate.run import Run
from trueup.hf import as_denoiser
from trueup.process import NoiseProcess

_CHEAP = 0.1  # seconds: a checkpoint that takes no longer is written after every batch
_SAVING = 10.0  # others when so many times as long was spent measuring


def default_levels(process: NoiseProcess) -> Tensor:
    """Times evenly spaced in lam, about LEVEL_SPACING apart, over the whole process.

    >>> from trueup.process import DiscreteVP
    >>> levels = default_levels(DiscreteVP.linear())
    >>> len(levels), levels[0].item(), levels[-1].item()
    (25, 0.0, 999.0)
    """
    top, bottom = float(process.lam(process.t_min)), float(process.lam(process.t_max))
    count = round((top - bottom) / LEVEL_SPACING) + 1
    lam = torch.linspace(top, bottom, max(count, 2), dtype=torch.float64)
    return torch.unique(process.snap(process.t_of_lam(lam)))


def check_levels(process: NoiseProcess, levels: Sequence[float] | Tensor | None) -> Tensor:
    """Times that were asked for, rising and as the network knows them; None: the default ones."""
    if levels is None:
        return default_levels(process)
    if isinstance(levels, (int, float)):
        raise ModelError(f"levels are times, for instance [0, 500, 999], not the number {levels}")
    asked = torch.as_tensor(levels, dtype=torch.float64).flatten()
    if not len(asked):
        raise ModelError("needs at least one noise level")
    if not torch.isfinite(asked).all() or (asked < process.t_min).any() or (asked > process.t_max).any():
        raise ModelError(f"levels are times between {process.t_min:g} and {process.t_max:g}")
    return torch.unique(process.snap(asked))


def measure(
    model: Any,
    data: Any,
    *,
    images: int | None = 500,
    levels: Sequence[float] | Tensor | None = None,
    mean_images: int = 0,
    seed: int = 0,
    batch_size: int | None = None,
    resize: str | None = None,
    crop: str | None = None,
    flip: bool = False,
    data_range: tuple[float, float] | None = None,
    edges: Sequence[float] | None = None,
    scheduler: Any = None,
    process: NoiseProcess | None = None,
    parametrization: Any = None,
    device: torch.device | str | None = None,
    run: str | PathLike[str] | None = None,
    skip_bad: bool = False,
    progress: bool | None = None,
) -> Moments:
    """Measure a network's residuals on the first `images` samples of `data` at every level.

    `levels` are times; the default covers the whole process. `mean_images` more samples are read, without
    being run through the network, to know the data's mean better (the x0 control of equation 16). `run` is a
    directory that keeps what was measured: called again, it goes on from there, and with more `images` it
    adds to them. `skip_bad` leaves out images that cannot be used; `Moments.skipped` says why each was. The
    rest is as in `calibrate`.
    """
    denoiser = as_denoiser(
        model, scheduler=scheduler, process=process, parametrization=parametrization, device=device
    )
    if carries_correction(denoiser.network) or carries_correction(denoiser._call):
        raise ModelError(
            "a calibration is attached to this model: remove it first, or its effect is measured"
        )
    counts = (("images", images), ("mean_images", mean_images), ("batch_size", batch_size))
    for name, value in counts:
        whole = isinstance(value, int) and value >= (0 if name == "mean_images" else 1)
        if not whole and (value is not None or name == "mean_images"):
            raise DataError(f"{name} is a whole number of at least 1, not {value!r}")
    transform = Transform(resize, crop, flip, data_range)
    samples = Samples(data, denoiser.shape, denoiser.data_range, transform, skip_bad)
    seed = int(seed)
    fresh = _empty(denoiser, levels, seed, edges, transform)
    if hasattr(data, "origin"):  # not data but samples, see `trueup.generate`
        fresh.provenance["generated"] = data.origin
    with Run(run) if run is not None else nullcontext() as kept:
        return _measure(denoiser, samples, fresh, images, mean_images, seed, batch_size, kept, progress)


def _measure(
    denoiser: Denoiser,
    samples: Samples,
    moments: Moments,
    images: int | None,
    mean_images: int,
    seed: int,
    batch_size: int | None,
    run: Run | None,
    progress: bool | None,
) -> Moments:
    if run is not None:
        moments = run.resume(moments, samples)
        batch_size = batch_size or run.batch_size
    if images is not None and moments.images > images:
        raise DataError(
            f"this run has measured {moments.images} images already, more than the {images} asked for: "
            "ask for at least as many, or use a new run directory"
        )
    size = read_size = batch_size or default_batch_size(denoiser)
    if denoiser.device.type != "mps":  # which has no float64
        moments = moments.to(denoiser.device)
    left = None if images is None else images - moments.images
    saved, cost = time.monotonic(), 0.0  # when the last checkpoint was written, and how long that took
    with denoiser.evaluating(), _Progress(samples, images, moments, progress) as bar:
        for batch in samples.batches(read_size, samples.position, limit=left):
            if denoiser.conditional and batch.y is None:
                raise DataError("the network is conditional: the data must come with labels")
            check_finite(moments)  # of the batch before: its last evaluations ran while this one was read
            if moments.images == 0:
                check_responds(denoiser, batch, seed)
                moments.provenance["own_call"] = own_call(denoiser, batch, float(moments.t[0]))
            size = add_batch(moments, denoiser, batch, seed, size)
            if run is not None:
                run.add(batch)
                if cost < _CHEAP or time.monotonic() - saved >= _SAVING * cost:
                    check_finite(moments)
                    started = time.monotonic()
                    run.save(moments, size, samples)
                    saved = time.monotonic()
                    cost = saved - started
            bar.update(len(batch.index))
    check_finite(moments)
    if run is not None and moments.images and samples.position != run.position:
        run.save(moments, size, samples)
    moments = moments.to("cpu")
    if moments.images == 0:
        raise DataError(
            f"{samples.name} holds no samples"
            + (f" that can be used: {samples.skipped[0]}" if samples.skipped else "")
        )
    for batch in samples.batches(256, samples.position, limit=mean_images):
        moments.add_samples(batch.index, batch.x0, batch.digests, y=batch.y, mean_only=True)
    moments.skipped = samples.skipped
    return moments


def _empty(
    denoiser: Denoiser,
    levels: Sequence[float] | Tensor | None,
    seed: int,
    edges: Sequence[float] | None,
    transform: Transform,
) -> Moments:
    process = denoiser.process
    t = check_levels(process, levels)
    return Moments.empty(
        process,
        t,
        denoiser.shape,
        edges=edges,
        provenance={
            "model": denoiser.description,
            "weights": denoiser.fingerprint(),
            "parametrization": denoiser.parametrization.settings(),
            "data_range": list(denoiser.data_range) if denoiser.data_range else None,
            "seed": seed,
            "transform": {"resize": transform.resize, "crop": transform.crop, "flip": transform.flip},
        },
    )


class _Progress:
    """A progress bar in network evaluations, with a rate and the time left; silent when not asked for."""

    def __init__(self, samples: Samples, images: int | None, moments: Moments, show: bool | None):
        try:
            available: int | None = len(samples)
        except TypeError:
            available = None
        known = [n for n in (available, images) if n is not None]
        self.each = moments.levels
        self.total = min(known) * self.each if known else None
        self.done = moments.images * self.each
        self.show = sys.stderr.isatty() if show is None else show

    def __enter__(self) -> _Progress:
        from tqdm import tqdm

        self.bar = tqdm(
            total=self.total,
            initial=self.done,
            desc="measuring",
            unit="eval",
            disable=not self.show,
            file=sys.stderr,
        )
        return self

    def update(self, images: int) -> None:
        self.bar.update(images * self.each)

    def __exit__(self, *_: object) -> None:
        self.bar.close()
