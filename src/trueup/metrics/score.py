"""Inception Score: how sure a classifier is of each image, and how varied its answers are."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.errors import DataError
from trueup.metrics.features import FeatureBatch
from trueup.metrics.gaussian import rows_of
from trueup.metrics.measures import measure
from trueup.metrics.reference import Reference
from trueup.statistics import Number

_ROWS = 4096


@measure("inception_score", "Inception Score of these", more_is_better=True)
def score(generated: FeatureBatch, reference: Reference) -> Number | None:
    """Of features that come with logits; the data has no part in it."""
    return None if generated.logits is None else inception_score(generated.logits)


def inception_score(logits: Tensor) -> Number:
    """exp of the mean divergence KL(p_i || mean p), over all images at once (one split).

    To first order an image moves the mean divergence by its own, less the mean.

    >>> round(inception_score(torch.eye(4) * 100.0).value, 6)
    4.0
    """
    parts = rows_of(logits, "logits").split(_ROWS)
    if not len(logits):
        raise DataError("no logits were given: there is no Inception Score")
    mean = torch.stack([_probabilities(rows).sum(0) for rows in parts]).sum(0) / len(logits)
    log_mean = mean.clamp_min(1e-300).log()
    probabilities = (_probabilities(rows) for rows in parts)
    divergence = torch.cat([(p * (p.clamp_min(1e-300).log() - log_mean)).sum(1) for p in probabilities])
    value = float(divergence.mean().exp())
    return Number.influenced(value, value * (divergence - divergence.mean()))


def _probabilities(logits: Tensor) -> Tensor:
    return logits.double().softmax(1)
