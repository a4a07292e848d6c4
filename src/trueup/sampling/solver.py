"""What a solver is, and the solvers there are, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from trueup.calibration.trajectory import Adjust, States
from trueup.denoiser import Denoiser
from trueup.errors import ModelError, TrueupError
from trueup.sampling.network import Network
from trueup.solvers import check_name


@runtime_checkable
class Solver(Protocol):
    """From noise to samples. One that is registered works by name wherever solvers do."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def adaptive(self) -> bool:
        """Whether it chooses its own steps, and needs no number of evaluations."""
        ...

    def evaluations(self, nfe: int | None, denoiser: Denoiser, y: Any = None) -> int | None:
        """How many evaluations it makes of the `nfe` it may; None if it decides on the way."""
        ...

    def settings(self) -> dict[str, Any]:
        """What tells it apart from other solvers, as plain values."""
        ...

    def budget(self, nfe: int) -> int:
        """The number of evaluations its steps depend on."""
        return nfe

    def states(self, denoiser: Denoiser, nfe: int, y: Any = None) -> States:
        """Where its states lie, for trajectories; one that shows none raises."""
        raise TrueupError(f"{self.name} does not say where its states lie: there are no trajectories for it")

    def solve(
        self,
        network: Network,
        noise: Tensor,
        nfe: int | None,
        advance: Callable[[int], Any],
        *,
        seed: int = 0,
        index: Tensor | None = None,
        adjust: Adjust | None = None,
    ) -> Tensor:
        """From standard normal noise (B, *shape) to samples; `advance(k)` is told of every k evaluations.

        seed and index say whose images they are, for noise that a solver adds (see `trueup.noise.normal`).
        adjust(i, state) may change state i, of those that `states` lists.
        """
        ...


class _Entry(NamedTuple):
    make: Callable[[Denoiser], Solver]
    offered: Callable[[Denoiser], bool]


_KNOWN: dict[str, _Entry] = {}


def register(
    name: str,
    make: Callable[[Denoiser], Solver],
    *,
    offered: Callable[[Denoiser], bool] = lambda denoiser: True,
) -> None:
    """Make a solver known by name; `make(denoiser)` sets one up, `offered(denoiser)` says for which networks.

    >>> from trueup.sampling import DPMSolver
    >>> register("quick", lambda denoiser: DPMSolver(2, grid="quadratic"))
    """
    _KNOWN[name] = _Entry(make, offered)


def solver_names() -> list[str]:
    """All solvers that are known by name."""
    return list(_KNOWN)


def solvers_for(denoiser: Denoiser) -> list[str]:
    """The solvers that work with a network's noise, by name."""
    return [name for name, entry in _KNOWN.items() if entry.offered(denoiser)]


def named(name: str, denoiser: Denoiser) -> Solver:
    """A solver by its name, set up for a denoiser."""
    check_name(name, _KNOWN)
    entry = _KNOWN[name]
    if not entry.offered(denoiser):
        there = ", ".join(solvers_for(denoiser))
        raise ModelError(
            f"{name} does not work with this network ({denoiser.process.kind} noise): use {there}"
        )
    return entry.make(denoiser)
