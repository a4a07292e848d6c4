"""From a network and images to a correction: measure, then fit."""

from trueup.estimate.classes import fit
from trueup.estimate.families import FAMILIES, Family, register
from trueup.estimate.levels import default_levels
from trueup.estimate.measuring import classes_of, measure
from trueup.estimate.moments import Moments
from trueup.estimate.shares import merge

__all__ = [
    "FAMILIES",
    "Family",
    "Moments",
    "classes_of",
    "default_levels",
    "fit",
    "measure",
    "merge",
    "register",
]
