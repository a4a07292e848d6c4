"""Numbers with their uncertainty, and the small exact statistics they are made from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

_EXACT = 200  # degrees of freedom up to which Student's quantile is solved for; above, expanded
_GROUPS = 20  # of images, for intervals of measures whose influence is only known group by group
FEWEST_FOLDS = 4  # of equal size: fewer cannot say how far they scatter
_FEWEST = 8  # images below which such a measure gets no interval at all


@dataclass(frozen=True, eq=False)
class Number:
    """A value with its standard error and 95% interval. What is not known is nan.

    The four are floats, or tensors of one shape: a number for every noise level, say. `influence`, where it
    is known, is what each image did to the value (n,), mean zero: two numbers over the same seeds then have a
    paired `difference`.

    >>> print(Number.of(0.5, 0.1, folds=16))
    0.5 ± 0.21
    """

    value: Any
    error: Any = math.nan
    low: Any = math.nan
    high: Any = math.nan
    influence: Tensor | None = None

    @classmethod
    def of(cls, value: Any, error: Any, folds: Any) -> Number:
        """With Student's interval, from an error that `folds` folds (or images) showed."""
        reach = _quantile(folds) * error
        return cls(value, error, value - reach, value + reach)

    @classmethod
    def mean(cls, values: Tensor) -> Number:
        """The mean of one number per image.

        >>> Number.mean(torch.tensor([1.0, 2.0, 3.0])).low
        -0.48...
        """
        mean = float(values.mean())
        if len(values) < 2:
            return cls(mean)
        return cls.of(mean, float(values.std()) / math.sqrt(len(values)), len(values))

    @classmethod
    def influenced(cls, value: float, influence: Tensor | None) -> Number:
        """A measure whose error, to first order, is that of the mean of `influence`, from means of groups.

        The interval is about which images happened to be drawn, at this number of images.
        """
        if influence is None or len(influence) < _FEWEST:
            return cls(value, influence=influence)
        index = group_index(len(influence))
        groups = int(index[-1]) + 1
        sums = torch.zeros(groups, dtype=torch.float64).index_add(0, index, influence.double().cpu())
        error = float((sums / index.bincount()).std()) / math.sqrt(groups)
        return replace(cls.of(value, error, groups), influence=influence)

    def difference(self, before: Number) -> Number:
        """This less another over the same seeds: what the two share cancels image by image."""
        change = self.value - before.value
        if self.influence is None or before.influence is None:
            return Number(change)
        if len(self.influence) != len(before.influence):
            counts = f"{len(before.influence)} images before and {len(self.influence)} after"
            raise ValueError(f"{counts}: a paired difference needs the same seeds in both")
        found = Number.influenced(change, self.influence - before.influence)
        # No group moved alone: too few images to know how far it scatters.
        return Number(change) if found.error == 0 and change != 0 else found

    def __getitem__(self, index: Any) -> Number:
        """One of many numbers."""
        value, error, low, high = (float(p[index]) for p in (self.value, self.error, self.low, self.high))
        return Number(value, error, low, high)

    def scaled(self, factor: float) -> Number:
        """In other units."""
        low, high = (factor * self.low, factor * self.high)[:: 1 if factor >= 0 else -1]
        return Number(factor * self.value, abs(factor) * self.error, low, high, self.influence)

    @property
    def reach(self) -> Any:
        """Half the interval's width."""
        return 0.5 * (self.high - self.low)

    @property
    def sign(self) -> int:
        """1 if it is surely above zero, -1 if surely below, 0 if neither is sure."""
        return int(self.low > 0) - int(self.high < 0)

    def plain(self) -> list[float | None]:
        """Value, error and interval as a file has them: null is unknown."""
        values = (float(v) for v in (self.value, self.error, self.low, self.high))
        return [None if math.isnan(value) else value for value in values]

    def as_json(self) -> dict[str, float | None]:
        """Plain values; what is not known is null."""
        values = {"value": self.value, "low": self.low, "high": self.high}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "unknown"
        return f"{self.value:.4g}" if math.isnan(self.low) else f"{self.value:.4g} ± {self.reach:.2g}"


def group_index(count: int) -> Tensor:
    """Which of the contiguous groups each image is in: 20 of them, fewer for few images.

    >>> group_index(9).tolist()
    [0, 0, 0, 1, 1, 2, 2, 3, 3]
    """
    groups = max(1, min(_GROUPS, count // 2))
    sizes = [len(part) for part in torch.arange(count).tensor_split(groups)]
    return torch.arange(groups).repeat_interleave(torch.tensor(sizes))


def group_means(values: Tensor, groups: Tensor | None) -> Tensor:
    """The mean row of every group, (G, ...), of rows (n, ...) with a group each (n,); None: as they are.

    >>> group_means(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([7, 7, 4])).tolist()
    [5.0, 2.0]
    """
    if groups is None:
        return values
    _, index, counts = groups.unique(return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(counts), *values.shape[1:]).index_add(0, index, values)
    return sums / counts.reshape(-1, *[1] * (values.ndim - 1))


def student_cdf(t: float, dof: int) -> float:
    """P(T <= t) for whole degrees of freedom, by the finite series.

    >>> round(student_cdf(2.0, 5), 6)
    0.94903
    """
    theta = math.atan2(t, math.sqrt(dof))
    cos2 = math.cos(theta) ** 2
    odd = dof % 2
    total, term = 0.0, math.cos(theta) if odd else 1.0
    for k in range(2 + odd, dof + 1, 2):
        total += term
        term *= cos2 * (k - 1) / k
    inside = math.sin(theta) * total
    return 0.5 + 0.5 * (2 / math.pi * (theta + inside) if odd else inside)


@lru_cache(maxsize=4096)
def student_quantile(probability: float, dof: float) -> float:
    """The t below which `probability` lies, interpolated between whole dof; for many by expansion in 1/dof.

    >>> round(student_quantile(0.975, 15), 4), round(student_quantile(0.975, 50_000), 4)
    (2.1314, 1.96)
    """
    if dof % 1 and dof < _EXACT:
        below, above = (student_quantile(probability, max(math.floor(dof) + i, 1)) for i in (0, 1))
        return below + (dof % 1) * (above - below)
    if dof > _EXACT:  # Abramowitz and Stegun 26.7.5, to 1e-9 of a t below 6
        z = NormalDist().inv_cdf(probability)
        terms = (
            (z**3 + z) / 4,
            (5 * z**5 + 16 * z**3 + 3 * z) / 96,
            (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
            (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
        )
        return z + sum(term / dof ** (k + 1) for k, term in enumerate(terms))
    high, whole = 1.0, int(dof)
    while student_cdf(high, whole) < max(probability, 1 - probability):
        high *= 2
    low = -high
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if student_cdf(middle, whole) < probability else (low, middle)
    return 0.5 * (low + high)


def effective_folds(rows: Tensor) -> Tensor:
    """How many folds of equal size folds of rows (F, ...) are worth, (...)."""
    return rows.sum(0).square() / rows.square().sum(0).clamp_min(1e-300)


def enough_folds(rows: Tensor) -> Tensor:
    """Whether folds of rows (F, ...) can say how far they scatter, (...): worth four of equal size."""
    return effective_folds(rows) > FEWEST_FOLDS - 1e-9


def threshold(sigmas: float, folds: float) -> float:
    """What a t statistic from `folds` folds must exceed to be as surprising as a normal `sigmas`."""
    return student_quantile(0.5 * (1 + math.erf(sigmas / math.sqrt(2))), max(folds - 1, 1))


def mean_and_error(sums: Tensor, rows: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean per row and its standard error, from sums (F, ...) over folds of rows (F,) or (F, ...).

    Folds may differ in size, and be empty. With `weights` (L,), the weighted sum of the means of sums (F, L).
    """
    weight = rows.reshape(*rows.shape, *[1] * (sums.dim() - rows.dim()))
    total = weight.sum(0)
    mean, share = sums.sum(0) / total, weight / total
    deviation = sums / total - share * mean
    if weights is not None:
        mean, deviation, share = mean @ weights, deviation @ weights, share.expand_as(sums).mean(1)
    lost = share.square().sum(0)  # of the scatter, to the mean that was fitted; 1/F for equal folds
    error = (deviation.square().sum(0) / (1 - lost).clamp_min(1e-300)).sqrt()
    return mean, torch.where(lost < 1, error, math.nan)


def squared_norm(gram: Tensor, rows: Tensor) -> Number:
    """Unbiased |eta|^2 from the inner products of fold sums, with an interval; equations 24 and 25.

    gram (..., F, F) holds s_f . s_g for fold sums s_f of rows (..., F) samples; folds may be empty. Only
    products of different folds are used, so the noise in eta does not add to its size; the estimate may come
    out below zero.
    """
    present = (rows > 0).expand(gram.shape[:-1])
    folds = present.sum(-1).to(gram)  # (...)
    off = present[..., :, None] & present[..., None, :] & ~torch.eye(gram.shape[-1], dtype=torch.bool)
    pairs = torch.where(off, rows[..., :, None] * rows[..., None, :], torch.ones_like(gram))
    value = (gram * off).sum((-2, -1)) / (pairs * off).sum((-2, -1))
    h = gram / pairs * off
    row = h.sum(-1)
    worth = effective_folds(rows.movedim(-1, 0)).expand(folds.shape)
    z = _quantile(worth)
    known, folds = enough_folds(rows.movedim(-1, 0)), folds.clamp_min(FEWEST_FOLDS)
    wide = folds[..., None, None]
    centred = h - (row[..., :, None] + row[..., None, :]) / (wide - 2)
    centred = (centred + row.sum(-1)[..., None, None] / ((wide - 1) * (wide - 2))) * off
    noise = centred.square().sum((-2, -1)) / (folds * (folds - 3))  # tr(Sigma^2) of a fold mean
    scatter = (row - row.sum(-1, keepdim=True) / folds[..., None]) * present
    spread = scatter.square().sum(-1) / (folds - 1) / (folds - 2) ** 2
    signal = (spread - noise / (folds - 2)).clamp_min(0.0)  # eta' Sigma eta of a fold mean
    # What chance makes of the estimate itself, which weighs pairs of folds by their rows.
    weighed = (pairs * centred).square().sum((-2, -1)) / (pairs * off).sum((-2, -1)).square()
    floor = 2 * weighed * (folds - 1) / (folds - 3)
    # The variance grows with |eta|^2 itself, so the interval solves for the sizes that would not be surprised
    # by the value seen, as Wilson's does for a proportion.
    slope = signal / folds / torch.maximum(value, floor.sqrt()).clamp_min(1e-300)
    middle = value + 2 * z**2 * slope
    reach = (middle.square() - value.square() + z**2 * floor).clamp_min(0.0).sqrt()
    parts = (value, (4 * signal / folds + floor).sqrt(), middle - reach, middle + reach)
    return Number(*(torch.where(known, part, math.nan) for part in parts))


def _quantile(folds: Any) -> Any:
    """Student's for a 95% interval from so many folds, or from each of a tensor of numbers of them."""
    if not isinstance(folds, Tensor):
        return student_quantile(0.975, max(folds - 1, 1))
    values = [_quantile(count) for count in folds.double().flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).reshape(folds.shape)


def trapezoid_weights(x: Tensor) -> Tensor:
    """Weights w with sum w y = the trapezoid integral of y over |x|; a single point weighs nothing."""
    gaps = torch.nn.functional.pad(x.diff().abs(), (1, 1))
    return 0.5 * (gaps[1:] + gaps[:-1])


def told(change: Number, more_is_better: bool = False) -> str:
    """A difference in words: how large it is, and whether it is more than luck.

    >>> told(Number.of(-0.3, 0.003, folds=200), more_is_better=True)
    '-0.3 (-0.306 to -0.294) WORSE'
    """
    if math.isnan(change.low):
        return f"{change.value:+.3g} (too few images for an interval)"
    if change.low == change.high == 0:
        return "none"
    words = ("WORSE", "within noise", "better")[:: 1 if more_is_better else -1]  # by sign
    return f"{change.value:+.3g} ({change.low:+.3g} to {change.high:+.3g}) {words[1 + change.sign]}"
