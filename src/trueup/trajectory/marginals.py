"""What the moments of x_t should be: known from the data alone, at any noise level."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.bands import Bands, band_variance
from trueup.calibration import Calibration
from trueup.denoiser import Denoiser
from trueup.errors import MismatchError
from trueup.images.samples import Samples
from trueup.noise import hashed
from trueup.solvers import check_count

_FOLDS = 16
_LEAST = 1e-8  # variance of a coefficient that never changes: far below what 8 bits can tell


@dataclass(eq=False, repr=False)
class Marginals:
    """Moments of the data, and with them those of x_t = alpha x0 + sigma eps (equation 34)."""

    bands: Bands
    mean: Tensor  # (C, K) DCT of E[x0]
    variance: Tensor  # (C, bands) of one coefficient
    variance_se: Tensor  # (C, bands)
    images: int

    @classmethod
    def of_data(cls, samples: Samples, batch_size: int = 64) -> Marginals:
        """From images, no network involved; an image that is there twice counts once."""
        bands = Bands(samples.shape[1:])
        channels, size = samples.shape[0], bands.index.numel()
        first = torch.zeros(_FOLDS, channels, size, dtype=torch.float64)
        second = torch.zeros(_FOLDS, channels, bands.count, dtype=torch.float64)
        rows = torch.zeros(_FOLDS, dtype=torch.float64)
        for batch in samples.batches(batch_size, unique=True):
            z = bands.dct(batch.x0.double().cpu()).flatten(2)  # (B, C, K)
            fold = hashed(batch.index if batch.group is None else batch.group) % _FOLDS
            first.index_add_(0, fold, z)
            second.index_add_(0, fold, bands.sum(z.square()))
            rows.index_add_(0, fold, torch.ones(len(z), dtype=torch.float64))
        count = int(rows.sum())
        check_count(count)
        return cls(bands, first.sum(0) / count, *band_variance(bands, first, second, rows), count)

    @classmethod
    def of_calibration(cls, calibration: Calibration, denoiser: Denoiser) -> Marginals:
        """Those of the data behind a calibration of a denoiser."""
        if calibration.shape != denoiser.shape:
            shapes = f"shape {calibration.shape}, the model's are {denoiser.shape}"
            raise MismatchError(f"this calibration is of samples of {shapes}")
        check_count(calibration.data_images)
        mean, variance, images = calibration.data_mean, calibration.data_variance, calibration.data_images
        return cls(calibration.correction.bands, mean, variance, calibration.data_variance_se, images)

    def at(self, alpha: float, sigma: float) -> tuple[Tensor, Tensor]:
        """Mean (C, K) and variance (C, bands) of x_t."""
        return alpha * self.mean, (alpha**2 * self.variance + sigma**2).clamp_min(_LEAST)

    def errors_at(self, alpha: float) -> tuple[Tensor, Tensor]:
        """How well the data say so: variance of a coefficient of the mean, and that of the variance."""
        return alpha**2 * self.variance / self.images, (alpha**2 * self.variance_se).square()
