"""A calibration whose correction is known, with the moments of some images: nothing is estimated."""

import torch

from trueup.calibration import Calibration, Correction, Evidence
from trueup.images import open_images
from trueup.statistics import Number
from trueup.trajectory.marginals import Marginals

LEVELS = 41


def calibration_of(denoiser, images, *, shift=0.0, y=None, generated=None) -> Calibration:
    """It takes `shift` off every value of eps, at every noise level."""
    data = Marginals.of_data(open_images(images, denoiser))
    process, bands = denoiser.process, data.bands
    ends = (float(process.lam(t)) for t in (process.t_min, process.t_max))
    t = torch.unique(process.snap(process.t_of_lam(torch.linspace(*ends, LEVELS, dtype=torch.float64))))
    off = bands.dct(torch.full(denoiser.shape, shift, dtype=torch.float64)).flatten(1)  # (C, K)
    none = torch.zeros(len(t), denoiser.shape[0], bands.count, dtype=torch.float64)
    zeros = torch.zeros(len(t), dtype=torch.float64)
    binding = denoiser.binding(y)
    return Calibration(
        correction=Correction(process.lam(t), off.expand(len(t), *off.shape).clone(), none, none, bands),
        t=t,
        shape=denoiser.shape,
        evidence=Evidence(
            images=data.images,
            folds=16,
            dimensions=off.numel(),
            loss=Number(zeros + 1, zeros, zeros, zeros + 2),
            eta2=Number(*[zeros] * 4),
            gain=Number(*[zeros] * 4),
            shift_se=zeros,
            scale=torch.ones(len(t), bands.count, dtype=torch.float64),
            bound_gain=Number(0.0, 0.0, 0.0, 0.0),
            shift_bound_gain=Number(0.0, 0.0, 0.0, 0.0),
        ),
        family="spectral",
        estimator="shrunk",
        data_mean=data.mean,
        data_variance=data.variance,
        data_variance_se=data.variance_se,
        data_images=data.images,
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
