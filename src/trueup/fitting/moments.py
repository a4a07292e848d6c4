"""How good samples are, without a metric of images: against the data's bands, and against the limit.

Samples are looked at as a person sees them: values beyond the data's range are clamped to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.calibration import Calibration
from trueup.denoiser import Denoiser
from trueup.statistics import Number
from trueup.stored import digest_of

FOLDS = 16
_AT_ONCE = 2**23  # values
_LEAST = 1e-8  # variance of a coefficient that never changes: far below what 8 bits can tell
GRAIN = 1e-4  # of the variance of a pixel: noise of a hundredth of the contrast, which nobody sees


def seen(x: Tensor, denoiser: Denoiser) -> Tensor:
    """Samples as they are shown."""
    return x if denoiser.data_range is None else x.clamp(*denoiser.data_range)


class DataLabels(Tensor):
    """Labels as often as they are in the data (`labels_of`): samples of no others have the data's moments."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl  # a part of them is labels like any


def dct_of(bands: Bands, x: Tensor) -> Tensor:
    """Coefficients (n, C, K), in float64 where the device has it."""
    return bands.dct(x.float() if x.device.type == "mps" else x.double()).flatten(2)


def channels_at_once(x: Tensor) -> int:
    """How many channels of (n, C, *spatial) to work on together: they have no part in each other."""
    return max(1, min(x.shape[1], x.shape[1] * _AT_ONCE // max(x.numel(), 1)))


def grain(bands: Bands, variance: Tensor) -> Tensor:
    """What nobody sees of the variance of a coefficient, from those of all bands (C, bands)."""
    share = bands.sizes.to(variance) / bands.sizes.sum()
    return GRAIN * (variance * share).sum(1).mean()


@dataclass(eq=False, repr=False)
class Moments:
    """What the bands of samples should be: the data's mean and variance."""

    bands: Bands
    mean: Tensor  # (C, K)
    variance: Tensor  # (C, bands) of one coefficient
    images: int

    @classmethod
    def of(cls, calibration: Calibration | None, labels: Any = None) -> Moments | None:
        """Those of the data behind a calibration; none if it has seen no data, or other labels than these."""
        if calibration is None or not calibration.data_images or calibration.generated is not None:
            return None
        if labels is not None and not isinstance(labels, DataLabels):
            return None
        bands, images = calibration.correction.bands, calibration.data_images
        return cls(bands, calibration.data_mean, calibration.data_variance.clamp_min(_LEAST), images)

    @property
    def identity(self) -> str:
        """A short hash, the same for a calibration's and its file's."""
        return digest_of(self.images, [self.mean.float(), self.variance.float()])

    def at(self, alpha: float, sigma: float) -> tuple[Tensor, Tensor]:
        """Mean (C, K) and variance (C, bands) of x_t, equation 34."""
        return alpha * self.mean, alpha**2 * self.variance + sigma**2

    def miss(self, x: Tensor) -> Miss:
        """How far samples are off, equation 36 per coefficient, every band counted alike."""
        n = len(x)
        folds = min(FOLDS, n)
        fold = torch.randperm(n, generator=torch.Generator().manual_seed(n)) % folds
        firsts, seconds = [], []
        for part in x.split(channels_at_once(x), 1):
            z = dct_of(self.bands, part)
            member = torch.nn.functional.one_hot(fold, folds).to(z)  # (n, F)
            kept = self.bands.keep(z.unflatten(2, self.bands.spatial))
            firsts.append(torch.einsum("nf,nck->fck", member, kept).cpu())
            seconds.append(torch.einsum("nf,ncb->fcb", member, self.bands.sum_all(z.square())).cpu())
        first, second, rows = torch.cat(firsts, 1), torch.cat(seconds, 1), member.sum(0).cpu()
        share = self.bands.share.to(first)

        def nats(first: Tensor, second: Tensor, count: Tensor) -> Tensor:
            sizes = self.bands.sizes.to(first)
            mean = first / count
            variance = (second / count - self.bands.sum(mean.square())) / sizes * (count / (count - share))
            off = self.bands.sum((mean - self.mean).square()) / sizes - self.variance * share / self.images
            unseen = grain(self.bands, self.variance)  # on both, or a band that hardly varies decides for all
            known = self.variance + unseen
            ratio = ((variance + unseen) / known).clamp_min(1e-6)
            return (0.5 * off / known + 0.5 * (ratio - 1 - ratio.log())).mean()

        whole = nats(first.sum(0), second.sum(0), rows.sum())
        without = [
            nats(first.sum(0) - first[f], second.sum(0) - second[f], rows.sum() - rows[f])
            for f in range(folds)
        ]
        return Miss(folds * whole - (folds - 1) * torch.stack(without))


@dataclass(eq=False, repr=False)
class Miss:
    """A miss in nats, as the jackknife's pseudo-values, so that those of paired samples can be compared."""

    values: Tensor  # (F,)

    @property
    def number(self) -> Number:
        """The miss with its interval."""
        return Number.mean(self.values)

    def less(self, other: Miss) -> Number:
        """The difference to a miss of samples from the same noise."""
        return Number.mean(self.values - other.values)


def whitened(bands: Bands, x: Tensor, limit: Tensor, among: Tensor | None = None) -> Tensor:
    """Squared error of every sample to its limit, over the limits' variance in each band, (n,).

    among: limits to know that variance from, where these are few.
    """
    count = channels_at_once(x)
    spread = (limit if among is None else among).split(count, 1)
    power = torch.cat([bands.sum_all(dct_of(bands, part).var(0)) for part in spread])
    variance = power / bands.sizes.to(power)  # (C, bands)
    variance = variance.clamp_min(grain(bands, variance).clamp_min(_LEAST))
    total = torch.zeros((), dtype=variance.dtype)
    for part, goal, known in zip(
        x.split(count, 1), limit.split(count, 1), variance.split(count), strict=True
    ):
        error = bands.sum_all((dct_of(bands, part) - dct_of(bands, goal)).square()) / known  # (n, c, bands)
        total = total + (error.sum((1, 2)) / limit[0].numel()).cpu()
    return total
