"""Which sampler, which schedule, for my model: how far each is from the model's own limit."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.calibration import Attachment, Calibration, as_calibration
from trueup.denoiser import Denoiser
from trueup.errors import TrueupError
from trueup.fitting.moments import seen, whitened
from trueup.fitting.solve import BROUGHT, checked_numbers
from trueup.fitting.teacher import Teacher, deal, intervals_for
from trueup.hf import as_denoiser
from trueup.noise import checked_seed, mix
from trueup.progress import Progress
from trueup.sampling.draw import as_solver, network_for
from trueup.sampling.fitted import Fitted, follow, plan
from trueup.sampling.network import Network
from trueup.sampling.rules import RULES, Grid
from trueup.sampling.solver import solvers_for
from trueup.statistics import Number

TRAJECTORIES = 32
FEWEST = 8
# As people know them: our rules on the usual grids, and solvers that are no such rule with their own steps.
_RULES = {"ddim": "DDIM", "dpm++-2": "DPM-Solver++ 2M", "dpm++-3": "DPM-Solver++ 3M", "unipc-2": "UniPC"}
_RULES |= {"ipndm-3": "iPNDM"}
_GRIDS = {"even in time": Grid("time"), "even in log-SNR": Grid(), "Karras": Grid(7.0)}
_NAMED = ("dpm-solver-2", "dpm-solver-3", "deis", "heun")
_OWN_STREAM = 0x73616D70


@dataclass(frozen=True)
class Row:
    """One sampler on one grid with one number of evaluations."""

    sampler: str
    grid: str
    nfe: int
    error: Number  # whitened, to the limit


@dataclass(eq=False, repr=False)
class Samplers:
    """What `samplers` found: the error of every sampler, from the same noise."""

    rows: list[Row]
    trajectories: int
    model: str
    calibrated: bool
    brought: tuple[int, ...] = ()  # evaluations whose fitted solver aims at the data, not at the limit
    settings: dict[str, Any] = field(default_factory=dict)  # whose samples, from what noise

    def __repr__(self) -> str:
        return f"<samplers of {self.model}: {self.verdict()}>"

    def best(self, nfe: int) -> Row:
        """The one nearest to the limit."""
        return min((row for row in self.rows if row.nfe == nfe), key=lambda row: row.error.value)

    @property
    def numbers(self) -> list[int]:
        """The numbers of evaluations."""
        return sorted({row.nfe for row in self.rows})

    def verdict(self) -> str:
        """The best of each number of evaluations, in a line."""
        found = ((nfe, self.best(nfe)) for nfe in self.numbers)
        return "; ".join(f"{nfe} evaluations: {row.sampler}, {row.grid}" for nfe, row in found)

    def table(self) -> str:
        """A row per sampler and grid, a column per number of evaluations, the best marked."""
        kinds = list(dict.fromkeys((row.sampler, row.grid) for row in self.rows))
        errors = {(row.sampler, row.grid, row.nfe): row.error for row in self.rows}
        network = f"{self.model}, {'calibrated' if self.calibrated else 'as it is'}"
        lines = [f"samplers of {network}: distance to its own limit, {self.trajectories} trajectories", ""]
        lines.append(f"{'':34}" + "".join(f"{nfe:>20}" for nfe in self.numbers))
        for sampler, grid in kinds:
            cells = []
            for nfe in self.numbers:
                error = errors.get((sampler, grid, nfe))
                mark = "*" if self.best(nfe) == Row(sampler, grid, nfe, error or Number(0.0)) else " "
                cells.append("-" if error is None else f"{error.value:.3g} ± {error.reach:.2g}{mark}")
            lines.append(f"{sampler:16} {grid:17}" + "".join(f"{cell:>20}" for cell in cells))
        lines += ["", "distance: squared error to the many-step limit from the same noise over the limit's"]
        lines.append("variance, every frequency band in its own units, ± 95%; * the nearest")
        if self.brought:
            numbers = ", ".join(map(str, self.brought))
            lines.append(
                f"fitted for {numbers}: brought to the data's moments, away from the limit on purpose"
            )
        return "\n".join([*lines, f"verdict: {self.verdict()}"])

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        rows = [
            {
                "sampler": r.sampler,
                "grid": r.grid,
                "nfe": r.nfe,
                "error": r.error.value,
                "low": r.error.low,
                "high": r.error.high,
            }
            for r in self.rows
        ]
        more: dict[str, Any] = {
            "model": self.model,
            "calibrated": self.calibrated,
            "trajectories": self.trajectories,
        }
        more |= {"verdict": self.verdict(), "brought to the data": list(self.brought)}
        more["settings"] = self.settings
        return {**more, "samplers": rows}


def samplers(
    model: Any,
    calibration: Calibration | str | PathLike[str] | None = None,
    *,
    nfe: int | list[int] = 8,
    trajectories: int = TRAJECTORIES,
    labels: Any = None,
    guidance: float = 1.0,
    seed: int = 0,
    progress: bool | None = None,
) -> Samplers:
    """How far the usual samplers, on the usual grids, end from the model's own many-step limit.

    All start from the same noise; no data are needed. The fitted solvers of a calibration are among them, and
    with one the network is corrected throughout.
    """
    seed = checked_seed(seed)
    numbers = checked_numbers(nfe)
    if not isinstance(trajectories, int) or isinstance(trajectories, bool) or trajectories < FEWEST:
        raise TrueupError(f"samplers are compared on {FEWEST} trajectories or more, not {trajectories!r}")
    denoiser = as_denoiser(model)
    denoiser.check_bare()
    found = None if calibration is None else as_calibration(calibration)
    network = network_for(denoiser, labels, guidance)
    deal(network, trajectories, mix(seed ^ _OWN_STREAM))
    intervals = intervals_for(max(numbers))
    solvers = [(number, *one) for number in numbers for one in _solvers(denoiser, found, number, network)]
    total = trajectories * (intervals + 1 + sum(number for number, *_ in solvers))
    rows = []
    attachment = None if found is None else Attachment(denoiser, found)  # or say that it belongs elsewhere
    corrected = None if found is None or found.empty else attachment
    with corrected or nullcontext(), Progress(total, "comparing samplers", show=progress) as bar:
        network.advance = bar.update
        teacher = Teacher.of(network, network.seed, intervals=intervals, keep=False, finer_than=max(numbers))
        teacher.check_varied(seen(teacher.samples, denoiser))
        for number, name, grid, solver in solvers:
            error = _error(solver, network, number, teacher)
            if error is not None:
                rows.append(Row(name, grid, number, error))
    fitted = (solver.solver for *_, solver in solvers if isinstance(solver, Fitted))
    brought = tuple(made.nfe for made in fitted if made.provenance.get("fitted") == BROUGHT)
    settings: dict[str, Any] = {"weights": denoiser.fingerprint(), "seed": seed, "guidance": guidance}
    settings["calibration"] = None if found is None else found.identity
    return Samplers(rows, trajectories, denoiser.description, corrected is not None, brought, settings)


def _solvers(
    denoiser: Denoiser, calibration: Calibration | None, nfe: int, network: Network
) -> list[tuple[str, str, Any]]:
    """(name, grid, solver) of all that can be compared."""
    found: list[tuple[str, str, Any]] = []
    rules = {rule.name: rule for rule in RULES}
    for rule, name in _RULES.items():
        for grid, where in _GRIDS.items():
            made = plan(denoiser, rules[rule], where, nfe, network.y, network.guidance)
            if made is not None:
                found.append((name, grid, Fitted(made)))
    offered = solvers_for(denoiser)
    for name in _NAMED:
        if name in offered:
            found.append((name, "its own", as_solver(name, denoiser)))
    there = () if calibration is None else calibration.solvers
    fitted = [made for made in there if made.is_for(nfe, network.guidance)]
    return found + [("fitted", "its own", Fitted(made)) for made in fitted]


def _error(solver: Any, network: Network, nfe: int, teacher: Teacher) -> Number | None:
    """The whitened error; None if the sampler does not go so far or leaves what is finite."""
    try:
        if isinstance(solver, Fitted):
            x = follow(solver.solver, network, teacher.noise)
        else:
            with torch.inference_mode(), network.denoiser.evaluating():
                x = solver.solve(network, teacher.noise, nfe)
    except TrueupError:
        return None
    bands, denoiser = Bands(network.denoiser.shape[1:]), network.denoiser
    errors: Tensor = whitened(bands, seen(x, denoiser), seen(teacher.samples, denoiser))
    mean = float(errors.mean())
    return Number.mean(errors) if math.isfinite(mean) else None
