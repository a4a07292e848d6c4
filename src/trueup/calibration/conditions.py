"""A correction that depends on an embedding: of a prompt, an image, anything a network is conditioned on.

The embedding's few largest components are what it is taken to say, and what the correction is linear in; a
layer of fixed random units beyond them is there where held-out conditions confirm that it is worth it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.calibration.correction import Correction
from trueup.errors import AttachError
from trueup.statistics import Number

FAR = 3.0  # standard deviations: beyond, a condition is taken to be no farther than this from the usual ones


def pooled(c: Tensor) -> Tensor:
    """One vector a row, (B, D): of tokens (B, T, D) their mean."""
    return c.flatten(1, -2).mean(1) if c.ndim > 2 else c


@dataclass(frozen=True, eq=False, repr=False)
class Projection:
    """What is seen of an embedding, (B, D) or (B, T, D) -> (B, Q): of mean 0 and variance 1 over conditions."""

    mean: Tensor  # (D,)
    basis: Tensor  # (M, D)
    units: Tensor  # (P, M + 1): weights and thresholds of the random units, none if P is 0
    outer: Tensor  # (Q - M, P + 1): what is taken of them, the last column subtracted

    @property
    def linear(self) -> int:
        """How many features are linear."""
        return len(self.basis)

    @property
    def count(self) -> int:
        """How many features there are."""
        return len(self.basis) + len(self.outer)

    def __call__(self, c: Tensor) -> Tensor:
        c = pooled(c)
        if c.ndim != 2 or c.shape[1] != len(self.mean):
            got = tuple(c.shape)
            raise AttachError(f"this calibration is for embeddings of width {len(self.mean)}, not {got}")
        first = ((c - self.mean) @ self.basis.T).clamp(-FAR, FAR)
        if not len(self.outer):
            return first
        hidden = (first @ self.units[:, :-1].T + self.units[:, -1]).tanh()
        second = hidden @ self.outer[:, :-1].T - self.outer[:, -1]
        return torch.cat([first, second.clamp(-FAR, FAR)], 1)

    def only_linear(self) -> Projection:
        """Without the random units."""
        return Projection(self.mean, self.basis, self.units[:0], self.outer[:0])

    def to(self, device: torch.device, dtype: torch.dtype) -> Projection:
        """On a device."""
        return Projection(*(part.to(device, dtype) for part in vars(self).values()))


@dataclass(frozen=True, eq=False, repr=False)
class OfConditions:
    """eps_corrected = (what `Calibration.correction` makes) - sum_q feature_q maps_q, at each noise level.

    gain: of the likelihood bound, in nats a sample, over the correction of all conditions, at conditions that
    were not fitted on.
    """

    projection: Projection
    maps: Tensor  # (L, Q, C, K) DCT, of all but the lowest frequencies 0
    support: Tensor  # (L - 1, bands), how far neighbouring levels agree
    conditions: int  # that it was fitted on
    gain: Number

    @property
    def empty(self) -> bool:
        """Whether it does nothing."""
        return not self.maps.any()

    def refined(self, lam: Tensor, bands: Bands) -> Tensor:
        """The maps where their course over lam bends, (R, Q, C, K); see `Correction.refined`."""
        nothing = torch.zeros(len(lam), self.maps.shape[2], bands.count, dtype=torch.float64)
        made = [Correction(lam, one, nothing, nothing, bands, self.support) for one in self.maps.unbind(1)]
        return torch.stack([one.refined().b for one in made], 1)
