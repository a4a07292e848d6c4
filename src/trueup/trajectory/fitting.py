"""One state of many trajectories: how far its moments are off, and the map that brings them back.

The miss is stated as a divergence. Per channel and band, the Gaussian with the states' moments (mean m,
variance S) differs from the one with the data's (mean mu, variance T) by

    sum over coefficients of  |m - mu|^2 / 2T  +  (S/T - 1 - log S/T) / 2    nats

(equation 36), which is what x -> mu + g (x - mu - delta) brings to zero with delta = m - mu and g^2 = T/S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.statistics import mean_and_error, threshold

FOLDS = 16
SIGMAS = 1.5  # how far below its estimate the size of a miss is taken; how sure held-out trajectories must be
LARGEST_GAIN = 1.5  # of the sample: detail that is not there cannot be amplified into being
_TINY = 1e-300


@dataclass(eq=False, repr=False)
class StateMoments:
    """Moments of a state over trajectories, by fold, with the starting noise as a control (equation 37)."""

    bands: Bands
    rows: Tensor  # (F,) trajectories
    offset: Tensor  # (F, C, K) mean of x less the data's
    offset_var: Tensor  # (C, bands) variance over trajectories of a coefficient of it
    variance: Tensor  # (F, C, bands)
    variance_var: Tensor  # (C, bands) variance over trajectories of it

    @classmethod
    def of(cls, bands: Bands, x: Tensor, noise: Tensor, mean: Tensor) -> StateMoments:
        """Of states x (n, C, *spatial), given the DCT of the noise they started from, (n, C, K)."""
        n = len(x)
        # Dealt by chance, always the same: labels go round, and a fold must not be a label.
        fold = (torch.randperm(n, generator=torch.Generator().manual_seed(n)) % min(FOLDS, n)).to(x.device)
        folds = int(fold.max()) + 1
        member = torch.nn.functional.one_hot(fold, folds).to(torch.float64)  # (n, F)
        rows = member.sum(0)
        z = bands.dct(x.double()).flatten(2) - mean.to(x.device)  # (n, C, K)
        centred = z - z.mean(0)
        # Means: what of a coefficient goes with its own starting noise has expectation zero.
        slope = bands.sum((centred * noise).sum(0)) / bands.sum(noise.square().sum(0))
        controlled = z - bands.spread(slope) * noise
        sizes = bands.sizes.to(z.device)
        spread = bands.sum(controlled.var(0)) / sizes
        offset = torch.einsum("nf,nck->fck", member / rows, controlled)
        # Variances: what of a trajectory's energy goes with that of its noise, whose expectation is one.
        energy = bands.sum(centred.square()) / sizes * (n / (n - 1))  # (n, C, bands)
        extra = bands.sum(noise.square()) / sizes - 1
        around = extra - extra.mean(0)
        slope = ((energy - energy.mean(0)) * around).sum(0) / around.square().sum(0).clamp_min(_TINY)
        controlled = energy - slope * extra
        variance = torch.einsum("nf,ncb->fcb", member / rows, controlled)
        # A control can overshoot where there are few trajectories: never below a tenth of what was seen.
        variance = torch.maximum(variance, 0.1 * energy.mean(0)).clamp_min(1e-12)
        return cls(bands, *(part.cpu() for part in (rows, offset, spread, variance, controlled.var(0))))

    @property
    def count(self) -> float:
        """How many trajectories."""
        return float(self.rows.sum())

    def mean(self, values: Tensor, without: int | None = None) -> Tensor:
        """Mean over folds, all or all but one."""
        weight = self.rows.clone()
        if without is not None:
            weight[without] = 0
        return torch.tensordot(weight / weight.sum(), values, 1)


@dataclass(eq=False, repr=False)
class Target:
    """The moments a state should have, and how well those are known."""

    mean: Tensor  # (C, K)
    variance: Tensor  # (C, bands)
    mean_var: Tensor  # (C, bands)
    variance_var: Tensor  # (C, bands)
    noise: Tensor  # (C, bands) share of the variance that is noise
    last: bool  # the sample


@dataclass(eq=False, repr=False)
class Miss:
    """How far a state's moments are off, by band."""

    mean: Tensor  # (C, bands) of the mean, in standard deviations, rms over coefficients
    ratio: Tensor  # (C, bands) standard deviation over what it should be
    ratio_se: Tensor  # (C, bands)
    nats: Tensor  # (bands,) equation 36, noise taken off
    nats_se: Tensor  # (bands,)
    total_se: Tensor  # () of the sum over bands


def measure(moments: StateMoments, target: Target, fitted: tuple[Tensor, Tensor] | None = None) -> Miss:
    """The miss of a state with its uncertainty, that of the data's moments included.

    Noise adds to a miss and is taken off it. The data's noise adds as well, but in bands whose means and
    variances were fitted to these very moments (two masks): there states share it, and it has to be put on.
    """
    bands, n = moments.bands, moments.count
    sizes = bands.sizes.to(torch.float64)
    offset, variance = moments.mean(moments.offset), moments.mean(moments.variance)
    means, variances = fitted or (torch.zeros(bands.count, dtype=torch.bool),) * 2
    noise = moments.offset_var / n + torch.where(means, -target.mean_var, target.mean_var)
    square = bands.sum(offset.square()) / sizes - noise
    states_var, data_var = moments.variance_var / n / variance**2, target.variance_var / target.variance**2
    ratio = (variance / target.variance).sqrt()

    def nats(without: int | None = None) -> Tensor:
        off, var = moments.mean(moments.offset, without), moments.mean(moments.variance, without)
        by_mean = 0.5 * (bands.sum(off.square()) - sizes * noise) / target.variance
        r = var / target.variance
        noise_of_r = states_var + data_var * torch.where(variances, -1.0, 2 * r - 1)
        by_variance = 0.5 * sizes * (r - 1 - r.log() - 0.5 * noise_of_r)
        return (by_mean + by_variance).sum(0)

    folds = len(moments.rows)
    left_out = torch.stack([nats(fold) for fold in range(folds)])  # (F, bands)
    scatter = (folds - 1) / folds * (left_out - left_out.mean(0)).square().sum(0)
    total = (folds - 1) / folds * (left_out.sum(1) - left_out.sum(1).mean()).square().sum()
    # The data's own error, which all trajectories share: through the slope of the miss, and where that is 0
    # as large as what it would show if nothing were off. Channels err together, bands do not.
    by_mean = (bands.sum(offset.square()) * target.mean_var).sqrt() / target.variance
    by_variance = 0.5 * sizes * (1 - ratio**2).abs() * target.variance_var.sqrt() / target.variance
    shared = by_mean.sum(0).square() + by_variance.sum(0).square()
    shared = shared + (sizes * (target.mean_var / target.variance).square()).sum(0) / 2
    shared = shared + (sizes * target.variance_var / target.variance.square()).square().sum(0) / 8
    mean = (square / target.variance).clamp_min(0.0).sqrt()
    ratio_se = ratio * (0.25 * (states_var + data_var)).sqrt()
    return Miss(mean, ratio, ratio_se, nats(), (scatter + shared).sqrt(), (total + shared.sum()).sqrt())


def fit(moments: StateMoments, target: Target) -> tuple[Tensor, Tensor]:
    """Shift (C, K) and gain (C, bands) that restore a state's moments, shrunk and confirmed (38 and 39)."""
    bands, n, folds = moments.bands, moments.count, len(moments.rows)
    sizes = bands.sizes.to(torch.float64)
    offset, variance = moments.mean(moments.offset), moments.mean(moments.variance)
    noise = moments.offset_var / n + target.mean_var  # (C, bands)
    surprise = (bands.sum(offset.square()) / noise.clamp_min(_TINY)).mean(0) / sizes  # (bands,)
    keep_shift = _kept(surprise, sizes)
    log_var = 0.25 * (moments.variance_var / n / variance**2 + target.variance_var / target.variance**2)
    log_gain = _log_gain(variance, target)  # (C, bands)
    keep_gain = _kept((log_gain.square() / log_var.clamp_min(_TINY)).mean(0), torch.ones_like(sizes))

    by_shift, by_gain = [], []
    for fold in range(folds):  # fitted without it, scored on it
        shift = bands.spread(keep_shift) * moments.mean(moments.offset, fold)
        held = 2 * shift * moments.offset[fold] - shift.square()
        by_shift.append((bands.sum(held) / (2 * target.variance)).sum(0))
        log_g = keep_gain * _log_gain(moments.mean(moments.variance, fold), target)
        now = moments.variance[fold] / target.variance
        by_gain.append((sizes * (0.5 * now * (1 - (2 * log_g).exp()) + log_g)).sum(0))
    scale_shift, scale_gain = (_confirmed(torch.stack(part), moments.rows) for part in (by_shift, by_gain))
    return (bands.spread(scale_shift * keep_shift) * offset, (scale_gain * keep_gain * log_gain).exp())


def _log_gain(variance: Tensor, target: Target) -> Tensor:
    """log g, (C, bands): T/S restored, but of what is missing in a noisy state only the share of its noise.

    A gain amplifies signal and noise alike. Where a state lacks variance it mostly lacks signal; restoring
    that by a gain would leave it with more noise than the network takes out, and the sample with grain.
    """
    log_g = 0.5 * (target.variance / variance).log()
    if target.last:
        return log_g.clamp_max(math.log(LARGEST_GAIN))
    return torch.where(log_g > 0, target.noise * log_g, log_g)


def _kept(surprise: Tensor, columns: Tensor) -> Tensor:
    """Share of an estimate to keep, from its mean square in units of its noise; equation 38."""
    excess = (surprise - 1.0 - SIGMAS * (2.0 / columns).sqrt()).clamp_min(0.0)
    return excess / (1.0 + excess)


def _confirmed(score: Tensor, rows: Tensor) -> Tensor:
    """How much of a map held-out trajectories confirm, (bands,); equation 39."""
    mean, error = mean_and_error(score * rows[:, None], rows)
    # Without a miss, what fold f gains from g and g from f is one number seen twice: the 2.
    surprise = threshold(SIGMAS, len(rows)) * 2**0.5 * error / mean.clamp_min(_TINY)
    return torch.where(mean > 0, (1 - surprise.square()).clamp_min(0.0), torch.zeros_like(mean))
