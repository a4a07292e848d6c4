"""Which rule on which grid: tried on a few trajectories, judged by how far samples are from the limit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.fitted import FittedSolver
from trueup.fitting.moments import seen, whitened
from trueup.fitting.teacher import Teacher
from trueup.process import NoiseProcess
from trueup.sampling.fitted import follow, plan
from trueup.sampling.network import Network
from trueup.sampling.rules import RULES, Grid, Rule

SPACINGS = (math.inf, 7.0, "time", "quadratic")
ENDS = (0.3, 0.15, 0.075, 0.0375, 0.019)  # noise at the last evaluation, over the spread of the samples
FIRST = "dpm++-2"  # the rule that grids are chosen with
OTHERS = ("dpm++-3", "unipc-2", "x0-3", "ipndm-3", "singlestep-2")
_BUDGET = 96  # evaluations per candidate
_FEWEST = 4


@dataclass(eq=False, repr=False)
class Candidate:
    """A rule on a grid, and its whitened error over a few trajectories."""

    solver: FittedSolver
    error: float


def grids(process: NoiseProcess, spread: float) -> list[Grid]:
    """Where evaluations may lie, for samples with this standard deviation."""
    top, low = float(process.lam(process.t_min)), float(process.lam(process.t_max))
    rises = {max(0.0, top + math.log(end * spread)) for end in ENDS}
    return [Grid(spacing, rise) for spacing in SPACINGS for rise in sorted(rises) if rise < top - low - 1]


def search(network: Network, teacher: Teacher, nfe: int, guidance: float, keep: int) -> list[Candidate]:
    """The best candidates, best first."""
    rows = min(len(teacher.noise), max(_FEWEST, _BUDGET // nfe))
    few, rules = teacher.rows(slice(rows)), {rule.name: rule for rule in RULES}
    spread = float(seen(teacher.samples, network.denoiser).std())
    all_labels, index = network.y, network.index
    network.y = None if all_labels is None else all_labels[:rows]
    network.index = None if index is None else index[:rows]
    try:
        pairs = [(rules[FIRST], grid) for grid in grids(network.process, spread)]
        found = _tried(network, few, nfe, guidance, pairs)
        best = {grid.spacing: grid for _, grid in reversed(found)}.values()  # rules differ in what suits them
        found += _tried(network, few, nfe, guidance, [(rules[n], grid) for grid in best for n in OTHERS])
    finally:
        network.y, network.index = all_labels, index
    return [candidate for candidate, _ in sorted(found, key=lambda pair: pair[0].error)[:keep]]


def search_cost(nfe: int) -> int:
    """About how many evaluations a search takes."""
    return len(SPACINGS) * (len(ENDS) + len(OTHERS)) * nfe * max(_FEWEST, _BUDGET // nfe)


def _tried(
    network: Network, teacher: Teacher, nfe: int, guidance: float, pairs: Iterable[tuple[Rule, Grid]]
) -> list[tuple[Candidate, Grid]]:
    found = []
    for rule, grid in pairs:
        solver = plan(network.denoiser, rule, grid, nfe, network.y, guidance)
        if solver is not None:
            error = float(error_of(solver, network, teacher).mean())
            if math.isfinite(error):
                found.append((Candidate(solver, error), grid))
    return sorted(found, key=lambda pair: pair[0].error)


def error_of(solver: FittedSolver, network: Network, teacher: Teacher) -> Tensor:
    """The whitened error of every trajectory, (n,)."""
    return error_between(solver, network, follow(solver, network, teacher.noise), teacher)


def error_between(solver: FittedSolver, network: Network, x: Tensor, teacher: Teacher) -> Tensor:
    """The same of samples already drawn."""
    shown = seen(x, network.denoiser), seen(teacher.samples, network.denoiser)
    return torch.nan_to_num(whitened(solver.bands, *shown), nan=math.inf, posinf=math.inf)
