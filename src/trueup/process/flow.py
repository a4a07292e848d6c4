"""Rectified flow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trueup.errors import ModelError
from trueup.process.base import NoiseProcess, Times, as_times


class Flow(NoiseProcess):
    """Rectified flow: x_t = (1 - s) x0 + s eps, and the network receives t = time_scale * s.

    reversed: the network's time runs from noise to data, and it receives time_scale * (1 - s); here t stays
    what it is, 0 at the data. Such code mostly predicts x0 - eps:
    `Denoiser(net, Flow(reversed=True), "reversed_flow", shape)`.
    """

    kind = "flow"

    def __init__(
        self, time_scale: float = 1.0, s_min: float = 1e-3, s_max: float = 1 - 1e-3, reversed: bool = False
    ):
        if not 0 < s_min < s_max < 1:
            raise ModelError("a rectified flow is calibrated inside 0 < s < 1")
        if not 0 < time_scale < math.inf:
            raise ModelError("time_scale must be positive")
        if not isinstance(reversed, bool):
            raise ModelError(f"reversed is True or False, not {reversed!r}")
        self.time_scale, self.s_min, self.s_max, self.reversed = time_scale, s_min, s_max, reversed
        self.told = (-1.0, float(time_scale)) if reversed else (1.0, 0.0)
        self.t_min, self.t_max = time_scale * s_min, time_scale * s_max

    def _s(self, t: Times) -> Tensor:
        return as_times(t) / self.time_scale

    def log_alpha(self, t: Times) -> Tensor:
        """log(1 - s)."""
        return torch.log1p(-self._s(t))

    def sigma(self, t: Times) -> Tensor:
        """The noise's share, s; finite at s = 1, where diffusers' schedulers start and lam is infinite."""
        return self._s(t)

    def lam(self, t: Times) -> Tensor:
        """log((1 - s)/s)."""
        return self.log_alpha(t) - self._s(t).log()

    def f(self, t: Times) -> Tensor:
        """-1/(1 - s), per unit of t."""
        return -1.0 / (1 - self._s(t)) / self.time_scale

    def dlam(self, t: Times) -> Tensor:
        """-1/(s (1 - s)), per unit of t."""
        s = self._s(t)
        return -1.0 / (s * (1 - s)) / self.time_scale

    def t_of_lam(self, lam: Times) -> Tensor:
        """s = sigmoid(-lam)."""
        return self.time_scale * torch.sigmoid(-as_times(lam))

    def to_unit(self, t: Tensor) -> Tensor:
        """The noise's share."""
        return self._s(t)

    def from_unit(self, unit: Tensor) -> Tensor:
        """The inverse of `to_unit`."""
        return unit * self.time_scale
