"""Small exact statistics: Student's t, and unbiased squared norms from folds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def student_cdf(t: float, dof: int) -> float:
    """P(T <= t) for whole degrees of freedom, by the finite series.

    >>> round(student_cdf(2.0, 5), 6)
    0.94903
    """
    theta = math.atan2(t, math.sqrt(dof))
    cos2 = math.cos(theta) ** 2
    if dof % 2:
        total, term = 0.0, math.cos(theta)
        for k in range(1, (dof - 1) // 2 + 1):
            total += term
            term *= cos2 * (2 * k) / (2 * k + 1)
        inside = (2 / math.pi) * (theta + math.sin(theta) * total)
    else:
        total, term = 0.0, 1.0
        for k in range(1, dof // 2 + 1):
            total += term
            term *= cos2 * (2 * k - 1) / (2 * k)
        inside = math.sin(theta) * total
    return 0.5 + 0.5 * inside


def student_quantile(probability: float, dof: int) -> float:
    """The t below which `probability` lies.

    >>> round(student_quantile(0.975, 15), 4)
    2.1314
    """
    low, high = -1.0, 1.0
    while student_cdf(high, dof) < probability:
        high *= 2
    while student_cdf(low, dof) > probability:
        low *= 2
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if student_cdf(middle, dof) < probability else (low, middle)
    return 0.5 * (low + high)


def threshold(sigmas: float, folds: int) -> float:
    """What a t statistic from `folds` folds must exceed to be as surprising as a normal `sigmas`."""
    return student_quantile(0.5 * (1 + math.erf(sigmas / math.sqrt(2))), max(folds - 1, 1))


@dataclass
class SquaredNorm:
    """An unbiased squared norm, its standard error, and a 95% interval (which is not symmetric)."""

    value: Tensor
    error: Tensor
    low: Tensor
    high: Tensor


def squared_norm(gram: Tensor, rows: Tensor) -> SquaredNorm:
    """Unbiased |eta|^2 from the inner products of fold sums, equations 24 and 25.

    gram (..., F, F) holds s_f . s_g for fold sums s_f of rows[f] samples. Only products of different
    folds are used, so the noise in eta does not add to its size; the estimate may come out below zero.
    """
    folds = len(rows)
    off = ~torch.eye(folds, dtype=torch.bool)
    if folds < 4:
        nothing = gram.new_full(gram.shape[:-2], math.nan)
        return SquaredNorm(nothing, nothing, nothing, nothing)
    pairs = rows[:, None] * rows[None, :]
    value = (gram * off).sum((-2, -1)) / (pairs * off).sum()
    h = gram / pairs * off
    row = h.sum(-1)
    z = student_quantile(0.975, folds - 1)
    centred = h - (row[..., :, None] + row[..., None, :]) / (folds - 2)
    centred = (centred + row.sum(-1)[..., None, None] / ((folds - 1) * (folds - 2))) * off
    noise = centred.square().sum((-2, -1)) / (folds * (folds - 3))  # tr(Sigma^2) of a fold mean
    spread = (row / (folds - 1)).var(-1) * ((folds - 1) / (folds - 2)) ** 2
    signal = (spread - noise / (folds - 2)).clamp_min(0.0)  # eta' Sigma eta of a fold mean
    floor = 2 * noise / (folds * (folds - 1))
    # The variance grows with |eta|^2 itself, so the interval solves for the sizes that would not be surprised
    # by the value seen, as Wilson's does for a proportion.
    slope = signal / folds / torch.maximum(value, floor.sqrt()).clamp_min(1e-300)
    middle = value + 2 * z**2 * slope
    reach = (middle.square() - value.square() + z**2 * floor).clamp_min(0.0).sqrt()
    return SquaredNorm(value, (4 * signal / folds + floor).sqrt(), middle - reach, middle + reach)


def mean_and_error(sums: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean per row and its standard error, from sums (F, ...) over folds of rows (F,)."""
    folds, total = len(rows), rows.sum()
    mean = sums.sum(0) / total
    if folds < 2:
        return mean, torch.full_like(mean, math.nan)
    weight = rows.reshape(-1, *[1] * (sums.dim() - 1))
    squares = (sums - weight * mean).square().sum(0)
    return mean, (squares * folds / (folds - 1)).sqrt() / total


def trapezoid_weights(x: Tensor) -> Tensor:
    """Weights w with sum w y = the trapezoid integral of y over |x|; a single point weighs nothing."""
    gaps = x.diff().abs()
    weights = torch.zeros_like(x)
    weights[1:] += 0.5 * gaps
    weights[:-1] += 0.5 * gaps
    return weights
