"""Held-out images decide: a correction stays where they confirm it, and goes where they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.calibration import Correction
from trueup.estimate.moments import Moments
from trueup.estimate.shrink import kernel_weights
from trueup.statistics import effective_folds, threshold

SIGMAS = 1.5  # how sure held-out images must be, in normal standard deviations, before anything is kept
SMALL_SAMPLE = 30.0  # the statistics of few images have heavy tails: SIGMAS + SMALL_SAMPLE / images
ONCE = 2.4  # a band must be this much surer still at one level at least: there are many to be wrong about
LEVEL = 2.0  # standard errors by which all bands together must have gained at a level
RAMP = 0.2  # a condition counts in full when it is met by so much more
FADE = 0.3  # standard errors of a coefficient's mean: smaller corrections have less of a say at other levels
NOTHING = 0.1  # standard errors of a coefficient's mean that are as good as no correction
LEAST_NOISE = 0.05  # of pooled evidence, whose noise is otherwise near 1: nothing at all is not sure
WIDTH = 0.8  # lam over which held-out evidence is pooled


@dataclass
class HeldOut:
    """What corrections fitted without a fold did on that fold."""

    product: Tensor  # (F, L, bands): sum of residual . correction
    square: Tensor  # (F, L, bands): sum of |correction|^2

    def gain(self, scale: Tensor | float = 1.0) -> Tensor:
        """Loss removed by `scale` times the correction, summed over samples, (F, L, bands); equation 22."""
        return 2 * scale * self.product - scale * scale * self.square


def score(moments: Moments, correction: Correction, residual: Tensor | None = None) -> HeldOut:
    """Products and squares of a correction on samples, exactly, from their moments.

    `residual` (F, L, C, K), fold sums of the residual less its known-mean controls, may stand in for the
    residual where it meets the constant part: same expectation, less noise.
    """
    product, square = by_channel(moments, correction, residual)
    return HeldOut(product.sum(2), square.sum(2))


def by_channel(
    moments: Moments, correction: Correction, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same for each channel, (F, L, C, bands)."""
    moments, bands = moments.pooled(), moments.bands
    b, a = correction.b, correction.a  # (L, C, K), (L, C, bands)
    d = correction.d + a * moments.filter_gain[:, None, None]  # a eps_hat + d u = a departure + this u
    r, o, u = (moments.first[0, :, :, i] for i in range(3))  # (F, L, C, K)
    _, ro, ru, oo, ou, uu = (moments.second[0, :, :, i] for i in range(6))  # (F, L, C, bands)
    rows = moments.rows[0, :, :, None, None]
    product = bands.sum(b * (r if residual is None else residual)) + a * ro + d * ru
    square = rows * bands.sum(b * b) + a * a * oo + d * d * uu
    return product, square + 2 * (a * bands.sum(b * o) + d * bands.sum(b * u) + a * d * ou)


def cross_validate(moments: Moments, residual: Tensor, fit: Callable[[Moments], Correction]) -> HeldOut:
    """Fit without each fold in turn and score on it."""
    parts = [
        score(moments.only(fold), fit(moments.without(fold)), residual[fold : fold + 1])
        for fold in range(moments.folds)
    ]
    return HeldOut(torch.cat([p.product for p in parts]), torch.cat([p.square for p in parts]))


def confirmed_scale(held: HeldOut, moments: Moments, *, varying: bool = False) -> Tensor:
    """How much of the correction to keep, (L, bands) in [0, 1]; equation 23.

    The best scale on held-out samples is product/square, one where that is within its noise. It is shrunk by
    (1 - (z/t)^2)+, with t the product's t statistic over folds: zero until the evidence passes z. Every
    condition is a ramp that starts where it is met, so that what is not confirmed is zero and nothing jumps.

    varying: the correction itself differs from fold to fold (what conditions say does), and with it what it
    takes off: a fold is then expected to have its share of the sum of squares, not of the samples.
    """
    rows = moments.rows[0]  # (F, L)
    n, folds = rows.sum(0), effective_folds(rows)
    share = (rows / n)[..., None]  # (F, L, 1)
    # Without a true correction, what fold f gains from g and g from f is one number seen twice: the 2.
    inflate = 2 / (1 - share.square().sum(0))  # (L, 1)

    def error(deviation: Tensor) -> Tensor:
        return (inflate * deviation.square().sum(0)).sqrt()

    expected, slope = share * held.product.sum(0), torch.zeros_like(held.product[0])
    if varying:
        slope = held.product.sum(0) / held.square.sum(0).clamp_min(1e-300)  # (L, bands)
        expected = slope * held.square
    deviation = held.product - expected
    # In units of its noise, so that no level drowns its neighbours; a correction that is small next to what a
    # coefficient's mean is known to fades from them.
    fade = FADE * one_coefficient(moments)
    unit = (error(deviation).square() + fade.square()).sqrt().clamp_min(1e-300)
    weights = kernel_weights(moments.lam, WIDTH)
    total, square = (weights @ (part.sum(0) / unit) for part in (held.product, held.square))
    noise = error(torch.einsum("ij,fjb->fib", weights, deviation / unit))
    noise = (noise.square() + LEAST_NOISE**2).sqrt()
    best = ((total + noise) / square.clamp_min(1e-300)).clamp(0.0, 1.0)
    sigmas = SIGMAS + SMALL_SAMPLE / n
    z, z_once = (_thresholds(level, folds)[:, None] for level in (sigmas, sigmas + ONCE))
    surprise = z * noise / total.clamp_min(1e-300)
    scale = (1.0 - surprise.square()).clamp_min(0.0) * best
    scale = scale * ramp(total / (z_once * noise)).amax(0)
    # A level whose bands together did not gain for sure on held-out samples keeps nothing.
    gain = held.gain(scale).sum(2, keepdim=True)  # (F, L, 1)
    likely = share * gain.sum(0)
    if varying:
        likely = ((2 * scale * slope - scale.square()) * held.square).sum(2, keepdim=True)
    gain_error = error(gain - likely).clamp_min(1e-300)
    return scale * ramp(gain.sum(0) / (LEVEL * gain_error))


def ramp(ratio: Tensor) -> Tensor:
    """0 up to 1, where a condition is just met, and 1 from 1 + RAMP on."""
    return ((ratio - 1) / RAMP).clamp(0.0, 1.0)


def _thresholds(sigmas: Tensor, folds: Tensor) -> Tensor:
    pairs = zip(sigmas.tolist(), folds.tolist(), strict=True)
    return torch.tensor([threshold(sigma, count) for sigma, count in pairs], dtype=torch.float64)


def realised_scale(held: HeldOut, correction: Correction, moments: Moments, scale: Tensor) -> Tensor:
    """`scale`, less where the final correction is smaller than those that were held out, (L, bands).

    Near the threshold the fit to all images may shrink to nothing what some fits without a fold kept; it
    must not be credited with their gain.
    """
    return realised(held, score(moments, correction).square.sum(0), moments, scale)


def realised(held: HeldOut, final: Tensor, moments: Moments, scale: Tensor) -> Tensor:
    """The same, of a final correction whose sum of squares (L, bands) is known."""
    tried = held.square.sum(0) + NOTHING**2 * one_coefficient(moments)
    return scale * (final.clamp_min(0.0) / tried.clamp_min(1e-300)).clamp_max(1.0).sqrt()


def one_coefficient(moments: Moments) -> Tensor:
    """Variance of the residual in one coefficient, (L, bands); over n, that of its mean."""
    samples = moments.rows[0].sum(0)[:, None].clamp_min(1e-300) * moments.shape[0] * moments.bands.sizes
    return moments.second[0, :, :, 0].sum((0, 2)) / samples
