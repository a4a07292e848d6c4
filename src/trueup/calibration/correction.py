"""The correction itself: a map and two gains per band at each noise level, in eps space (equation 12)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.bands import Bands


@dataclass(eq=False, repr=False)
class Correction:
    """eps_corrected = eps_hat - b - idct(a dct(eps_hat) + d dct(u)), with b kept as its DCT."""

    lam: Tensor  # (L,) float64, falling
    b: Tensor  # (L, C, K)
    a: Tensor  # (L, C, bands)
    d: Tensor  # (L, C, bands)
    bands: Bands

    @property
    def empty(self) -> bool:
        """Whether it does nothing at all."""
        return not (self.b.any() or self.a.any() or self.d.any())

    def scaled(self, scale: Tensor) -> Correction:
        """Scaled per level and band, scale (L, bands)."""
        wide = scale[:, None, :]
        return Correction(
            self.lam, self.b * self.bands.spread(wide), self.a * wide, self.d * wide, self.bands
        )

    def _grid(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], *self.bands.spatial)

    def shift_map(self) -> Tensor:
        """The constant part as images, (L, C, *spatial)."""
        return self.bands.idct(self._grid(self.b))

    def apply(self, eps_hat: Tensor, u: Tensor, lam: Tensor) -> Tensor:
        """The corrected noise prediction, one lam per row: the definition, written for reading and testing.

        `attach` runs the same thing fused and in the network's own space.
        """
        weights = interpolation_weights(self.lam, lam).to(self.b)  # (B, L)
        b, a, d = (torch.einsum("nl,l...->n...", weights, part) for part in (self.b, self.a, self.d))
        wide = [self._grid(self.bands.spread(part)) for part in (a, d)]
        z, x = (self.bands.dct(v.to(self.b)) for v in (eps_hat, u))
        delta = self._grid(b) + wide[0] * z + wide[1] * x
        return eps_hat - self.bands.idct(delta).to(eps_hat)


def interpolation_weights(levels: Tensor, lam: Tensor) -> Tensor:
    """Linear interpolation over falling levels, constant beyond them, (B, L); equation 27.

    >>> interpolation_weights(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1.25, 9.0])).tolist()
    [[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]]
    """
    return hat_weights(level_position(levels, lam), len(levels))


def level_position(levels: Tensor, lam: Tensor) -> Tensor:
    """Where lam lies among falling levels, as a fractional index."""
    if len(levels) == 1:
        return torch.zeros_like(lam)
    rising = -levels
    right = torch.searchsorted(rising, -lam.contiguous()).clamp(1, len(levels) - 1)
    left = right - 1
    fraction = (-lam - rising[left]) / (rising[right] - rising[left])
    return left + fraction.clamp(0.0, 1.0)


def hat_weights(position: Tensor, count: int) -> Tensor:
    """A fractional index as weights on its two neighbours, (B, count)."""
    index = torch.arange(count, device=position.device, dtype=position.dtype)
    return (1.0 - (position[..., None] - index).abs()).clamp_min(0.0)
