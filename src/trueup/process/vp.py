"""Variance preserving noise, on whole timesteps and in continuous time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trueup.errors import ModelError
from trueup.process.base import NoiseProcess, Times, as_times

_SMALLEST_ALPHA2 = 2.0**-24  # stands in for a terminal SNR of exactly zero, as in diffusers' Euler schedulers


class _VP(NoiseProcess):
    """What follows from alpha^2 + sigma^2 = 1."""

    ends = (1e-3, 1e-4)  # as published with DPM-Solver

    def lam(self, t: Times) -> Tensor:
        """Half the log signal-to-noise ratio."""
        log_alpha = self.log_alpha(t)
        return log_alpha - 0.5 * torch.log(-torch.expm1(2 * log_alpha))

    def dlam(self, t: Times) -> Tensor:
        """Of lam: f / sigma^2."""
        return self.f(t) / -torch.expm1(2 * self.log_alpha(t))

    @property
    def prior_std(self) -> float:
        """One: what is left of the data at the end counts for nothing."""
        return 1.0


class DiscreteVP(_VP):
    """Variance preserving on timesteps 0..T-1 (DDPM and its descendants).

    Between timesteps log alpha is linear, as in the published DPM-Solver, and t = -1 is clean data.
    """

    kind = "discrete_vp"
    integer_times = True

    def __init__(self, alphas_cumprod: Tensor | Sequence[float]):
        alpha2 = _float64(alphas_cumprod, "alphas_cumprod").flatten()
        if alpha2.numel() < 2:
            raise ModelError("a noise schedule needs at least two timesteps")
        if not (alpha2[0] < 1 and (alpha2.diff() < 0).all() and alpha2[-1] >= 0):
            raise ModelError("alphas_cumprod must fall from each timestep to the next and must lie in [0, 1)")
        if alpha2[-1] == 0:  # has no log; only the last can be zero
            alpha2 = torch.cat([alpha2[:-1], (0.5 * alpha2[-2:-1]).clamp_max(_SMALLEST_ALPHA2)])
        self.alphas_cumprod = alpha2
        self._knots = torch.cat([torch.zeros(1, dtype=torch.float64), 0.5 * alpha2.log()])  # t = -1, 0, ...
        self.t_min, self.t_max = 0.0, float(alpha2.numel() - 1)

    @classmethod
    def from_betas(cls, betas: Tensor | Sequence[float]) -> DiscreteVP:
        """From the variances added at each step."""
        return cls(torch.cumprod(1.0 - _float64(betas, "betas").flatten(), 0))

    @classmethod
    def linear(cls, beta_start: float = 1e-4, beta_end: float = 0.02, steps: int = 1000) -> DiscreteVP:
        """The schedule of DDPM."""
        return cls.from_betas(torch.linspace(beta_start, beta_end, steps, dtype=torch.float64))

    @classmethod
    def scaled_linear(
        cls, beta_start: float = 0.00085, beta_end: float = 0.012, steps: int = 1000
    ) -> DiscreteVP:
        """The schedule of latent diffusion: betas linear in their square root."""
        root = torch.linspace(beta_start**0.5, beta_end**0.5, steps, dtype=torch.float64)
        return cls.from_betas(root**2)

    @classmethod
    def cosine(cls, steps: int = 1000, max_beta: float = 0.999) -> DiscreteVP:
        """The schedule of improved DDPM (diffusers: `squaredcos_cap_v2`)."""
        share = (torch.arange(steps + 1, dtype=torch.float64) / steps + 0.008) / 1.008
        bar = torch.cos(share * math.pi / 2).square()
        return cls.from_betas((1.0 - bar[1:] / bar[:-1]).clamp_max(max_beta))

    def _segment(self, t: Times) -> tuple[Tensor, Tensor, Tensor]:
        times = as_times(t)
        knots = self._knots.to(times.device)
        position = times + 1.0
        index = position.floor().clamp(0, knots.numel() - 2).long()
        return knots[index], knots[index + 1], position - index

    def log_alpha(self, t: Times) -> Tensor:
        """Log alpha, linear between timesteps."""
        left, right, weight = self._segment(t)
        return left + weight * (right - left)

    def f(self, t: Times) -> Tensor:
        """Drift, constant between timesteps."""
        left, right, _ = self._segment(t)
        return right - left

    def t_of_lam(self, lam: Times) -> Tensor:
        """Inverse of lam: log alpha = -softplus(-2 lam)/2, then the linear segment that holds it."""
        log_alpha = -0.5 * torch.nn.functional.softplus(-2 * as_times(lam))
        falling = -self._knots.to(log_alpha.device)
        index = (torch.searchsorted(falling, -log_alpha.contiguous()) - 1).clamp(0, falling.numel() - 2)
        return (-log_alpha - falling[index]) / (falling[index + 1] - falling[index]) + index - 1.0

    def to_unit(self, t: Tensor) -> Tensor:
        """0 is clean data (t = -1), 1 the last timestep."""
        return (t + 1) / len(self.alphas_cumprod)

    def from_unit(self, unit: Tensor) -> Tensor:
        """The inverse of `to_unit`.

        >>> DiscreteVP.linear().from_unit(torch.tensor([1e-3, 1.0], dtype=torch.float64))
        tensor([  0., 999.], dtype=torch.float64)
        """
        return unit * len(self.alphas_cumprod) - 1


class ContinuousVP(_VP):
    """Variance preserving on t in [0, 1] with linear beta(t) (score SDE)."""

    kind = "continuous_vp"

    def __init__(
        self, beta_min: float = 0.1, beta_max: float = 20.0, t_min: float = 1e-3, t_max: float = 1.0
    ):
        if not (0 < beta_min < beta_max < math.inf and 0 < t_min < t_max < math.inf):
            raise ModelError("a continuous VP process needs 0 < beta_min < beta_max and 0 < t_min < t_max")
        self.beta_min, self.beta_max, self.t_min, self.t_max = beta_min, beta_max, t_min, t_max

    def log_alpha(self, t: Times) -> Tensor:
        """Log alpha = -t^2 (beta_max - beta_min)/4 - t beta_min/2."""
        times = as_times(t)
        return -0.25 * times**2 * (self.beta_max - self.beta_min) - 0.5 * times * self.beta_min

    def f(self, t: Times) -> Tensor:
        """-beta(t)/2."""
        return -0.5 * (self.beta_min + as_times(t) * (self.beta_max - self.beta_min))

    def t_of_lam(self, lam: Times) -> Tensor:
        """The positive root of the quadratic log alpha(t), written so that it does not cancel."""
        drop = torch.nn.functional.softplus(-2 * as_times(lam))  # -2 log alpha
        slope = self.beta_max - self.beta_min
        return 2 * drop / (self.beta_min + torch.sqrt(self.beta_min**2 + 2 * slope * drop))


def _float64(values: Any, name: str) -> Tensor:
    try:
        return torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise ModelError(f"{name} must be a list or tensor of numbers: {error}") from None
