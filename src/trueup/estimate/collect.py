"""Run the network on noised data and collect its moments."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trueup.data import Batch, Samples, Transform, digest
from trueup.denoiser import Denoiser, carries_correction
from trueup.errors import DataError, ModelError
from trueup.estimate.moments import Moments
from trueup.hf import as_denoiser
from trueup.noise import level_keys, normals
from trueup.process import NoiseProcess

LEVEL_SPACING = 0.4  # in lam; docs/results.md shows what interpolating over it costs
_AT_ONCE = 2**21  # values of x_t at levels whose bookkeeping is done together; at least one level's


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


def measure(
    model: Any,
    data: Any,
    *,
    images: int | None = 500,
    levels: Sequence[float] | Tensor | None = None,
    mean_images: int = 0,
    seed: int = 0,
    antithetic: bool = False,
    batch_size: int = 32,
    resize: str | None = None,
    crop: str | None = None,
    flip: bool = False,
    data_range: tuple[float, float] | None = None,
    edges: Sequence[float] | None = None,
    scheduler: Any = None,
    process: NoiseProcess | None = None,
    parametrization: Any = None,
    device: torch.device | str | None = None,
    progress: bool | None = None,
) -> Moments:
    """Measure a network's residuals on the first `images` samples of `data` at every level.

    `levels` are times; the default covers the whole process. `mean_images` more samples are read, without
    being run through the network, to know the data's mean better (the x0 control of equation 16).
    The rest is as in `calibrate`.
    """
    denoiser = as_denoiser(
        model, scheduler=scheduler, process=process, parametrization=parametrization, device=device
    )
    if carries_correction(denoiser.network) or carries_correction(denoiser._call):
        raise ModelError(
            "a calibration is attached to this model: remove it first, or its effect is measured"
        )
    for name, value in (("images", images), ("mean_images", mean_images), ("batch_size", batch_size)):
        whole = isinstance(value, int) and value >= (0 if name == "mean_images" else 1)
        if not whole and not (name == "images" and value is None):
            raise DataError(f"{name} is a whole number of at least 1, not {value!r}")
    samples = Samples(data, denoiser.shape, denoiser.data_range, Transform(resize, crop, flip, data_range))
    moments = _empty(denoiser, levels, seed, antithetic, edges, samples.transform)
    if denoiser.device.type != "mps":  # which has no float64
        moments = moments.to(denoiser.device)
    evaluations = moments.levels * moments.draws
    with denoiser.evaluating(), _Progress(samples, images, evaluations, progress) as bar:
        for batch in samples.batches(batch_size, 0, images):
            check_finite(moments)  # of the batch before: its last evaluations ran while this one was read
            if moments.images == 0:
                moments.provenance["own_call"] = _own_call(denoiser, batch, float(moments.t[0]))
            add_batch(moments, denoiser, batch, seed)
            bar.update(len(batch.index))
    check_finite(moments)
    moments = moments.to("cpu")
    if moments.images == 0:
        raise DataError(f"{samples.name} holds no samples")
    if mean_images:
        for batch in samples.batches(256, moments.images, moments.images + mean_images):
            moments.add_data(batch.x0, digest(batch.x0))
    return moments


def _empty(
    denoiser: Denoiser,
    levels: Sequence[float] | Tensor | None,
    seed: int,
    antithetic: bool,
    edges: Sequence[float] | None,
    transform: Transform,
) -> Moments:
    process = denoiser.process
    if levels is None:
        t = default_levels(process)
    else:
        if isinstance(levels, (int, float)):
            raise ModelError(f"levels are times, for instance [0, 500, 999], not the number {levels}")
        asked = torch.as_tensor(levels, dtype=torch.float64).flatten()
        if not torch.isfinite(asked).all() or (asked < process.t_min).any() or (asked > process.t_max).any():
            raise ModelError(f"levels are times between {process.t_min:g} and {process.t_max:g}")
        t = torch.unique(process.snap(asked))
    return Moments.empty(
        t,
        process.lam(t),
        process.alpha(t),
        process.sigma(t),
        denoiser.shape,
        edges=edges,
        draws=2 if antithetic else 1,
        provenance={
            "model": denoiser.description,
            "weights": denoiser.fingerprint(),
            "process": process.settings(),
            "parametrization": denoiser.parametrization.settings(),
            "data_range": list(denoiser.data_range) if denoiser.data_range else None,
            "seed": seed,
            "antithetic": antithetic,
            "transform": {"resize": transform.resize, "crop": transform.crop, "flip": transform.flip},
        },
    )


@torch.inference_mode()
def add_batch(moments: Moments, denoiser: Denoiser, batch: Batch, seed: int) -> None:
    """Add one batch of samples at every level."""
    device = denoiser.device
    x0 = batch.x0.to(device)
    y = batch.y.to(device) if batch.y is not None else None
    index = batch.index.to(device)
    if denoiser.conditional and y is None:
        raise DataError("the network is conditional: the data must come with labels")
    # Copies to a device wait for it, so there are none between here and the last evaluation.
    alphas, sigmas = (
        v.to(device, x0.dtype).reshape(-1, *[1] * x0.ndim) for v in (moments.alpha, moments.sigma)
    )
    keys = level_keys(moments.t).to("cpu" if device.type == "mps" else device)
    times = _times(moments.t, len(x0), denoiser.process, device)
    at_once = max(1, _AT_ONCE // x0.numel())
    for start in range(0, moments.levels, at_once):
        levels = slice(start, start + at_once)
        alpha, sigma = alphas[levels], sigmas[levels]
        noise = normals(seed, index, keys[levels], denoiser.shape, device)  # (l, B, C, *spatial)
        for sign in (1.0, -1.0)[: moments.draws]:
            eps = sign * noise if moments.draws > 1 else noise
            x_t = alpha * x0 + sigma * eps  # equation 1
            outputs = [denoiser(*at_level, y).float() for at_level in zip(x_t, times[levels], strict=True)]
            with torch.autocast(device.type, enabled=False):
                eps_hat = denoiser.parametrization.to_eps(torch.stack(outputs), x_t, alpha, sigma)
                moments.add(levels, index, eps_hat, eps, x_t / sigma)
    moments.count_rows(batch.index)
    moments.add_data(batch.x0, digest(batch.x0))


def check_finite(moments: Moments) -> None:
    """Raise if the network returned nonsense. Waits for the device, so it is asked once a batch, late."""
    finite = torch.isfinite(moments.second).all(-1).all(-1).all(-1).all(0).cpu()
    if not finite.all():
        t = float(moments.t[~finite][0])
        raise ModelError(f"the network returned values that are not finite at t = {t:g}")


def _own_call(denoiser: Denoiser, batch: Batch, t: float) -> bool:
    x0 = batch.x0[:1].to(denoiser.device, denoiser.dtype)
    y = batch.y[:1].to(denoiser.device) if batch.y is not None else None
    times = _times(torch.tensor([t]), 1, denoiser.process, denoiser.device)[0]
    return denoiser.has_own_call(x0, times, y)


def _times(t: Tensor, count: int, process: NoiseProcess, device: torch.device) -> Tensor:
    """Times as a network takes them, (levels, count)."""
    dtype = torch.int64 if process.integer_times else torch.float32
    return t.to(device, dtype)[:, None].repeat(1, count)


class _Progress:
    """A progress bar in network evaluations, with a rate and the time left; silent when not asked for."""

    def __init__(self, samples: Samples, images: int | None, each: int, show: bool | None):
        try:
            available: int | None = len(samples)
        except TypeError:
            available = None
        known = [n for n in (available, images) if n is not None]
        self.total = min(known) * each if known else None
        self.each = each
        self.show = sys.stderr.isatty() if show is None else show

    def __enter__(self) -> _Progress:
        from tqdm import tqdm

        self.bar = tqdm(
            total=self.total, desc="measuring", unit="eval", disable=not self.show, file=sys.stderr
        )
        return self

    def update(self, images: int) -> None:
        self.bar.update(images * self.each)

    def __exit__(self, *_: object) -> None:
        self.bar.close()
