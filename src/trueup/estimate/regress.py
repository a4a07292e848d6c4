"""Closed-form estimates from moments: means, slopes, and their noise. No shrinking here.

A combination is a tensor (3, L, C, bands): the weights of (residual, eps_hat, u), constant within a
channel's band. eps and x0 are combinations too, so controls cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.estimate.moments import EPS_HAT, PAIRS, RESIDUAL, Moments, U
from trueup.parametrization import Parametrization

_PRECISION = 1e-5  # products are summed from float32: a fit cannot be trusted further than this
_ABSENT = 1e-9  # a regressor with less than this share of its parent's power is rounding error


class Centred:
    """Means and centred second moments, in all and by fold."""

    def __init__(self, moments: Moments):
        self.moments = moments
        bands = moments.bands
        self.rows = moments.rows  # (F,)
        self.n = float(moments.rows.sum())
        self.mean = moments.first.sum(0) / self.n  # (L, 3, C, K)
        folds, levels, _, channels, _ = moments.first.shape
        by_fold = torch.zeros(folds, 3, 3, levels, channels, bands.count, dtype=torch.float64)
        rows = moments.rows.reshape(-1, 1, 1, 1)
        for index, (i, j) in enumerate(PAIRS):
            cross = bands.sum(
                moments.first[:, :, i] * self.mean[:, j] + moments.first[:, :, j] * self.mean[:, i]
            )
            centre = bands.sum(self.mean[:, i] * self.mean[:, j])
            by_fold[:, i, j] = by_fold[:, j, i] = moments.second[:, :, index] - cross + rows * centre
        self.by_fold = by_fold
        self.residual_power = moments.second[:, :, 0].sum(0)  # (L, C, bands), not centred
        self.total = by_fold.sum(0)  # (3, 3, L, C, bands)

    def unit(self, vector: int) -> Tensor:
        """The combination that is one of the three vectors."""
        out = torch.zeros_like(self.total[0])
        out[vector] = 1.0
        return out

    def eps(self) -> Tensor:
        """The combination that is the noise itself."""
        return self.unit(EPS_HAT) - self.unit(RESIDUAL)

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
        return torch.einsum("ilck,flick->flck", weights, self.moments.first)


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
    residual, u = centred.unit(RESIDUAL), centred.unit(U)
    u_power = centred.dot(u, u)
    rho = _divide(centred.dot(centred.unit(EPS_HAT), u), u_power)
    innovation = centred.unit(EPS_HAT) - rho * u
    out_power = centred.dot(centred.unit(EPS_HAT), centred.unit(EPS_HAT))
    i_power = centred.dot(innovation, innovation)
    i_power = torch.where(i_power > _ABSENT * out_power, i_power, torch.zeros_like(i_power))
    on_innovation = _divide(centred.dot(residual, innovation), i_power)
    on_u = _divide(centred.dot(residual, u), u_power)
    rest = residual - on_innovation * innovation - on_u * u
    sizes = centred.moments.bands.sizes.to(torch.float64)
    freedom = (centred.n * sizes - sizes - 2).clamp_min(1.0)
    unexplained = torch.maximum(centred.dot(rest, rest), _PRECISION * centred.dot(residual, residual))
    unexplained = unexplained.clamp_min(0.0) + _PRECISION**2 * centred.residual_power
    variance = unexplained / freedom
    pair = []
    for value, direction, power in ((on_innovation, innovation, i_power), (on_u, u, u_power)):
        influence = _divide(centred.fold_dot(rest, direction), power)
        pair.append(Slope(value, _divide(variance, power), influence))
    return pair[0], pair[1], rho


@dataclass
class Mean:
    """Mean of a residual per coefficient, with its noise."""

    value: Tensor  # (L, C, K)
    variance: Tensor  # (L, C, bands), of one coefficient's mean
    combination: Tensor  # (3, L, C, bands)
    offset: Tensor  # (L, C, K), known; value = mean of the combination + offset


def mean_residual(
    centred: Centred, estimator: str, parametrization: Parametrization, a: Tensor, d: Tensor
) -> Mean:
    """E[residual - a eps_hat - d u] per coefficient; equations 14 to 16 and 18.

    `plain` is the paper's average of outputs, `paired` averages output minus target, `regressed` takes out
    what the known-mean controls explain: eps, and x0 where the data's mean is known from more images than
    were run. `shrunk` takes per channel and band whichever of the last two has the smaller variance.
    """
    moments, n = centred.moments, centred.n
    zero = torch.zeros_like(centred.mean[:, 0])
    if estimator == "plain":
        alpha, sigma = moments.alpha.reshape(-1, 1, 1), moments.sigma.reshape(-1, 1, 1)
        p, q = parametrization.coefficients(alpha, sigma)
        known = -p * sigma / (alpha * q - sigma * p)  # what the conversion itself pairs, equation 14
        combination = centred.unit(EPS_HAT) - known * centred.eps()
        return _mean(centred, combination, zero, zero_extra=True)
    paired = centred.unit(RESIDUAL) - a * centred.unit(EPS_HAT) - d * centred.unit(U)
    plain_pair = _mean(centred, paired, zero, zero_extra=True)
    if estimator == "paired" or n < 4:
        return plain_pair
    eps, x0 = centred.eps(), centred.x0()
    extra_images = moments.data_rows - moments.images
    on_eps = _divide(centred.dot(paired, eps), centred.dot(eps, eps))
    combination, offset, extra = paired - on_eps * eps, zero, torch.zeros_like(plain_pair.variance)
    if extra_images > 0:
        on_x0 = _divide(centred.dot(combination, x0), centred.dot(x0, x0))
        combination = combination - on_x0 * x0
        offset = moments.bands.spread(on_x0) * (moments.data_first / moments.data_rows)
        sizes = moments.bands.sizes.to(torch.float64)
        extra = on_x0.square() * centred.dot(x0, x0) / (n * sizes) / moments.data_rows
    regressed = _mean(centred, combination, offset, zero_extra=False)
    regressed.variance = regressed.variance + extra
    if estimator == "regressed":
        return regressed
    better = regressed.variance < plain_pair.variance  # (L, C, bands)
    wide = moments.bands.spread(better)
    return Mean(
        torch.where(wide, regressed.value, plain_pair.value),
        torch.where(better, regressed.variance, plain_pair.variance),
        torch.where(better, regressed.combination, plain_pair.combination),
        torch.where(wide, regressed.offset, plain_pair.offset),
    )


def _mean(centred: Centred, combination: Tensor, offset: Tensor, *, zero_extra: bool) -> Mean:
    sizes = centred.moments.bands.sizes.to(torch.float64)
    fitted = 0.0 if zero_extra else 2.0 / sizes  # controls cost degrees of freedom, shared by a band
    freedom = torch.as_tensor(centred.n - 1.0 - fitted, dtype=torch.float64).clamp_min(1.0)
    residual = centred.unit(RESIDUAL)
    power = torch.maximum(centred.dot(combination, combination), _PRECISION * centred.dot(residual, residual))
    power = power.clamp_min(0.0) + _PRECISION**2 * centred.residual_power  # not zero even for constants
    variance = power / (centred.n * sizes) / freedom
    return Mean(centred.mean_of(combination) + offset, variance, combination, offset)


def _divide(top: Tensor, bottom: Tensor) -> Tensor:
    """top/bottom, and 0 where the bottom is 0."""
    safe = torch.where(bottom > 0, bottom, torch.ones_like(bottom))
    return torch.where(bottom > 0, top / safe, torch.zeros_like(top))
