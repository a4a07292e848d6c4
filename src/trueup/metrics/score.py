"""Inception Score: how sure a classifier is of each image, and how varied its answers are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trueup.errors import DataError
from trueup.metrics.estimate import Estimate
from trueup.metrics.gaussian import rows_of

_ROWS = 4096


def inception_score(logits: Tensor) -> Estimate:
    """exp of the mean divergence KL(p_i || mean p), over all images at once (one split).

    To first order an image moves the mean divergence by its own, less the mean.

    >>> round(inception_score(torch.eye(4) * 100.0).value, 6)
    4.0
    """
    score = InceptionScore().update(logits)
    log_mean = score.mean.clamp_min(1e-300).log()
    divergence = torch.cat(
        [
            (p * (p.clamp_min(1e-300).log() - log_mean)).sum(1)
            for p in map(_probabilities, logits.split(_ROWS))
        ]
    )
    return Estimate(score.value, score.value * (divergence - divergence.mean()))


class InceptionScore:
    """The same from batches of logits, exactly: it needs only the sum of p and of its entropies.

    >>> round(InceptionScore().update(torch.eye(4) * 100.0).value, 6)
    4.0
    """

    def __init__(self) -> None:
        self.count = 0
        self._sum: Tensor | None = None
        self._entropy = 0.0

    def update(self, logits: Tensor) -> InceptionScore:
        """Take in logits (n, classes); returns self."""
        for rows in rows_of(logits, "logits").split(_ROWS):
            p = _probabilities(rows)
            self._sum = p.sum(0) if self._sum is None else self._sum + p.sum(0)
            self._entropy += float(torch.special.entr(p).sum())
            self.count += len(p)
        return self

    @property
    def mean(self) -> Tensor:
        """Mean probability of each class, (classes,) float64."""
        if self._sum is None:
            raise DataError("no logits were given: there is no Inception Score")
        return self._sum / self.count

    @property
    def value(self) -> float:
        """exp(entropy of the mean - mean entropy)."""
        return math.exp(float(torch.special.entr(self.mean).sum()) - self._entropy / self.count)


def _probabilities(logits: Tensor) -> Tensor:
    return logits.double().softmax(1)
