"""What a constant miss looks like: a grid of patches, and where brightness ends up by it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from trueup.bands import band_variance
from trueup.doctor.parts import NEGLIGIBLE, Parts, surprising
from trueup.estimate.regress import slopes
from trueup.process import NoiseProcess
from trueup.statistics import Number, enough_folds, mean_and_error, squared_norm, trapezoid_weights

FEWEST_PATCHES = 4  # along an axis: with fewer a period is not told from what is smooth
LARGEST_PATCH = 32  # pixels
MOST_OF_IT = 0.8  # of the energy at the multiples of a period, for a shorter one to be the period


@dataclass(frozen=True)
class Grid:
    """Energy of the mean residual at multiples of a patch's frequency, above that beside them."""

    period: int
    share: Number  # of the loss, averaged over levels
    least: float  # that would have been found

    @property
    def found(self) -> bool:
        """Whether it is surely there."""
        return bool(self.share.value > self.least)


def grid(parts: Parts) -> Grid | None:
    """The clearest grid of patches in the mean residual; None where samples hold no patches.

    A map of period p has its energy at multiples of n/p, in the Fourier transform. A smooth one has some
    there, too, because its ends do not meet, and as much or more on either side: that is taken off.
    """
    moments, rows = parts.moments, parts.rows
    spatial, folds = moments.bands.spatial, moments.folds
    longer = [n for n in spatial if n > 1]
    most = min(min(longer, default=1) // FEWEST_PATCHES, LARGEST_PATCH)
    periods = [p for p in range(2, most + 1) if all(n % p == 0 for n in longer)]
    if not periods or not enough_folds(rows).all():
        return None
    combs = {p: _comb(spatial, p) for p in periods}
    pairs = (rows.sum(0).square() - rows.square().sum(0)).clamp_min(1e-300)
    average = rows.mean(1)  # (F,)
    level = (average.sum().square() - average.square().sum()) / pairs / parts.loss / moments.levels  # (L,)
    grams = {p: torch.zeros(2, folds, folds, dtype=torch.float64) for p in periods}
    for k, weight in enumerate(level):  # one by one: all of them are a lot for large samples
        maps = moments.bands.picture(parts.residual[:, k])  # (F, C, *spatial)
        z = torch.fft.fftn(maps, dim=tuple(range(2, maps.ndim)), norm="ortho").flatten(2)
        for p, (at, beside, _) in combs.items():
            for gram, w in zip(grams[p], (at - beside, beside), strict=True):
                gram += (
                    weight
                    * torch.einsum("k,fck,gck->fg", w[w != 0], z[..., w != 0].conj(), z[..., w != 0]).real
                )
    made = []
    for p, (_, _, count) in combs.items():
        share, level_beside = (squared_norm(gram, average)[()] for gram in grams[p])
        # Above what measuring adds, and above what a map without any grid has there by chance.
        noise = surprising(count * moments.shape[0], folds) * share.error
        chance = surprising(count) * math.sqrt(2 / count) * max(level_beside.value, 0.0)
        made.append(Grid(p, share, max(NEGLIGIBLE, noise + chance)))
    found = [g for g in made if g.found]
    if not found:
        return min(made, key=lambda g: g.least)
    most = max(g.share.value for g in found)
    return next(g for g in found if g.share.value >= MOST_OF_IT * most)


def _comb(spatial: tuple[int, ...], period: int) -> tuple[Tensor, Tensor, int]:
    """Weights of Fourier coefficients (K,) at multiples of a patch's frequency, and of those beside them."""
    at, near = torch.zeros(2, *spatial, dtype=torch.float64)
    steps = [range(0, n, n // period) if n > 1 else range(1) for n in spatial]
    places = [place for place in product(*steps) if any(place)]
    for place in places:
        at[place] = 1.0
        moved = [axis for axis, k in enumerate(place) if k]
        for axis, step in product(moved, (-1, 1)):
            beside = list(place)
            beside[axis] = (beside[axis] + step) % spatial[axis]
            near[tuple(beside)] += 0.5 / len(moved)
    return at.flatten().to(torch.complex128), near.flatten().to(torch.complex128), len(places)


@dataclass(frozen=True)
class Drift:
    """Where brightness ends up after sampling, were the data Gaussian: by channel."""

    mean: list[Number]  # added to it, in the data's units
    spread: list[Number]  # factor by which its standard deviation is off; the error is the logarithm's

    def widest(self) -> tuple[Number, Number]:
        """The surest of each."""
        return (
            max(self.mean, key=lambda n: abs(n.value) / max(n.error, 1e-300)),
            max(self.spread, key=lambda n: abs(math.log(n.value)) / max(n.error, 1e-300)),
        )


def drift(parts: Parts) -> Drift:
    """What the mean residual and the response at the mean frequency add up to along the probability flow."""
    moments, rows = parts.moments, parts.rows
    variance = brightness(parts)[1]
    weights = trapezoid_weights(moments.lam)
    noise = (-moments.lam).exp()  # sigma / alpha
    folds = float(parts.folds.min())
    pixels = math.sqrt(math.prod(moments.bands.spatial))
    on_u = slopes(parts.centred)[1]
    means, spreads = [], []
    for c in range(moments.shape[0]):
        kept = (variance[c] / (variance[c] + noise.square())).sqrt()  # of what is added at a level
        value, error = mean_and_error(parts.residual[:, :, c, 0], rows, -weights * noise * kept / pixels)
        means.append(Number.of(float(value), float(error), folds))
        scatter = on_u.influence[:, :, c, 0] @ weights  # (F,)
        unsure = float((scatter.square().sum() * len(scatter) / max(len(scatter) - 1, 1)).sqrt())
        grown = Number.of(-float(weights @ on_u.value[:, c, 0]), unsure, folds)  # of its logarithm
        spreads.append(Number(math.exp(grown.value), unsure, math.exp(grown.low), math.exp(grown.high)))
    return Drift(means, spreads)


def brightness(parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and the error of the mean of the data's lowest coefficient, by channel (C,)."""
    moments = parts.moments
    first, second, rows = moments.data_first[0], moments.data_second[0], moments.data_rows[0]
    variance, _ = band_variance(moments.bands, first, second, rows)
    count = rows.sum().clamp_min(1e-300)
    return first.sum(0)[:, 0] / count, variance[:, 0], (variance[:, 0] / count).sqrt()


@dataclass(frozen=True)
class Leak:
    """What is left of the data in the last state, which a sampler starts without."""

    nats: Number  # a coefficient: how far the brightness of samples is from the data's, for that alone
    alpha: float
    snr: float
    mean: float  # added to brightness, in the data's units: the channel that has most
    spread: float  # factor by which its standard deviation is off


def leak(parts: Parts, process: NoiseProcess) -> Leak:
    """Brightness of x_T as it is and as samplers draw it: a bijection, so that the end differs as much."""
    mean, variance, error = brightness(parts)
    alpha, sigma, start = (
        float(process.alpha(process.t_max)),
        float(process.sigma(process.t_max)),
        process.prior_std,
    )
    power = alpha**2 * variance + sigma**2
    ratio = power / start**2
    offset = alpha * mean / start
    nats = 0.5 * (offset.square() + ratio - 1 - ratio.log())  # KL(data at T, start), by channel
    uncertain = float((offset * alpha * error / start).square().mean().sqrt()) / math.sqrt(len(mean))
    count = float(parts.moments.data_rows.sum())
    worst = int(nats.argmax())
    kept = (variance[worst] / power[worst]).sqrt()
    pixels = math.sqrt(math.prod(parts.moments.bands.spatial))
    return Leak(
        Number.of(float(nats.mean()), uncertain, max(count, 2.0)),
        alpha,
        (alpha / sigma) ** 2,
        -float(alpha * mean[worst] * kept) / pixels,
        float(start / power[worst].sqrt()),
    )
