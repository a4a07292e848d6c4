"""Measuring and calibrating exact networks on all of a tensor of samples, in one batch."""

from trueup.estimate import fit
from trueup.estimate import measure as measure_images
from trueup.hf import as_denoiser
from trueup.images import Images


def measure(model, x0, *, batch_size=None, images=None, **settings):
    """Moments of a network on samples; what it is used for is right, and quiet."""
    denoiser = as_denoiser(model).with_batch_size(batch_size or min(len(x0), 500))
    return measure_images(denoiser, Images(x0, count=images), trust=True, progress=False, **settings)


def calibrate(model, x0, *, family="spectral", estimator="shrunk", **settings):
    """The calibration that follows from them."""
    return fit(measure(model, x0, **settings), family=family, estimator=estimator)
