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
TRIED = ("dpm++-2", "dpm++-3", "unipc-2", "x0-3", "ipndm-3", "singlestep-2")
# All rules on all grids with few trajectories, the best with more: evaluations of each, and how many go on.
ROUNDS = ((24, 12), (96, None))


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
    """The best candidates, one of a rule, best first: fits differ more between rules than between grids."""
    rules, spread = {rule.name: rule for rule in RULES}, float(seen(teacher.samples, network.denoiser).std())
    pairs = [(rules[name], grid) for name in TRIED for grid in grids(network.process, spread)]
    all_labels, index = network.y, network.index
    try:
        for evaluations, most in ROUNDS:
            rows = min(len(teacher.noise), max(1, evaluations // nfe))
            network.y = None if all_labels is None else all_labels[:rows]
            network.index = None if index is None else index[:rows]
            found = _tried(network, teacher, slice(rows), nfe, guidance, pairs)
            pairs = [pair for _, pair in found[:most]]
    finally:
        network.y, network.index = all_labels, index
    of_rules = {rule.name: candidate for candidate, (rule, _) in reversed(found)}  # the best of each
    return sorted(of_rules.values(), key=lambda candidate: candidate.error)[:keep]


def search_cost(nfe: int) -> int:
    """About how many evaluations a search takes."""
    counts = (len(TRIED) * len(SPACINGS) * len(ENDS), ROUNDS[0][1])
    tried = zip(counts, ROUNDS, strict=True)
    return sum(count * nfe * max(1, evaluations // nfe) for count, (evaluations, _) in tried)


def _tried(
    network: Network,
    teacher: Teacher,
    part: slice,
    nfe: int,
    guidance: float,
    pairs: Iterable[tuple[Rule, Grid]],
) -> list[tuple[Candidate, tuple[Rule, Grid]]]:
    found, few = [], teacher.rows(part)
    for rule, grid in pairs:
        solver = plan(network.denoiser, rule, grid, nfe, network.y, guidance)
        if solver is not None:
            x = follow(solver, network, few.noise)
            error = float(error_between(solver, network, x, few, teacher.samples).mean())
            if math.isfinite(error):
                found.append((Candidate(solver, error), (rule, grid)))
    return sorted(found, key=lambda pair: pair[0].error)


def error_between(
    solver: FittedSolver, network: Network, x: Tensor, teacher: Teacher, among: Tensor | None = None
) -> Tensor:
    """The whitened error of every sample already drawn, (n,); among: see `whitened`."""
    shown = (
        seen(v, network.denoiser) for v in (x, teacher.samples, teacher.samples if among is None else among)
    )
    return torch.nan_to_num(whitened(solver.bands, *shown), nan=math.inf, posinf=math.inf)
