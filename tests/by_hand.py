"""A calibration whose correction is known, with the moments of some images: nothing is estimated."""

import torch

from trueup.bands import Bands, band_variance
from trueup.calibration import Calibration, Correction, Evidence
from trueup.images import open_images
from trueup.statistics import Number

LEVELS = 41


def calibration_of(denoiser, images, *, shift=0.0, y=None, generated=None) -> Calibration:
    """It takes `shift` off every value of eps, at every noise level."""
    process, bands = denoiser.process, Bands(denoiser.shape[1:])
    x0 = torch.cat([batch.x0 for batch in open_images(images, denoiser).batches(64, unique=True)])
    z = bands.dct(x0.double().cpu()).flatten(2)  # (n, C, K)
    variance, variance_se = band_variance(bands, z, bands.sum(z.square()), torch.ones(len(z)).double())
    ends = (float(process.lam(t)) for t in (process.t_min, process.t_max))
    t = torch.unique(process.snap(process.t_of_lam(torch.linspace(*ends, LEVELS, dtype=torch.float64))))
    off = bands.dct(torch.full(denoiser.shape, shift, dtype=torch.float64)).flatten(1)  # (C, K)
    none = torch.zeros(len(t), denoiser.shape[0], bands.count, dtype=torch.float64)
    zeros, wholly = (f(len(t), dtype=torch.float64) for f in (torch.zeros, torch.ones))
    support = torch.ones(len(t) - 1, bands.count, dtype=torch.float64)
    off = off.expand(len(t), *off.shape).clone()  # (L, C, K)
    binding = denoiser.binding(y)
    return Calibration(
        correction=Correction(process.lam(t), off, none, none, bands, support),
        t=t,
        shape=denoiser.shape,
        evidence=Evidence(
            images=len(z),
            folds=16,
            dimensions=off[0].numel(),
            loss=Number(wholly, zeros, wholly, wholly),
            eta2=Number(*[zeros] * 4),
            gain=Number(*[zeros] * 4),
            shift_se=zeros,
            scale=torch.ones(len(t), bands.count, dtype=torch.float64),
            bound_gain=Number(0.0, 0.0, 0.0, 0.0),
            shift_bound_gain=Number(0.0, 0.0, 0.0, 0.0),
        ),
        family="spectral",
        estimator="shrunk",
        data_mean=z.mean(0),
        data_variance=variance,
        data_variance_se=variance_se,
        data_images=len(z),
        data_digests=torch.zeros(0, dtype=torch.int64),
        provenance={
            "model": denoiser.description,
            "weights": denoiser.fingerprint(),
            "process": process.settings(),
            "parametrization": denoiser.parametrization.settings(),
            "binding": None if binding is None else binding.settings(),
            "data_range": None if denoiser.data_range is None else list(denoiser.data_range),
            "seed": 0,
            "transform": {},
            "generated": generated,
        },
    )
