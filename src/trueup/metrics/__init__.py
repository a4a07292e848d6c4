"""Sample quality: Fréchet, kernel and colour distances, precision and recall, each with its interval."""

from trueup.metrics.features import FeatureBatch, Features, ModuleFeatures, Pixels, colours
from trueup.metrics.gaussian import GaussianStatistics
from trueup.metrics.measures import MEASURES, Measure, measure, measures
from trueup.metrics.reference import Reference

# Importing a measure registers it: in the order in which tables show them.
# isort: off
from trueup.metrics.frechet import frechet, frechet_distance
from trueup.metrics.kernel import kernel_distance
from trueup.metrics.score import inception_score
from trueup.metrics.manifold import precision, recall
from trueup.metrics.colour import wasserstein
from trueup.metrics.loading import load_features
# isort: on

__all__ = ["FeatureBatch", "Features", "ModuleFeatures", "Pixels", "colours", "load_features"]
__all__ += ["MEASURES", "GaussianStatistics", "Measure", "Reference", "measure", "measures"]
__all__ += ["frechet", "frechet_distance", "inception_score", "kernel_distance"]
__all__ += ["precision", "recall", "wasserstein"]
