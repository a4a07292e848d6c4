"""Noise that explodes, as it is and as the network inside EDM's preconditioner sees it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trueup.errors import ModelError
from trueup.process.base import NoiseProcess, Times, as_times


class VE(NoiseProcess):
    """Variance exploding with t = sigma: the D(x; sigma) of EDM, score SDE's VE."""

    kind = "ve"

    def __init__(self, sigma_min: float = 0.002, sigma_max: float = 80.0):
        _check_sigmas(sigma_min, sigma_max)
        self.sigma_min, self.sigma_max = sigma_min, sigma_max
        self.t_min, self.t_max = sigma_min, sigma_max

    def log_alpha(self, t: Times) -> Tensor:
        """Zero: the data is not scaled."""
        return torch.zeros_like(as_times(t))

    def lam(self, t: Times) -> Tensor:
        """-log sigma."""
        return -as_times(t).log()

    def f(self, t: Times) -> Tensor:
        """No drift."""
        return torch.zeros_like(as_times(t))

    def dlam(self, t: Times) -> Tensor:
        """-1/sigma."""
        return -1.0 / as_times(t)

    def t_of_lam(self, lam: Times) -> Tensor:
        """exp(-lam)."""
        return (-as_times(lam)).exp()


class EDM(NoiseProcess):
    """What the raw network inside an EDM preconditioner sees: c_in-scaled input, t = ln(sigma)/4.

    alpha = c_in and sigma = c_in * noise, so alpha^2 sigma_data^2 + sigma^2 = 1 (equation 11).
    """

    kind = "edm"

    def __init__(self, sigma_data: float = 0.5, sigma_min: float = 0.002, sigma_max: float = 80.0):
        _check_sigmas(sigma_min, sigma_max)
        if not 0 < sigma_data < math.inf:
            raise ModelError("EDM's sigma_data must be positive")
        self.sigma_data, self.sigma_min, self.sigma_max = sigma_data, sigma_min, sigma_max
        self.t_min, self.t_max = 0.25 * math.log(sigma_min), 0.25 * math.log(sigma_max)

    def log_alpha(self, t: Times) -> Tensor:
        """Log c_in."""
        return -0.5 * torch.log((8 * as_times(t)).exp() + self.sigma_data**2)

    def lam(self, t: Times) -> Tensor:
        """-log of the unscaled noise level."""
        return -4 * as_times(t)

    def f(self, t: Times) -> Tensor:
        """-4 sigma^2."""
        return -4 * self.sigma(t) ** 2

    def dlam(self, t: Times) -> Tensor:
        """Lam is linear in t."""
        return torch.full_like(as_times(t), -4.0)

    def t_of_lam(self, lam: Times) -> Tensor:
        """-lam/4."""
        return -0.25 * as_times(lam)

    def to_data(self, x: Tensor, t: Times) -> Tensor:
        """The network sees x_t scaled by c_in; a sample is not."""
        return x / float(self.alpha(t))

    def to_unit(self, t: Tensor) -> Tensor:
        """Sigma itself."""
        return (4 * t).exp()

    def from_unit(self, unit: Tensor) -> Tensor:
        """ln(sigma)/4."""
        return 0.25 * unit.log()


def _check_sigmas(sigma_min: float, sigma_max: float) -> None:
    """Raise unless 0 < sigma_min < sigma_max, neither of them beyond all data."""
    if not 0 < sigma_min < sigma_max < 1e12:
        raise ModelError(f"needs 0 < sigma_min < sigma_max, got {sigma_min} and {sigma_max}")
