"""A correction linear in what an embedding says (docs/math.md, "Embeddings").

What the residual of the network with the correction of all conditions still depends on is its regression on a
few features of the condition: shrunk, smoothed over levels and confirmed like everything else, by conditions
that it was not fitted on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.calibration import Calibration, Correction, OfConditions
from trueup.estimate import confirm
from trueup.estimate.confirm import HeldOut
from trueup.estimate.moments import Moments
from trueup.estimate.regress import divide
from trueup.estimate.shrink import Noisy, kernel_weights, shrinkers
from trueup.estimate.solve import INFLATION_WIDTH, PAIRED_FOLDS
from trueup.statistics import Number, effective_folds, enough_folds, mean_and_error, trapezoid_weights

RIDGE = 1e-3  # of a feature's own power


def fit_conditions(moments: Moments, pooled_fit: Calibration) -> OfConditions | None:
    """What the residual depends on beyond the correction of all conditions; None if nothing is confirmed."""
    correction = pooled_fit.correction
    keep = torch.isin(moments.t, pooled_fit.t)
    assert moments.conditions is not None
    sums, after = moments.conditions.to("cpu"), moments.to("cpu").at_levels(keep).pooled()
    used = (after.rows[0] > 0).any(1)
    after = after.used().corrected(correction)
    if not enough_folds(after.rows[0]).all():
        return None
    parts = [part[used][:, keep] for part in (sums.total, sums.gram, sums.sums)]
    problem = _Regression.of(after, correction, sums.bands, *parts)
    linear, more = sums.projection.linear, sums.projection.count
    tries = [problem.solved(linear), *([problem.solved(more)] if more > linear else [])]
    best, projection = tries[0], sums.projection.only_linear()
    if len(tries) > 1:
        value, error = problem.total(tries[1].by_fold - tries[0].by_fold)
        if Number.of(value, PAIRED_FOLDS**0.5 * error, problem.folds).low > 0:
            best, projection = tries[1], sums.projection
    if not best.maps.any():
        return None
    value, error = problem.total(best.by_fold)
    gain = Number.of(value, PAIRED_FOLDS**0.5 * error, problem.folds)
    maps = torch.zeros(*best.maps.shape[:3], after.bands.length, dtype=torch.float64)
    maps[..., problem.low] = best.maps
    return OfConditions(projection, maps, _agreement(maps, after.bands), sums.conditions, gain)


class _Solved(NamedTuple):
    maps: Tensor  # (L, Q, C, kept), shrunk and confirmed
    by_fold: Tensor  # (F, L) what they took off the loss, held out


@dataclass(eq=False, repr=False)
class _Regression:
    """The residual of a corrected network on features, at the lowest frequencies."""

    moments: Moments  # of the corrected network
    low: Tensor  # (kept,) coefficients
    band: Tensor  # (kept,) their bands
    gram: Tensor  # (F, L, Q, Q)
    target: Tensor  # (F, L, Q, C, kept) products of features and residual

    @classmethod
    def of(
        cls, moments: Moments, correction: Correction, bands: int, total: Tensor, gram: Tensor, sums: Tensor
    ) -> _Regression:
        low = moments.bands.coefficients(range(bands))
        band = moments.bands.band[low]
        a = correction.a
        d = correction.d + a * moments.filter_gain[:, None, None]
        on_o, on_u, b = (part[:, None] for part in (a[..., band], d[..., band], correction.b[..., low]))
        residual, departure, u = sums.unbind(3)
        target = residual - on_o * departure - on_u * u - total[..., None, None] * b
        return cls(moments, low, band, gram, target)

    @property
    def folds(self) -> float:
        return float(effective_folds(self.moments.rows[0]).min())

    def total(self, by_fold: Tensor) -> tuple[float, float]:
        """Gain of the likelihood bound and its standard error."""
        value, error = mean_and_error(by_fold, self.moments.rows[0], trapezoid_weights(self.moments.lam))
        return float(value), float(error)

    def solved(self, features: int) -> _Solved:
        """By the first so many of the features."""
        gram, target = self.gram[..., :features, :features], self.target[:, :, :features]
        whole, all_of = gram.sum(0), target.sum(0)
        inverse = _inverse(whole)
        maps = torch.einsum("lpq,lqck->lpck", inverse, all_of)
        rest = target - torch.einsum("flpq,lqck->flpck", gram, maps)
        influence = torch.einsum("lpq,flqck->flpck", inverse, rest)  # (F, L, Q, C, kept)
        noise = confirm.one_coefficient(self.moments)  # (L, bands)
        operators = [
            self._operator(maps[:, q], influence[:, :, q], noise * inverse[:, q, q, None])
            for q in range(features)
        ]

        def shrunk(maps: Tensor) -> Tensor:
            made = torch.zeros_like(maps)
            for q, operator in enumerate(operators):
                for k in self.band.unique().tolist():
                    at = self.band == k
                    made[:, q][..., at] = torch.einsum("lm,mck->lck", operator[k], maps[:, q][..., at])
            return made

        product, square = [], []
        for own, own_target in zip(gram, target, strict=True):
            tried = shrunk(torch.einsum("lpq,lqck->lpck", _inverse(whole - own), all_of - own_target))
            product.append(self._by_band((tried * own_target).sum(1)))
            square.append(self._by_band((tried * torch.einsum("lpq,lqck->lpck", own, tried)).sum(1)))
        held = HeldOut(torch.stack(product), torch.stack(square))
        final = shrunk(maps)
        kept = confirm.confirmed_scale(held, self.moments, varying=True)
        size = self._by_band((final * torch.einsum("lpq,lqck->lpck", whole, final)).sum(1))
        realised = confirm.realised(held, size, self.moments, kept)
        return _Solved(final * kept[:, None, None, self.band], held.gain(realised).sum(2))

    def _operator(self, value: Tensor, influence: Tensor, model: Tensor) -> Tensor:
        """Shrinking of one feature's maps (L, C, kept), with what each fold contributed (F, L, C, kept)."""
        folds, bands = len(influence), int(self.band.max()) + 1
        at = [self.band == k for k in range(bands)]
        robust = torch.stack([influence[..., one].square().sum(0).mean((1, 2)) for one in at], 1)
        weights = kernel_weights(self.moments.lam, INFLATION_WIDTH)
        model = model[:, :bands].clamp_min(1e-300)  # (L, bands)
        variance = model * (weights @ (robust * folds / (folds - 1) / model)).clamp_min(1.0)
        sd = variance.sqrt()
        deviations = [(influence[..., one] / sd[:, k, None, None]).flatten(2) for k, one in enumerate(at)]
        gram = torch.stack([torch.einsum("lck,mck->lm", value[..., one], value[..., one]) for one in at])
        return shrinkers([Noisy(gram, sd.T, [part * folds**0.5 for part in deviations])], self.moments.lam)[0]

    def _by_band(self, x: Tensor) -> Tensor:
        """(L, C, kept) -> (L, bands)."""
        made = torch.zeros(x.shape[0], self.moments.bands.count, dtype=torch.float64)
        return made.index_add_(1, self.band, x.sum(1))


def _inverse(gram: Tensor) -> Tensor:
    """With a ridge that is nothing next to what there is of each feature."""
    size = torch.diagonal(gram, dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype)
    return torch.linalg.inv(gram + RIDGE * size.clamp_min(1e-300) * eye)


def _agreement(maps: Tensor, bands: Bands) -> Tensor:
    """How far the maps of neighbouring levels agree, (L - 1, bands); see `trueup.estimate.solve.support`."""
    squares = bands.sum(maps.square().sum((1, 2)))
    products = bands.sum((maps[1:] * maps[:-1]).sum((1, 2)))
    return divide(2 * products, squares[1:] + squares[:-1]).clamp(0.0, 1.0)
