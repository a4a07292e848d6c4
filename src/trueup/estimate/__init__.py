"""From a network and images to a correction: measure, then fit."""

from trueup.estimate.families import FAMILIES, Family, register
from trueup.estimate.measuring import default_levels, measure
from trueup.estimate.moments import Moments
from trueup.estimate.solve import fit

__all__ = ["FAMILIES", "Family", "Moments", "default_levels", "fit", "measure", "register"]
