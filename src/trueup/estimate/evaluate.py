"""Run the network on one batch at every level and add what comes out to the moments."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trueup.data import Batch
from trueup.denoiser import Denoiser
from trueup.errors import ModelError
from trueup.estimate.moments import Moments
from trueup.noise import level_key, level_keys, normal, normals
from trueup.process import NoiseProcess

_AT_ONCE = 2**21  # values of x_t at levels whose bookkeeping is done together; at least one level's


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
    moments.add_samples(batch.index, batch.x0, batch.digests, y=batch.y)
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
    x_t = alpha * rows.x0 + sigma * noise  # equation 1
    outputs = [denoiser(*at_level, rows.y).float() for at_level in zip(x_t, times, strict=True)]
    count = len(outputs)
    level = torch.arange(which.start, which.start + count, device=denoiser.device)
    with torch.autocast(denoiser.device.type, enabled=False):
        eps_hat = denoiser.parametrization.to_eps(torch.stack(outputs), x_t, alpha, sigma)
        moments.add(
            level.repeat_interleave(len(rows.index)),
            rows.index.repeat(count),
            *(v.flatten(0, 1) for v in (eps_hat, noise, x_t / sigma)),
            y=None if rows.y is None or not moments.classes else rows.y.repeat(count),
        )


def check_finite(moments: Moments) -> None:
    """Raise if the network returned nonsense. Waits for the device, so it is asked once a batch, late."""
    finite = torch.isfinite(moments.second).flatten(3).all(3).all(0).all(0).cpu()
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


def own_call(denoiser: Denoiser, batch: Batch, t: float) -> bool:
    """Whether a denoiser's `call` changes what goes in or comes out, tried on one sample."""
    x0 = batch.x0[:1].to(denoiser.device, denoiser.dtype)
    y = batch.y[:1].to(denoiser.device) if batch.y is not None else None
    times = _times(torch.tensor([t]), denoiser.process, denoiser.device)
    return denoiser.has_own_call(x0, times, y)


def _times(t: Tensor, process: NoiseProcess, device: torch.device) -> Tensor:
    """Times as a network takes them."""
    return t.to(device, torch.int64 if process.integer_times else torch.float32)
