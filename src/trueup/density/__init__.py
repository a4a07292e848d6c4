"""How likely images are under a model: the variational bound, and exactly by the probability flow."""

from trueup.density.result import Likelihood
from trueup.density.run import likelihood
from trueup.density.score_matching import Objectives, objectives

__all__ = ["Likelihood", "Objectives", "likelihood", "objectives"]
