"""DPM-Solver, orders 1 to 3, singlestep: Lu et al. 2022, algorithms 1 and 2, as published.

A step from level s to level t evaluates the network at s and at order - 1 levels between; its weights are
those of `trueup.sampling.steps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from trueup.denoiser import Denoiser
from trueup.errors import TrueupError
from trueup.process import NoiseProcess
from trueup.sampling import adaptive
from trueup.sampling.network import Network
from trueup.sampling.solver import Solver, register
from trueup.sampling.steps import GRIDS, Levels, between, eps_weights, network_times, tableau
from trueup.solvers import DPM_SOLVERS, check_evaluations

ALLOCATIONS = ("fast", "fixed", "adaptive")
_FINE_FROM = 15  # evaluations, from which on it ends later


@dataclass(frozen=True)
class DPMSolver(Solver):
    """DPM-Solver of one order on one grid.

    grid: "logsnr" (even in lam), "uniform" or "quadratic" in time. allocation: "fast" spends exactly the
    evaluations asked for, by ending on lower orders where they do not divide; "fixed" takes floor(nfe/order)
    steps of full order; "adaptive" chooses its steps by atol and rtol, for every image on its own, and
    needs no nfe. end: the time to stop at, on 0..1; by default where the process says: variance preserving
    ones 1e-3 below 15 evaluations, then 1e-4.

    >>> DPMSolver(3).orders(20), DPMSolver(3).orders(15), DPMSolver(3, allocation="fixed").orders(20)
    ([3, 3, 3, 3, 3, 3, 2], [3, 3, 3, 3, 2, 1], [3, 3, 3, 3, 3, 3])
    """

    order: int = 3
    grid: str = "logsnr"
    allocation: str = "fast"
    end: float | None = None
    atol: float = 0.0078
    rtol: float = 0.05

    def __post_init__(self) -> None:
        if self.order not in (1, 2, 3):
            raise TrueupError(f"DPM-Solver has orders 1, 2 and 3, not {self.order!r}")
        for name, known in (("grid", GRIDS), ("allocation", ALLOCATIONS)):
            if (value := getattr(self, name)) not in known:
                raise TrueupError(f"unknown {name} {value!r}; choose from {', '.join(known)}")
        if self.allocation == "adaptive" and self.order == 1:
            raise TrueupError("the adaptive DPM-Solver compares two orders: use order 2 or 3")
        if not (self.atol > 0 and self.rtol > 0):
            raise TrueupError("atol and rtol must be positive")
        if self.end is not None and not 0 < self.end < 1:
            raise TrueupError(f"the end time lies between 0 and 1, not at {self.end!r}")

    @property
    def name(self) -> str:
        """What `trueup sample --solver` calls it."""
        return f"dpm-solver-{self.order}" + ("" if self.allocation == "fast" else f"-{self.allocation}")

    @property
    def adaptive(self) -> bool:
        """Whether it chooses its own steps."""
        return self.allocation == "adaptive"

    def orders(self, nfe: int) -> list[int]:
        """The order of every step."""
        check_evaluations(self.name, nfe)
        if self.allocation == "fixed" or self.order == 1:
            return [self.order] * (nfe // self.order)
        if self.order == 2:
            return [2] * (nfe // 2) + [1] * (nfe % 2)
        whole, rest = divmod(nfe, 3)
        return [3] * whole + [rest] if rest else [3] * (whole - 1) + [2, 1]

    def evaluations(self, nfe: int | None, denoiser: Denoiser, y: Any = None) -> int | None:
        """How many evaluations it makes of the `nfe` it may; fewer where whole times coincide."""
        whole_times = denoiser.takes_whole_times_only(y)
        if self.adaptive:
            if whole_times:
                between = "times between the timesteps, and this network knows whole ones only"
                raise TrueupError(f"{self.name} needs {between}: use dpm-solver-3")
            return None
        assert nfe is not None
        return sum(run[:, 1:].numel() for run in self.plan(denoiser.process, nfe, whole_times))

    def end_time(self, process: NoiseProcess, nfe: int | None) -> Tensor:
        """The time it stops at."""
        coarse = nfe is not None and nfe < _FINE_FROM
        end = self.end or (process.ends[0 if coarse else 1] if process.ends is not None else None)
        if end is None:
            return torch.tensor(process.t_min, dtype=torch.float64)
        return process.from_unit(torch.tensor(end, dtype=torch.float64))

    def plan(self, process: NoiseProcess, nfe: int, whole_times: bool = False) -> list[Tensor]:
        """The times of every step, (steps, order + 1) for each run of steps of one order.

        A step's last time is the next one's first. whole_times: every level the network is asked at is
        moved to the nearest whole timestep.
        """
        start, end = torch.tensor(process.t_max, dtype=torch.float64), self.end_time(process, nfe)
        orders = self.orders(nfe)
        over_evaluations = self.grid != "logsnr" and self.allocation == "fast"  # as published
        weights = orders if over_evaluations else [1] * len(orders)
        edges = between(self.grid, process, start, end, sum(weights))[torch.tensor([0, *weights]).cumsum(0)]
        runs, done = [], 0
        for order, same in groupby(orders):
            steps = slice(done, done := done + len(list(same)))
            runs.append(between(self.grid, process, edges[:-1][steps], edges[1:][steps], order))
        return _to_whole_times(runs, process) if whole_times else runs

    def settings(self) -> dict[str, Any]:
        """What tells it apart from other solvers."""
        kept = ("order", "grid", "allocation", "end")
        return {"kind": type(self).__name__, **{name: getattr(self, name) for name in kept}}

    def solve(self, network: Network, noise: Tensor, nfe: int | None) -> Tensor:
        """From standard normal noise to samples."""
        process, x = network.process, noise * network.process.prior_std
        if self.adaptive:
            end = process.lam(self.end_time(process, None))
            x = adaptive.solve(network, x, self.order, end, self.atol, self.rtol)
        else:
            assert nfe is not None
            for step in self._steps(network, nfe, x):
                x = _stepped(network, step, x)
        return process.to_data(x, self.end_time(process, nfe))

    def _steps(self, network: Network, nfe: int, x: Tensor) -> Iterator[_Step]:
        """Everything about the steps that does not depend on x, computed and copied to the device at once."""
        process = network.process
        plan = self.plan(process, nfe, network.denoiser.takes_whole_times_only(network.y))
        times = torch.cat([network_times(process, run[:, :-1]).flatten() for run in plan]).to(x)
        done = 0
        for run in plan:
            levels = Levels.at(process, run)
            eps = torch.stack(eps_weights(network.parametrization, levels), 2).tolist()  # (steps, points, 2)
            weights = torch.stack([torch.stack(w) for w in tableau(levels.points())])  # (order, 3, steps)
            for step, rows in enumerate(weights.permute(2, 0, 1).tolist()):
                yield zip(times[done : (done := done + len(rows))], eps[step][:-1], rows, strict=True)


# Of every evaluation in a step: its time on the device, eps as weights on output and x_t, Weights after it.
_Step = Iterable[tuple[Tensor, list[float], list[float]]]


def _stepped(network: Network, step: _Step, x: Tensor) -> Tensor:
    """The state at the end of a step."""
    state, first = x, None
    for t, (on_output, on_x), w in step:
        latest = network(state, t)
        if (on_output, on_x) != (1.0, 0.0):  # not a noise prediction
            latest = torch.add(latest * on_output, state, alpha=on_x)
        if first is None:
            first = latest
            state = torch.add(x * w[0], first, alpha=w[1] + w[2])
        else:
            state = torch.add(x * w[0], first, alpha=w[1]).add_(latest, alpha=w[2])
    return state


def _to_whole_times(runs: list[Tensor], process: NoiseProcess) -> list[Tensor]:
    """Every time but the last whole; of steps that become shorter, or empty, only what is left is taken."""
    last = runs[-1][-1, -1]
    moved = [torch.unique_consecutive(process.snap(step)) for run in runs for step in run]
    moved = [whole for whole in moved if len(whole) > 1]
    if not moved:
        raise TrueupError("there is no whole timestep between the start and the end: end later")
    if last < moved[-1][-1]:
        moved[-1][-1] = last  # it is not asked there
    return [torch.stack(list(same)) for _, same in groupby(moved, key=len)]


def _offered(solver: DPMSolver, denoiser: Denoiser) -> bool:
    """Adaptive ones need times between the timesteps, and order 3 steps over too much of noise that explodes.

    (At the published tolerance Gaussian data came out with 1.2 times its standard deviation.)
    """
    if not solver.adaptive:
        return True
    if solver.order == 3 and denoiser.process.kind in ("edm", "ve"):
        return False
    return denoiser.conditional or not denoiser.takes_whole_times_only()  # which needs labels to be tried


def _register(name: str) -> None:
    order, _, allocation = name.removeprefix("dpm-solver-").partition("-")
    solver = DPMSolver(int(order), allocation=allocation or "fast")
    register(name, lambda denoiser: solver, offered=partial(_offered, solver))


for _name in DPM_SOLVERS:
    _register(_name)
