"""What a paired comparison found: each measure before and after, and which differences are more than luck."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trueup.density import Objectives
from trueup.density.opening import SIDES
from trueup.metrics import MEASURES
from trueup.statistics import Number, student_quantile, told


@dataclass(frozen=True)
class Change:
    """One measure of samples from the same seeds, before and after."""

    before: Number
    after: Number
    more_is_better: bool = False

    @property
    def difference(self) -> Number:
        """After less before: what both share cancels image by image."""
        return self.after.difference(self.before)

    @property
    def better(self) -> bool | None:
        """Whether it is better, or worse (False); None: within noise, or not known."""
        sign = self.difference.sign
        return None if sign == 0 else (sign > 0) == self.more_is_better

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is not known is null."""
        numbers = {name: getattr(self, name).as_json() for name in (*SIDES, "difference")}
        return {**numbers, "better": self.better}


@dataclass
class Row:
    """One solver at one number of evaluations."""

    solver: str
    settings: str  # all of the solver's
    nfe: int | None
    evaluations: int | None  # made; None where every image makes its own number
    changes: dict[str, Change]  # by the measure's name
    mean_colour: dict[str, list[float]]  # before, after
    uncalibrated: str | None = None  # the solver of the side before, where that is another

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "changes": {name: change.as_json() for name, change in self.changes.items()}}


@dataclass
class Comparison:
    """What `evaluate` returns."""

    rows: list[Row]
    samples: int
    seed: int
    features: dict[str, Any]
    reference: dict[str, Any]
    calibration: dict[str, Any]
    settings: dict[str, Any]  # the network, its labels and guidance
    evaluations: dict[str, int]  # of the network, one image each, by what they were made for
    loss: Objectives | None = None  # of the network as it is and with the calibration attached
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is not known is null."""
        loss = None if self.loss is None else self.loss.as_json()
        return {**vars(self), "rows": [row.as_json() for row in self.rows], "loss": loss}

    def table(self) -> str:
        """For a terminal."""
        lines = []
        for row in self.rows:
            made = "its own number of" if row.evaluations is None else str(row.evaluations)
            other = "" if row.uncalibrated is None else f"; uncalibrated by {row.uncalibrated}"
            heading = f"{row.solver}, {made} evaluations, {self.samples:,} samples, seed {self.seed}{other}"
            lines.append(heading)
            lines.append(f"  {'':26} {'uncalibrated':>14} {'calibrated':>14}   difference, 95% interval")
            for name, change in row.changes.items():
                values = f"{change.before.value:14.4g} {change.after.value:14.4g}"
                words = told(change.difference, change.more_is_better)
                lines.append(f"  {MEASURES[name].title:26} {values}   {words}")
            means = [", ".join(f"{v:.3g}" for v in row.mean_colour[side][:4]) for side in SIDES]
            data = ", ".join(f"{v:.3g}" for v in self.reference["mean_colour"][:4])
            lines += [f"  {'mean colour':26} {means[0]:>14} {means[1]:>14}   data: {data}", ""]
        if self.loss is not None:
            lines.append(_loss_line(self.loss))
        seen_by = f"features: {self.features['name']} ({self.features['preprocessing']})"
        data = f"reference: {self.reference['images']:,} {self.reference['made_of']}"
        lines.append(f"{seen_by}; {data}. Intervals are over which samples were drawn.")
        spent = ", ".join(f"{number:,} for {what}" for what, number in self.evaluations.items())
        lines.append(f"evaluations of the network: {spent}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _loss_line(loss: Objectives) -> str:
    """The denoising loss of the network as it was run, level by level added up."""
    before, after, drop = (loss.losses(which) for which in (*SIDES, "drop"))
    change = told(Number.mean(-drop.sum(1)))
    # Surely at all of so many levels together (Bonferroni).
    reach = student_quantile(1 - 0.025 / len(loss.t), max(len(drop) - 1, 1))
    drops = [(float(t), Number.mean(column)) for t, column in zip(loss.t, drop.T, strict=True)]
    worse = [t for t, mean in drops if mean.value + reach * mean.error < 0]
    images = f"{len(loss.before)} {'other ' if loss.held_out else ''}images, sum of {len(loss.t)} levels"
    sums = f"{float(before.sum(1).mean()):.5g} -> {float(after.sum(1).mean()):.5g}"
    where = f"WORSE at t = {', '.join(f'{t:g}' for t in worse)}" if worse else "worse at none"
    return f"denoising loss on {images}: {sums}, {change}; {where}"
