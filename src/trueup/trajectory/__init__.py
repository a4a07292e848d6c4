"""Samplers whose states stay on the marginals: measure how they drift, and bring them back."""

from trueup.trajectory.calibrating import calibrate_sampler, check_sampler
from trueup.trajectory.drift import Drift

__all__ = ["Drift", "calibrate_sampler", "check_sampler"]
