"""Variance exploding noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trueup.process.base import NoiseProcess, Times, as_times, check_sigmas


class VE(NoiseProcess):
    """Variance exploding with t = sigma: the D(x; sigma) of EDM, score SDE's VE."""

    kind = "ve"

    def __init__(self, sigma_min: float = 0.002, sigma_max: float = 80.0):
        check_sigmas(sigma_min, sigma_max)
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

    def settings(self) -> dict[str, Any]:
        """The range of sigma."""
        return {"kind": self.kind, "sigma_min": self.sigma_min, "sigma_max": self.sigma_max}
