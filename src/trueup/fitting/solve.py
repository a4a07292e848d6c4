"""Fit a solver to a model: steps, rule and what is added to them, for a number of evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from trueup import distributed
from trueup.calibration import Attachment, Calibration, as_calibration
from trueup.denoiser import Denoiser
from trueup.errors import TrueupError
from trueup.fitted import FittedSolver
from trueup.fitting.kept import Kept
from trueup.fitting.look import with_solvers
from trueup.fitting.moments import DataLabels, Miss, Moments, seen
from trueup.fitting.regress import fitted, restored
from trueup.fitting.search import error_between, search, search_cost
from trueup.fitting.teacher import Teacher, deal, intervals_for
from trueup.hf import as_denoiser
from trueup.noise import checked_seed, mix, normal
from trueup.progress import Progress
from trueup.sampling.draw import STARTING_NOISE, check_labels, network_for
from trueup.sampling.fitted import follow
from trueup.sampling.network import Network
from trueup.statistics import Number
from trueup.stored import digest_of

TRAJECTORIES = 128
FEWEST = 32
HELD_OUT = 0.25  # of the trajectories
TRIED = 3  # candidates that are fitted to all trajectories
MATERIAL = 0.05  # nats a coefficient by which the limit misses the data: all spreads off by a fifth, say
ENOUGH_IMAGES = (
    30  # by the variances of 10, a quarter of sets of perfect samples would be far; of 30, none of 120
)
BROUGHT = "states brought to the data's moments"
_FEW = 100  # labels that a file names
_OWN_STREAM = 0x736F6C  # so that nothing is fitted on the very samples it is then judged by


def fit_solver(
    model: Any,
    calibration: Calibration | str | PathLike[str] | None = None,
    *,
    nfe: int | list[int] = 8,
    trajectories: int = TRAJECTORIES,
    labels: Any = None,
    guidance: float = 1.0,
    seed: int = 0,
    run: str | PathLike[str] | None = None,
    keep: bool = False,
    progress: bool | None = None,
) -> Calibration:
    """The calibration with a solver fitted to the calibrated network for each number of evaluations.

    The network's many-step limit from given noise can be computed, so what few steps get wrong is known
    exactly, without data. Grids and rules are tried on a few trajectories; the steps of the best are fitted
    to the fine trajectories in closed form, per channel and frequency band, and kept if other trajectories
    say that they help. Where the limit itself misses the data's moments by more than `MATERIAL`, states are
    brought to the data's moments instead, which the calibration knows.

    `sample(model, n, nfe=8, calibration=cal)` uses it, and so does any diffusers pipeline:
    `pipe.scheduler = cal.scheduler(nfe=8)`. Without a calibration the solver alone is fitted. labels,
    guidance: as in use; a solver is for one guidance scale. Trajectories take labels from all over the list.
    Moments of the data are for labels as they are in the data (`labels_of`), and are not looked at with
    others. run: a directory to go on from after an interruption; what it kept is removed at the end, unless
    it is to `keep` that until the result is saved (`trueup.fitting.kept.clear`).
    """
    seed = checked_seed(seed)
    denoiser = as_denoiser(model)
    denoiser.check_bare()
    if calibration is None:
        found = Calibration.without_data(denoiser, check_labels(denoiser, labels, guidance))
    else:
        found = as_calibration(calibration).resized(denoiser.shape[1:])
    numbers = checked_numbers(nfe)
    attachment = Attachment(denoiser, found)  # or say that it belongs to another model
    corrected = nullcontext() if found.empty else attachment
    fitter = Fitter(denoiser, found, trajectories, labels, guidance, seed, progress, numbers)
    settings = {**denoiser.identity(), **fitter.settings(), "calibration": found.identity}
    with Kept(run if distributed.rank() == 0 else None, settings) as kept_run:
        before = distributed.by_first(kept_run.solvers)
        made = [solver for solver in before if solver.nfe in numbers]
        left = [number for number in numbers if number not in {solver.nfe for solver in made}]
        if left:
            with corrected, fitter:
                fitter.start(kept_run)
                for done, number in enumerate(left):
                    fitter.expect(left[done:])
                    solver = fitter.fit(number)
                    made.append(distributed.by_first(lambda solver=solver: solver))  # type: ignore[misc]
                    kept_run.keep_solvers(found, made)
                fitter.expect([])
        if not keep:
            kept_run.clear()
    for solver in made:
        solver.provenance.pop("run", None)
    others = [old for old in found.solvers if not any(old.is_for(new.nfe, new.guidance) for new in made)]
    found = replace(found, solvers=(*others, *made))
    return with_solvers(denoiser, found, made, labels, progress)


class Fitter:
    """The trajectories of a network, to fit solvers to."""

    def __init__(
        self,
        denoiser: Denoiser,
        calibration: Calibration | None,
        trajectories: int,
        labels: Any,
        guidance: float,
        seed: int,
        progress: bool | None,
        numbers: list[int],
    ):
        if not isinstance(trajectories, int) or isinstance(trajectories, bool) or trajectories < FEWEST:
            raise TrueupError(f"a solver is fitted to {FEWEST} trajectories or more, not {trajectories!r}")
        self.denoiser, self.guidance = denoiser, guidance
        self.network = network_for(denoiser, labels, guidance)
        self.seed, self.count = mix(seed ^ _OWN_STREAM), trajectories
        self.fitted_to = trajectories - _held_out(trajectories)
        # After those with a limit come as many as are fitted to, for the moments of samples, which need none.
        deal(self.network, trajectories + self.fitted_to, self.seed)
        self.index, self.labels = torch.arange(trajectories + self.fitted_to), self.network.y
        # Guided samples are not meant to have the data's moments.
        self.data = Moments.of(calibration, labels) if guidance == 1.0 else None
        self.gains = "none" if calibration is None or calibration.empty else calibration.gains
        self.intervals, self.most = intervals_for(max(numbers)), max(numbers)
        self.origin = {"trajectories": trajectories, "seed": seed}
        if self.labels is not None:
            noun = "labels" if denoiser.vocabulary is None else "prompts"
            given = check_labels(denoiser, labels, guidance)
            assert given is not None
            self.origin["labels"] = told(labels if isinstance(labels, DataLabels) else given, noun)
        self.bar = Progress(fit_cost(trajectories, *numbers), "fitting a solver", show=progress)

    def __enter__(self) -> Fitter:
        self.network.advance = self.bar.__enter__().update
        return self

    def settings(self) -> dict[str, Any]:
        """What tells its trajectories and solvers from others of the same network and correction."""
        told, data = self.labels, self.data
        return {
            **self.origin,
            "guidance": self.guidance,
            "intervals": self.intervals,
            "told": None if told is None else digest_of(list(told.shape), [told.double()]),
            "data": None if data is None else data.identity,
            "answer": None if self.denoiser.fingerprint() else self._answer(),
        }

    def _answer(self) -> str:
        """What the network says to one noise: all that tells networks without weights apart."""
        denoiser, t = self.denoiser, self.denoiser.process.snap(self.denoiser.process.t_of_lam(0.0))
        with self._rows(slice(1)) as network, torch.inference_mode(), denoiser.evaluating():
            return digest_of(None, [network(self._noise(slice(1)), t)])

    def _noise(self, part: slice) -> Tensor:
        shape, device = self.denoiser.shape, self.denoiser.device
        return normal(self.seed, self.index[part], STARTING_NOISE, shape, device)

    def start(self, kept: Kept) -> None:
        """Make the trajectories, or take those that an interrupted fit has kept."""
        noise = self._noise(slice(self.count))
        teacher = distributed.by_first(lambda: kept.teacher(noise))
        if teacher is None:
            with self._rows(slice(self.count)) as network:
                teacher = Teacher.of(network, self.seed, intervals=self.intervals, finer_than=self.most)
            kept.keep_teacher(teacher)
        teacher = teacher.to(self.denoiser.device)
        shown = seen(teacher.samples, self.denoiser)
        teacher.check_varied(shown)
        self.limit = None if self.data is None else self.data.miss(shown).number
        self.fitting = teacher.rows(slice(0, self.fitted_to))
        self.judging = teacher.rows(slice(self.fitted_to, self.count))
        # Moments of few samples say little.
        self.held = slice(self.fitted_to, self.count + (self.fitted_to if self.far_from_data else 0))

    def expect(self, numbers: Sequence[int]) -> None:
        """Say what is left to do, now that it is known what decides."""
        self.bar.left(sum(_cost(self.count, number, self.far_from_data) for number in numbers))

    def __exit__(self, *error: object) -> None:
        self.bar.__exit__(*error)

    @contextmanager
    def _rows(self, part: slice) -> Iterator[Network]:
        """The network for some of the trajectories."""
        network = self.network
        network.index = self.index[part]
        network.y = None if self.labels is None else self.labels[part]
        yield network

    @property
    def far_from_data(self) -> bool:
        """Whether the limit itself is not where the data are; so few images do not know where that is."""
        if self.limit is None or self.data is None or self.data.images < ENOUGH_IMAGES:
            return False
        return self.limit.low > 0 and self.limit.value > MATERIAL

    def bases(self, nfe: int) -> list[FittedSolver]:
        """The best rules on their grids."""
        with self._rows(slice(0, self.fitted_to)) as network:
            tried = search(network, self.fitting, nfe, self.guidance, TRIED, not self.far_from_data)
        if not tried:
            raise TrueupError(f"no solver of {nfe} evaluations stays finite on this network")
        return tried

    def better(self, base: FittedSolver) -> FittedSolver:
        """A rule on its grid fitted to the limit, or brought to the data's moments."""
        with self._rows(slice(0, self.fitted_to)) as network:
            if self.far_from_data and self.data is not None:
                return restored(base, network, self.fitting.noise, self.data)
            return fitted(base, network, self.fitting)

    def fit(self, nfe: int) -> FittedSolver:
        """The best of what was tried for a number of evaluations."""
        bases = self.bases(nfe)
        better = [self.better(base) for base in bases]
        before, after = ([self.judged(solver) for solver in group] for group in (bases, better))
        base = min(range(len(bases)), key=lambda i: before[i].score)
        best = min(range(len(better)), key=lambda i: after[i].score)
        # Errors to the limit have long tails, where next to nothing is sure: the smaller will do. Moments
        # must be surely less; but a rule that left the finite has no interval, and is worse than any other.
        helps = after[best].score < before[base].score
        if self.far_from_data and math.isfinite(before[base].score):
            helps = after[best].less(before[base]).high < 0
        chosen, judged = (better[best], after[best]) if helps else (bases[base], before[base])
        origin = {**chosen.provenance, **self.origin, "fitted": _how(helps, self.far_from_data)}
        evidence = {
            "error_base": before[base].error.value,
            "error": judged.error.value,
            "error_se": judged.error.error,
        }
        first = before[base].miss
        if self.limit is not None and judged.miss is not None and first is not None:
            evidence |= {"limit_miss": self.limit.value, "limit_miss_se": self.limit.error}
            evidence |= {"miss_base": first.number.value}
            evidence |= {"miss": judged.miss.number.value, "miss_se": judged.miss.number.error}
        # What left the finite, as the rule before it was fitted may, is unknown.
        evidence = {name: v if math.isfinite(v) else math.nan for name, v in evidence.items()}
        return replace(chosen, gains=self.gains, evidence=evidence, provenance=origin)

    def judged(self, solver: FittedSolver) -> Judged:
        """What trajectories that it was not fitted to say of a solver."""
        with self._rows(self.held) as network:
            x = follow(solver, network, self._noise(self.held))
        errors = error_between(solver, network, x[: len(self.judging.noise)], self.judging)
        miss = None if self.data is None else self.data.miss(seen(x, self.denoiser))
        return Judged(errors, miss, self.far_from_data)


@dataclass(eq=False, repr=False)
class Judged:
    """What trajectories that it was not fitted to say of a solver."""

    errors: Tensor  # (n,) whitened, to the limit
    miss: Miss | None  # of the data's moments
    by_data: bool  # which of the two decides

    @property
    def error(self) -> Number:
        """To the limit."""
        return Number.mean(self.errors.double())

    @property
    def score(self) -> float:
        """The smaller, the better."""
        value = self.miss.number.value if self.by_data and self.miss is not None else self.error.value
        return value if math.isfinite(value) else math.inf

    def less(self, other: Judged) -> Number:
        """How much smaller or larger it is, trajectory by trajectory."""
        if self.by_data and self.miss is not None and other.miss is not None:
            return self.miss.less(other.miss)
        return Number.mean((self.errors - other.errors).double())


def fit_cost(trajectories: int, *numbers: int, by_data: bool = False) -> int:
    """About how many evaluations of the network fitting solvers takes; by_data: where the data decide."""
    each = sum(_cost(trajectories, nfe, by_data) for nfe in numbers)
    return (intervals_for(max(numbers)) + 1) * trajectories + each


def _cost(trajectories: int, nfe: int, by_data: bool) -> int:
    held = _held_out(trajectories)
    judging = trajectories if by_data else held
    # Of the last step nothing is fitted; rules are judged, and what was made of them.
    return search_cost(nfe) + TRIED * ((nfe - 1) * (trajectories - held) + 2 * nfe * judging)


def _held_out(trajectories: int) -> int:
    return max(FEWEST // 2, round(HELD_OUT * trajectories))


def told(labels: Tensor, noun: str = "labels") -> Any:
    """Labels as a file states them: each of a few, or how many there were."""
    if isinstance(labels, DataLabels):
        return "as in the data"
    few = labels.ndim < 2 and labels.numel() <= _FEW and noun == "labels"
    return labels.reshape(-1).tolist() if few else f"{len(labels)} {noun}"


def _how(better: bool, by_data: bool) -> str:
    if not better:
        return f"not {'surely ' * by_data}better fitted: steps and rule alone"
    return BROUGHT if by_data else "steps fitted to the limit"


def checked_numbers(nfe: Any) -> list[int]:
    """Numbers of evaluations a solver can be fitted to, rising."""
    numbers = list(nfe) if isinstance(nfe, (list, tuple, range)) else [nfe]
    if not numbers:
        raise TrueupError("say how many evaluations: nfe")
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool) or not 2 <= number <= 500:
            raise TrueupError(f"a solver is fitted to 2 to 500 evaluations, not {number!r}")
    return sorted(set(numbers))
