"""From a network and images to a correction: measure, then fit."""

from trueup.estimate.collect import default_levels, measure
from trueup.estimate.moments import Moments
from trueup.estimate.solve import ESTIMATORS, FAMILIES, calibrate, fit

__all__ = ["ESTIMATORS", "FAMILIES", "Moments", "calibrate", "default_levels", "fit", "measure"]
