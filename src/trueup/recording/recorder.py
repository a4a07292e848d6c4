"""`Moments` that a training loop adds to, one batch at a time, and that forget."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trueup.calibration import Calibration
from trueup.denoiser import Binding, Denoiser, prediction, unwrapped
from trueup.denoiser.binding import Place
from trueup.errors import MismatchError, ModelError, TrueupError
from trueup.estimate import Moments, fit
from trueup.estimate.levels import check_classes, check_levels
from trueup.estimate.moments import fold_of
from trueup.estimate.stored import SUMS
from trueup.hf import as_denoiser
from trueup.parametrization import Parametrization
from trueup.recording.rows import Reader, described, home, numbers
from trueup.statistics import Number, enough_folds

_HEAVY = 2.0**40  # a weight at which all sums are rescaled: far from where float64 ends
_CYCLE = 1 << 16  # rows after which dealing begins again: hashing every batch costs as much as adding it
_APART = 7919  # between the running numbers that ranks begin with
# Batches that are counted together on a GPU, and bytes they may take; counting takes twenty times as many.
_TOGETHER, _HELD = 16, 1 << 26


class Recorder:
    """Records how a network errs while it trains: no evaluation of its own, no gradient, one line in the
    loop.

        recorder.update(x_t, t, output, target)

    process: a `trueup.process` or a diffusers scheduler. prediction: as for `Denoiser`, or by diffusers'
    name; without one, what the scheduler says. shape: one sample's. classes: labels whose sums are kept
    apart, the null label among them if there is one, which `null_label` names: it is no part of the
    correction of all. Every update then needs `y`, and `index`, or nobody can tell how many images a class
    has, and classes get the correction of all. half_life: calls after
    which an evaluation counts half, since the weights have moved on; None: nothing is forgotten. every: of
    the calls of `observe`, one in so many evaluates the network. levels: times at which errors are known, by
    default those of `trueup.estimate.measure`. folds: groups of rows for held-out checks, 16 unless samples
    are very large.

    >>> from trueup.process import DiscreteVP
    >>> process = DiscreteVP.linear()
    >>> recorder = Recorder(process, "epsilon", shape=(1, 8, 8))
    >>> for step in range(40):
    ...     eps, t = torch.randn(32, 1, 8, 8), torch.randint(1000, (32,))
    ...     x_t = process.noised(torch.zeros_like(eps), eps, t)
    ...     recorder.update(x_t, t, x_t + 0.1, eps)  # what this network says is too bright by about 0.1
    >>> recorder.uncalibration().low > 0
    True
    """

    def __init__(
        self,
        process: Any,
        prediction: Parametrization | str | None = None,
        shape: Sequence[int] = (3, 32, 32),
        *,
        classes: Sequence[int] = (),
        null_label: int | None = None,
        half_life: float | None = 1000,
        every: int = 10,
        model: str = "a network in training",
        levels: Sequence[float] | Tensor | None = None,
        folds: int | None = None,
    ):
        if half_life is not None and not (_real(half_life) and 0 < half_life < math.inf):
            raise TrueupError(
                f"half_life is a number of steps above 0, or None to forget nothing, not {half_life!r}"
            )
        if not isinstance(every, int) or every < 1:
            raise TrueupError(f"every is a whole number of at least 1, not {every!r}")
        if folds is not None and (not isinstance(folds, int) or folds < 1):
            raise TrueupError(f"folds is a whole number of at least 1, not {folds!r}")
        classes = check_classes(classes)
        if len(classes) == 1:
            raise TrueupError(f"labels that are all {classes[0]} tell nothing apart: leave out classes")
        if null_label is not None and null_label not in classes:
            raise TrueupError(f"the null label {null_label} is not among the classes: add it to them")
        self._described = known = described(process, prediction, shape)
        self.half_life, self.every = half_life, every
        provenance = {
            "model": model,
            "weights": {},
            "parametrization": known.parametrization.settings(),
            "binding": _binding(classes, known.process.told).settings(),
            "data_range": None,
            **({} if null_label is None else {"null_label": int(null_label)}),
        }
        self._indexed = True  # whether every row came with the index of its image
        t = check_levels(known.process, levels)
        self._sums = Moments.empty(
            known.process, t, known.shape, classes=classes, folds=folds, provenance=provenance
        )
        self._reader = Reader(known, self._sums.classes, self._sums.lam)
        self._strays = torch.zeros(3, dtype=torch.int64)  # see `Rows`
        self._weight = 1.0  # of a row at this step; those before count as they did when they came
        self._deal: Tensor | None = None
        self._waiting: list[tuple[tuple[Any, ...], float]] = []  # batches, each with its rows' weight
        self.steps, self.rows = 0, 0

    @property
    def shape(self) -> tuple[int, ...]:
        """One sample's."""
        return self._sums.shape

    @property
    def classes(self) -> tuple[int, ...]:
        """The labels whose sums are kept apart."""
        return self._sums.classes

    @property
    def skipped(self) -> int:
        """Rows left out because something in them was not finite; asking waits for the device."""
        self._settle()
        return int(self._strays[2])

    @property
    def due(self) -> bool:
        """Whether the next `observe` evaluates its network."""
        return self.steps % self.every == 0

    def update(
        self,
        x_t: Tensor,
        t: Tensor | float,
        output: Tensor,
        target: Tensor,
        y: Tensor | None = None,
        index: Tensor | None = None,
    ) -> None:
        """Count a batch: x_t (B, *shape), its times t (B,), what the network said and what it should have.

        Everything stays on the device of x_t, and nothing waits for it. Values there are not looked at: a
        time or a label that cannot be is told by whatever reads the record next; rows that are not finite are
        left out. A GPU, where a hundred launches take longer than their work, counts copies of a few batches
        together.

        index (B,): each image's place in the data set. An image then stays in its fold over epochs, and
        intervals cover which images there happened to be; without it rows are dealt as they come, both sides
        of a held-out check may have seen an image, and intervals are about its noise alone.
        """
        self._add(x_t, t, output, target, y, index)

    def observe(
        self,
        network: Callable[..., Any],
        x_t: Tensor,
        t: Tensor | float,
        target: Tensor,
        y: Tensor | None = None,
        index: Tensor | None = None,
    ) -> None:
        """Record another network, such as the moving average, on the same batch: in every `every`-th call.

        It is called as network(x_t, t) or network(x_t, t, y), without gradient and in evaluation mode.
        """
        if not self.due:
            self._step()
            return
        evaluated = Denoiser(network, self._described.process, self._described.parametrization, self.shape)
        with evaluated.evaluating(), torch.no_grad():
            times = torch.as_tensor(t, device=x_t.device).expand(len(x_t)).clone()
            told = (x_t.clone(), times) if y is None else (x_t.clone(), times, y)  # it may write into them
            output = prediction(network(*told))
        self._add(x_t, t, output, target, y, index)

    def _step(self) -> None:
        self.steps += 1
        if self.half_life is not None:
            self._weight *= 2 ** (1 / self.half_life)
            if self._weight > _HEAVY:
                self._rebase()

    def _rebase(self) -> None:
        """Let a row of this step count once, and those before as much less."""
        self._settle()
        self._sums.decay(1 / self._weight)
        self._weight = 1.0

    @torch.no_grad()
    def _add(
        self, x_t: Tensor, t: Tensor | float, output: Any, target: Tensor, y: Any, index: Tensor | None
    ) -> None:
        told = self._reader.checked(x_t, t, output, target, y)
        device, count = home(x_t.device), len(x_t)
        index = None if index is None else numbers("index", index)
        if index is not None and index.shape != (count,):
            raise TrueupError(f"index is {tuple(index.shape)}, expected one for each of the {count} rows")
        self._indexed = self._indexed and index is not None
        self._step()
        cell = self._dealt(count, device) if index is None else None
        batch = (*told, index, cell)
        self.rows += count
        if not _gathers(device):
            self._count(batch, self._weight)
            return
        if self._waiting and [p is None for p in batch] != [p is None for p in self._waiting[0][0]]:
            self._settle()
        # Copies, since a loop may write into its tensors again.
        copies = tuple(None if part is None else part.clone() for part in batch)
        self._waiting.append((copies, self._weight))
        held = sum(part.nbytes for of, _ in self._waiting for part in of if part is not None)
        if len(self._waiting) >= _TOGETHER or held >= _HELD:
            self._settle()

    @torch.no_grad()
    def _settle(self) -> None:
        """Count the batches that wait."""
        if not self._waiting:
            return
        batches, weights = zip(*self._waiting, strict=True)
        self._waiting = []
        parts: tuple[Any, ...] = tuple(
            None if same[0] is None else torch.cat([part.to(same[0].device) for part in same])
            for same in zip(*batches, strict=True)
        )
        rows = torch.tensor([len(batch[0]) for batch in batches])
        weight = torch.tensor(weights, dtype=torch.float64).repeat_interleave(rows)
        self._count(parts, weight.to(home(parts[0].device), non_blocking=True))

    def _count(self, batch: tuple[Any, ...], weight: Tensor | float) -> None:
        """Add rows to the sums: x_t, t, output, target, y, index and cell, of which one is None."""
        *told, index, cell = batch
        device = home(told[0].device)
        with torch.autocast(told[0].device.type, enabled=False):
            rows = self._reader.read(*told)
            if self._sums.first.device != device:
                self._sums, self._strays = self._sums.to(device), self._strays.to(device)
            self._strays += rows.strays
            cell = self._folds(index.to(device)) if cell is None else cell
            if rows.position is not None:
                cell = rows.position * self._sums.folds + cell
            vectors = (rows.eps_hat, rows.eps, rows.u)
            # Where the cell is known, nobody asks for the index.
            self._sums.add(rows.level, cell, *vectors, cell=cell, weight=weight * rows.used)
            self._sums.add_samples(cell, rows.x0, None, cell=cell, weight=weight * rows.share)

    def _folds(self, key: Tensor) -> Tensor:
        return fold_of(key.to(torch.int64), self._sums.folds)

    def _dealt(self, count: int, device: torch.device) -> Tensor:
        """The folds of rows by their running numbers, which are those of the rank."""
        if self._deal is None or self._deal.device != device or len(self._deal) < count:
            self._deal = self._folds(torch.arange(max(_CYCLE, count), device=device))
        start = (self.rows + _APART * _rank()) % (len(self._deal) - count + 1)
        return self._deal[start : start + count]

    def moments(self) -> Moments:
        """What was recorded, on the CPU; a row of the last step weighs one.

        The data's own sums are scaled to as many rows as the level with the fewest has: their mean is then
        no control (equation 16), whose error all folds would share and none could see.
        """
        self._settle()
        self._reader.refuse(self._strays)
        now = _at_weight_one(self)._sums.to("cpu")
        rows = now.pooled().rows[0]  # (F, L)
        enough = enough_folds(rows)  # else a fit does not look at the level, if it can
        looked_at = enough if enough.any() else rows.sum(0) > 0
        if looked_at.any():
            scale = now.effective[looked_at].min() / now.data_rows.sum()
            for sums in (now.data_rows, now.data_first, now.data_second):
                sums.mul_(scale)
        return now

    def calibration(
        self, network: Any = None, *, family: str = "spectral", estimator: str = "shrunk"
    ) -> Calibration:
        """The calibration that follows from what was recorded: an ordinary one, to save and to attach.

        network: the one that was recorded, as a module, a pipeline or a `Denoiser`; its weights are noted, so
        that `attach` knows them, and how it is called. Without it `attach` needs `force=True`.
        """
        moments = self.moments()
        seen = moments.rows.sum((0, 1)) > 0  # (L,)
        if not seen.any():
            raise TrueupError("nothing was recorded yet: call update() or observe() first")
        moments = moments.at_levels(seen)
        made = {"steps": self.steps, "rows": self.rows, "half_life": self.half_life}
        provenance = {**moments.provenance, "recorded": made, "indexed": self._indexed}
        if self.classes and not self._indexed:
            warnings.warn("without `index` nobody can tell how many images a class has", stacklevel=2)
        if network is not None:
            provenance |= self._identity(network)
        return fit(replace(moments, provenance=provenance), family=family, estimator=estimator)

    def uncalibration(self) -> Number:
        """How uncalibrated the network is, in bits/dim, with its interval; see `Calibration.uncalibration`.

        It takes a fit, a second or so for CIFAR-10: ask now and then, not every step.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes, which are no part of it
            self._settle()
            known = self.rows > 0 and bool(self._sums.rows.any())
            return self.calibration().uncalibration if known else Number(math.nan)

    def log(self, prefix: str = "uncalibration") -> dict[str, float]:
        """The same as plain floats for TensorBoard or W&B; empty while there is too little to tell."""
        now = self.uncalibration()
        if math.isnan(now.value):
            return {}
        return {prefix: float(now.value), f"{prefix}/low": float(now.low), f"{prefix}/high": float(now.high)}

    def _identity(self, network: Any) -> dict[str, Any]:
        """The weights of a network, and how it is called."""
        known = self._described
        how: dict[str, Any] = {"process": known.process, "prediction": known.parametrization}
        if isinstance(network, Denoiser) or hasattr(network, "scheduler"):
            denoiser = as_denoiser(network)
        elif isinstance(network, nn.Module) and hasattr(unwrapped(network), "config"):
            denoiser = as_denoiser(network, **how)
        else:
            denoiser = Denoiser(network, shape=self.shape, conditional=bool(self.classes), **how)
        denoiser.check_bare()
        if denoiser.shape != self.shape or not denoiser.process.agrees_with(known.process):
            raise ModelError("this network is of another shape or noise process than what was recorded")
        ours, theirs = known.parametrization.name, denoiser.parametrization.name
        if ours != theirs:
            problem = f"a {ours} prediction was recorded, and this network makes a {theirs} one"
            raise ModelError(f"{problem}: record what it returns itself, with Recorder(..., {theirs!r})")
        found = denoiser.binding(torch.tensor(self.classes[:1]) if self.classes else None)
        null = denoiser.null_label
        if null is not None and self.classes and self._sums.provenance.get("null_label") != null:
            raise ModelError(f"this network's null label is {null}: say so to the recorder (null_label=)")
        return {
            "weights": denoiser.fingerprint(),
            "binding": None if found is None else found.settings(),
            "data_range": list(denoiser.data_range) if denoiser.data_range else None,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything, for `torch.save` beside the optimizer's."""
        self._settle()
        return {
            "model": self._settings(),
            "sums": {name: getattr(self._sums, name).clone() for name in SUMS},
            "strays": self._strays.clone(),
            "counters": {"steps": self.steps, "rows": self.rows, "weight": self._weight},
            "indexed": self._indexed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; one of another model is refused."""
        try:
            settings, sums, counters = state["model"], dict(state["sums"]), state["counters"]
            self._check_same(settings)
            found = {name: sums[name].to(getattr(self._sums, name), copy=True) for name in SUMS}
            strays, indexed = state["strays"].to(self._strays, copy=True), bool(state["indexed"])
            steps, rows, weight = int(counters["steps"]), int(counters["rows"]), float(counters["weight"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise MismatchError(f"this is not the state of a recorder: {error!r}") from None
        wrong = [name for name in SUMS if found[name].shape != getattr(self._sums, name).shape]
        if wrong:
            raise MismatchError(f"the sums of this state are of another size ({wrong[0]})")
        self._sums, self._strays, self._waiting = replace(self._sums, **found), strays, []
        self.steps, self.rows, self._weight, self._indexed = steps, rows, weight, indexed

    def merge(self, other: Recorder) -> Recorder:
        """A recorder of both, such as two ranks'; neither changes. Rows of both must not be the same ones."""
        if not hasattr(other, "_settings"):
            raise TrueupError(f"expected another Recorder, not {type(other).__name__}")
        self._check_same(other._settings())
        ours, theirs = (_at_weight_one(one) for one in (self, other))
        ours._sums = ours._sums + theirs._sums
        ours._strays = ours._strays + theirs._strays.to(ours._strays)
        ours.steps, ours.rows = max(self.steps, other.steps), self.rows + other.rows
        ours._indexed = self._indexed and other._indexed
        return ours

    def all_reduce(self, group: Any = None) -> Recorder:
        """A recorder of all ranks, the same on each; every rank calls it, and goes on with its own."""
        total = _at_weight_one(self)
        if not (dist.is_available() and dist.is_initialized()):
            return total
        rows = torch.tensor(self.rows, device=total._strays.device)
        for sums in (*(getattr(total._sums, name) for name in SUMS), total._strays, rows):
            dist.all_reduce(sums, group=group)
        total.rows = int(rows)
        return total

    def _settings(self) -> dict[str, Any]:
        """What two records must share to be of one model."""
        sums = self._sums
        return {
            "process": sums.provenance["process"],
            "prediction": sums.provenance["parametrization"],
            "shape": list(sums.shape),
            "classes": list(sums.classes),
            "null_label": sums.provenance.get("null_label"),
            "levels": sums.t.tolist(),
            "folds": sums.folds,
        }

    def _check_same(self, theirs: Mapping[str, Any]) -> None:
        ours = self._settings()
        other = [name for name in ours if ours[name] != theirs[name]]
        if other:
            told = (
                "" if name == "process" else f" ({theirs[name]}, here {ours[name]})" for name in other[:1]
            )
            raise MismatchError(f"this record is of another model: its {other[0]} differs{next(told)}")


def _at_weight_one(recorder: Recorder) -> Recorder:
    """A copy in which a row of the last step counts once."""
    recorder._settle()
    made = copy.copy(recorder)
    made._sums, made._strays = _copied(recorder._sums), recorder._strays.clone()
    made._rebase()
    return made


def _copied(moments: Moments) -> Moments:
    return replace(moments, **{name: getattr(moments, name).clone() for name in SUMS})


def _binding(classes: Sequence[int], told: tuple[float, float]) -> Binding:
    """Of a network that is called as network(x_t, t, y), as far as anybody knows."""
    x, t, y = (Place(position, None) for position in range(3))
    return Binding(x, t, y if classes else None, *told)


def _real(value: Any) -> bool:
    return isinstance(value, Real)


def _gathers(device: torch.device) -> bool:
    return device.type != "cpu"


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
