"""What the noise does: x_t = alpha(t) x0 + sigma(t) eps, equations 1 to 3 of docs/math.md.

`t` is what the network receives. Every function takes a number or a tensor of times, fractional
ones included, and answers in float64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trueup.errors import ModelError

Times = Tensor | float | int

_SMALLEST_ALPHA2 = 2.0**-24  # stands in for a terminal SNR of exactly zero, as in diffusers' Euler schedulers


def as_times(t: Times) -> Tensor:
    """A number or a tensor of times, as a float64 tensor."""
    if isinstance(t, Tensor):
        return t.to(torch.float64)
    return torch.tensor(float(t), dtype=torch.float64)


class NoiseProcess(ABC):
    """A noise process on times `t_min`..`t_max`; lam falls as t grows.

    >>> process = DiscreteVP.linear()
    >>> round(float(process.lam(999)), 3)
    -5.059
    >>> round(float(process.t_of_lam(process.lam(17.25))), 6)
    17.25
    """

    kind: str = ""
    t_min: float
    t_max: float
    integer_times: bool = False  # whether the network was trained at whole timesteps only

    @abstractmethod
    def log_alpha(self, t: Times) -> Tensor:
        """log alpha(t)."""

    @abstractmethod
    def lam(self, t: Times) -> Tensor:
        """Half the log signal-to-noise ratio, log(alpha/sigma): the place of a noise level."""

    @abstractmethod
    def dlam(self, t: Times) -> Tensor:
        """d lam / d t, negative."""

    @abstractmethod
    def f(self, t: Times) -> Tensor:
        """Drift of the forward SDE, d log alpha / d t."""

    @abstractmethod
    def t_of_lam(self, lam: Times) -> Tensor:
        """The time whose noise level is lam."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What `from_settings` needs to rebuild this process, as plain JSON values."""

    def alpha(self, t: Times) -> Tensor:
        """Scale of the data."""
        return self.log_alpha(t).exp()

    def sigma(self, t: Times) -> Tensor:
        """Scale of the noise."""
        return (self.log_alpha(t) - self.lam(t)).exp()

    def g2(self, t: Times) -> Tensor:
        """Squared diffusion coefficient, -2 sigma^2 dlam/dt (equation 3)."""
        return -2.0 * self.sigma(t) ** 2 * self.dlam(t)

    def snap(self, t: Times) -> Tensor:
        """The nearest time the network was trained at."""
        times = as_times(t).clamp(self.t_min, self.t_max)
        return times.round() if self.integer_times else times

    def agrees_with(self, other: NoiseProcess) -> bool:
        """Whether both put the same noise at the same times, wherever both are defined."""
        low, high = max(self.t_min, other.t_min), min(self.t_max, other.t_max)
        if type(self) is not type(other) or low >= high:
            return False
        if self.integer_times and (self.t_max != other.t_max):
            return False  # a schedule of another length is another schedule
        t = torch.linspace(low, high, 65, dtype=torch.float64)[1:-1]
        return all(
            torch.allclose(getattr(self, name)(t), getattr(other, name)(t), rtol=1e-4, atol=1e-4)
            for name in ("log_alpha", "lam")
        )


class DiscreteVP(NoiseProcess):
    """Variance preserving on timesteps 0..T-1 (DDPM and its descendants).

    Between timesteps log alpha is linear, as in the published DPM-Solver, and t = -1 is clean data.
    """

    kind = "discrete_vp"
    integer_times = True

    def __init__(self, alphas_cumprod: Tensor | Sequence[float]):
        alpha2 = _float64(alphas_cumprod, "alphas_cumprod").flatten()
        if alpha2.numel() < 2:
            raise ModelError("a noise schedule needs at least two timesteps")
        if not (torch.isfinite(alpha2).all() and (alpha2 >= 0).all() and (alpha2 < 1).all()):
            raise ModelError("alphas_cumprod must lie in [0, 1)")
        if not (alpha2.diff() < 0).all():
            raise ModelError("alphas_cumprod must fall from each timestep to the next")
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
        bar = torch.cos(
            (torch.arange(steps + 1, dtype=torch.float64) / steps + 0.008) / 1.008 * math.pi / 2
        ).square()
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

    def lam(self, t: Times) -> Tensor:
        """Half the log signal-to-noise ratio."""
        log_alpha = self.log_alpha(t)
        return log_alpha - 0.5 * torch.log(-torch.expm1(2 * log_alpha))

    def f(self, t: Times) -> Tensor:
        """Drift, constant between timesteps."""
        left, right, _ = self._segment(t)
        return right - left

    def dlam(self, t: Times) -> Tensor:
        """For alpha^2 + sigma^2 = 1: lam' = f / sigma^2."""
        return self.f(t) / -torch.expm1(2 * self.log_alpha(t))

    def t_of_lam(self, lam: Times) -> Tensor:
        """Inverse of lam: log alpha = -softplus(-2 lam)/2, then the linear segment that holds it."""
        log_alpha = -0.5 * torch.nn.functional.softplus(-2 * as_times(lam))
        falling = -self._knots.to(log_alpha.device)
        index = (torch.searchsorted(falling, -log_alpha.contiguous()) - 1).clamp(0, falling.numel() - 2)
        return (-log_alpha - falling[index]) / (falling[index + 1] - falling[index]) + index - 1.0

    def settings(self) -> dict[str, Any]:
        """The schedule itself."""
        return {"kind": self.kind, "alphas_cumprod": self.alphas_cumprod.tolist()}


class ContinuousVP(NoiseProcess):
    """Variance preserving on t in [0, 1] with linear beta(t) (score SDE)."""

    kind = "continuous_vp"

    def __init__(
        self, beta_min: float = 0.1, beta_max: float = 20.0, t_min: float = 1e-3, t_max: float = 1.0
    ):
        if not 0 < beta_min < beta_max < math.inf:
            raise ModelError("a continuous VP process needs 0 < beta_min < beta_max")
        if not 0 < t_min < t_max < math.inf:
            raise ModelError("a continuous VP process needs 0 < t_min < t_max")
        self.beta_min, self.beta_max, self.t_min, self.t_max = beta_min, beta_max, t_min, t_max

    def log_alpha(self, t: Times) -> Tensor:
        """Log alpha = -t^2 (beta_max - beta_min)/4 - t beta_min/2."""
        times = as_times(t)
        return -0.25 * times**2 * (self.beta_max - self.beta_min) - 0.5 * times * self.beta_min

    def lam(self, t: Times) -> Tensor:
        """Half the log signal-to-noise ratio."""
        log_alpha = self.log_alpha(t)
        return log_alpha - 0.5 * torch.log(-torch.expm1(2 * log_alpha))

    def f(self, t: Times) -> Tensor:
        """-beta(t)/2."""
        return -0.5 * (self.beta_min + as_times(t) * (self.beta_max - self.beta_min))

    def dlam(self, t: Times) -> Tensor:
        """For alpha^2 + sigma^2 = 1: lam' = f / sigma^2."""
        return self.f(t) / -torch.expm1(2 * self.log_alpha(t))

    def t_of_lam(self, lam: Times) -> Tensor:
        """The positive root of the quadratic log alpha(t), written so that it does not cancel."""
        drop = torch.nn.functional.softplus(-2 * as_times(lam))  # -2 log alpha
        slope = self.beta_max - self.beta_min
        return 2 * drop / (self.beta_min + torch.sqrt(self.beta_min**2 + 2 * slope * drop))

    def settings(self) -> dict[str, Any]:
        """The four numbers."""
        return {
            "kind": self.kind,
            "beta_min": self.beta_min,
            "beta_max": self.beta_max,
            "t_min": self.t_min,
            "t_max": self.t_max,
        }


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

    def settings(self) -> dict[str, Any]:
        """The range of sigma."""
        return {"kind": self.kind, "sigma_min": self.sigma_min, "sigma_max": self.sigma_max}


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

    def settings(self) -> dict[str, Any]:
        """The three sigmas."""
        return {
            "kind": self.kind,
            "sigma_data": self.sigma_data,
            "sigma_min": self.sigma_min,
            "sigma_max": self.sigma_max,
        }


class Flow(NoiseProcess):
    """Rectified flow: x_t = (1 - s) x0 + s eps, and the network receives t = time_scale * s."""

    kind = "flow"

    def __init__(self, time_scale: float = 1.0, s_min: float = 1e-3, s_max: float = 1 - 1e-3):
        if not 0 < s_min < s_max < 1:
            raise ModelError("a rectified flow is calibrated inside 0 < s < 1")
        if not 0 < time_scale < math.inf:
            raise ModelError("time_scale must be positive")
        self.time_scale, self.s_min, self.s_max = time_scale, s_min, s_max
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
        s = self._s(t)
        return torch.log1p(-s) - s.log()

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

    def settings(self) -> dict[str, Any]:
        """Time scale and range."""
        return {"kind": self.kind, "time_scale": self.time_scale, "s_min": self.s_min, "s_max": self.s_max}


_KINDS: dict[str, Callable[..., NoiseProcess]] = {
    cls.kind: cls for cls in (DiscreteVP, ContinuousVP, VE, EDM, Flow)
}


def from_settings(settings: Mapping[str, Any]) -> NoiseProcess:
    """Rebuild a process from its `settings()`."""
    values = dict(settings)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ModelError(f"unknown noise process {kind!r}; known: {', '.join(sorted(_KINDS))}")
    try:
        return _KINDS[kind](**values)
    except (TypeError, ValueError) as error:
        raise ModelError(f"noise process {kind!r} cannot be built from {sorted(values)}: {error}") from error


def _check_sigmas(sigma_min: float, sigma_max: float) -> None:
    if not 0 < sigma_min < sigma_max < math.inf:
        raise ModelError(f"needs 0 < sigma_min < sigma_max, got {sigma_min} and {sigma_max}")


def _float64(values: Any, name: str) -> Tensor:
    try:
        return torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"{name} must be a list or tensor of numbers: {error}") from None
