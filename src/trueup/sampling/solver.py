"""What a solver is, and the solvers there are, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from trueup.denoiser import Denoiser
from trueup.errors import ModelError
from trueup.sampling.network import Network


@runtime_checkable
class Solver(Protocol):
    """From noise to samples. One that is registered works by name wherever solvers do."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def adaptive(self) -> bool:
        """Whether it chooses its own steps, and needs no number of evaluations."""

    def evaluations(self, nfe: int | None, denoiser: Denoiser, y: Any = None) -> int | None:
        """How many evaluations it makes of the `nfe` it may; None if it decides on the way."""

    def settings(self) -> dict[str, Any]:
        """What tells it apart from other solvers, as plain values."""

    def budget(self, nfe: int) -> int:
        """The number of evaluations its steps depend on."""
        return nfe

    def solve(self, network: Network, noise: Tensor, nfe: int | None) -> Tensor:
        """From noise (B, *shape) to samples."""


Make = Callable[[Denoiser], Solver]
Offered = Callable[[Denoiser], bool]
_KNOWN: dict[str, tuple[Make, Offered]] = {}


def register(name: str, make: Make, *, offered: Offered = lambda denoiser: True) -> None:
    """Make a solver known by name; `make(denoiser)` sets one up, `offered(denoiser)` says for which networks.

    >>> from trueup.sampling import DPMSolver
    >>> register("quick", lambda denoiser: DPMSolver(2, grid="quadratic"))
    """
    _KNOWN[name] = make, offered


def solver_names() -> list[str]:
    """All solvers that are known by name."""
    return list(_KNOWN)


def solvers_for(denoiser: Denoiser) -> list[str]:
    """The solvers that work with a network's noise, by name."""
    return [name for name, (_, offered) in _KNOWN.items() if offered(denoiser)]


def named(name: str, denoiser: Denoiser) -> Solver:
    """A solver by its name, set up for a denoiser."""
    make, offered = _KNOWN[name]
    if not offered(denoiser):
        there, kind = ", ".join(solvers_for(denoiser)), denoiser.process.kind
        raise ModelError(f"{name} does not work with this network ({kind} noise): use {there}")
    return make(denoiser)
