"""Which noise levels to look at: drawn where the loss is, so that few evaluations measure an integral."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.bands import Bands, band_variance
from trueup.calibration.correction import interpolation_weights
from trueup.noise import mix
from trueup.process import NoiseProcess

_NODES = 1024
_EVENLY = 0.1  # share of levels drawn evenly, so that no weight is more than ten times too large
_FOR_GAIN = 0.3  # share drawn where the calibration gains: the difference is asked for, too
_FEWEST = 8
_GOLDEN = (math.sqrt(5) - 1) / 2


def filter_loss(lam: Tensor, variance: Tensor, bands: Bands) -> Tensor:
    """Denoising loss of the best linear filter per band at each lam, (L,); equation 29.

    variance (C, bands) is that of one DCT coefficient of the data.
    """
    snr = (2 * lam).exp()[:, None, None] * variance.clamp_min(1e-12)  # alpha^2 v / sigma^2
    return (snr / (1 + snr) * bands.sizes.to(variance)).sum((1, 2))


def data_variance(x0: Tensor, bands: Bands) -> Tensor:
    """Variance of one DCT coefficient of the data, per channel and band, (C, bands).

    >>> data_variance(torch.randn(500, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
    ...               Bands((8, 8))).round().unique().tolist()
    [1.0]
    """
    z = bands.dct(x0.double()).flatten(2)  # (B, C, K)
    # The mean of few says little: about zero, which is not too small.
    first = z if len(x0) >= _FEWEST else torch.zeros_like(z)
    rows = torch.ones(len(x0), dtype=torch.float64, device=z.device)
    return band_variance(bands, first, bands.sum_all(z.square()), rows)[0]


@dataclass(frozen=True)
class Chances:
    """How often to look at a level: by the loss a linear filter of the data has there, and by the gain.

    The filter needs no network, only the variance of the data's frequencies, and its loss has the shape of a
    network's. A calibration knows where it gains, which is mostly where there is little loss.
    """

    variance: Tensor  # (C, bands)
    bands: Bands
    gain: tuple[Tensor, Tensor] | None = None  # falling lam (L,) and the loss removed there

    def mass(self, lam: Tensor, weight: Tensor) -> Tensor:
        """The chance of each level, where a loss at it counts `weight`."""
        parts = [(1.0, weight * filter_loss(lam, self.variance, self.bands))]
        if self.gain is not None:
            levels, gain = self.gain
            parts.append((_FOR_GAIN, weight * (interpolation_weights(levels, lam) @ gain.clamp_min(0.0))))
        parts.append((_EVENLY, torch.ones_like(weight)))
        total = torch.zeros_like(weight)
        for share, density in parts:
            if density.sum() > 0:
                total = (1 - share) * total + share * density / density.sum()
        return total


@dataclass(frozen=True)
class Levels:
    """A distribution over noise levels: draws come with what each counts in the integral over lam.

    `mass` is how often a level is drawn, `width` what it stands for: an interval of lam, within which
    continuous levels are drawn, or for a bound of T steps one step.
    """

    lam: Tensor  # (K,) falling, the middle of each interval where continuous
    mass: Tensor  # (K,), sums to 1
    width: Tensor  # (K,)
    continuous: bool

    def draw(self, index: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Which levels (B, count) each sample gets, their lam and weights: sum(weight * term) is unbiased.

        One level out of each of `count` equal shares of the distribution, at a place that moves on by the
        golden ratio from sample to sample: the samples together cover the levels evenly.
        """
        offset = (mix(seed ^ 0x6C6576656C73) / 2.0**64 + index.double().cpu() * _GOLDEN) % 1.0
        position = (torch.arange(count) + offset[:, None]) / count  # (B, count) in [0, 1)
        ends = self.mass.cumsum(0)
        cell = torch.searchsorted(ends, position.contiguous(), right=True).clamp_max(len(ends) - 1)
        lam, weight = self.lam[cell], self.width[cell] / self.mass[cell] / count
        if self.continuous:
            inside = ((ends[cell] - position) / self.mass[cell]).clamp(0, 1)  # 1 at the start of a cell
            lam = lam + (inside - 0.5) * self.width[cell]
        return cell, lam, weight


def continuous_levels(process: NoiseProcess, chances: Chances | None) -> Levels:
    """All of a process's lam, drawn as `chances` say, or as often as uniform times have it."""
    top, bottom = float(process.lam(process.t_min)), float(process.lam(process.t_max))
    edges = torch.linspace(top, bottom, _NODES + 1, dtype=torch.float64)
    lam = 0.5 * (edges[1:] + edges[:-1])
    width = torch.full_like(lam, (top - bottom) / _NODES)
    if chances is None:
        spans = process.t_of_lam(edges).clamp(process.t_min, process.t_max).diff()
        return Levels(lam, spans / spans.sum(), width, continuous=True)
    return Levels(lam, chances.mass(lam, width), width, continuous=True)
