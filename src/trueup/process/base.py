"""What the noise does: x_t = alpha(t) x0 + sigma(t) eps, equations 1 to 3 of docs/math.md.

`t` is what the network receives, unless its code counts time the other way (`told`). Every function takes a
number or a tensor of times, fractional ones included, and answers in float64. A process is a subclass with a
`kind` of its own: defining it makes it known, and everything else (calibrating, sampling with DPM-Solver,
files, likelihood) works with it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trueup.errors import ModelError

Times = Tensor | float | int


def as_times(t: Times) -> Tensor:
    """A number or a tensor of times, as a float64 tensor."""
    if isinstance(t, Tensor):
        return (t.cpu() if t.device.type == "mps" else t).to(torch.float64)  # MPS has no float64
    return torch.tensor(float(t), dtype=torch.float64)


class NoiseProcess(ABC):
    """A noise process on times `t_min`..`t_max`; lam falls as t grows.

    >>> from trueup.process import DiscreteVP
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
    # Where DPM-Solver stops, in unit time: below 15 evaluations, and else.
    ends: tuple[float, float] | None = None
    told: tuple[float, float] = (1.0, 0.0)  # (scale, offset): the network receives scale * t + offset
    _known: dict[str, type[NoiseProcess]] = {}  # noqa: RUF012 (shared on purpose)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.kind:  # not yet a process
            return
        known = NoiseProcess._known.get(cls.kind, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ModelError(
                f"{cls.__name__} needs a `kind` of its own: files that say {cls.kind!r} mean {known.__name__}"
            )
        NoiseProcess._known[cls.kind] = cls

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

    def settings(self) -> dict[str, Any]:
        """What `from_settings` rebuilds this process from: its kind and arguments, as plain JSON values."""
        values = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        plain = {name: v.tolist() if isinstance(v, Tensor) else v for name, v in values.items()}
        return {"kind": self.kind, **plain}

    def alpha(self, t: Times) -> Tensor:
        """Scale of the data."""
        return self.log_alpha(t).exp()

    def sigma(self, t: Times) -> Tensor:
        """Scale of the noise."""
        return (self.log_alpha(t) - self.lam(t)).exp()

    def g2(self, t: Times) -> Tensor:
        """Squared diffusion coefficient, -2 sigma^2 dlam/dt (equation 3)."""
        return -2.0 * self.sigma(t) ** 2 * self.dlam(t)

    def scales(self, t: Times, like: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and sigma at one time, or at a time per row, ready to multiply rows like `like` with."""
        wide = (-1, *[1] * (like.ndim - 1))  # (B,) -> (B, 1, 1, 1)
        soon = like.is_cuda  # without waiting for the device; what comes from one must be waited for
        alpha, sigma = (v.reshape(wide).to(like, non_blocking=soon) for v in (self.alpha(t), self.sigma(t)))
        return alpha, sigma

    def noised(self, x0: Tensor, eps: Tensor, t: Times) -> Tensor:
        """x_t = alpha x0 + sigma eps, equation 1."""
        alpha, sigma = self.scales(t, eps)
        return alpha * x0 + sigma * eps

    @property
    def prior_std(self) -> float:
        """Standard deviation of the noise a sampler starts from."""
        return float(self.sigma(self.t_max))

    def to_data(self, x: Tensor, t: Times) -> Tensor:
        """What a state at the last time is a sample of: itself, unless the process scales what it shows."""
        return x

    def to_unit(self, t: Tensor) -> Tensor:
        """Time as samplers count it: 0 is clean data; 1 is the end, or sigma itself where noise explodes."""
        return t

    def from_unit(self, unit: Tensor) -> Tensor:
        """The inverse of `to_unit`."""
        return unit

    def snap(self, t: Times) -> Tensor:
        """The nearest time the network was trained at."""
        times = as_times(t).clamp(self.t_min, self.t_max)
        return times.round() if self.integer_times else times

    def agrees_with(self, other: NoiseProcess) -> bool:
        """Whether both put the same noise at the same times, wherever both are defined."""
        low, high = max(self.t_min, other.t_min), min(self.t_max, other.t_max)
        longer = self.integer_times and self.t_max != other.t_max  # another length is another schedule
        if type(self) is not type(other) or low >= high or longer:
            return False
        t = torch.linspace(low, high, 65, dtype=torch.float64)[1:-1]
        return all(
            torch.allclose(getattr(self, name)(t), getattr(other, name)(t), rtol=1e-4, atol=1e-4)
            for name in ("log_alpha", "lam")
        )


def from_settings(settings: Mapping[str, Any]) -> NoiseProcess:
    """Rebuild a process from its `settings()`."""
    values = dict(settings)
    kind = values.pop("kind", None)
    known = NoiseProcess._known
    if not isinstance(kind, str) or kind not in known:
        raise ModelError(f"unknown noise process {kind!r}; known: {', '.join(sorted(known))}")
    try:
        return known[kind](**values)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"noise process {kind!r} cannot be built from {sorted(values)}: {error}") from error
