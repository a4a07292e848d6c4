"""Which rule on which grid: tried on a few trajectories, judged by how far samples are from the limit.

What counts is how good a rule is once its steps are fitted, and the best before is often not the best after:
so those that are good as they are get fitted to some trajectories and judged by others, and the best of them
are fitted to all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor

from trueup import distributed
from trueup.fitted import FittedSolver
from trueup.fitting.moments import seen, whitened
from trueup.fitting.regress import fitted
from trueup.fitting.teacher import Teacher
from trueup.process import NoiseProcess
from trueup.sampling.fitted import follow, plan
from trueup.sampling.network import Network
from trueup.sampling.rules import RULES, Grid

SPACINGS = (math.inf, 7.0, "time", "quadratic")
ENDS = (0.3, 0.15, 0.075, 0.0375, 0.019)  # noise at the last evaluation, over the spread of the samples
TRIED = ("dpm++-2", "unipc-2", "x0-3", "ipndm-3", "singlestep-2")
FIRST = 24  # evaluations that each rule on each grid gets
GOOD = 12  # of them are fitted
FITTED_TO, JUDGED_BY = 24, 8  # trajectories


def grids(process: NoiseProcess, spread: float) -> list[Grid]:
    """Where evaluations may lie, for samples with this standard deviation."""
    top, low = float(process.lam(process.t_min)), float(process.lam(process.t_max))
    rises = {round(max(0.0, top + math.log(end * spread)), 2) for end in ENDS}
    return [Grid(spacing, rise) for spacing in SPACINGS for rise in sorted(rises) if rise < top - low - 1]


def search(
    network: Network, teacher: Teacher, nfe: int, guidance: float, keep: int, fit: bool = True
) -> list[FittedSolver]:
    """The rules on their grids that are best when fitted, best first.

    fit: False for those that are best as they are, one of each rule: they will be fitted to something else
    than the limit.
    """
    rules, spread = {rule.name: rule for rule in RULES}, float(seen(teacher.samples, network.denoiser).std())
    pairs, y, count = product(TRIED, grids(network.process, spread)), network.y, len(teacher.noise)
    to = min(FITTED_TO, count - min(JUDGED_BY, count // 4))

    def error(solver: FittedSolver, part: slice) -> float:
        few = teacher.rows(part)
        with _rows(network, part):
            x = follow(solver, network, few.noise)
        return float(error_between(solver, network, x, few, teacher.samples).mean())

    def when_fitted(solver: FittedSolver) -> float:
        if not fit:
            return error(solver, slice(to))
        with _rows(network, slice(to)):
            made = fitted(solver, network, teacher.rows(slice(to)))
        return error(made, slice(to, to + JUDGED_BY))

    planned = (plan(network.denoiser, rules[name], grid, nfe, y, guidance) for name, grid in pairs)
    first = slice(max(1, FIRST // nfe))
    good = _best([(error(solver, first), solver) for solver in planned if solver is not None])[:GOOD]
    found = _best([(when_fitted(solver), solver) for solver in good])
    if not fit:
        of_rules = {solver.provenance["base"].split(",")[0]: solver for solver in reversed(found)}
        found = [solver for solver in found if solver in of_rules.values()]
    return found[:keep]


def search_cost(nfe: int) -> int:
    """About how many evaluations a search takes."""
    tried = len(TRIED) * len(SPACINGS) * len(ENDS) * nfe * max(1, FIRST // nfe)
    return tried + GOOD * ((nfe - 1) * FITTED_TO + nfe * JUDGED_BY)


def _best(found: list[tuple[float, FittedSolver]]) -> list[FittedSolver]:
    """By their errors, smallest first; without those that are not finite."""
    errors = distributed.by_first(lambda: [error for error, _ in found])  # or ranks might go different ways
    order = sorted(range(len(found)), key=errors.__getitem__)
    return [found[place][1] for place in order if math.isfinite(errors[place])]


@contextmanager
def _rows(network: Network, part: slice) -> Iterator[None]:
    """The network for some of its trajectories."""
    y, index = network.y, network.index
    network.y = None if y is None else y[part]
    network.index = None if index is None else index[part]
    try:
        yield
    finally:
        network.y, network.index = y, index


def error_between(
    solver: FittedSolver, network: Network, x: Tensor, teacher: Teacher, among: Tensor | None = None
) -> Tensor:
    """The whitened error of every sample already drawn, (n,); among: see `whitened`."""
    shown = (
        seen(v, network.denoiser) for v in (x, teacher.samples, teacher.samples if among is None else among)
    )
    return torch.nan_to_num(whitened(solver.bands, *shown), nan=math.inf, posinf=math.inf)
