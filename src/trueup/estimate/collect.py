"""Run the network on noised data and collect its moments."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trueup.data import Batch, Samples, Transform, digest
from trueup.denoiser import Denoiser, carries_correction
from trueup.errors import DataError, ModelError
from trueup.estimate.moments import Moments
from trueup.estimate.run import Run
from trueup.hf import as_denoiser
from trueup.noise import level_key, level_keys, normal, normals
from trueup.process import NoiseProcess

LEVEL_SPACING = 0.4  # in lam; docs/results.md shows what interpolating over it costs
_CHEAP = 0.1  # seconds: a checkpoint that takes no longer is written after every batch
_SAVING = 10.0  # others when so many times as long was spent measuring
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
    on_skip: Callable[[list[str]], None] | None = None,
    progress: bool | None = None,
) -> Moments:
    """Measure a network's residuals on the first `images` samples of `data` at every level.

    `levels` are times; the default covers the whole process. `mean_images` more samples are read, without
    being run through the network, to know the data's mean better (the x0 control of equation 16). `run` is a
    directory that keeps what was measured: called again, it goes on from there, and with more `images` it
    adds to them. `skip_bad` leaves out images that cannot be used; `on_skip` is then told why each was. The
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
    fresh = _empty(denoiser, levels, seed, antithetic, edges, transform)
    with Run(run) if run is not None else nullcontext() as kept:
        moments = _measure(denoiser, samples, fresh, images, mean_images, seed, batch_size, kept, progress)
    if on_skip is not None:
        on_skip(samples.skipped)
    return moments


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
                moments.provenance["own_call"] = _own_call(denoiser, batch, float(moments.t[0]))
            size = add_batch(moments, denoiser, batch, seed, size)
            if run is not None:
                run.add(batch.index, batch.x0)
                if cost < _CHEAP or time.monotonic() - saved >= _SAVING * cost:
                    check_finite(moments)
                    started = time.monotonic()
                    run.save(moments, size, samples)
                    saved = time.monotonic()
                    cost = saved - started
            bar.update(len(batch.index))
    check_finite(moments)
    if run is not None and samples.position != run.position:
        run.save(moments, size, samples)
    moments = moments.to("cpu")
    if moments.images == 0:
        raise DataError(
            f"{samples.name} holds no samples"
            + (f" that can be used: {samples.skipped[0]}" if samples.skipped else "")
        )
    for batch in samples.batches(256, samples.position, limit=mean_images):
        moments.add_data(batch.x0, digest(batch.x0))
    return moments


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whatever device."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    words = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
    return known or any(word in str(error) for word in words)


def default_batch_size(denoiser: Denoiser) -> int:
    """How many samples to evaluate at once to begin with; it is halved when memory runs out.

    >>> from trueup.process import ContinuousVP
    >>> default_batch_size(Denoiser(lambda x_t, t: x_t, ContinuousVP(), "noise", shape=(3, 32, 32)))
    8
    """
    values, most = (2**15, 8) if denoiser.device.type == "cpu" else (2**21, 256)
    fits = max(1, values // math.prod(denoiser.shape))
    return min(most, 2 ** int(math.log2(fits)))


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
def add_batch(
    moments: Moments, denoiser: Denoiser, batch: Batch, seed: int, at_most: int | None = None
) -> int:
    """Add one batch of samples at every level, `at_most` of them at a time; returns how many fitted."""
    device = denoiser.device
    # Copies to a device wait for it, so there are none between here and the last evaluation.
    x0, index = batch.x0.to(device), batch.index.to(device)
    y = batch.y.to(device) if batch.y is not None else None
    axes = [1] * x0.ndim
    levels = _Levels(
        moments.alpha.to(device, x0.dtype).reshape(-1, *axes),
        moments.sigma.to(device, x0.dtype).reshape(-1, *axes),
        level_keys(moments.t).to("cpu" if device.type == "mps" else device),
        _times(moments.t, denoiser.process, device),
    )
    size = at_most or len(x0)
    done = 0
    while done < len(x0):
        part = slice(done, done + size)
        rows = Batch(index[part], x0[part], None if y is None else y[part])
        size = _add_rows(moments, denoiser, rows, seed, levels, 0, size)
        done = part.stop
    moments.count_rows(batch.index)
    moments.add_data(batch.x0, digest(batch.x0))
    return size


class _Levels(NamedTuple):
    """What evaluating needs to know of every level, on the device."""

    alpha: Tensor  # (L, 1, ...)
    sigma: Tensor
    keys: Tensor  # (L,) of the noise
    times: Tensor  # (L,) as the network takes them


def _add_rows(
    moments: Moments, denoiser: Denoiser, rows: Batch, seed: int, levels: _Levels, first: int, size: int
) -> int:
    """Add rows at all levels from `first` on; halves them when memory runs out. Returns what fitted."""
    at_once = max(1, _AT_ONCE // rows.x0.numel())
    for start in range(first, moments.levels, at_once):
        try:
            _add_levels(moments, denoiser, rows, seed, levels, slice(start, start + at_once))
            continue
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if len(rows.index) == 1:
                raise ModelError("not enough memory to evaluate the network on a single sample") from None
        if denoiser.device.type == "cuda":
            torch.cuda.empty_cache()
        size = (len(rows.index) + 1) // 2
        pieces = (v.split(size) if v is not None else (None, None) for v in (rows.index, rows.x0, rows.y))
        for piece in zip(*pieces, strict=True):
            size = min(size, _add_rows(moments, denoiser, Batch(*piece), seed, levels, start, size))
        break
    return size


def _add_levels(
    moments: Moments, denoiser: Denoiser, rows: Batch, seed: int, levels: _Levels, which: slice
) -> None:
    """Evaluate rows at some levels and add what came out, all of it or nothing."""
    alpha, sigma, keys, times = (v[which] for v in levels)
    noise = normals(seed, rows.index, keys, denoiser.shape, denoiser.device)  # (l, B, C, *spatial)
    times = times[:, None].expand(-1, len(rows.x0))
    results = []
    for sign in (1.0, -1.0)[: moments.draws]:
        eps = sign * noise if moments.draws > 1 else noise
        x_t = alpha * rows.x0 + sigma * eps  # equation 1
        outputs = [denoiser(*at_level, rows.y).float() for at_level in zip(x_t, times, strict=True)]
        with torch.autocast(denoiser.device.type, enabled=False):
            eps_hat = denoiser.parametrization.to_eps(torch.stack(outputs), x_t, alpha, sigma)
            results.append((eps_hat, eps, x_t / sigma))
    with torch.autocast(denoiser.device.type, enabled=False):
        moments.add(
            which, rows.index.repeat(len(results)), *(torch.cat(v, 1) for v in zip(*results, strict=True))
        )


def check_finite(moments: Moments) -> None:
    """Raise if the network returned nonsense. Waits for the device, so it is asked once a batch, late."""
    finite = torch.isfinite(moments.second).all(-1).all(-1).all(-1).all(0).cpu()
    if not finite.all():
        t = float(moments.t[~finite][0])
        raise ModelError(f"the network returned values that are not finite at t = {t:g}")


@torch.inference_mode()
def check_responds(denoiser: Denoiser, batch: Batch, seed: int) -> None:
    """Raise if the network answers the same whatever it is given."""
    process = denoiser.process
    t = process.snap(process.t_of_lam(torch.tensor([1.0, -1.0], dtype=torch.float64)))
    outputs = []
    for level, at in enumerate(_times(t, process, denoiser.device)):
        alpha, sigma = (float(v) for v in (process.alpha(t[level]), process.sigma(t[level])))
        for row in range(min(2, len(batch.index))):
            one = slice(row, row + 1)
            eps = normal(seed, batch.index[one], level_key(float(t[level])), denoiser.shape, denoiser.device)
            x_t = alpha * batch.x0[one].to(denoiser.device) + sigma * eps
            y = batch.y[one].to(denoiser.device) if batch.y is not None else None
            outputs.append(denoiser(x_t, at.reshape(1), y))
    if all(torch.equal(output, outputs[0]) for output in outputs):
        raise ModelError("the network returns the same values whatever it is given: are its weights loaded?")


def _own_call(denoiser: Denoiser, batch: Batch, t: float) -> bool:
    x0 = batch.x0[:1].to(denoiser.device, denoiser.dtype)
    y = batch.y[:1].to(denoiser.device) if batch.y is not None else None
    times = _times(torch.tensor([t]), denoiser.process, denoiser.device)
    return denoiser.has_own_call(x0, times, y)


def _times(t: Tensor, process: NoiseProcess, device: torch.device) -> Tensor:
    """Times as a network takes them."""
    return t.to(device, torch.int64 if process.integer_times else torch.float32)


class _Progress:
    """A progress bar in network evaluations, with a rate and the time left; silent when not asked for."""

    def __init__(self, samples: Samples, images: int | None, moments: Moments, show: bool | None):
        try:
            available: int | None = len(samples)
        except TypeError:
            available = None
        known = [n for n in (available, images) if n is not None]
        self.each = moments.levels * moments.draws
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
