"""A solver fitted to a model, as a calibration keeps it: `trueup.fitted`, which schedulers know as well."""

from trueup.fitted import FittedSolver

__all__ = ["FittedSolver"]
