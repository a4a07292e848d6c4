"""From moments to a calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trueup.bands import band_variance
from trueup.calibration import Calibration, Correction, Evidence, Innovation
from trueup.calibration.correction import CHANGED
from trueup.calibration.drawn import small_maps
from trueup.errors import Argument, TrueupError
from trueup.estimate import confirm
from trueup.estimate.families import FAMILIES, Family, Slopes
from trueup.estimate.moments import Moments, U
from trueup.estimate.regress import Centred, Mean, Slope, divide, mean_residual
from trueup.estimate.shrink import Noisy, kernel_weights, shrinkers
from trueup.statistics import (
    Number,
    effective_folds,
    enough_folds,
    mean_and_error,
    squared_norm,
    trapezoid_weights,
)

ESTIMATORS = ("plain", "paired", "regressed", "shrunk")
MOST_DIGESTS = 2**19  # images whose digests a file keeps; more would make it large
PAIRED_FOLDS = 1.5  # f scores what g fitted and g what f fitted: between 1 (all signal) and 2 (all noise)
INFLATION_WIDTH = 1.0  # lam over which the excess of fold scatter over model variance is averaged


def fit_pooled(moments: Moments, *, family: str, estimator: str) -> Calibration:
    """Fit a calibration to moments of all classes together."""
    check_names(family, estimator)
    if moments.images == 0:
        raise TrueupError("these moments hold no samples")
    noted, moments = moments, prepared(moments)
    kind, rows = FAMILIES[family], moments.rows[0]  # (F, L)
    folds, confirmable = effective_folds(rows), bool(enough_folds(rows).all())  # (L,)

    centred = Centred(moments)
    shrink = shrinkage([centred], kind)[0] if estimator == "shrunk" else None

    def once(part: Moments) -> Correction:
        return estimate(Centred(part), kind, estimator, shrink)

    correction = estimate(centred, kind, estimator, shrink)
    shift = _shift(centred, moments.images)
    residual = _summed(centred, shift)
    held = confirm.cross_validate(moments, residual, once) if moments.folds > 1 else None
    scale = torch.ones(moments.levels, moments.bands.count, dtype=torch.float64)
    if estimator == "shrunk":
        confirmed, scale = 0 * scale, 0 * scale
        if held is not None and confirmable:
            confirmed = confirm.confirmed_scale(held, moments)
            scale = confirm.realised_scale(held, correction, moments, confirmed)
        correction = correction.scaled(confirmed)
    correction.support = support(correction, moments)
    correction.innovation = innovation(centred, kind, correction)
    weights = trapezoid_weights(moments.lam)

    nothing = torch.full((moments.levels,), torch.nan, dtype=torch.float64)
    gain, bound = Number(nothing, nothing, nothing, nothing), Number(math.nan)
    if held is not None:
        by_fold = held.gain(scale).sum(2)  # (F, L)
        known = PAIRED_FOLDS**0.5 if confirmable else math.nan
        value, error = mean_and_error(by_fold, rows)
        gain = Number.of(value, known * error, folds)
        if moments.levels > 1:  # one level says nothing about an integral over all of them
            value, error = mean_and_error(by_fold, rows, weights)  # equation 26
            bound = Number.of(float(value), known * float(error), float(folds.min()))
    gram = torch.einsum("flck,glck->lfg", residual, residual)
    pairs = (rows.sum(0).square() - rows.square().sum(0)).clamp_min(1e-300)  # (L,)
    average = rows.mean(1)  # (F,)
    level = (average.sum().square() - average.square().sum()) / pairs  # as if all levels had the same samples
    evidence = Evidence(
        images=noted.images,
        folds=int(folds.min() + 1e-9),
        dimensions=math.prod(moments.shape),
        loss=Number.of(*mean_and_error(centred.second[:, :, 0].sum((2, 3)), rows), folds),
        eta2=squared_norm(gram, rows.T),
        gain=gain,
        bound_gain=bound,
        shift_bound_gain=squared_norm(torch.einsum("l,lfg->fg", weights * level, gram), average)[()],
        shift_se=(shift.variance * moments.bands.kept).sum((1, 2)).sqrt(),
        scale=scale,
        expected=small_maps(shift.value, moments.bands) if len(moments.shape) == 3 else None,
    )
    used = noted.used()
    first, second, data_rows = (v[0].cpu() for v in (used.data_first, used.data_second, used.data_rows))
    variance, variance_se = band_variance(moments.bands, first, second, data_rows)
    return Calibration(
        correction=correction,
        t=moments.t,
        shape=moments.shape,
        evidence=evidence,
        family=family,
        estimator=estimator,
        data_mean=first.sum(0) / data_rows.sum().clamp_min(1e-300),
        data_variance=variance,
        data_variance_se=variance_se,
        data_images=noted.data_images,
        data_digests=noted.digests if len(noted.digests) <= MOST_DIGESTS else noted.digests[:0],
        provenance=dict(moments.provenance),
    )


def _shift(centred: Centred, images: int) -> Mean:
    """The mean residual, by an estimate that few images do not upset."""
    return mean_residual(centred, "paired" if images < 8 else "shrunk", *_no_slopes(centred))


def _summed(centred: Centred, mean: Mean) -> Tensor:
    """Fold sums of a residual less its known-mean controls, (F, L, C, K).

    What is known of the data's mean is known of each fold's own images: were it known of all of them, every
    fold would share its error, and products of different folds would take that for a residual.
    """
    moments = centred.moments
    first, rows = moments.data_first.sum(0), moments.data_rows.sum(0)[:, None, None]
    own = divide(first, rows.expand_as(first))  # (F, C, K)
    known = centred.rows[:, :, None, None] * moments.bands.spread(mean.known) * own[:, None]
    return centred.fold_sums(mean.combination) + known


def known_residual(centred: Centred, images: int) -> Tensor:
    """Fold sums of the residual with the least noise, (F, L, C, K)."""
    return _summed(centred, _shift(centred, images))


def prepared(moments: Moments) -> Moments:
    """All classes and only what can be fitted to, of equal weight."""
    return _measured(moments.to("cpu").used()).of_equal_weight()


def _measured(moments: Moments) -> Moments:
    """The levels with enough folds to say how sure they are; all, where none has."""
    enough = enough_folds(moments.rows[0])
    return moments if enough.all() or not enough.any() else moments.at_levels(enough).used()


def support(correction: Correction, moments: Moments) -> Tensor:
    """How far the corrections c_i, c_j of neighbouring levels agree, band by band, (L - 1, bands).

    That is 2 E[c_i c_j] / (E c_i^2 + E c_j^2), with E over the data at both levels: 1 if they are the same,
    and 0 if one is nothing or they are opposed. Were what they have in common c and the rest independent, it
    would be the share of c in each, and so how much of their mean to keep where there is no third.
    """
    first, second = torch.arange(moments.levels - 1), torch.arange(1, moments.levels)
    n = moments.rows[0].sum(0)[:, None].clamp_min(1e-300)  # (L, 1)

    def norm(sign: float) -> Tensor:
        """Mean square of c_i + sign c_j over the data at either level, (L - 1, bands)."""
        b, a, d = (part[first] + sign * part[second] for part in (correction.b, correction.a, correction.d))
        squares = []
        for levels in (first, second):
            made = Correction(moments.lam[levels], b, a, d, moments.bands)
            squares.append(confirm.score(moments.at_levels(levels), made).square.sum(0) / n[levels])
        return squares[0] + squares[1]

    # |c_i + c_j|^2 = S + 2P and |c_i - c_j|^2 = S - 2P, with S the sum of squares and P the product: P/(S/2).
    total, apart, least = norm(1.0), norm(-1.0), confirm.NOTHING**2 * confirm.one_coefficient(moments) / n
    return divide(total - apart, total + apart + least[first] + least[second]).clamp(0.0, 1.0)


def check_names(family: str, estimator: str) -> None:
    """Raise for a family or an estimator that is not known, or that do not go together."""
    for what, name, known in (("family", family, FAMILIES), ("estimator", estimator, ESTIMATORS)):
        if name not in known:
            raise TrueupError(f"unknown {what} {name!r}; choose from {', '.join(known)}")
    if FAMILIES[family].slopes is not None and estimator == "plain":
        problem = "plain is the paper's estimator of a constant shift"
        raise TrueupError(problem, "use {} with it", Argument("family", "shift"))


def _no_slopes(centred: Centred) -> tuple[Tensor, Tensor]:
    zero = torch.zeros_like(centred.second[0, :, 0])  # (L, C, bands)
    return zero, zero


@dataclass
class Shrinkage:
    """The operators of equation 21, one (L, L) matrix per band, for the two slopes and the mean."""

    innovation: Tensor
    u: Tensor
    mean: Tensor


def estimate(centred: Centred, family: Family, estimator: str, shrink: Shrinkage | None) -> Correction:
    """Slopes and mean residual, shrunk and smoothed where operators are given; equations 14 to 18 and 21."""
    moments = centred.moments
    a, d = _no_slopes(centred)
    if family.slopes is not None and moments.images > 2:
        a, d = _gains(family.slopes(centred), shrink)
    b = torch.zeros_like(centred.first[0, :, 0])
    if family.constant:
        b = mean_residual(centred, estimator, a, d).value
        for index, operator in zip(moments.bands.members, shrink.mean if shrink else (), strict=False):
            b[..., index] = torch.einsum("lm,mck->lck", operator, b[..., index])
    return Correction(moments.lam, b, a, d, moments.bands)


def _gains(found: Slopes, shrink: Shrinkage | None) -> tuple[Tensor, Tensor]:
    """a and d of the slopes on innovation and u, shrunk where operators are given."""
    innovation, on_u, rho = found
    a, on_input = innovation.value, on_u.value
    if shrink is not None:
        a = torch.einsum("blm,mcb->lcb", shrink.innovation, a)
        on_input = torch.einsum("blm,mcb->lcb", shrink.u, on_input)
    return a, on_input - rho * a


def of_network(centred: Centred, family: Family) -> Innovation:
    """The innovation in every band."""
    assert family.slopes is not None
    rho = family.slopes(centred)[2]
    return Innovation(rho, centred.mean_of(centred.eps_hat() - rho * centred.unit(U)))


def innovation(
    centred: Centred, family: Family, correction: Correction, known: Innovation | None = None
) -> Innovation | None:
    """What a multiplies, in the bands where it is not 0: of the network, so neither shrunk nor scaled.

    known: instead of what these moments say of it.
    """
    if family.slopes is None or not correction.a.any():
        return None
    used = correction.a.any(0).any(0).to(torch.float64)  # (bands,)
    known = of_network(centred, family) if known is None else known
    found = Innovation(used * known.rho, centred.moments.bands.spread(used) * known.mean)
    changed = [replace(correction, innovation=found).with_gains(form) for form in CHANGED]
    found.support = torch.stack([support(form, centred.moments) for form in changed])
    return found


def shrinkage(parts: Sequence[Centred], family: Family) -> list[Shrinkage]:
    """Choose the operators from all images; held-out fits reuse them on their own estimates.

    Choosing them anew without each fold would let a fold's own support decide how much of it is kept, which
    evens out what the folds say and makes them look more certain than they are. Of several classes, all are
    looked at together (`shrinkers`).
    """
    moments = parts[0].moments
    nothing = torch.zeros(moments.bands.count, moments.levels, moments.levels, dtype=torch.float64)
    shrink = [Shrinkage(nothing, nothing, nothing) for _ in parts]
    if min(part.moments.folds for part in parts) < 2:
        return shrink
    gains = [_no_slopes(part) for part in parts]
    if family.slopes is not None and min(part.moments.images for part in parts) > 2:
        found = [family.slopes(part) for part in parts]
        for name, direction in (("innovation", 0), ("u", 1)):
            noisy = [_noisy_slope(f[direction], p.moments) for f, p in zip(found, parts, strict=True)]  # type: ignore[arg-type]
            for own, operator in zip(shrink, shrinkers(noisy, moments.lam), strict=True):
                setattr(own, name, operator)
        gains = [_gains(f, own) for f, own in zip(found, shrink, strict=True)]
    means = [_noisy_mean(mean_residual(p, "shrunk", *g), p) for p, g in zip(parts, gains, strict=True)]
    for own, operator in zip(shrink, shrinkers(means, moments.lam), strict=True):
        own.mean = operator
    return shrink


def _noisy_slope(slope: Slope, moments: Moments) -> Noisy:
    """One direction's slopes, all bands at once; channels are the columns."""
    folds = moments.folds
    model = slope.variance.mean(1)  # (L, bands)
    robust = slope.influence.square().sum(0).mean(1) * folds / (folds - 1)
    weights = kernel_weights(moments.lam, INFLATION_WIDTH)
    excess = torch.where(model > 0, robust / model.clamp_min(1e-300), torch.ones_like(model))
    variance = model * (weights @ excess).clamp_min(1.0)
    sd = torch.where(variance > 0, variance, torch.ones_like(variance)).sqrt().T  # absent slopes are zero
    influence = slope.influence / sd.T[:, None, :] * folds**0.5  # (F, L, C, bands)
    return Noisy(torch.einsum("lcb,mcb->blm", slope.value, slope.value), sd, [*influence.unbind(-1)])


def _noisy_mean(mean: Mean, centred: Centred) -> Noisy:
    """The map, band by band; a band's coefficients and channels are the columns."""
    moments = centred.moments
    rows = centred.rows[:, :, None, None]
    deviations = _summed(centred, mean) - rows * mean.value  # (F, L, C, K)
    sd = mean.variance.mean(1).clamp_min(1e-300).sqrt()  # (L, bands)
    # Sums of rows_f samples: divided by their own standard deviation they are of size one.
    size = (rows * centred.n).sqrt() * sd[:, None, :]
    deviations = divide(deviations, moments.bands.spread(size))
    members = moments.bands.members
    by_band = [deviations[..., index].flatten(2) for index in members]
    values = [mean.value[..., index].flatten(1) for index in members]  # (L, C * size)
    return Noisy(torch.stack([value @ value.T for value in values]), sd.T, by_band)
