"""Conditions that are pictures: sums of their frequencies beside the moments.

Products of a condition's channels with each other, and with the residual, the departure and u, are summed by
channel and band: what a regression of the residual on them needs (`trueup.estimate.by_picture`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands, along_last_axes
from trueup.calibration.pictures import KIND, MOST_CHANNELS, onto
from trueup.errors import ArtifactError, DataError
from trueup.estimate.sums import Sums
from trueup.stored import LARGEST, Bounds, check_tensors, numbers


@dataclass(eq=False, repr=False)
class Pictures(Sums):
    """Of the coefficients of conditions, on the grid of the samples."""

    NAMES = ("first", "gram", "sums")
    size: tuple[int, ...]  # (M, *spatial) of a condition
    first: Tensor  # (F, L, M, K)
    gram: Tensor  # (F, L, M, M, bands)
    sums: Tensor  # (F, L, M, 3, C, bands) products with residual, departure, u
    _ready: dict[torch.device, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def empty(cls, size: tuple[int, ...], cells: tuple[int, int], channels: int, bands: Bands) -> Pictures:
        """No evaluations yet, of so many folds and levels."""
        shapes = dimensions(size[0], cells, channels, bands)
        first, gram, sums = (torch.zeros(shape, dtype=torch.float64) for shape in shapes)
        return cls(size, first, gram, sums)

    features = None  # nothing has to be known of all conditions before the first is measured

    def add(self, cell: Tensor, weight: Tensor, c: Tensor, z: Tensor, every: Tensor, bands: Bands) -> None:
        """Add evaluations: cell (B,) fold and level as one number, weight (B,), conditions (B, M, ...), and
        of the vectors the coefficients whose means are kept (B, 3, C, K) and all there are."""
        if tuple(c.shape[1:]) != self.size:
            raise DataError(f"a condition is {tuple(c.shape[1:])}, and others are {self.size}")
        g = self._on_grid(c.to(self.first.device).float(), bands)  # (B, M, *spatial)
        wide, indicator = weight[:, None, None], bands.indicator(every)
        self.first.flatten(0, 1).index_add_(0, cell, wide * bands.keep(g).double())
        g = g.flatten(2)
        for m in range(self.size[0]):  # not all at once: that would be large
            own = (g[:, m : m + 1] * g) @ indicator  # (B, M, bands)
            self.gram[:, :, m].flatten(0, 1).index_add_(0, cell, wide * own.double())
            with_vectors = (g[:, m, None, None] * every) @ indicator  # (B, 3, C, bands)
            self.sums[:, :, m].flatten(0, 1).index_add_(0, cell, wide[..., None] * with_vectors.double())

    def _on_grid(self, c: Tensor, bands: Bands) -> Tensor:
        """Their DCT on the grid of the samples."""
        if c.device not in self._ready:
            matrices = onto(self.size[1:], bands.spatial, bands.spatial)
            self._ready[c.device] = [matrix.to(c) for matrix in matrices]
        return along_last_axes(c, self._ready[c.device])

    def __add__(self, other: Pictures) -> Pictures:
        if self.size != other.size:
            raise DataError("sums of conditions of another size cannot be added")
        return self.plus(other)

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """As metadata and tensors."""
        return {"kind": KIND, "size": list(self.size)}, self.named()

    def to(self, device: torch.device | str) -> Pictures:
        """The same sums on another device."""
        return replace(super().to(device), _ready={})


def dimensions(count: int, cells: tuple[int, int], channels: int, bands: Bands) -> list[tuple[int, ...]]:
    """Of the sums, for conditions of so many channels."""
    own = (*cells, count)
    return [(*own, bands.length), (*own, count, bands.count), (*own, 3, channels, bands.count)]


def unpack_pictures(
    meta: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    cells: tuple[int, int],
    channels: int,
    bands: Bands,
) -> Pictures:
    """From metadata and tensors; what makes no sense raises ArtifactError."""
    axes = len(bands.spatial) + 1
    size = tuple(map(int, numbers(meta.get("size"), "size", 1, 2**20, least=axes, most=axes)))
    if list(size) != meta["size"] or size[0] > MOST_CHANNELS or math.prod(size) * 8 > LARGEST:
        raise ArtifactError("the size of its conditions makes no sense")
    names = [f"condition.{name}" for name in Pictures.NAMES]
    shapes = dimensions(size[0], cells, channels, bands)
    check_tensors(tensors, {name: Bounds(shape) for name, shape in zip(names, shapes, strict=True)})
    first, gram, sums = (tensors[name] for name in names)
    return Pictures(size, first, gram, sums)
