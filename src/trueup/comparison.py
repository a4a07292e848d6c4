"""What a paired comparison found: each measure before and after, and which differences are more than luck."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from trueup.metrics import Estimate, interval, paired_difference
from trueup.statistics import Number

# In the order shown: what it is called, and whether more of it is better.
MEASURES = {
    "frechet": ("Fréchet distance", False),
    "sfid": ("sFID (spatial features)", False),
    "kernel": ("kernel distance (KID)", False),
    "inception_score": ("Inception Score of these", True),
    "precision": ("precision", True),
    "recall": ("recall", True),
    "colour": ("colour drift (W1)", False),
    "brightness": ("brightness drift (W1)", False),
}


@dataclass(frozen=True)
class Change:
    """One measure before and after."""

    before: Number
    after: Number
    difference: Number
    better: bool | None  # None: within noise

    @classmethod
    def of(cls, before: Estimate, after: Estimate, more_is_better: bool) -> Change:
        """From two estimates over the same seeds."""
        difference, low, high, _ = paired_difference(before, after)
        sure = low > 0 or high < 0
        return cls(
            before=Number(before.value, math.nan, *interval(before)[:2]),
            after=Number(after.value, math.nan, *interval(after)[:2]),
            difference=Number(difference, math.nan, low, high),
            better=(difference > 0) == more_is_better if sure else None,
        )


@dataclass
class Row:
    """One solver at one number of evaluations."""

    solver: str
    settings: str  # all of the solver's
    nfe: int | None
    evaluations: int | None  # made; None where every image makes its own number
    changes: dict[str, Change]
    mean_colour: dict[str, list[float]]  # before, after


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
    loss: list[dict[str, float]]  # per level; empty without data
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is not known is null."""
        plain: dict[str, Any] = _finite(asdict(self))
        return plain

    def table(self) -> str:
        """For a terminal."""
        lines = []
        for row in self.rows:
            made = "its own number of" if row.evaluations is None else str(row.evaluations)
            lines.append(f"{row.solver}, {made} evaluations, {self.samples:,} samples, seed {self.seed}")
            lines.append(f"  {'':26} {'uncalibrated':>14} {'calibrated':>14}   difference, 95% interval")
            for name, change in row.changes.items():
                word = {True: "better", False: "WORSE", None: "within noise"}[change.better]
                if math.isnan(change.difference.low):
                    word = "too few samples to tell"
                d = change.difference
                lines.append(
                    f"  {MEASURES[name][0]:26} {change.before.value:14.4g} {change.after.value:14.4g}   "
                    f"{d.value:+.3g} ({d.low:+.3g} to {d.high:+.3g}) {word}"
                )
            means = [", ".join(f"{v:.3g}" for v in row.mean_colour[w][:4]) for w in ("before", "after")]
            data = ", ".join(f"{v:.3g}" for v in self.reference["mean_colour"][:4])
            lines += [f"  {'mean colour':26} {means[0]:>14} {means[1]:>14}   data: {data}", ""]
        if self.loss:
            before, after = (sum(level[k] for level in self.loss) for k in ("before", "after"))
            worse = [level["t"] for level in self.loss if level["gain"] + level["reach"] < 0]
            lines.append(
                f"denoising loss on {self.reference['loss_images']} "
                f"{'other ' if self.reference['loss_held_out'] else ''}images, sum of {len(self.loss)} "
                f"levels: {before:.5g} -> {after:.5g} ({before - after:.3g} less)"
                + (f"; WORSE at t = {', '.join(f'{t:g}' for t in worse)}" if worse else "; worse at none")
            )
        lines.append(
            f"features: {self.features['name']} ({self.features['preprocessing']}); reference: "
            f"{self.reference['images']:,} images. Intervals are over which samples were drawn."
        )
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _finite(value: Any) -> Any:
    """As JSON can have it."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
