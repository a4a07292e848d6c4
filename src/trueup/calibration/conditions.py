"""A correction that depends on an embedding: of a prompt, an image, anything a network is conditioned on.

The embedding's few largest components are what it is taken to say, and what the correction is linear in; a
layer of fixed random units beyond them is there where held-out conditions confirm that it is worth it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands, resampled
from trueup.calibration.correction import Correction
from trueup.errors import ArtifactError, AttachError
from trueup.statistics import Number
from trueup.stored import LARGEST, Bounds, check_tensors, kept_coefficients, packed, part, total, whole

KIND = "embedding"
FAR = 3.0  # standard deviations: beyond, a condition is taken to be no farther than this from the usual ones


def pooled(c: Tensor) -> Tensor:
    """One vector a row, (B, D): of tokens (B, T, D) their mean."""
    return c.flatten(1, -2).mean(1) if c.ndim > 2 else c


@dataclass(frozen=True, eq=False, repr=False)
class Projection:
    """What is seen of an embedding: features of mean 0 and variance 1 over conditions."""

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
        """(B, D) or (B, T, D) -> (B, Q)."""
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

    @property
    def tensors(self) -> list[Tensor]:
        """All it consists of."""
        return [*vars(self.projection).values(), self.maps, self.support]

    def resized(self, spatial: Sequence[int], bands: Bands) -> OfConditions:
        """On another grid than that of bands, see `Correction.resized`: maps are pictures."""
        if tuple(spatial) == bands.spatial:
            return self
        onto, old = bands.resized(spatial)
        return replace(self, maps=resampled(self.maps, bands, onto), support=self.support[..., old])

    def refined(self, lam: Tensor, bands: Bands) -> Tensor:
        """The maps where their course over lam bends, (R, Q, C, K); see `Correction.refined`."""
        nothing = torch.zeros(len(lam), self.maps.shape[2], bands.count, dtype=torch.float64)
        made = [Correction(lam, one, nothing, nothing, bands, self.support) for one in self.maps.unbind(1)]
        return torch.stack([one.refined().b for one in made], 1)


def unpack_projection(tensors: Mapping[str, Tensor]) -> Projection:
    """A projection of a file; what makes no sense raises ArtifactError."""
    mean, basis, units, outer = (part(tensors, name, Tensor) for name in ("mean", "basis", "units", "outer"))
    if not basis.numel() or basis.ndim != 2 or len(basis) > 1000 or len(units) > 1000 or len(outer) > 1000:
        raise ArtifactError("its projection of conditions makes no sense")
    wide = Bounds((), -1e12, 1e12, torch.float32)
    sizes = {
        "mean": (basis.shape[1],),
        "basis": tuple(basis.shape),
        "units": (len(units), len(basis) + 1),
        "outer": (len(outer), len(units) + 1 if len(units) else outer.shape[-1]),
    }
    check_tensors(tensors, {name: wide._replace(shape=size) for name, size in sizes.items()})
    if bool(len(units)) != bool(len(outer)):
        raise ArtifactError("its projection of conditions makes no sense")
    return Projection(mean, basis, units, outer)


def pack_conditions(of: OfConditions, bands: Bands) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As metadata and tensors."""
    kept, maps = packed(of.maps, bands)
    tensors = {**vars(of.projection), "maps": maps, "support": of.support}
    meta = {"kind": KIND, "kept_bands": kept, "conditions": of.conditions, "gain": of.gain.plain()}
    return meta, {f"condition.{name}": tensor.float() for name, tensor in tensors.items()}


def unpack_conditions(
    meta: Mapping[str, Any], tensors: Mapping[str, Tensor], pooled: Correction, channels: int
) -> OfConditions:
    """From metadata and tensors; what makes no sense raises ArtifactError."""
    own = {name.split(".", 1)[1]: tensor for name, tensor in tensors.items()}
    of_maps: dict[str, Tensor] = {name: own.pop(name) for name in ("maps", "support") if name in own}
    projection, bands, levels = unpack_projection(own), pooled.bands, len(pooled.lam)
    kept, size = kept_coefficients(meta, bands), bands.length
    if levels * projection.count * channels * size * 8 > LARGEST:
        raise ArtifactError(f"{projection.count} features of embeddings make no sense")
    bounds = {
        "maps": Bounds((levels, projection.count, channels, len(kept)), -1e6, 1e6, torch.float32),
        "support": Bounds((levels - 1, bands.count), 0.0, 1.0, torch.float32),
    }
    check_tensors(of_maps, bounds)
    maps = torch.zeros(levels, projection.count, channels, size, dtype=torch.float64)
    maps[..., kept] = of_maps["maps"].double()
    count = whole(meta, "conditions", 1, 2**40)
    return OfConditions(projection, maps, of_maps["support"].double(), count, total(meta, "gain"))
