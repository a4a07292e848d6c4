"""The loss that a correction removes, taken apart: what is constant, what answers the input, what is noise.

The correction of equation 12 is a mean, a response to the input and a gain on what the network adds to it:

    b + a eps_hat + d u = E[residual] + (a rho + d) (u - E[u]) + a i,    i = eps_hat - rho u - c

Over the data the three are uncorrelated, and so are different bands: what each removes of the loss adds up.
Every part is scored as the whole is, on images it was not fitted on. The mean is fitted by itself, as a
shift: in the sum above the means of u and of the innovation bring in noise of theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trueup.calibration import Correction
from trueup.estimate import Moments, confirm
from trueup.estimate.families import FAMILIES
from trueup.estimate.moments import U
from trueup.estimate.regress import Centred, slopes
from trueup.estimate.solve import PAIRED_FOLDS, estimate, known_residual, prepared, shrinkage
from trueup.statistics import Number, effective_folds, mean_and_error, threshold

NEGLIGIBLE = 1e-4  # share of the loss that nobody need know of
SURE = 4.0  # normal standard errors before anything is called found: 1 in 16,000 by chance


@dataclass(frozen=True)
class Part:
    """What one part removes, as a share of the loss, averaged over noise levels."""

    share: Number
    by_level: Tensor  # (L,)
    folds: float

    @property
    def found(self) -> bool:
        """Whether it is surely there."""
        return bool(self.share.value > self.least)

    @property
    def least(self) -> float:
        """The smallest share that is called found, if it was confirmed."""
        return max(NEGLIGIBLE, threshold(SURE, self.folds) * float(self.share.error))


class Parts:
    """Moments of a network, as far as the doctor looks at them."""

    def __init__(self, moments: Moments):
        self.moments = moments = prepared(moments)
        self.centred = centred = Centred(moments)
        self.rows = moments.rows[0]  # (F, L)
        self.folds = effective_folds(self.rows)  # (L,)
        self.residual = known_residual(centred, moments.images)  # (F, L, C, K)
        self.loss = centred.second[:, :, 0].sum((0, 2, 3)) / self.rows.sum(0)  # (L,)
        kinds = [FAMILIES[name] for name in ("spectral", "shift")]
        operators = [shrinkage([centred], kind)[0] for kind in kinds]
        by_fold = []
        for fold in range(moments.folds):
            others = Centred(moments.without(fold))
            spectral, shift = (
                estimate(others, kind, "shrunk", operator)
                for kind, operator in zip(kinds, operators, strict=True)
            )
            made = {"whole": spectral, "mean": shift, **_slopes(spectral, others)}
            held, known = moments.only(fold), self.residual[fold : fold + 1]
            by_fold.append({n: confirm.by_channel(held, correction, known) for n, correction in made.items()})
        # Products with the residual and squares of every part, (F, L, C, bands).
        scored = {
            n: [torch.cat(v) for v in zip(*(one[n] for one in by_fold), strict=True)] for n in by_fold[0]
        }
        scale = {n: self._confirmed(*scored[n]) for n in ("whole", "mean")}  # (L, 1, bands)
        self._gain = {}
        for name, (product, square) in scored.items():
            own = scale.get(name, scale["whole"])
            self._gain[name] = 2 * own * product - own * own * square  # equation 22
        gain = scale["whole"] * estimate(centred, kinds[0], "shrunk", operators[0]).a
        self.every = torch.ones_like(gain)  # (L, C, bands)
        self.noise = (gain > 0).double()  # where the innovation has more variance than signal
        self.lowest = torch.zeros_like(gain)  # the mean's band
        self.lowest[..., 0] = 1.0

    def _confirmed(self, product: Tensor, square: Tensor) -> Tensor:
        held = confirm.HeldOut(product.sum(2), square.sum(2))
        return confirm.confirmed_scale(held, self.moments)[:, None]

    def whole(self, levels: Tensor | None = None) -> Part:
        """All of it."""
        return self.part({"whole": self.every}, levels)

    def limit(self, entries: Tensor) -> float:
        """The share of the loss that so many unknowns per cell (C, bands) are sure to show, at all levels.

        Each is known up to the variance of a mean of residuals; squares must add up to more than chance.
        """
        n = self.centred.n  # (L, 1, 1)
        noise = self.centred.residual_power / n / (n * self.moments.bands.sizes)  # (L, C, bands), of one
        total, squares = ((entries * noise**k).sum((1, 2)) for k in (1, 2))
        folds = float(self.folds.min())
        surprise = [surprising(float(v), folds) for v in total.square() / squares.clamp_min(1e-300)]
        energy = torch.tensor(surprise, dtype=torch.float64) * (2 * squares).sqrt()
        return max(NEGLIGIBLE, float((energy / self.loss.clamp_min(1e-300)).mean()))

    def part(self, where: dict[str, Tensor], levels: Tensor | None = None) -> Part:
        """What some bands (L, C, bands) of mean, response or innovation remove; levels: averaged over."""
        levels = torch.ones(self.moments.levels, dtype=torch.bool) if levels is None else levels
        cells = torch.stack([self._gain[name] * mask for name, mask in where.items()])
        by_fold = cells.sum((0, 3, 4))  # (F, L)
        weights = levels.double() / self.loss.clamp_min(1e-300) / max(int(levels.sum()), 1)
        value, error = mean_and_error(by_fold, self.rows, weights)
        folds = float(self.folds[levels].min()) if levels.any() else 1.0
        share = Number.of(float(value), PAIRED_FOLDS**0.5 * float(error), folds)
        by_level = mean_and_error(by_fold, self.rows)[0] / self.loss.clamp_min(1e-300)
        return Part(share, by_level, folds)


def surprising(freedom: float, folds: float | None = None) -> float:
    """How many standard errors above its mean a sum of so many squares is as surprising as SURE.

    Wilson and Hilferty's cube; folds: with Student's quantile, for errors that folds show.
    """
    z = SURE if folds is None else threshold(SURE, folds)
    freedom = max(freedom, 1.0)
    cube = 1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))
    return math.sqrt(freedom / 2) * (cube**3 - 1)


def _slopes(correction: Correction, centred: Centred) -> dict[str, Correction]:
    """Response and innovation of a correction, about the means of what they multiply."""
    rho = slopes(centred)[2]
    a, bands = correction.a, centred.moments.bands
    response = a * rho + correction.d  # to u
    u = centred.mean_of(centred.unit(U))  # (L, C, K)
    i = centred.mean_of(centred.eps_hat() - rho * centred.unit(U))
    return {
        "response": replace(correction, b=-bands.spread(response) * u, a=torch.zeros_like(a), d=response),
        "innovation": replace(correction, b=-bands.spread(a) * i, a=a, d=-a * rho),
    }
