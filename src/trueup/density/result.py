"""What a likelihood came out as: per image, in the mean, before and after, with intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trueup.statistics import Number, told

_BOUND = "bound on the negative log-likelihood"
_FEWEST = 20  # images before anything is called a disagreement


@dataclass(repr=False)
class Likelihood:
    """What `trueup.likelihood` returns. Terms are nats per image; `bits_per_dim` and the table are bits/dim.

    `before` and `after` are negative log-likelihoods, or bounds above them: less is better.
    """

    method: str  # "bound" or "ode"
    description: str  # how it was found, in words
    dimensions: int
    discrete: bool  # a probability of 8-bit values, or a density
    index: list[int]  # of each image in the data
    # name -> (before, after), (N,) each; they sum to the total
    terms: dict[str, tuple[Tensor, Tensor | None]]
    settings: dict[str, Any]
    evaluations: list[float]  # of the network, per image, before and after
    start_bias: tuple[Tensor, Tensor | None] | None = None  # see docs/math.md, equation 49
    promised: Number | None = None  # the calibration's own gain of the bound, in nats
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = self._total(0)
        self.after = self._total(1) if self.calibrated else None

    def __repr__(self) -> str:
        change = self.difference()
        after = "" if change is None else f", calibrated {told(change)}"
        return f"<{self.method} of {len(self.index)} images: {_fixed(self.mean())} bits/dim{after}>"

    @property
    def calibrated(self) -> bool:
        """Whether there is an after."""
        return all(after is not None for _, after in self.terms.values())

    def _total(self, side: int) -> Tensor:
        return torch.stack([pair[side] for pair in self.terms.values()]).sum(0)  # type: ignore[misc]

    def bits_per_dim(self, nats: Tensor) -> Tensor:
        """Nats per image as bits per dimension."""
        return nats / (self.dimensions * math.log(2))

    def mean(self, after: bool = False) -> Number:
        """The mean in bits/dim."""
        values = self.after if after else self.before
        if values is None:
            raise ValueError("there is no calibration to have an after")
        return Number.mean(self.bits_per_dim(values))

    def difference(self, term: str | None = None) -> Number | None:
        """After less before in bits/dim, image by image; None without a calibration."""
        if not self.calibrated or self.after is None:
            return None
        before, after = (self.before, self.after) if term is None else self.terms[term]
        assert after is not None
        return Number.mean(self.bits_per_dim(after - before))

    def agreement(self) -> str | None:
        """Whether the bound moved by what the calibration said it would (equation 26), in words."""
        if self.promised is None or "diffusion" not in self.terms:
            return None
        measured = self.difference("diffusion")
        assert measured is not None
        said, found = self.promised.scaled(1 / (self.dimensions * math.log(2))), measured.scaled(-1)
        words = f"diffusion term: predicted gain {said.value:.2g} ± {said.reach:.1g}, found {found.value:.2g}"
        words += "" if math.isnan(found.reach) else f" ± {found.reach:.1g}"
        if len(self.index) < _FEWEST:  # an interval of so few says little
            return f"{words} bits/dim"
        apart = abs(found.value - said.value) > math.hypot(said.reach, found.reach)
        return f"{words} bits/dim: {'they DISAGREE' if apart else 'they agree'}"

    def table(self) -> str:
        """For a terminal."""
        unit = "bits/dim" if self.discrete else "bits/dim of a density, which may be negative"
        count = len(self.index)
        kind = "negative log-likelihood by the probability flow" if self.method == "ode" else _BOUND
        lines = [
            f"{kind}, {unit}, {count:,} image{'s' * (count != 1)}; less is better",
            f"  {self.description}",
        ]
        head = f"  {'':12} {'uncalibrated':>20}"
        lines.append(head + (f" {'calibrated':>20}   difference, 95% interval" if self.calibrated else ""))
        names: list[str | None] = [*self.terms] if len(self.terms) > 1 else []
        for name in [*names, None]:
            before, after = (self.before, self.after) if name is None else self.terms[name]
            line = f"  {name or 'total':12} {_fixed(Number.mean(self.bits_per_dim(before))):>20}"
            change = self.difference(name)
            if after is not None and change is not None:
                line += f" {_fixed(Number.mean(self.bits_per_dim(after))):>20}   {told(change)}"
            lines.append(line)
        if self.start_bias is not None:
            lines.append(self._bias_line())
        agreement = self.agreement()
        if agreement is not None:
            lines.append(f"  {agreement}")
        made = " and calibrated ".join(f"{number:.4g}" for number in self.evaluations)
        lines.append(f"  evaluations of the network per image: {made}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _bias_line(self) -> str:
        assert self.start_bias is not None
        values = [float(self.bits_per_dim(v).mean()) for v in self.start_bias if v is not None]
        shown = " and ".join(f"{value:+.4f}" for value in values)
        return (
            f"  starting at the least noise the model knows instead of at none: {shown} bits/dim left out, "
            "to first order"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is not known is null."""

        def rows(name: str | None) -> dict[str, Any]:
            pair = (self.before, self.after) if name is None else self.terms[name]
            numbers = [None if v is None else Number.mean(self.bits_per_dim(v)) for v in pair]
            named = zip(("before", "after", "difference"), [*numbers, self.difference(name)], strict=True)
            return {key: number.as_json() for key, number in named if number is not None}

        sides = {"before": self.before} | ({} if self.after is None else {"after": self.after})
        bits = {name: self.bits_per_dim(nats).tolist() for name, nats in sides.items()}
        images = [
            {"index": index, **{name: _number(values[row]) for name, values in bits.items()}}
            for row, index in enumerate(self.index)
        ]
        bias = None
        if self.start_bias is not None:
            bias = [_number(float(self.bits_per_dim(v).mean())) for v in self.start_bias if v is not None]
        return {
            "method": self.method,
            "description": self.description,
            "unit": "bits/dim",
            "of": "probability of 8-bit values" if self.discrete else "density",
            "images": len(self.index),
            "dimensions": self.dimensions,
            "total": rows(None),
            "terms": {name: rows(name) for name in self.terms},
            "start_bias": bias,
            "agreement": self.agreement(),
            "evaluations": self.evaluations,
            "settings": self.settings,
            "notes": self.notes,
            "per_image": images,
        }


def _fixed(number: Number) -> str:
    if math.isnan(number.low):
        return f"{number.value:.4f}"
    return f"{number.value:.4f} ± {number.reach:.2g}"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
