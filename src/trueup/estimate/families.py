"""Families of corrections: which functions of what a network sees its residual is regressed on.

A family registers itself under its name, and is fitted, shrunk, confirmed and applied like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from trueup.estimate.regress import Centred, Slope, slopes

Slopes = tuple[Slope, Slope, Tensor]  # on the innovation eps_hat - rho u, on u, and rho


@dataclass(frozen=True)
class Family:
    """The constant part, and the slopes per channel and band on output and input, if any."""

    constant: bool = True
    slopes: Callable[[Centred], Slopes] | None = None


FAMILIES: dict[str, Family] = {}


def register(name: str, family: Family) -> None:
    """Make a family known."""
    FAMILIES[name] = family


register("shift", Family())
register("spectral", Family(slopes=slopes))
register("none", Family(constant=False))
