"""A value with its 95% interval: numbers travel with their uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Number:
    """A value with its 95% interval; ends that are not known are nan."""

    value: float
    low: float
    high: float

    @classmethod
    def mean(cls, values: Tensor) -> Number:
        """The mean of one number per image, with Student's interval.

        >>> import torch
        >>> Number.mean(torch.tensor([1.0, 2.0, 3.0]))
        Number(value=2.0, low=-0.48..., high=4.48...)
        """
        from trueup.estimate.statistics import student_quantile

        mean = float(values.mean())
        if len(values) < 2:
            return cls(mean, math.nan, math.nan)
        reach = student_quantile(0.975, len(values) - 1) * float(values.std()) / math.sqrt(len(values))
        return cls(mean, mean - reach, mean + reach)

    def scaled(self, factor: float) -> Number:
        """In other units."""
        ends = factor * self.low, factor * self.high
        return Number(factor * self.value, *(ends if factor >= 0 else ends[::-1]))

    @property
    def reach(self) -> float:
        """Half the interval's width."""
        return 0.5 * (self.high - self.low)

    def as_json(self) -> dict[str, float | None]:
        """Plain values; what is not known is null."""
        values = {"value": self.value, "low": self.low, "high": self.high}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "unknown"
        return f"{self.value:.4g}" if math.isnan(self.low) else f"{self.value:.4g} ± {self.reach:.2g}"
