"""Drawing samples with any solver, before and after calibration, from the same noise."""

from trueup.sampling.dpm_solver import DPMSolver
from trueup.sampling.draw import as_solver, pictures, sample, sample_batches
from trueup.sampling.generated import Generated, generate

__all__ = ["DPMSolver", "Generated", "as_solver", "generate", "pictures", "sample", "sample_batches"]
