"""What embeddings say, as a few features, and their sums beside the moments (docs/math.md, "Embeddings").

Products of the features with the residual, the departure and u are summed for the lowest frequencies: what a
regression of the residual on them needs (`trueup.estimate.embeddings`).
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
from trueup.calibration.conditions import FAR, KIND, Projection, pooled, unpack_projection
from trueup.errors import ArtifactError, DataError
from trueup.estimate.sums import Sums
from trueup.stored import Bounds, check_tensors, whole

FEATURES = 8  # largest components of the embeddings that a correction may be linear in
UNITS = 64  # random units of the layer beyond them
BEYOND = 16  # largest components of what they say
COEFFICIENTS = 64  # lowest frequencies, a channel: what is said in words is seen from afar
FEWEST = 20  # different conditions
_PARTS = ("mean", "basis", "units", "outer")


@dataclass(eq=False, repr=False)
class Conditions(Sums):
    """Of features and of their products."""

    NAMES = ("total", "gram", "sums")
    projection: Projection
    bands: int  # the lowest
    conditions: int
    total: Tensor  # (F, L, Q)
    gram: Tensor  # (F, L, Q, Q)
    sums: Tensor  # (F, L, Q, 3, C, kept) products with residual, departure, u

    @classmethod
    def empty(
        cls, projection: Projection, conditions: int, cells: tuple[int, int], channels: int, bands: Bands
    ) -> Conditions:
        """No evaluations yet, of so many folds and levels."""
        few = (bands.kept.cumsum(0) <= COEFFICIENTS) & (bands.kept > 0)
        low = max(1, int(few.int().cumprod(0).sum()))
        kept, q = int(bands.kept[:low].sum()), projection.count
        sizes = ((q,), (q, q), (q, 3, channels, kept))
        sums = [torch.zeros(*cells, *size, dtype=torch.float64) for size in sizes]
        return cls(projection, low, conditions, *sums)

    @property
    def features(self) -> tuple[Projection, int]:
        """What is looked at, as `see` found it."""
        return self.projection, self.conditions

    def add(self, cell: Tensor, weight: Tensor, c: Tensor, z: Tensor, every: Tensor, bands: Bands) -> None:
        """Add evaluations: cell (B,) fold and level as one number, weight (B,), conditions, (B, 3, C, K)
        and, not looked at here, all coefficients."""
        device = self.sums.device
        phi = self.projection.to(device, torch.float32)(c.to(device).float()).double()  # (B, Q)
        low = z[..., bands.coefficients(range(self.bands)).to(device)].double()
        own = weight[:, None] * phi
        self.total.flatten(0, 1).index_add_(0, cell, own)
        self.gram.flatten(0, 1).index_add_(0, cell, own[:, :, None] * phi[:, None])
        for q in range(phi.shape[1]):  # not all at once: that would be large
            self.sums[:, :, q].flatten(0, 1).index_add_(0, cell, own[:, q, None, None, None] * low)

    def __add__(self, other: Conditions) -> Conditions:
        ours, theirs = (vars(part.projection).values() for part in (self, other))
        if self.bands != other.bands or not all(map(torch.equal, ours, theirs)):
            raise DataError("sums of other features cannot be added")
        return replace(self.plus(other), conditions=max(self.conditions, other.conditions))

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """As metadata and tensors."""
        tensors = {f"condition.{n}": getattr(self.projection, n).float() for n in _PARTS}
        return {"kind": KIND, "bands": self.bands, "conditions": self.conditions}, self.named() | tensors


def unpack_conditions(
    meta: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    cells: tuple[int, int],
    channels: int,
    bands: Bands,
) -> Conditions:
    """From metadata and tensors; what makes no sense raises ArtifactError."""
    projection = unpack_projection(
        {n: tensors[f"condition.{n}"] for n in _PARTS if f"condition.{n}" in tensors}
    )
    low, count, q = (
        whole(meta, "bands", 1, bands.count),
        whole(meta, "conditions", 1, 2**40),
        projection.count,
    )
    kept = int(bands.kept[:low].sum())
    bounds = {
        "condition.total": Bounds((*cells, q)),
        "condition.gram": Bounds((*cells, q, q)),
        "condition.sums": Bounds((*cells, q, 3, channels, kept)),
    }
    own = {name: tensor for name, tensor in tensors.items() if name.split(".")[1] not in _PARTS}
    check_tensors(own, bounds)
    diagonal = torch.diagonal(tensors["condition.gram"], dim1=-2, dim2=-1)
    if (diagonal < 0).any():
        raise ArtifactError("condition.gram: a sum of squares is negative")
    return Conditions(projection, low, count, *(tensors[name] for name in bounds))


def see(embeddings: Iterable[Tensor], *, seed: int = 0) -> tuple[Projection, int]:
    """What to look at in embeddings (B, D) or (B, T, D): their largest components; and how many there are."""
    given = torch.cat([pooled(c).double() for c in embeddings])
    if not torch.isfinite(given).all():
        raise DataError("an embedding holds values that are not finite")
    different = torch.unique(given, dim=0)
    if len(different) < FEWEST:
        raise DataError(
            f"{len(different)} different conditions are too few to learn from: use {FEWEST} or more"
        )
    mean = different.mean(0)
    # Components, each of variance 1; one that hardly varies says nothing.
    _, size, directions = torch.linalg.svd(different - mean, full_matrices=False)
    most = min(FEATURES, len(different) // 5)
    used = int((size[:most] > 1e-6 * size[0]).sum())
    basis = directions[:used] / (size[:used, None] / math.sqrt(len(different) - 1))
    generator = torch.Generator().manual_seed(seed)
    units = torch.randn(UNITS, used + 1, generator=generator, dtype=torch.float64)
    units[:, :-1] /= math.sqrt(used)
    first = ((different - mean) @ basis.T).clamp(-FAR, FAR)
    hidden = (first @ units[:, :-1].T + units[:, -1]).tanh()
    # What the linear features say already is taken out.
    known = torch.cat([first, torch.ones_like(first[:, :1])], 1)
    rest = hidden - known @ torch.linalg.lstsq(known, hidden).solution
    _, size, directions = torch.linalg.svd(rest, full_matrices=False)
    beyond = min(BEYOND, len(different) // 10)
    beyond = int((size[:beyond] > 1e-3 * size[0]).sum()) if len(different) >= 10 * FEWEST else 0
    outer = directions[:beyond] / (size[:beyond, None] / math.sqrt(len(different) - 1))
    centre = (hidden @ outer.T).mean(0) if beyond else outer.new_zeros(0)
    outer = torch.cat([outer, centre[:, None]], 1)
    made = Projection(mean, basis, units if beyond else units[:0], outer if beyond else outer[:0])
    return made.to(torch.device("cpu"), torch.float32), len(different)


def keys(c: Tensor) -> Tensor:
    """A number for every condition, the same for the same, (B,)."""
    rows = (row.contiguous().numpy().tobytes() for row in pooled(c).cpu().float())
    found = [
        int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "little", signed=True) for row in rows
    ]
    return torch.tensor(found, dtype=torch.int64)
