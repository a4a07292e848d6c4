"""What a likelihood came out as: per image, in the mean, before and after, with intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trueup.statistics import Number, group_means, told

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
    group: Tensor | None = None  # (N,) which images belong together: means and intervals are over groups
    start_bias: tuple[Tensor, Tensor | None] | None = None  # see docs/math.md, equation 49
    promised: Number | None = None  # the calibration's own gain of the bound, in nats
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        afters = [after for _, after in self.terms.values() if after is not None]
        self.before = torch.stack([before for before, _ in self.terms.values()]).sum(0)
        self.after = torch.stack(afters).sum(0) if afters else None

    def __repr__(self) -> str:
        change = self.difference()
        after = "" if change is None else f", calibrated {told(change)}"
        return f"<{self.method} of {len(self.index)} images: {_fixed(self.mean())} bits/dim{after}>"

    def bits_per_dim(self, nats: Tensor) -> Tensor:
        """Nats per image as bits per dimension."""
        return nats / (self.dimensions * math.log(2))

    def numbers(self, term: str | None = None) -> dict[str, Number]:
        """Means in bits/dim, of a term or of the total: before; with a calibration after and difference."""
        before, after = (self.before, self.after) if term is None else self.terms[term]
        shown = {"before": before}
        if after is not None:
            shown |= {"after": after, "difference": after - before}
        return {name: Number.mean(self._units(nats)) for name, nats in shown.items()}

    def _units(self, nats: Tensor) -> Tensor:
        """Bits/dim of what counts as one: an image's value, or the mean of a group."""
        return group_means(self.bits_per_dim(nats), self.group)

    def mean(self, after: bool = False) -> Number:
        """The mean in bits/dim."""
        if after and self.after is None:
            raise ValueError("there is no calibration to have an after")
        return self.numbers()["after" if after else "before"]

    def difference(self, term: str | None = None) -> Number | None:
        """After less before in bits/dim, image by image; None without a calibration."""
        return self.numbers(term).get("difference")

    def bias(self) -> list[float] | None:
        """What starting at the least noise leaves out in bits/dim, before and after; see `start_bias`."""
        if self.start_bias is None:
            return None
        return [float(self._units(nats).mean()) for nats in self.start_bias if nats is not None]

    def agreement(self) -> str | None:
        """Whether the bound moved by what the calibration said it would (equation 26), in words."""
        if self.promised is None or "diffusion" not in self.terms:
            return None
        said = self.promised.scaled(1 / (self.dimensions * math.log(2)))
        found = self.numbers("diffusion")["difference"].scaled(-1)
        words = f"diffusion term: predicted gain {said.value:.2g} ± {said.reach:.1g}, found {found.value:.2g}"
        words += "" if math.isnan(found.reach) else f" ± {found.reach:.1g}"
        if len(self._units(self.before)) < _FEWEST:  # an interval of so few says little
            return f"{words} bits/dim"
        apart = abs(found.value - said.value) > math.hypot(said.reach, found.reach)
        return f"{words} bits/dim: {'they DISAGREE' if apart else 'they agree'}"

    def table(self) -> str:
        """For a terminal."""
        unit = "bits/dim" if self.discrete else "bits/dim of a density, which may be negative"
        count = len(self.index)
        kind = "negative log-likelihood by the probability flow" if self.method == "ode" else _BOUND
        lines = [f"{kind}, {unit}, {count:,} image{'s' * (count != 1)}; less is better"]
        head = f"  {'':12} {'uncalibrated':>20}"
        head += "" if self.after is None else f" {'calibrated':>20}   difference, 95% interval"
        lines += [f"  {self.description}", head]
        names: list[str | None] = [*self.terms] if len(self.terms) > 1 else []
        for name in [*names, None]:
            found = self.numbers(name)
            line = f"  {name or 'total':12} {_fixed(found['before']):>20}"
            if len(found) > 1:
                line += f" {_fixed(found['after']):>20}   {told(found['difference'])}"
            lines.append(line)
        if (bias := self.bias()) is not None:
            left_out = " and ".join(f"{value:+.4f}" for value in bias)
            start = "starting at the least noise the model knows instead of at none"
            lines.append(f"  {start}: {left_out} bits/dim left out, to first order")
        lines += [f"  {words}" for words in [self.agreement()] if words is not None]
        made = " and calibrated ".join(f"{number:.4g}" for number in self.evaluations)
        lines.append(f"  evaluations of the network per image: {made}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is not known is null."""

        def rows(term: str | None) -> dict[str, Any]:
            return {name: number.as_json() for name, number in self.numbers(term).items()}

        sides = {"before": self.before} | ({} if self.after is None else {"after": self.after})
        bits = {name: self.bits_per_dim(nats).tolist() for name, nats in sides.items()}
        bias, plain = self.bias(), ("method", "description", "dimensions", "evaluations", "settings", "notes")
        return {
            **{name: getattr(self, name) for name in plain},
            "unit": "bits/dim",
            "of": "probability of 8-bit values" if self.discrete else "density",
            "images": len(self.index),
            "total": rows(None),
            "terms": {name: rows(name) for name in self.terms},
            "start_bias": None if bias is None else [_number(value) for value in bias],
            "agreement": self.agreement(),
            "per_image": [
                {"index": index, **{name: _number(values[row]) for name, values in bits.items()}}
                for row, index in enumerate(self.index)
            ],
        }


def _fixed(number: Number) -> str:
    return f"{number.value:.4f}" + ("" if math.isnan(number.low) else f" ± {number.reach:.2g}")


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
