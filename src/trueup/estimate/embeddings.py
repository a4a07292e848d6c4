"""A correction linear in what an embedding says (docs/math.md, "Embeddings").

What the residual of the network with the correction of all conditions still depends on is its regression on a
few features of the condition: shrunk, smoothed over levels and confirmed like everything else, by conditions
that it was not fitted on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.calibration import Calibration, Correction, OfConditions
from trueup.estimate.beyond import Regression
from trueup.estimate.conditions import Conditions
from trueup.estimate.moments import Moments
from trueup.estimate.regress import divide
from trueup.statistics import enough_folds


def fit_conditions(moments: Moments, pooled_fit: Calibration) -> OfConditions | None:
    """What the residual depends on beyond the correction of all conditions; None if nothing is confirmed."""
    correction = pooled_fit.correction
    keep = torch.isin(moments.t, pooled_fit.t)
    assert isinstance(moments.conditions, Conditions)
    sums, after = moments.conditions.to("cpu"), moments.to("cpu").at_levels(keep).pooled()
    used = (after.rows[0] > 0).any(1)
    after = after.used().corrected(correction)
    if not enough_folds(after.rows[0]).all():
        return None
    parts = [part[used][:, keep] for part in (sums.total, sums.gram, sums.sums)]
    low = after.bands.coefficients(range(sums.bands))
    problem = _regression(after, correction, low, *parts)
    linear, more = sums.projection.linear, sums.projection.count
    tries = [problem.solved(linear), *([problem.solved(more)] if more > linear else [])]
    best, projection = tries[0], sums.projection.only_linear()
    if len(tries) > 1 and problem.total(tries[1].by_fold - tries[0].by_fold).low > 0:
        best, projection = tries[1], sums.projection
    if not best.slopes.any():
        return None
    maps = torch.zeros(*best.slopes.shape[:3], after.bands.length, dtype=torch.float64)
    maps[..., low] = best.slopes
    gain = problem.total(best.by_fold)
    return OfConditions(projection, maps, _agreement(maps, after.bands), sums.conditions, gain)


def _regression(
    after: Moments, correction: Correction, low: Tensor, total: Tensor, gram: Tensor, sums: Tensor
) -> Regression:
    """Of what a correction leaves, at some coefficients."""
    band, a = after.bands.band[low], correction.a
    d = correction.d + a * after.filter_gain[:, None, None]
    on_o, on_u, b = (part[:, None] for part in (a[..., band], d[..., band], correction.b[..., low]))
    residual, departure, u = sums.unbind(3)
    target = residual - on_o * departure - on_u * u - total[..., None, None] * b
    return Regression(after, band, gram[..., None, None], target)


def _agreement(maps: Tensor, bands: Bands) -> Tensor:
    """How far the maps of neighbouring levels agree, (L - 1, bands); see `trueup.estimate.solve.support`."""
    squares = bands.sum(maps.square().sum((1, 2)))
    products = bands.sum((maps[1:] * maps[:-1]).sum((1, 2)))
    return divide(2 * products, squares[1:] + squares[:-1]).clamp(0.0, 1.0)
