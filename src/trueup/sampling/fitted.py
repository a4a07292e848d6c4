"""A solver fitted to a model, or the rule on a grid that one starts from, as a solver like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.denoiser import Denoiser
from trueup.errors import MismatchError
from trueup.fitted import MEMORY, FittedSolver
from trueup.sampling.network import Network
from trueup.sampling.rules import Grid, Rule
from trueup.sampling.solver import Solver
from trueup.sampling.steps import Levels, network_times
from trueup.solvers import FITTED

Look = Callable[[int, Tensor], Tensor]


class Fitted(Solver):
    """A fitted solver, which has one number of evaluations."""

    name = FITTED
    adaptive = False

    def __init__(self, solver: FittedSolver):
        self.solver = solver

    def __repr__(self) -> str:
        return f"Fitted({self.solver.identity})"

    def evaluations(self, nfe: int | None, denoiser: Denoiser, y: Any = None) -> int:
        """As many as it was fitted for."""
        if nfe != self.solver.nfe:
            raise MismatchError(f"this solver was fitted for {self.solver.nfe} evaluations, not {nfe}")
        return self.solver.nfe

    def settings(self) -> dict[str, Any]:
        """What tells it apart from other solvers."""
        return {"kind": type(self).__name__, "identity": self.solver.identity}

    def solve(self, network: Network, noise: Tensor, nfe: int | None) -> Tensor:
        """From standard normal noise to samples."""
        return follow(self.solver, network, noise)


def plan(
    denoiser: Denoiser, rule: Rule, grid: Grid, nfe: int, y: Any = None, guidance: float = 1.0
) -> FittedSolver | None:
    """A rule on a grid, nothing fitted yet; None if whole timesteps coincide."""
    t = grid.times(denoiser.process, nfe)
    if denoiser.takes_whole_times_only(y):
        t = denoiser.process.snap(t)
    if not (t.diff() < 0).all():
        return None
    return at_times(denoiser, rule, t, f"{rule.name}, {grid.name}", guidance)


def at_times(denoiser: Denoiser, rule: Rule, t: Tensor, base: str, guidance: float = 1.0) -> FittedSolver:
    """A rule at falling times, nothing fitted yet; base: what to call it."""
    process, bands, nfe = denoiser.process, Bands.of(denoiser.shape), len(t)
    levels, one = Levels.at(process, t), torch.ones(1, dtype=torch.float64)
    alpha, sigma = torch.cat([levels.log_alpha.exp(), one]), torch.cat([levels.sigma, 0 * one])
    nothing = torch.zeros(nfe, 1 + MEMORY, denoiser.shape[0], bands.count, dtype=torch.float64)
    offset = torch.zeros(nfe, denoiser.shape[0], bands.length, dtype=torch.float64)
    told, weights = network_times(process, t), rule.weights(levels)
    origin = {"base": base}
    return FittedSolver(
        nfe, told, alpha, sigma, rule.history, weights, bands, nothing, offset, guidance, provenance=origin
    )


@torch.inference_mode()
def follow(solver: FittedSolver, network: Network, noise: Tensor, look: Look | None = None) -> Tensor:
    """From standard normal noise to samples; look(i, state) is shown states 1 to N, and may change them."""
    x = noise * network.process.prior_std
    history: list[Tensor] = []
    with network.denoiser.evaluating():
        for i, t in enumerate(solver.t):
            output = network(x, t)
            history.insert(0, solver.remembered(i, output, x, network.parametrization))
            del history[MEMORY:]
            x = solver.step(i, x, history)
            x = x if look is None else look(i + 1, x)
    return x
