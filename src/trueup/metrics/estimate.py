"""A measure with what every generated image did to it, so that differences can be told from luck."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.errors import DataError
from trueup.statistics import student_quantile

GROUPS = 20
_FEWEST = 8  # images below which we give no interval at all


@dataclass(frozen=True)
class Estimate:
    """A value, and the first-order influence (n,) of each generated image on it (mean zero, float64).

    The value's sampling error over generated images is, to first order, the error of the mean of
    `influence`. None means it is not known, and there are no intervals then.
    """

    value: float
    influence: Tensor | None = None

    def __post_init__(self) -> None:
        if self.influence is not None and (self.influence.dim() != 1 or not len(self.influence)):
            raise DataError(f"influence holds one number per image, got {tuple(self.influence.shape)}")


def group_index(count: int) -> Tensor:
    """Which of the contiguous groups each image is in: GROUPS of them, fewer for few images.

    Recall's influence is only known group by group, so every interval is made from groups.

    >>> group_index(9).tolist()
    [0, 0, 0, 1, 1, 2, 2, 3, 3]
    """
    groups = max(1, min(GROUPS, count // 2))
    sizes = [len(part) for part in torch.arange(count).tensor_split(groups)]
    return torch.arange(groups).repeat_interleave(torch.tensor(sizes))


def interval(estimate: Estimate) -> tuple[float, float, float]:
    """95% interval and standard error (low, high, error); nan where there are too few images.

    It is about which images happened to be drawn, at this number of images. What the number itself does
    (the Fréchet distance falls as it grows) is not in it: compare values at equal counts.

    >>> low, high, error = interval(Estimate(5.0, torch.tensor([1.0, -1.0] * 50)))
    >>> low <= 5.0 <= high
    True
    """
    error, reach = _error(estimate.influence)
    return estimate.value - reach, estimate.value + reach, error


def paired_difference(before: Estimate, after: Estimate) -> tuple[float, float, float, float]:
    """`after - before` with its 95% interval and standard error: (difference, low, high, error).

    Image i of both was made from the same seed: what the two share cancels image by image.
    """
    difference = after.value - before.value
    if before.influence is None or after.influence is None:
        return difference, math.nan, math.nan, math.nan
    if len(before.influence) != len(after.influence):
        raise DataError(
            f"{len(before.influence)} images before and {len(after.influence)} after: "
            "a paired difference needs the same seeds in both"
        )
    error, reach = _error(after.influence - before.influence)
    if error == 0 and difference != 0:  # no group moved alone: too few images to know how far it scatters
        return difference, math.nan, math.nan, math.nan
    return difference, difference - reach, difference + reach, error


def _error(influence: Tensor | None) -> tuple[float, float]:
    """Standard error of the mean, and the half-width of a 95% interval, from the means of groups."""
    if influence is None or len(influence) < _FEWEST:
        return math.nan, math.nan
    index = group_index(len(influence))
    groups = int(index[-1]) + 1
    sums = torch.zeros(groups, dtype=torch.float64).index_add(0, index, influence.double().cpu())
    means = sums / index.bincount()
    error = float(means.std()) / math.sqrt(groups)
    return error, error * student_quantile(0.975, groups - 1)
