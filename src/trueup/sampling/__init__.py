"""Drawing samples with any solver, before and after calibration, from the same noise."""

from trueup.sampling.dpm_solver import DPMSolver
from trueup.sampling.draw import as_solver, image_maker, pictures, sample, sample_batches
from trueup.sampling.generated import Generated, generate
from trueup.sampling.solver import Solver, register, solver_names, solvers_for

__all__ = ["DPMSolver", "Generated", "Solver", "as_solver", "generate", "image_maker", "pictures"]
__all__ += ["register", "sample", "sample_batches", "solver_names", "solvers_for"]
