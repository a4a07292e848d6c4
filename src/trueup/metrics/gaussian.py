"""Mean and covariance of features, streamed in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.errors import DataError

_ROWS = 4096  # rows worked on at a time, so that float64 copies stay small


def rows_of(features: Tensor, name: str = "features") -> Tensor:
    """Features as they must be: (n, d) and finite; anything else raises DataError."""
    if features.dim() != 2 or not features.shape[1]:
        raise DataError(f"{name} must be (images, dimensions), got {tuple(features.shape)}")
    if not torch.isfinite(features).all():
        raise DataError(f"{name} hold values that are not finite")
    return features


def check_pair(reference: Tensor, generated: Tensor, fewest: int, why: str) -> None:
    """Raise DataError unless both are rows of the same dimensions, `fewest` or more."""
    for name, rows in (("reference", reference), ("generated", generated)):
        if len(rows_of(rows, f"{name} features")) < fewest:
            raise DataError(f"{why}, got {len(rows)} {name} ones")
    if reference.shape[1] != generated.shape[1]:
        wide = f"reference rows of {reference.shape[1]} values, generated ones of {generated.shape[1]}"
        raise DataError(f"{wide}: both must be made in the same way")


class GaussianStatistics:
    """Count, mean and covariance of rows that arrive in batches.

    The scatter is kept about the running mean (Chan, Golub & LeVeque 1979): raw second moments would lose
    the small variances of features with large means.

    >>> statistics = GaussianStatistics().update(torch.tensor([[1.0], [2.0]])).update(torch.tensor([[6.0]]))
    >>> statistics.count, float(statistics.mean), float(statistics.covariance)
    (3, 3.0, 7.0)
    """

    def __init__(self, mean: Tensor | None = None, scatter: Tensor | None = None, count: int = 0):
        self._mean, self._scatter, self.count = mean, scatter, count

    def update(self, features: Tensor) -> GaussianStatistics:
        """Take in rows (n, d); returns self."""
        for rows in rows_of(features).split(_ROWS):
            mean = rows.double().mean(0)
            centred = rows - mean  # float64, as the mean is
            self.merge(GaussianStatistics(mean, centred.T @ centred, len(rows)))
        return self

    def merge(self, other: GaussianStatistics) -> GaussianStatistics:
        """Take in what another one saw; returns self."""
        if other._mean is None or other._scatter is None:
            return self
        if self._mean is None or self._scatter is None:
            self._mean, self._scatter, self.count = other._mean, other._scatter.clone(), other.count
            return self
        if self._mean.shape != other._mean.shape:
            both = f"{len(self._mean)} and {len(other._mean)} dimensions"
            raise DataError(f"features of {both} cannot be put together")
        count, shift = self.count + other.count, other._mean - self._mean
        self._scatter += other._scatter  # in place: at 2048 dimensions every copy is 34 MB
        self._scatter.addr_(shift, shift, alpha=self.count * other.count / count)
        self._mean, self.count = self._mean + shift * (other.count / count), count
        return self

    @property
    def mean(self) -> Tensor:
        """Mean of the rows, (d,) float64."""
        if self._mean is None:
            raise DataError("no features were given: there is no mean")
        return self._mean

    @property
    def covariance(self) -> Tensor:
        """Covariance of the rows, divided by count - 1, (d, d) float64."""
        if self._scatter is None or self.count < 2:
            raise DataError(f"a covariance needs two images or more, got {self.count}")
        return self._scatter / (self.count - 1)
