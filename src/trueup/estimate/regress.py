"""Closed-form estimates from moments: means, slopes, and their noise. No shrinking here.

A combination is a tensor (3, L, C, bands): the weights of (residual, departure, u), constant within a
channel's band. eps_hat, eps and x0 are combinations too, so controls cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.estimate.moments import DEPARTURE, RESIDUAL, Moments, U
from trueup.estimate.stored import PAIRS
from trueup.parametrization import Parametrization

_PRECISION = 1e-5  # products are summed from float32: a fit cannot be trusted further than this
_ABSENT = 1e-3  # of the departure's power: sums of float32 products do not resolve a smaller innovation
_SHARPNESS = 4.0  # how soon the better of two estimates of the mean takes over; see `mean_residual`


class Centred:
    """Means and centred second moments, in all and by fold, of moments of equal weight and one class."""

    def __init__(self, moments: Moments):
        self.moments = moments
        bands = moments.bands
        self.rows = moments.rows[0]  # (F, L)
        self.first, self.second = moments.first[0], moments.second[0]
        self.n = self.rows.sum(0)[:, None, None].clamp_min(1e-300)  # (L, 1, 1)
        self.mean = self.first.sum(0) / self.n[..., None]  # (L, 3, C, K)
        folds, levels, _, channels, _ = self.first.shape
        by_fold = torch.zeros(folds, 3, 3, levels, channels, bands.count, dtype=torch.float64)
        rows = self.rows[:, :, None, None]
        for index, (i, j) in enumerate(PAIRS):
            cross = bands.sum(self.first[:, :, i] * self.mean[:, j] + self.first[:, :, j] * self.mean[:, i])
            centre = bands.sum(self.mean[:, i] * self.mean[:, j])
            by_fold[:, i, j] = by_fold[:, j, i] = self.second[:, :, index] - cross + rows * centre
        self.by_fold = by_fold
        self.residual_power = self.second[:, :, 0].sum(0)  # (L, C, bands), not centred
        self.total = by_fold.sum(0)  # (3, 3, L, C, bands)

    def unit(self, vector: int) -> Tensor:
        """The combination that is one of the three vectors."""
        out = torch.zeros_like(self.total[0])
        out[vector] = 1.0
        return out

    def eps_hat(self) -> Tensor:
        """The combination that is the network's output."""
        return self.unit(DEPARTURE) + self.moments.filter_gain[:, None, None] * self.unit(U)

    def eps(self) -> Tensor:
        """The combination that is the noise itself."""
        return self.eps_hat() - self.unit(RESIDUAL)

    def x0(self) -> Tensor:
        """The combination that is the data."""
        alpha, sigma = (v.reshape(1, -1, 1, 1) for v in (self.moments.alpha, self.moments.sigma))
        return (sigma / alpha) * (self.unit(U) - self.eps())

    def dot(self, left: Tensor, right: Tensor) -> Tensor:
        """Centred sum of products of two combinations, (L, C, bands)."""
        return torch.einsum("ilcb,jlcb,ijlcb->lcb", left, right, self.total)

    def fold_dot(self, left: Tensor, right: Tensor) -> Tensor:
        """The same within each fold, about the overall means, (F, L, C, bands)."""
        return torch.einsum("ilcb,jlcb,fijlcb->flcb", left, right, self.by_fold)

    def mean_of(self, combination: Tensor) -> Tensor:
        """Mean of a combination, (L, C, K)."""
        weights = self.moments.bands.spread(combination)  # (3, L, C, K)
        return torch.einsum("ilck,lick->lck", weights, self.mean)

    def fold_sums(self, combination: Tensor) -> Tensor:
        """Sum of a combination over each fold's samples, (F, L, C, K)."""
        weights = self.moments.bands.spread(combination)
        return torch.einsum("ilck,flick->flck", weights, self.first)


@dataclass
class Slope:
    """Regression slope on one direction, with its variance and what each fold contributed to it."""

    value: Tensor  # (L, C, bands)
    variance: Tensor  # (L, C, bands)
    influence: Tensor  # (F, L, C, bands)


def slopes(centred: Centred) -> tuple[Slope, Slope, Tensor]:
    """Residual on the innovation eps_hat - rho u, and on u, with rho; equation 17.

    The two regressors are nearly one at high noise. Their difference is what matters there, so it is the
    innovation that is regressed on: it is uncorrelated with u, and each slope is a one-line division.
    """
    residual, departure, u = (centred.unit(vector) for vector in (RESIDUAL, DEPARTURE, U))
    u_power = centred.dot(u, u)
    on_departure = divide(centred.dot(departure, u), u_power)
    rho = on_departure + centred.moments.filter_gain[:, None, None]
    innovation = departure - on_departure * u
    out_power = centred.dot(departure, departure)
    i_power = centred.dot(innovation, innovation)
    least = _ABSENT * out_power
    present = divide(i_power - least, least).clamp(0.0, 1.0)  # zero where it is not resolved
    i_power = torch.maximum(i_power, least)
    on_innovation = present * divide(centred.dot(residual, innovation), i_power)
    on_u = divide(centred.dot(residual, u), u_power)
    rest = residual - on_innovation * innovation - on_u * u
    sizes = centred.moments.bands.sizes.to(torch.float64)
    freedom = (centred.n * sizes - centred.moments.bands.kept - 2).clamp_min(1.0)
    unexplained = torch.maximum(centred.dot(rest, rest), _PRECISION * centred.dot(residual, residual))
    unexplained = unexplained.clamp_min(0.0) + _PRECISION**2 * centred.residual_power
    variance = unexplained / freedom
    influence = present * divide(centred.fold_dot(rest, innovation), i_power)
    slope = Slope(on_innovation, divide(variance, i_power), influence)
    return slope, Slope(on_u, divide(variance, u_power), divide(centred.fold_dot(rest, u), u_power)), rho


@dataclass
class Mean:
    """Mean of a residual per coefficient, with its noise."""

    value: Tensor  # (L, C, K)
    variance: Tensor  # (L, C, bands), of one coefficient's mean
    combination: Tensor  # (3, L, C, bands)
    known: Tensor  # (L, C, bands); value = mean of the combination + known x mean of all x0


def mean_residual(centred: Centred, estimator: str, a: Tensor, d: Tensor) -> Mean:
    """E[residual - a eps_hat - d u] per coefficient; equations 14 to 16 and 18.

    `plain` is the paper's average of outputs, `paired` averages output minus target, `regressed` takes out
    what the known-mean controls explain: eps, and x0 where the data's mean is known from more images than
    were run. `shrunk` takes out the part of them, per channel and band, that the variances V of the two
    before favour, V_paired^4 : V_regressed^4: nearly all or nothing, but without a jump.
    """
    moments, n = centred.moments, centred.n
    if estimator == "plain":
        alpha, sigma = moments.alpha.reshape(-1, 1, 1), moments.sigma.reshape(-1, 1, 1)
        p, q = Parametrization(**moments.provenance["parametrization"]).coefficients(alpha, sigma)
        known = -p * sigma / (alpha * q - sigma * p)  # what the conversion itself pairs, equation 14
        return _mean(centred, centred.eps_hat() - known * centred.eps())
    # a eps_hat + d u, written so that a and d that undo each other leave no rounding error behind
    on_u = d + a * moments.filter_gain[:, None, None]
    paired = centred.unit(RESIDUAL) - a * centred.unit(DEPARTURE) - on_u * centred.unit(U)
    plain_pair = _mean(centred, paired)
    if estimator == "paired":
        return plain_pair
    eps, x0 = centred.eps(), centred.x0()
    on_eps = divide(centred.dot(paired, eps), centred.dot(eps, eps))
    data_rows = float(moments.data_rows.sum())
    more = ((data_rows - n).round() > 0).to(n)  # levels that ran fewer images than the data's mean is from
    x0_power = centred.dot(x0, x0)
    on_x0 = more * divide(centred.dot(paired - on_eps * eps, x0), x0_power)
    data_mean = moments.data_first.sum((0, 1)) / max(data_rows, 1.0)
    x0_variance = x0_power.clamp_min(0.0) / (n * moments.bands.sizes) / max(data_rows, 1.0)

    def controlled(share: Tensor) -> Mean:
        of_x0 = share * on_x0
        mean = _mean(centred, paired - share * on_eps * eps - of_x0 * x0, share)
        value = mean.value + moments.bands.spread(of_x0) * data_mean
        return Mean(value, mean.variance + of_x0.square() * x0_variance, mean.combination, of_x0)

    enough = (n - 4.0).round() >= 0  # samples, to fit two controls to
    regressed = controlled(enough.to(n).expand_as(on_eps))
    if estimator == "regressed":
        return regressed
    log_ratio = plain_pair.variance.clamp_min(1e-300).log() - regressed.variance.clamp_min(1e-300).log()
    return controlled(enough * torch.sigmoid(_SHARPNESS * log_ratio))


def _mean(centred: Centred, combination: Tensor, controls: Tensor | float = 0.0) -> Mean:
    """The mean of a combination; `controls`: how much of two coefficients per band was fitted."""
    sizes = centred.moments.bands.sizes.to(torch.float64)
    freedom = (centred.n - 1.0 - controls * 2.0 / sizes).clamp_min(1.0)
    residual = centred.unit(RESIDUAL)
    power = torch.maximum(centred.dot(combination, combination), _PRECISION * centred.dot(residual, residual))
    power = power.clamp_min(0.0) + _PRECISION**2 * centred.residual_power  # not zero even for constants
    variance = power / (centred.n * sizes) / freedom
    return Mean(centred.mean_of(combination), variance, combination, torch.zeros_like(variance))


def divide(top: Tensor, bottom: Tensor) -> Tensor:
    """top/bottom, and 0 where the bottom is 0."""
    safe = torch.where(bottom > 0, bottom, torch.ones_like(bottom))
    return torch.where(bottom > 0, top / safe, torch.zeros_like(top))
