"""A correction linear in what an embedding says, from the same kind of sums (docs/math.md, "Embeddings").

Beside the moments, the products of a few features of the condition with the residual, the departure and u are
summed, for the lowest frequencies. What the residual of the network with the correction of all conditions
still depends on is their regression on the features: shrunk, smoothed over levels and confirmed like
everything else, by conditions that it was not fitted on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.calibration.conditions import OfConditions, Projection, pooled
from trueup.calibration.correction import Correction
from trueup.errors import DataError

FEATURES = 8  # largest components of the embeddings that a correction may be linear in
UNITS = 64  # random units of the layer beyond them
BEYOND = 16  # largest components of what they say
COEFFICIENTS = 64  # lowest frequencies, a channel: what is said in words is seen from afar
FEWEST = 20  # different conditions
_PARTS = ("mean", "basis", "units", "outer")


@dataclass(eq=False, repr=False)
class Conditions:
    """Sums over evaluations, by fold and noise level, of features and of their products."""

    projection: Projection
    bands: int  # the lowest
    conditions: int
    total: Tensor  # (F, L, Q)
    gram: Tensor  # (F, L, Q, Q)
    sums: Tensor  # (F, L, Q, 3, C, kept) products with residual, departure, u

    @classmethod
    def empty(cls, projection: Projection, conditions: int, folds: int, levels: int, shape: tuple[int, ...]):
        """No evaluations yet."""
        bands = Bands(shape[1:])
        low = max(1, int((bands.sizes.cumsum(0) <= COEFFICIENTS).sum()))
        kept, q = int(bands.sizes[:low].sum()), projection.count
        sizes = ((q,), (q, q), (q, 3, shape[0], kept))
        sums = [torch.zeros(folds, levels, *size, dtype=torch.float64) for size in sizes]
        return cls(projection, low, conditions, *sums)

    def add(self, cell: Tensor, c: Tensor, z: Tensor, bands: Bands) -> None:
        """Add evaluations: cell (B,) fold and level as one number, conditions, vectors (B, 3, C, K)."""
        device = self.sums.device
        phi = self.projection.to(device, torch.float32)(c.to(device).float()).double()  # (B, Q)
        low = z[..., bands.coefficients(range(self.bands)).to(device)].double()
        self.total.flatten(0, 1).index_add_(0, cell, phi)
        self.gram.flatten(0, 1).index_add_(0, cell, phi[:, :, None] * phi[:, None])
        for q in range(phi.shape[1]):  # not all at once: that would be large
            self.sums[:, :, q].flatten(0, 1).index_add_(0, cell, phi[:, q, None, None, None] * low)

    def to(self, device: torch.device | str) -> Conditions:
        """The same sums on another device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in ("total", "gram", "sums")})

    def __add__(self, other: Conditions) -> Conditions:
        ours, theirs = (vars(part.projection).values() for part in (self, other))
        if self.bands != other.bands or not all(map(torch.equal, ours, theirs)):
            raise DataError("sums of other features cannot be added")
        both = {n: getattr(self, n) + getattr(other, n).to(self.sums.device) for n in ("total", "gram", "sums")}
        return replace(self, conditions=max(self.conditions, other.conditions), **both)

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """As metadata and tensors."""
        tensors = {f"condition.{n}": getattr(self, n).cpu() for n in ("total", "gram", "sums")}
        tensors |= {f"condition.{n}": getattr(self.projection, n).float() for n in _PARTS}
        return {"bands": self.bands, "conditions": self.conditions}, tensors
