"""What was measured about a correction, with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trueup.calibration.correction import GAINS
from trueup.errors import ArtifactError
from trueup.statistics import Number
from trueup.stored import numbers, part, whole

_UNJUDGED = "Whether samples get better is for `trueup evaluate` to say."
_MISS = "nats a coefficient"


@dataclass(eq=False, repr=False)
class Evidence:
    """Losses and gains are in eps space, summed over a sample; a number for every noise level (L,).

    gain is what the correction takes off E|eps_hat - eps|^2 on images it was not fitted on. eta2 is the
    unbiased size of the mean residual, whether or not it is corrected. bound gains are in nats.
    """

    images: int
    folds: int
    dimensions: int
    loss: Number
    eta2: Number
    gain: Number
    shift_se: Tensor  # (L,) standard error of the unshrunk mean residual, as the norm of a map
    scale: Tensor  # (L, bands) share of what was held out that was confirmed and is in the final fit
    bound_gain: Number  # of this correction
    shift_bound_gain: Number  # of the ideal constant shift
    expected: Tensor | None = None  # (L, C, H, W) E[eps_hat], to look at: small, of pictures' axes alone

    def bits_per_dim(self, nats: float) -> float:
        """Nats per sample as bits per dimension."""
        return nats / (self.dimensions * math.log(2))


@dataclass(frozen=True, eq=False)
class SampleEvidence:
    """What samples near the limit say: how far their bands' means and variances miss the data's (eq. 36)."""

    misses: dict[str, Number]  # nats a coefficient, by form of the correction
    change: Number | None  # what the form that was chosen does to the miss, on the same noise
    trajectories: int
    evaluations: int  # of each

    @classmethod
    def of(cls, provenance: Mapping[str, Any]) -> SampleEvidence | None:
        """What a calibration's provenance says of them, if anything; ArtifactError if it makes no sense."""
        said = provenance.get("samples")
        if said is None:
            return None
        said = part(provenance, "samples", dict)
        found = {
            name: _interval(value, f"miss of {str(name)[:20]}")
            for name, value in part(said, "miss", dict).items()
        }
        change = found.pop("change", None)
        if "none" not in found or not set(found) <= set(GAINS):
            raise ArtifactError("what it says of samples is about no form of a correction")
        counts = (whole(said, "trajectories", 2, 2**40), whole(said, "evaluations", 1, 2**40))
        return cls(found, change, *counts)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        miss = {form: _ends(number) for form, number in self.misses.items()}
        change = None if self.change is None else _ends(self.change)
        counts = {"trajectories": self.trajectories, "evaluations": self.evaluations}
        return {"miss": miss, "change": change, **counts}

    def changed_by(self, gains: str) -> Number | None:
        """What a form does to the miss; its interval is known of the one that was chosen."""
        if gains not in self.misses or gains == "none":
            return None
        value = self.misses[gains].value - self.misses["none"].value
        if self.change is not None and math.isclose(self.change.value, value, rel_tol=1e-6, abs_tol=1e-9):
            return self.change
        return Number(value)

    def verdict(self, gains: str) -> str:
        """What a form of the correction does to samples, in a sentence or two."""
        before = self.misses["none"]
        if gains == "none" and self.change is not None:  # samples chose another form
            return "Nothing is attached for sampling, although samples would be closer to the data with it."
        if gains == "none":
            return (
                "Samples of the network as it is are as close to the data "
                f"({_short(before)} {_MISS}): nothing is attached for sampling, likelihoods keep the gain."
            )
        change = self.changed_by(gains)
        if change is None:
            return _UNJUDGED
        # A miss is unbiased, and may come out below 0.
        moved = f"{max(before.value, 0.0):.2g} -> {max(self.misses[gains].value, 0.0):.2g} {_MISS}"
        sure = "" if math.isnan(change.low) else f" (a change of {change.low:+.2g} to {change.high:+.2g})"
        if change.sign < 0:
            return f"Samples get closer to the data: they miss its bands by {moved}{sure}."
        return (
            f"Samples do not surely get closer to the data: they miss its bands by {moved}{sure}. "
            "More images or more steps may help."
        )

    def lines(self, gains: str) -> list[str]:
        """What was seen, for the summary."""
        used = ", ".join(f"{form} {_short(number)}" for form, number in self.misses.items())
        many = f"{self.trajectories} samples, {self.evaluations} evaluations each"
        lines = [f"samples near the limit ({many}) miss the data's bands by, in {_MISS}:"]
        told = f"  {used}; drawn with: {gains}"
        change = self.changed_by(gains)
        if change is not None and not math.isnan(change.low):
            told += f", a change of {change.value:+.2g} ({change.low:+.2g} to {change.high:+.2g})"
        return [*lines, told]


def of_samples(seen: SampleEvidence | None, gains: str) -> str:
    """A sentence on samples, whether or not some were looked at."""
    return _UNJUDGED if seen is None else seen.verdict(gains)


def _interval(values: Any, name: str) -> Number:
    """A value and the ends of its interval."""
    value, low, high = numbers(values, name, -1e12, 1e12, least=3, most=3)
    if not low <= value <= high:
        raise ArtifactError(f"{name} has an interval that it is not in")
    return Number(value, math.nan, low, high)


def _ends(number: Number) -> dict[str, float]:
    return {"value": number.value, "low": number.low, "high": number.high}


def _short(number: Number) -> str:
    return f"{number.value:.2g} ± {number.reach:.1g}"
