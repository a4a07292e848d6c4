"""Sample quality: Fréchet, kernel and colour distances, precision and recall, each with its interval."""

from trueup.metrics.colour import colours, wasserstein
from trueup.metrics.estimate import GROUPS, Estimate, interval, paired_difference
from trueup.metrics.features import FeatureBatch, Features, ModuleFeatures, Pixels, load_features
from trueup.metrics.frechet import frechet, frechet_distance
from trueup.metrics.gaussian import GaussianStatistics
from trueup.metrics.kernel import kernel_distance
from trueup.metrics.manifold import precision_recall
from trueup.metrics.measures import measures
from trueup.metrics.reference import Reference
from trueup.metrics.score import InceptionScore, inception_score
from trueup.metrics.store import FeatureStore

__all__ = [
    "GROUPS",
    "Estimate",
    "FeatureBatch",
    "FeatureStore",
    "Features",
    "GaussianStatistics",
    "InceptionScore",
    "ModuleFeatures",
    "Pixels",
    "Reference",
    "colours",
    "frechet",
    "frechet_distance",
    "inception_score",
    "interval",
    "kernel_distance",
    "load_features",
    "measures",
    "paired_difference",
    "precision_recall",
    "wasserstein",
]
