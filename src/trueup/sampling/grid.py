"""Where a sampler puts its levels: even in lam, in time, or in the square root of time."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.process import NoiseProcess

GRIDS = ("logsnr", "uniform", "quadratic")


def between(grid: str, process: NoiseProcess, s: Tensor, t: Tensor, steps: int) -> Tensor:
    """steps + 1 times from s to t, along a last axis; both ends are included exactly."""
    share = torch.linspace(0, 1, steps + 1, dtype=torch.float64)

    def even(first: Tensor, last: Tensor) -> Tensor:
        return first[..., None] + share * (last - first)[..., None]

    if grid == "logsnr":
        times = process.t_of_lam(even(process.lam(s), process.lam(t)))
    else:
        power = 2.0 if grid == "quadratic" else 1.0
        ends = (process.to_unit(end) ** (1 / power) for end in (s, t))
        times = process.from_unit(even(*ends) ** power)
    times[..., 0], times[..., -1] = s, t
    return times
