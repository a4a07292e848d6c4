"""Where a sampler puts its levels: even in lam, in time, or in the square root of time."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.process import EDM, DiscreteVP, Flow, NoiseProcess

GRIDS = ("logsnr", "uniform", "quadratic")


def to_unit(process: NoiseProcess, t: Tensor) -> Tensor:
    """Time as samplers count it: 0 is clean data; 1 is the end, or sigma itself where noise explodes."""
    if isinstance(process, DiscreteVP):
        return (t + 1) / len(process.alphas_cumprod)
    if isinstance(process, Flow):
        return t / process.time_scale
    return (4 * t).exp() if isinstance(process, EDM) else t


def from_unit(process: NoiseProcess, unit: Tensor) -> Tensor:
    """The inverse of `to_unit`.

    >>> from_unit(DiscreteVP.linear(), torch.tensor([1e-3, 1.0], dtype=torch.float64))
    tensor([  0., 999.], dtype=torch.float64)
    """
    if isinstance(process, DiscreteVP):
        return unit * len(process.alphas_cumprod) - 1
    if isinstance(process, Flow):
        return unit * process.time_scale
    return 0.25 * unit.log() if isinstance(process, EDM) else unit


def between(grid: str, process: NoiseProcess, s: Tensor, t: Tensor, steps: int) -> Tensor:
    """steps + 1 times from s to t, along a last axis; both ends are included exactly."""
    share = torch.linspace(0, 1, steps + 1, dtype=torch.float64)

    def even(first: Tensor, last: Tensor) -> Tensor:
        return first[..., None] + share * (last - first)[..., None]

    if grid == "logsnr":
        times = process.t_of_lam(even(process.lam(s), process.lam(t)))
    else:
        power = 2.0 if grid == "quadratic" else 1.0
        ends = (to_unit(process, end) ** (1 / power) for end in (s, t))
        times = from_unit(process, even(*ends) ** power)
    times[..., 0], times[..., -1] = s, t
    return times
