"""What a corrected network's residual still depends on: its regression on features of a condition.

Shrunk, smoothed over levels and confirmed like everything else, by samples that it was not fitted on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trueup.estimate import confirm
from trueup.estimate.confirm import HeldOut
from trueup.estimate.moments import Moments
from trueup.estimate.shrink import Noisy, kernel_weights, shrinkers
from trueup.estimate.solve import INFLATION_WIDTH, PAIRED_FOLDS
from trueup.statistics import Number, effective_folds, mean_and_error, trapezoid_weights

RIDGE = 1e-3  # of a feature's own power
_TINY = 1e-300


class Solved(NamedTuple):
    """What is taken off for each feature."""

    slopes: Tensor  # (L, Q, C, N), shrunk and confirmed
    by_fold: Tensor  # (F, L) what they took off the loss, held out


@dataclass(eq=False, repr=False)
class Regression:
    """The residual of a corrected network on Q features, at N places of a channel, each in a band.

    Those of an embedding have the same products at all places: C and N of the gram are then 1.
    """

    moments: Moments  # of the corrected network
    band: Tensor  # (N,) of each place
    gram: Tensor  # (F, L, Q, Q, C, N)
    target: Tensor  # (F, L, Q, C, N) products of features and residual

    @property
    def folds(self) -> float:
        """How many folds of equal size they are worth."""
        return float(effective_folds(self.moments.rows[0]).min())

    def total(self, by_fold: Tensor) -> Number:
        """Gain of the likelihood bound."""
        value, error = mean_and_error(by_fold, self.moments.rows[0], trapezoid_weights(self.moments.lam))
        return Number.of(float(value), PAIRED_FOLDS**0.5 * float(error), self.folds)

    def solved(self, features: int) -> Solved:
        """By the first so many of the features."""
        gram, target = self.gram[:, :, :features, :features], self.target[:, :, :features]
        whole, all_of = gram.sum(0), target.sum(0)
        inverse = _inverse(whole)
        slopes = torch.einsum("lpqcn,lqcn->lpcn", inverse, all_of)
        rest = target - torch.einsum("flpqcn,lqcn->flpcn", gram, slopes)
        influence = torch.einsum("lpqcn,flqcn->flpcn", inverse, rest)  # (F, L, Q, C, N)
        noise = confirm.one_coefficient(self.moments)[:, None, self.band]  # (L, 1, N)
        operators = [
            self._operator(slopes[:, q], influence[:, :, q], self._mean(noise * inverse[:, q, q]))
            for q in range(features)
        ]

        def shrunk(slopes: Tensor) -> Tensor:
            made = torch.zeros_like(slopes)
            for q, operator in enumerate(operators):
                for k in self.band.unique().tolist():
                    at = self.band == k
                    made[:, q][..., at] = torch.einsum("lm,mcn->lcn", operator[k], slopes[:, q][..., at])
            return made

        product, square = [], []
        for own, own_target in zip(gram, target, strict=True):
            tried = shrunk(torch.einsum("lpqcn,lqcn->lpcn", _inverse(whole - own), all_of - own_target))
            product.append(self._by_band((tried * own_target).sum(1)))
            square.append(self._by_band((tried * torch.einsum("lpqcn,lqcn->lpcn", own, tried)).sum(1)))
        held = HeldOut(torch.stack(product), torch.stack(square))
        final = shrunk(slopes)
        kept = confirm.confirmed_scale(held, self.moments, varying=True)
        size = self._by_band((final * torch.einsum("lpqcn,lqcn->lpcn", whole, final)).sum(1))
        realised = confirm.realised(held, size, self.moments, kept)
        return Solved(final * kept[:, None, None, self.band], held.gain(realised).sum(2))

    def _operator(self, value: Tensor, influence: Tensor, model: Tensor) -> Tensor:
        """Shrinking of one feature's slopes (L, C, N), with what each fold contributed (F, L, C, N)."""
        folds, bands = len(influence), int(self.band.max()) + 1
        at = [self.band == k for k in range(bands)]
        robust = torch.stack([influence[..., one].square().sum(0).mean((1, 2)) for one in at], 1)
        weights = kernel_weights(self.moments.lam, INFLATION_WIDTH)
        model = model[:, :bands].clamp_min(_TINY)  # (L, bands)
        variance = model * (weights @ (robust * folds / (folds - 1) / model)).clamp_min(1.0)
        sd = variance.sqrt()
        deviations = [(influence[..., one] / sd[:, k, None, None]).flatten(2) for k, one in enumerate(at)]
        gram = torch.stack([torch.einsum("lcn,mcn->lm", value[..., one], value[..., one]) for one in at])
        return shrinkers([Noisy(gram, sd.T, [part * folds**0.5 for part in deviations])], self.moments.lam)[0]

    def _by_band(self, x: Tensor) -> Tensor:
        """Sums, (L, C, N) -> (L, bands)."""
        made = torch.zeros(x.shape[0], self.moments.bands.count, dtype=torch.float64)
        return made.index_add_(1, self.band, x.sum(1))

    def _mean(self, x: Tensor) -> Tensor:
        """Means, (L, C or 1, N) -> (L, bands)."""
        x = x.mean(1, keepdim=True)
        return self._by_band(x) / self._by_band(torch.ones_like(x)).clamp_min(1)


def _inverse(gram: Tensor) -> Tensor:
    """Of (L, Q, Q, C, N), with a ridge that is little next to each feature; 0 where there is none."""
    size = torch.diagonal(gram, dim1=1, dim2=2).movedim(-1, 1).clamp_min(0.0).sqrt()  # (L, Q, C, N)
    there = (size > 0).to(size)
    size = torch.where(size > 0, size, torch.ones_like(size))
    scale = size[:, :, None] * size[:, None]
    matrix = (gram / scale).movedim((1, 2), (-2, -1))
    matrix = matrix + RIDGE * torch.eye(gram.shape[1], dtype=gram.dtype)
    inverse = torch.linalg.inv(matrix).movedim((-2, -1), (1, 2)) / scale
    return inverse * there[:, :, None] * there[:, None]
