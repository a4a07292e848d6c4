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
from trueup.estimate.stored import PAIRS
from trueup.statistics import enough_folds

ABSENT = 1e-3  # of a condition's power, as of an innovation's: sums of float32 products resolve no less

ROUNDING = 1e-5  # of a sum of float32 products


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
    problem = Regression(bare.corrected(correction), band, found.gram, found.target(bare, correction))
    best = problem.solved(sums.size[0])
    if not best.slopes.any():
        return None
    level = scale(bare.lam)[:, None, None, None]
    support = _agreement(level * best.slopes, found.gram.sum(0) / level[..., None].square())
    square = torch.einsum("lmcb,lmpcb,lpcb->l", best.slopes, found.gram.sum(0), best.slopes)
    gains = torch.einsum("mib,licb->lcmb", found.directions, best.slopes)
    centred, used = found.centred, bare.bands.spread(gains.flatten(0, 2).any(0).to(gains))
    return OfPictures(
        lam=bare.lam,
        gains=gains,
        on=found.on.transpose(2, 3),
        known=used * centred.mean[:, DEPARTURE:].transpose(0, 1),
        mean=used * sums.first.sum((0, 1)) / bare.rows.sum(),
        size=square / centred.n[:, 0, 0],
        support=support,
        bands=bare.bands,
        conditions=int(moments.images),
        gain=problem.total(best.by_fold),
    )


class _Beyond(NamedTuple):
    """What a condition says that departure and u do not: y - on_departure departure - on_u u - mean.

    Channels may be nearly one another in it: slopes are found for the directions in which it varies.
    """

    centred: Centred
    products: Tensor  # (F, L, M, 3, C, bands) of y and residual, departure, u, about the means of all
    on: Tensor  # (2, L, M, C, bands), on departure and on u
    directions: Tensor  # (M, I, bands), of channels
    present: Tensor  # (L, I, C, bands), 0 to 1: none where next to nothing is left
    gram: Tensor  # (F, L, I, I, C, bands) of what is left

    @classmethod
    def of(cls, moments: Moments, sums: Pictures) -> _Beyond:
        centred, bands = Centred(moments), moments.bands
        rows, n = moments.rows[0][..., None, None], centred.n  # (F, L, 1, 1), (L, 1, 1)
        mean = sums.first.sum(0) / n  # (L, M, K)
        products, own = sums.sums.clone(), sums.gram.clone()
        for m, (first, of_all) in enumerate(zip(sums.first.unbind(2), mean.unbind(1), strict=True)):
            one, other = (part[:, :, None, None] for part in (first, of_all[None]))  # with vectors
            products[:, :, m] -= bands.sum(centred.first * other) + bands.sum(centred.mean * one)
            products[:, :, m] += rows[..., None] * bands.sum(centred.mean * other)
            one, other = (part[:, :, None] for part in (first, of_all[None]))  # with one another
            own[:, :, m] -= bands.sum(sums.first * other) + bands.sum(mean * one)
            own[:, :, m] += rows * bands.sum(mean * other)

        departure, u = products.sum(0)[:, :, DEPARTURE], products.sum(0)[:, :, U]  # (L, M, C, bands)
        vectors = centred.by_fold[:, DEPARTURE:, DEPARTURE:]  # (F, 2, 2, L, C, bands)
        (power, cross), (_, of_u) = vectors.sum(0)
        slope = divide(cross, of_u)  # departure on u
        innovation = (power - slope * cross)[:, None]
        whole = centred.second[:, :, PAIRS.index((DEPARTURE, DEPARTURE))].sum(0)  # with its mean
        least = (ABSENT * power + ROUNDING * whole)[:, None]
        seen = divide(innovation - least, least).clamp(0.0, 1.0)  # as in `regress.slopes`
        on_innovation = seen * divide(departure - slope[:, None] * u, torch.maximum(innovation, least))
        on_u = divide(u, of_u[:, None].expand_as(u)) - on_innovation * slope[:, None]
        on = torch.stack([on_innovation, on_u])

        left = own[..., None, :] - torch.einsum("vlpcb,flmvcb->flmpcb", on, products[:, :, :, DEPARTURE:])
        left = left - torch.einsum("vlmcb,flpvcb->flmpcb", on, products[:, :, :, DEPARTURE:])
        left = left + torch.einsum("vlmcb,wlpcb,fvwlcb->flmpcb", on, on, vectors)
        directions = _directions(left.sum((0, 1)).mean(2), own.sum((0, 1)), sums.gram.sum((0, 1)))
        left = torch.einsum("mib,pjb,flmpcb->flijcb", directions, directions, left)
        alone = torch.einsum("mib,lmpb,pib->lib", directions, own.sum(0), directions)[:, :, None]
        share = divide(torch.diagonal(left.sum(0), dim1=1, dim2=2).movedim(-1, 1), alone)
        present = ((share - ABSENT) / ABSENT).clamp(0.0, 1.0)
        there = (present > 0).to(left)
        gram = left * there[:, :, None] * there[:, None]
        # What is not resolved is as if it were there: else differences of rounding errors decide.
        ridge = ABSENT * (rows / n)[..., None] * (alone * there)  # (F, L, I, C, bands)
        gram = gram + torch.diag_embed(ridge.movedim(2, -1)).movedim((-2, -1), (2, 3))
        return cls(centred, products, on, directions, present, gram)

    def target(self, moments: Moments, correction: Correction) -> Tensor:
        """Products with what a correction leaves of the residual, (F, L, I, C, bands)."""
        on_u = correction.d + correction.a * moments.filter_gain[:, None, None]
        left = torch.stack([torch.ones_like(on_u), -correction.a, -on_u])  # (3, L, C, bands)
        made = torch.einsum("vlcb,flmvcb->flmcb", left, self.products)
        vectors = self.centred.by_fold[:, :, DEPARTURE:]
        made = made - torch.einsum("vlcb,wlmcb,fvwlcb->flmcb", left, self.on, vectors)
        return self.present * torch.einsum("mib,flmcb->flicb", self.directions, made)


def _directions(left: Tensor, own: Tensor, power: Tensor) -> Tensor:
    """Principal directions of what is left of channels, in units of their own spread, (M, M, bands) each.

    power: with their means, next to which a channel that does not vary is rounding.
    """
    size, whole = (torch.diagonal(part, dim1=0, dim2=1).T for part in (own, power))  # (M, bands)
    varies = size > ROUNDING * whole
    unit = torch.where(varies, 1 / size.clamp_min(1e-300).sqrt(), torch.zeros_like(size))
    matrix = (left * unit[:, None] * unit[None]).movedim(-1, 0)
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    known = ((values - ABSENT) / ABSENT).clamp(0.0, 1.0)  # (bands, I): the others are rounding
    return unit[:, None] * (vectors * known[:, None]).movedim(0, -1)  # (M, I, bands)


def _agreement(slopes: Tensor, gram: Tensor) -> Tensor:
    """How far what is taken off at neighbouring levels agrees, (L - 1, bands)."""
    between = gram[1:] + gram[:-1]  # (L - 1, M, M, C, bands)

    def product(one: Tensor, other: Tensor) -> Tensor:
        return torch.einsum("lmcb,lmpcb,lpcb->lb", one, between, other)

    squares = product(slopes[1:], slopes[1:]) + product(slopes[:-1], slopes[:-1])
    return divide(2 * product(slopes[1:], slopes[:-1]), squares).clamp(0.0, 1.0)
