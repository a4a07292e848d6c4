"""From a network and images to a correction: measure, then fit."""

from trueup.estimate.families import FAMILIES, Family, register
from trueup.estimate.measuring import default_levels, measure
from trueup.estimate.moments import Moments
from trueup.estimate.solve import calibrate, fit

__all__ = ["FAMILIES", "Family", "Moments", "calibrate", "default_levels", "fit", "measure", "register"]
