"""What samples say: which gains to attach, which sampler to use, and a solver fitted to the model."""

from trueup.fitting.calibrating import calibrate, labels_of
from trueup.fitting.gains import judge
from trueup.fitting.samplers import Samplers, samplers
from trueup.fitting.solve import fit_solver

__all__ = ["Samplers", "calibrate", "fit_solver", "judge", "labels_of", "samplers"]
