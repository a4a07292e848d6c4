"""The steps of DPM-Solver (Lu et al. 2022, algorithms 1 and 2), equations 30 to 32 of docs/math.md.

Every value a step forms is a combination of x_s, the first eps and the latest one, so that it is a small
table of weights, computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trueup.parametrization import Parametrization
from trueup.process import NoiseProcess

GRIDS = ("logsnr", "uniform", "quadratic")  # levels even in lam, in time, or in its square root


@dataclass(frozen=True)
class Levels:
    """Noise levels: times and what the process says of them, in float64, any shape."""

    t: Tensor
    log_alpha: Tensor
    lam: Tensor

    @classmethod
    def at(cls, process: NoiseProcess, t: Tensor) -> Levels:
        """The levels at some times."""
        return cls(t, process.log_alpha(t), process.lam(t))

    @property
    def sigma(self) -> Tensor:
        """Scale of the noise."""
        return (self.log_alpha - self.lam).exp()

    def points(self) -> list[Levels]:
        """One by one along the last axis."""
        parts = (value.unbind(-1) for value in (self.t, self.log_alpha, self.lam))
        return [Levels(*values) for values in zip(*parts, strict=True)]


class Weights(NamedTuple):
    """A value as x * on_x + eps_first * on_first + eps_latest * on_latest."""

    on_x: Tensor
    on_first: Tensor
    on_latest: Tensor


def first_order(s: Levels, t: Levels) -> Weights:
    """DDIM's step from s to t, equation 30."""
    h = t.lam - s.lam
    return Weights((t.log_alpha - s.log_alpha).exp(), -t.sigma * torch.expm1(h), torch.zeros_like(h))


def midpoint(s: Levels, m: Levels, t: Levels) -> Weights:
    """Second order from eps at s and at m between, equation 31."""
    on_x, on_eps, _ = first_order(s, t)
    r = (m.lam - s.lam) / (t.lam - s.lam)
    on_latest = on_eps / (2 * r)
    return Weights(on_x, on_eps - on_latest, on_latest)


def taylor(s: Levels, m: Levels, t: Levels) -> Weights:
    """The step of algorithm 2, with the slope of eps taken from s to m, equation 32."""
    on_x, on_eps, _ = first_order(s, t)
    h = t.lam - s.lam
    r = (m.lam - s.lam) / h
    on_latest = -t.sigma / r * (torch.expm1(h) / h - 1)
    return Weights(on_x, on_eps - on_latest, on_latest)


def tableau(points: Sequence[Levels]) -> list[Weights]:
    """How each point after the first follows from those before it; as many points as order + 1."""
    if len(points) == 2:
        return [first_order(*points)]
    if len(points) == 3:
        s, m, t = points
        return [first_order(s, m), midpoint(s, m, t)]
    s, m1, m2, t = points
    return [first_order(s, m1), taylor(s, m1, m2), taylor(s, m2, t)]


def eps_weights(parametrization: Parametrization, levels: Levels) -> tuple[Tensor, Tensor]:
    """(on output, on x_t) of eps, equation 6."""
    alpha, sigma = levels.log_alpha.exp(), levels.sigma
    p, q = parametrization.coefficients(alpha, sigma)
    return alpha / (alpha * q - sigma * p), -p / (alpha * q - sigma * p)


def network_times(process: NoiseProcess, t: Tensor) -> Tensor:
    """What the network is told: never a time it was not trained on."""
    # The published end time lies below the first timestep, and points shortly before it may as well.
    return t.clamp(process.t_min, process.t_max)


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
