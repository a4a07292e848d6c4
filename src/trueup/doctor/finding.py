"""What the doctor says: one finding a line, or that nothing was found and what would have been."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from trueup.calibration.words import FEWEST_IMAGES
from trueup.statistics import Number

# Kinds in the order of causes: one that is further up explains those that are marked as its symptoms.
SYMPTOMS = ("patch-grid", "constant-map", "drift", "excess-noise", "contrast")
CAUSES = ("misuse", "batch-norm", "dropout", "quantised", "l1", "unconverged")
KINDS = (*CAUSES, *SYMPTOMS, "terminal-snr")


@dataclass(frozen=True, eq=False)
class Finding:
    """One thing that is wrong with a network, the number that shows it, and what to do."""

    kind: str  # one of KINDS
    sentence: str
    advice: str
    measurement: Number  # with a 95% interval where there is one
    unit: str
    share: Number = field(default_factory=lambda: Number(math.nan))  # of the loss, averaged over noise levels

    def line(self) -> str:
        """As it is printed."""
        return f"{self.kind}: {self.sentence}" + (f"; {self.advice}" if self.advice else "")

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; what is not known is null."""
        return {
            "kind": self.kind,
            "sentence": self.sentence,
            "advice": self.advice,
            "measurement": self.measurement.as_json(),
            "unit": self.unit,
            "share_of_loss": self.share.as_json(),
        }


@dataclass(frozen=True, eq=False)
class Checkup:
    """All findings, the probable root cause first; `limits`: what would have been found, by kind.

    Limits are in the units of their kinds: shares of the loss, or relative differences of outputs.
    """

    findings: list[Finding]
    images: int
    limits: dict[str, float]
    notes: list[str] = field(default_factory=list)  # what could not be looked at, and why
    settings: dict[str, Any] = field(default_factory=dict)  # whose findings these are

    @property
    def healthy(self) -> bool:
        """Whether nothing was found, and something would have been."""
        return not self.findings and any(limit < math.inf for limit in self.limits.values())

    def lines(self) -> list[str]:
        """A line for each finding; or that there are none, and how small a miss would have shown."""
        if self.findings:
            return [*(finding.line() for finding in self.findings), *self.notes]
        known = [f"{kind} of {_percent(limit)}" for kind, limit in self.limits.items() if limit < math.inf]
        if not known:
            return [too_few(self.images), *self.notes]
        seen = f"would have been seen: {', '.join(known)} of the loss"
        return [f"healthy: nothing above noise in {self.images:,} images ({seen})", *self.notes]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "healthy": self.healthy,
            "findings": [finding.as_json() for finding in self.findings],
            "images": self.images,
            "would_have_been_seen": {k: v if math.isfinite(v) else None for k, v in self.limits.items()},
            "notes": list(self.notes),
            "settings": self.settings,
        }


def too_few(images: int) -> str:
    """Why nobody can say that a network is healthy."""
    if images < FEWEST_IMAGES:
        return f"not enough images ({images:,}) to say that it is healthy: use {FEWEST_IMAGES} or more"
    where = "in too few groups, or most of them in one,"
    return f"{images:,} images {where} to say that it is healthy: use 20 groups or more"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"


def percent(share: Number) -> str:
    """A share with its interval."""
    return f"{100 * share.value:.2g}%" + ("" if math.isnan(share.low) else f" ± {100 * share.reach:.1g}")
