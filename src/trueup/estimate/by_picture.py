"""A correction by the bands of a condition that is a picture (docs/math.md, "Pictures as conditions").

An ideal network's residual is uncorrelated with the condition as it is with its output and its input. What
is regressed on is the part of the condition that those two do not say already: the correction of all samples
has seen to the rest, and stays what it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trueup.calibration import Calibration, Correction, OfPictures
from trueup.calibration.pictures import scale
from trueup.errors import DataError
from trueup.estimate.beyond import Regression
from trueup.estimate.moments import DEPARTURE, Moments, U
from trueup.estimate.pictures import Pictures
from trueup.estimate.regress import Centred, divide
from trueup.statistics import enough_folds

ABSENT = 1e-3  # of a condition's power, as of an innovation's: sums of float32 products resolve no less


def fit_pictures(moments: Moments, pooled_fit: Calibration) -> OfPictures | None:
    """What the residual depends on beyond output and input; None if nothing is confirmed."""
    correction = pooled_fit.correction
    keep = torch.isin(moments.t, pooled_fit.t)
    assert isinstance(moments.conditions, Pictures)
    bare = moments.to("cpu").at_levels(keep).pooled()
    sums = moments.conditions.to("cpu").at((bare.rows[0] > 0).any(1), keep)
    bare = bare.used()
    if not enough_folds(bare.rows[0]).all():
        return None
    if not all(part.isfinite().all() for part in sums.tensors):
        raise DataError("a condition holds values that are not finite")
    found = _Beyond.of(bare, sums)
    band = torch.arange(bare.bands.count)
    target = found.target(bare, correction)
    problem = Regression(bare.corrected(correction), band, found.gram, target)
    best = problem.solved(sums.size[0])
    if not best.slopes.any():
        return None
    gains = best.slopes.transpose(1, 2)  # (L, C, M, bands)
    rest = found.rest(bare, gains)
    size = scale(bare.lam)[:, None, None, None]
    rest.support = _agreement(size * best.slopes, found.gram.sum(0) / size[..., None].square())
    count, gain = int(moments.images), problem.total(best.by_fold)
    return OfPictures(sums.size, gains, rest, found.data_mean, count, gain)


class _Beyond(NamedTuple):
    """What a condition says that departure and u do not: g - on_departure departure - on_u u - mean."""

    centred: Centred
    products: Tensor  # (F, L, M, 3, C, bands) of g and residual, departure, u, about the means of all
    on: Tensor  # (2, L, M, C, bands), on departure and on u
    present: Tensor  # (L, M, C, bands), 0 to 1: how much to believe of it, none where next to nothing is left
    mean: Tensor  # (L, M, K) of g
    data_mean: Tensor  # (M, K) the same of all levels
    gram: Tensor  # (F, L, M, M, C, bands) of what is left

    @classmethod
    def of(cls, moments: Moments, sums: Pictures) -> _Beyond:
        centred, bands = Centred(moments), moments.bands
        rows, n = moments.rows[0][..., None, None], centred.n  # (F, L, 1, 1), (L, 1, 1)
        mean = sums.first.sum(0) / n  # (L, M, K)
        shared = torch.einsum("flick,lmk->flmick", centred.first, mean)
        shared = shared + torch.einsum("lick,flmk->flmick", centred.mean, sums.first)
        both = torch.einsum("lick,lmk->lmick", centred.mean, mean)
        products = sums.sums - bands.sum(shared) + rows[..., None, None] * bands.sum(both)
        shared = torch.einsum("flmk,lpk->flmpk", sums.first, mean)
        shared, both = shared + shared.transpose(2, 3), torch.einsum("lmk,lpk->lmpk", mean, mean)
        own = sums.gram - bands.sum(shared) + rows[..., None] * bands.sum(both)  # (F, L, M, M, bands)

        departure, u = products.sum(0)[:, :, DEPARTURE], products.sum(0)[:, :, U]  # (L, M, C, bands)
        vectors = centred.by_fold[:, DEPARTURE:, DEPARTURE:]  # (F, 2, 2, L, C, bands)
        (power, cross), (_, of_u) = vectors.sum(0)
        slope = divide(cross, of_u)  # departure on u
        innovation = (power - slope * cross)[:, None]
        least = 1e-3 * power[:, None]
        seen = divide(innovation - least, least).clamp(0.0, 1.0)  # as in `regress.slopes`
        on_innovation = seen * divide(departure - slope[:, None] * u, torch.maximum(innovation, least))
        on_u = divide(u, of_u[:, None].expand_as(u)) - on_innovation * slope[:, None]
        on = torch.stack([on_innovation, on_u])

        left = own[..., None, :] - torch.einsum("vlpcb,flmvcb->flmpcb", on, products[:, :, :, DEPARTURE:])
        left = left - torch.einsum("vlmcb,flpvcb->flmpcb", on, products[:, :, :, DEPARTURE:])
        left = left + torch.einsum("vlmcb,wlpcb,fvwlcb->flmpcb", on, on, vectors)
        alone = torch.diagonal(own.sum(0), dim1=1, dim2=2).movedim(-1, 1)[:, :, None]  # (L, M, 1, bands)
        share = divide(torch.diagonal(left.sum(0), dim1=1, dim2=2).movedim(-1, 1), alone.expand_as(u))
        present = ((share - ABSENT) / ABSENT).clamp(0.0, 1.0)
        there = (present > 0).to(left)
        gram = left * there[:, :, None] * there[:, None]
        data_mean = sums.first.sum((0, 1)) / moments.rows.sum()
        return cls(centred, products, on, present, mean, data_mean, gram)

    def target(self, moments: Moments, correction: Correction) -> Tensor:
        """Products with what a correction leaves of the residual, (F, L, M, C, bands)."""
        on_u = correction.d + correction.a * moments.filter_gain[:, None, None]
        left = torch.stack([torch.ones_like(on_u), -correction.a, -on_u])  # (3, L, C, bands)
        made = torch.einsum("vlcb,flmvcb->flmcb", left, self.products)
        vectors = self.centred.by_fold[:, :, DEPARTURE:]
        return self.present * (made - torch.einsum("vlcb,wlmcb,fvwlcb->flmcb", left, self.on, vectors))

    def rest(self, moments: Moments, gains: Tensor) -> Correction:
        """What goes with gains (L, C, M, bands), so that all is uncorrelated with output and input."""
        a, on_u = (-torch.einsum("lcmb,lmcb->lcb", gains, on) for on in self.on)
        d = on_u - a * moments.filter_gain[:, None, None]  # departure = eps_hat - k u
        spread, (_, departure, u) = moments.bands.spread, self.centred.mean.unbind(1)
        b = -torch.einsum("lcmk,lmk->lck", spread(gains), self.mean)
        b = b - spread(a) * departure - spread(on_u) * u
        return Correction(moments.lam, b, a, d, moments.bands)


def _agreement(slopes: Tensor, gram: Tensor) -> Tensor:
    """How far what is taken off at neighbouring levels agrees, (L - 1, bands)."""
    between = gram[1:] + gram[:-1]  # (L - 1, M, M, C, bands)

    def product(one: Tensor, other: Tensor) -> Tensor:
        return torch.einsum("lmcb,lmpcb,lpcb->lb", one, between, other)

    squares = product(slopes[1:], slopes[1:]) + product(slopes[:-1], slopes[:-1])
    return divide(2 * product(slopes[1:], slopes[:-1]), squares).clamp(0.0, 1.0)
