"""The loss that a correction removes, taken apart: what is constant, what answers the input, what is noise.

The correction of equation 12 is a mean, a response to the input and a gain on what the network adds to it:

    b + a eps_hat + d u = E[residual] + (a rho + d) (u - E[u]) + a i,    i = eps_hat - rho u - c

Over the data the three are uncorrelated, and so are different bands: what each removes of the loss adds up.
Every part is scored as the whole is, on images it was not fitted on. The mean is fitted by itself, as a shift:
in the sum above, the means of u and of the innovation bring in noise that is not its own.
"""

from __future__ import annotations

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
        """The smallest share that would have been called found."""
        return max(NEGLIGIBLE, threshold(SURE, int(self.folds)) * float(self.share.error))


class Parts:
    """Moments of a network, as far as the doctor looks at them."""

    def __init__(self, moments: Moments):
        self.moments = moments = prepared(moments)
        family = FAMILIES["spectral"]
        self.centred = centred = Centred(moments)
        self.rows = moments.rows[0]  # (F, L)
        self.folds = effective_folds(self.rows)  # (L,)
        self.residual = known_residual(centred, moments.images)  # (F, L, C, K)
        self.loss = centred.second[:, :, 0].sum((0, 2, 3)) / self.rows.sum(0)  # (L,)
        without = [Centred(moments.without(fold)) for fold in range(moments.folds)]
        spectral, correction = self._fits("spectral", without)
        shift, _ = self._fits("shift", without)
        self._made = [
            {"mean": mean, "whole": fit, **_slopes(fit, others)}
            for mean, fit, others in zip(shift, spectral, without, strict=True)
        ]
        self.gain = correction.a  # (L, C, bands)
        self.noise = (self.gain > 0).double()  # where the innovation has more variance than signal
        self.beyond_lowest = torch.ones_like(self.gain)  # all bands but the mean's
        self.beyond_lowest[..., 0] = 0.0

    def _fits(self, family: str, without: list[Centred]) -> tuple[list[Correction], Correction]:
        """A correction fitted without each fold, as far as these confirm it; and the one fitted to all."""
        kind = FAMILIES[family]
        operators = shrinkage([self.centred], kind)[0]
        fits = [estimate(others, kind, "shrunk", operators) for others in without]
        held = _joined([self._score(fold, fit) for fold, fit in enumerate(fits)])
        scale = confirm.confirmed_scale(held, self.moments)
        whole = estimate(self.centred, kind, "shrunk", operators)
        return [fit.scaled(scale) for fit in fits], whole.scaled(scale)

    def _score(self, fold: int, correction: Correction) -> confirm.HeldOut:
        return confirm.score(self.moments.only(fold), correction, self.residual[fold : fold + 1])

    def whole(self, levels: Tensor | None = None) -> Part:
        """All of it."""
        return self.part({"whole": torch.ones_like(self.gain)}, levels)

    def part(self, where: dict[str, Tensor], levels: Tensor | None = None) -> Part:
        """What some bands (L, C, bands) of mean, response or innovation remove; levels: averaged over."""
        levels = torch.ones(self.moments.levels, dtype=torch.bool) if levels is None else levels
        spread = {name: self.moments.bands.spread(mask) for name, mask in where.items()}
        scored = []
        for fold, made in enumerate(self._made):
            b = sum(made[name].b * mask for name, mask in spread.items())
            a, d = (sum(getattr(made[name], n) * mask for name, mask in where.items()) for n in ("a", "d"))
            scored.append(self._score(fold, replace(made["mean"], b=b, a=a, d=d)))
        by_fold = _joined(scored).gain().sum(2)  # (F, L)
        weights = levels.double() / self.loss.clamp_min(1e-300) / max(int(levels.sum()), 1)
        value, error = mean_and_error(by_fold, self.rows, weights)
        folds = float(self.folds[levels].min()) if levels.any() else 1.0
        share = Number.of(float(value), PAIRED_FOLDS**0.5 * float(error), folds)
        by_level = mean_and_error(by_fold, self.rows)[0] / self.loss.clamp_min(1e-300)
        return Part(share, by_level, folds)


def _joined(parts: list[confirm.HeldOut]) -> confirm.HeldOut:
    return confirm.HeldOut(torch.cat([p.product for p in parts]), torch.cat([p.square for p in parts]))


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
