"""Fréchet distance between Gaussians fitted to features: FID and sFID."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trueup.errors import DataError
from trueup.metrics.features import FeatureBatch
from trueup.metrics.gaussian import GaussianStatistics, check_pair
from trueup.metrics.measures import measure
from trueup.metrics.reference import Reference
from trueup.statistics import Number

_ROWS = 4096
_STEP = 0.5  # of the quadrature in log t; its error falls as exp(-2 pi^2 / step)


def _too_few(generated: FeatureBatch, reference: Reference) -> list[str]:
    count, dimensions = generated.pooled.shape
    so = f"images are no more than the {dimensions:,} feature dimensions: the covariance is singular and the "
    so += "Fréchet distance biased upward; compare it only at equal counts"
    counts = {"generated": count, "reference": reference.count}
    return [f"{count:,} {whose} {so}" for whose, count in counts.items() if count <= dimensions]


@measure("frechet", "Fréchet distance", notes=_too_few)
def fid(generated: FeatureBatch, reference: Reference) -> Number:
    """FID, of whatever features these are."""
    return frechet(generated.pooled, reference.pooled)


@measure("sfid", "sFID (spatial features)")
def sfid(generated: FeatureBatch, reference: Reference) -> Number | None:
    """The same of features that know where things are."""
    if generated.spatial is None or reference.spatial is None:
        return None
    return frechet(generated.spatial, reference.spatial)


def frechet_distance(mean_a: Tensor, cov_a: Tensor, mean_b: Tensor, cov_b: Tensor) -> float:
    """|mean_a - mean_b|² + tr(cov_a + cov_b - 2 (cov_a cov_b)^½), without taking a matrix root.

    >>> eye = torch.eye(2)
    >>> frechet_distance(torch.zeros(2), eye, torch.tensor([3.0, 0.0]), 4 * eye)
    11.0
    """
    mean_a, cov_a, mean_b, cov_b = (x.double() for x in (mean_a, cov_a, mean_b, cov_b))
    if not mean_a.shape == mean_b.shape == cov_a.shape[1:] == cov_b.shape[1:]:
        shapes = [tuple(x.shape) for x in (mean_a, mean_b, cov_a, cov_b)]
        raise DataError(f"means and covariances of shapes {shapes} do not belong together")
    root = factor(cov_a)
    return _distance(mean_a - mean_b, cov_a, cov_b, torch.linalg.eigvalsh(root.T @ cov_b @ root))


def frechet(features: Tensor, reference: GaussianStatistics) -> Number:
    """Fréchet distance of features (n, d) from a reference, with the jackknife influence of each row.

    Leaving out row i takes a rank-one term from M = Lᵀ Σ L, where Σ_ref = L Lᵀ, and the trace of the root
    of what remains is an integral over log-determinants, which one eigendecomposition of M gives for all
    rows at once:

        tr M^½ - tr (M - u uᵀ)^½ = -1/(2π) ∫ t^(-½) log(1 - uᵀ (M + t)⁻¹ u) dt

    So the n leave-one-out distances are exact, not linearised. Their standard error is about the real scatter
    from n = d up, and errs on the wide side below (benchmarks/intervals.py). The distance's own bias, which
    falls with n, is not part of it.
    """
    statistics = GaussianStatistics().update(features)
    if len(features) < 3:
        raise DataError(f"a Fréchet distance needs three images or more, got {len(features)}")
    check_pair(reference.mean[None], features, 1, "")
    covariance, target = statistics.covariance, reference.covariance
    n, shift, root = len(features), statistics.mean - reference.mean, factor(target)
    eigenvalues, vectors = torch.linalg.eigh(root.T @ covariance @ root)
    value = _distance(shift, covariance, target, eigenvalues)
    seen = eigenvalues > len(eigenvalues) * 1e-15 * eigenvalues.max()  # the rest is rounding
    eigenvalues, project = eigenvalues[seen], root @ vectors[:, seen]
    trace, trace_root = covariance.trace(), eigenvalues.sqrt().sum()
    grow = (n - 1) / (n - 2)  # a covariance of n - 1 rows is divided by n - 2
    influence = []
    for rows in features.split(_ROWS):
        centred = rows.double() - statistics.mean
        size = centred.square().sum(1)
        means = shift.square().sum() - 2 * centred @ shift / (n - 1) + size / (n - 1) ** 2
        traces = grow * (trace - size * n / (n - 1) ** 2)
        removed = _root_removed((centred @ project).square() * (n / (n - 1) ** 2), eigenvalues)
        without = means + traces + target.trace() - 2 * math.sqrt(grow) * (trace_root - removed)
        influence.append((n - 1) * (value - without))
    joined = torch.cat(influence)
    return Number.influenced(value, joined - joined.mean())


def factor(covariance: Tensor) -> Tensor:
    """L with L Lᵀ = covariance: Cholesky's where there is one, else from the positive eigenvalues."""
    root, failed = torch.linalg.cholesky_ex(covariance)
    if not failed:
        return root
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    kept = eigenvalues > len(eigenvalues) * 1e-15 * eigenvalues.max()
    if not kept.any():  # a single point: any one direction, of no width
        return torch.zeros_like(covariance[:, :1])
    return vectors[:, kept] * eigenvalues[kept].sqrt()


def _distance(shift: Tensor, cov_a: Tensor, cov_b: Tensor, eigenvalues: Tensor) -> float:
    roots = eigenvalues.clamp_min(0.0).sqrt().sum()
    return float(shift.square().sum() + cov_a.trace() + cov_b.trace() - 2 * roots)


def _root_removed(weights: Tensor, eigenvalues: Tensor) -> Tensor:
    """tr M^½ - tr (M - u uᵀ)^½ for u with squared coordinates `weights` (n, r) along M's eigenvectors.

    The integral over t, in equal steps of log t. Its integrand falls as t^½ and t^(-½) at the ends.
    """
    if not len(eigenvalues):
        return weights.new_zeros(len(weights))
    low, high = math.log(float(eigenvalues[0])) - 36, math.log(float(eigenvalues[-1])) + 36
    t = torch.arange(low, high, _STEP, dtype=torch.float64, device=weights.device).exp()
    share = weights @ (1 / (eigenvalues[:, None] + t))  # (n, T): uᵀ (M + t)⁻¹ u, which is at most 1
    return torch.log1p(-share.clamp_max(1 - 1e-12)) @ t.sqrt() * (-_STEP / (2 * math.pi))
