"""A correction for every class, drawn towards that of all classes as far as its own images do not say more.

The network with the correction of all classes is a network like any other, and its moments are known
(`Moments.corrected`): what a class differs by is fitted to those. How much classes differ at all, and how
smoothly over noise levels, is found from all of them together; what is kept of each depends on its own noise
(docs/math.md, "Classes"). So a class of few images has the correction of all, and one of many its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trueup.calibration import Calibration, Correction, Innovation, OfClass, OfConditions, OfPictures
from trueup.estimate import confirm
from trueup.estimate.by_picture import fit_pictures
from trueup.estimate.confirm import HeldOut
from trueup.estimate.embeddings import fit_conditions
from trueup.estimate.families import FAMILIES, Family
from trueup.estimate.moments import Moments, U
from trueup.estimate.pictures import Pictures
from trueup.estimate.regress import Centred, divide
from trueup.estimate.solve import (
    PAIRED_FOLDS,
    Shrinkage,
    estimate,
    fit_pooled,
    innovation,
    known_residual,
    of_network,
    shrinkage,
    support,
)
from trueup.statistics import Number, effective_folds, enough_folds, mean_and_error, trapezoid_weights

FEWEST = 10  # images of a class with a correction of its own: fewer do not show how far they scatter
KNOWN = 0.8  # share of the classes that must have images in enough folds at a level


def fit(moments: Moments, *, family: str = "spectral", estimator: str = "shrunk") -> Calibration:
    """Fit a calibration to moments; fast, no network involved.

    Moments kept by class make a correction for every class as well (`Calibration.classes`). The null label of
    guidance, where `measure` was told of one, is a class of its own, and no part of the others'. Those with
    sums of what embeddings or pictures say make one that depends on them (`Calibration.conditions`); of
    pictures it has gains, which a family without them does not have.
    """
    pooled = fit_pooled(moments.without_class(null_label(moments)), family=family, estimator=estimator)
    if family == "none":
        return pooled
    classes = fit_classes(moments, pooled) if moments.classes else ()
    conditions: OfConditions | OfPictures | None = None
    if isinstance(moments.conditions, Pictures):
        conditions = fit_pictures(moments, pooled) if FAMILIES[family].slopes is not None else None
    elif moments.conditions is not None:
        conditions = fit_conditions(moments, pooled)
    return replace(pooled, classes=classes, conditions=conditions)


def null_label(moments: Moments) -> int | None:
    """The label that stands for no condition, if it was measured."""
    return moments.provenance.get("null_label")


@dataclass
class _Class:
    """One class's moments, of the network and of the network with the correction of all classes."""

    label: int
    bare: Moments
    pooled: Moments
    folds: Tensor  # which of all folds it has images in

    def fitted(self, family: Family, estimator: str, shrink: Shrinkage | None) -> tuple[Correction, HeldOut]:
        """What it differs by, and what that did on folds it was fitted without."""

        def once(part: Moments) -> Correction:
            return estimate(Centred(part), family, estimator, shrink)

        residual = known_residual(Centred(self.pooled), self.pooled.images)
        return once(self.pooled), confirm.cross_validate(self.pooled, residual, once)


def fit_classes(moments: Moments, pooled: Calibration) -> tuple[OfClass, ...]:
    """The correction of every class that has images enough and differs from that of all."""
    family, whole = FAMILIES[pooled.family], pooled.correction
    correction = whole
    everywhere = moments.to("cpu").at_levels(torch.isin(moments.t, pooled.t))
    counts = {y: everywhere.of_class(y).images for y in moments.classes}
    found = {y: OfClass(y, images, Number(math.nan)) for y, images in counts.items()}
    null = null_label(moments)
    enough = [y for y, images in counts.items() if images >= FEWEST]
    if not moments.provenance.get("indexed", True):  # nobody can tell how many images a class has
        enough = [y for y in enough if y == null]
    if not enough:
        return tuple(found.values())
    sure = torch.stack([enough_folds(everywhere.of_class(y).rows[0]) for y in enough])  # (classes, L)
    known = sure.double().mean(0) >= KNOWN  # elsewhere classes have the correction of all
    if not known.any():
        return tuple(found.values())
    moments, correction = everywhere.at_levels(known), correction.at_levels(known)
    pooled = replace(pooled, correction=correction)
    together = moments.without_class(null).used().of_equal_weight()
    of_all = None if family.slopes is None else of_network(Centred(together), family)
    # The null label is another use of the network: how far classes differ says nothing of it.
    for labels in ([y for y in enough if y != null], [y for y in enough if y == null]):
        parts = [part for y in labels if (part := _of_class(moments, y, correction)) is not None]
        found |= {of.label: of for of in _fit_alike(moments, parts, pooled, of_all)}
    return tuple(
        replace(of, correction=whole.with_levels(known, of.correction)) if of.correction is not None else of
        for of in found.values()
    )


def _fit_alike(
    moments: Moments, parts: list[_Class], pooled: Calibration, of_all: Innovation | None
) -> Iterator[OfClass]:
    """The corrections of classes that have something to do with each other."""
    if not parts:
        return
    family, shrunk = FAMILIES[pooled.family], pooled.estimator == "shrunk"
    centred = [Centred(part.pooled) for part in parts]
    shrink = shrinkage(centred, family) if shrunk else [None] * len(parts)
    fits = [part.fitted(family, pooled.estimator, own) for part, own in zip(parts, shrink, strict=True)]
    kept, realised = _confirmed(moments, parts, fits) if shrunk else (None, None)
    for part, (own, held) in zip(parts, fits, strict=True):
        gain = _gain(part, held.gain(1.0 if realised is None else realised))
        if kept is not None and realised is not None:
            # All classes together confirmed it; its own images must at least not speak against it.
            share = min(max(gain.value / gain.error if gain.error > 0 else 0.0, 0.0), 1.0)
            own, gain = own.scaled(share * kept), _gain(part, held.gain(share * realised))
        made = None if own.empty else _whole(part, own, pooled.correction, family, of_all)
        told = made is not None and moments.levels > 1  # one level says nothing about an integral over them
        yield OfClass(part.label, part.bare.images, gain if told else Number(math.nan), made)


def _of_class(moments: Moments, y: int, correction: Correction) -> _Class | None:
    """One class's moments; None where too few folds hold images of it."""
    whole = moments.of_class(y)
    folds = (whole.rows > 0).any(2)[0]
    bare = whole.used().of_equal_weight()
    bare = replace(bare, data_rows=torch.zeros_like(bare.data_rows))  # no more is known of the data than here
    enough = enough_folds(bare.rows[0]).all()
    return _Class(y, bare, bare.corrected(correction), folds) if enough else None


def _confirmed(
    moments: Moments, parts: list[_Class], fits: list[tuple[Correction, HeldOut]]
) -> tuple[Tensor, Tensor]:
    """How much of what classes differ by held-out images of all of them confirm, (L, bands) twice.

    As it is applied, and as its gain is counted: less where the final fits are smaller than those held out.
    """
    shape = (moments.folds, moments.levels, moments.bands.count)
    product, square, final = (torch.zeros(size, dtype=torch.float64) for size in (shape, shape, shape[1:]))
    rows, second = torch.zeros_like(moments.rows[:1]), torch.zeros_like(moments.second[:1, :1])
    for part, (own, held) in zip(parts, fits, strict=True):
        product[part.folds] += held.product
        square[part.folds] += held.square
        rows[:, part.folds] += part.pooled.rows
        second += part.pooled.second.sum(1, keepdim=True)
        final += confirm.score(part.pooled, own).square.sum(0)
    used = (rows[0] > 0).any(1)
    together = HeldOut(product[used], square[used])
    # What the judge looks at: how many images folds have, and the size of residuals.
    judged = replace(moments, classes=(), rows=rows[:, used], second=second)
    kept = confirm.confirmed_scale(together, judged)
    return kept, confirm.realised(together, final, judged, kept)


def _gain(part: _Class, by_fold: Tensor) -> Number:
    """Of the likelihood bound, in nats a sample of the class, over the correction of all classes."""
    rows, lam = part.pooled.rows[0], part.pooled.lam
    weights = trapezoid_weights(lam) if len(lam) > 1 else torch.ones_like(lam)
    value, error = mean_and_error(by_fold.sum(2), rows, weights)
    return Number.of(float(value), PAIRED_FOLDS**0.5 * float(error), float(effective_folds(rows).min()))


def _whole(
    part: _Class, own: Correction, pooled: Correction, family: Family, of_all: Innovation | None
) -> Correction:
    """The correction of all classes and what a class differs by, as one; of the bare network."""
    whole = pooled.then(own)
    whole.support = support(whole, part.bare)
    if of_all is not None:
        centred = Centred(part.bare)
        whole.innovation = innovation(centred, family, whole, _drawn(centred, family, of_all))
    return whole


def _drawn(centred: Centred, family: Family, pooled: Innovation) -> Innovation:
    """A class's innovation drawn towards that of all classes by what is noise in it, band by band."""
    own = of_network(centred, family)
    bands = centred.moments.bands
    sizes, kept = bands.sizes.to(own.rho), bands.kept.to(own.rho).clamp_min(1.0)
    part = centred.eps_hat() - own.rho * centred.unit(U)
    power = centred.dot(part, part) / sizes  # of one coefficient, summed over samples
    noise = {
        "mean": power / (centred.n * (centred.n - 1.0).clamp_min(1.0)),
        "rho": divide(
            power, centred.dot(centred.unit(U), centred.unit(U)) * (centred.n - 1.0).clamp_min(1.0)
        ),
    }
    seen = {
        "mean": bands.sum((own.mean - pooled.mean).square()) / kept,
        "rho": (own.rho - pooled.rho).square(),
    }
    share = {name: (1 - divide(noise[name], seen[name])).clamp_min(0.0) for name in noise}
    rho = pooled.rho + share["rho"] * (own.rho - pooled.rho)
    return Innovation(rho, pooled.mean + bands.spread(share["mean"]) * (own.mean - pooled.mean))
