"""Which measures apply to the features at hand: the one place that decides it."""

from __future__ import annotations

from trueup.errors import DataError
from trueup.metrics.estimate import Estimate
from trueup.metrics.features import FeatureBatch
from trueup.metrics.frechet import frechet
from trueup.metrics.kernel import kernel_distance
from trueup.metrics.manifold import precision_recall
from trueup.metrics.reference import LIMIT, Reference
from trueup.metrics.score import inception_score

NEIGHBOURS = 3


def measures(generated: FeatureBatch, reference: Reference) -> tuple[dict[str, Estimate], list[str]]:
    """Every measure of generated images' features (n, ...) against a reference, and warnings in words.

    The keys are "frechet", "sfid" (with spatial features), "inception_score" (with logits), "precision",
    "recall" and "kernel". The last three need every pair of images: they see the first 10,000.
    """
    n, dimensions = generated.pooled.shape
    if n <= NEIGHBOURS:
        raise DataError(f"{n} images are too few to measure: give {NEIGHBOURS + 1} or more")
    pooled = generated.pooled.cpu()
    results = {"frechet": frechet(pooled, reference.pooled)}
    if generated.spatial is not None and reference.spatial is not None:
        results["sfid"] = frechet(generated.spatial.cpu(), reference.spatial)
    if generated.logits is not None:
        results["inception_score"] = inception_score(generated.logits.cpu())
    first = pooled[:LIMIT]
    results["precision"], results["recall"] = precision_recall(reference.rows, first, NEIGHBOURS)
    results["kernel"] = kernel_distance(reference.rows, first)
    warnings = [
        f"{count:,} {whose} images are fewer than the {dimensions:,} feature dimensions: the covariance is "
        "singular and the Fréchet distance biased upward; compare it only at equal counts"
        for whose, count in (("generated", n), ("reference", reference.count))
        if count <= dimensions
    ]
    return results, warnings
