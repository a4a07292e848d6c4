"""Which rule on which grid: fitted to a few trajectories, judged by how far their samples are from the limit.

What counts is how good a rule is once its steps are fitted, and the best before is often not the best after:
a fit takes whatever weights of the state and the last answers serve, but it cannot move an evaluation, and it
leaves the last step as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor

from trueup.fitted import MEMORY, FittedSolver
from trueup.fitting.moments import seen, whitened
from trueup.fitting.regress import fitted_states
from trueup.fitting.teacher import Teacher
from trueup.process import NoiseProcess
from trueup.sampling.fitted import follow, plan
from trueup.sampling.network import Network
from trueup.sampling.rules import RULES, Grid

SPACINGS = (math.inf, 7.0, "time", "quadratic")
ENDS = (0.3, 0.15, 0.075, 0.0375, 0.019)  # noise at the last evaluation, over the spread of the samples
TRIED = ("dpm++-2", "unipc-2", "x0-3", "ipndm-3", "singlestep-2")
FEW = 8  # trajectories that each is fitted to, and judged by


def grids(process: NoiseProcess, spread: float) -> list[Grid]:
    """Where evaluations may lie, for samples with this standard deviation."""
    top, low = float(process.lam(process.t_min)), float(process.lam(process.t_max))
    rises = {round(max(0.0, top + math.log(end * spread)), 2) for end in ENDS}
    return [Grid(spacing, rise) for spacing in SPACINGS for rise in sorted(rises) if rise < top - low - 1]


def search(
    network: Network, teacher: Teacher, nfe: int, guidance: float, keep: int, fit: bool
) -> list[FittedSolver]:
    """The rules on their grids that are best when fitted, best first.

    fit: False for those that are best as they are, one of each rule: they will be fitted to something else
    than the limit.
    """
    rules, spread = {rule.name: rule for rule in RULES}, float(seen(teacher.samples, network.denoiser).std())
    few, y, found = teacher.rows(slice(FEW)), network.y, []
    with _rows(network, slice(FEW)):
        for name, grid in product(TRIED, grids(network.process, spread)):
            solver = plan(network.denoiser, rules[name], grid, nfe, y, guidance)
            if solver is not None:
                x = _when_fitted(solver, network, few) if fit else follow(solver, network, few.noise)
                error = float(error_between(solver, network, x, few, teacher.samples).mean())
                found.append((error, len(found), name, solver))
    finite = sorted(one for one in found if math.isfinite(one[0]))
    if not fit:
        finite = [one for k, one in enumerate(finite) if one[2] not in {other[2] for other in finite[:k]}]
    return [solver for *_, solver in finite[:keep]]


def search_cost(nfe: int) -> int:
    """About how many evaluations a search takes."""
    return len(TRIED) * len(SPACINGS) * len(ENDS) * FEW * nfe


@torch.inference_mode()
def _when_fitted(solver: FittedSolver, network: Network, teacher: Teacher) -> Tensor:
    """Samples of a solver that was fitted to these very trajectories."""
    made, x, history = fitted_states(solver, network, teacher)
    last = solver.nfe - 1
    with network.denoiser.evaluating():
        answer = made.remembered(last, network(x, made.t[last]), x, network.parametrization)
    return made.step(last, x, [answer, *history][:MEMORY])


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
