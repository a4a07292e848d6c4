"""Frequencies: the orthonormal DCT over any number of spatial axes, and its radial bands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from trueup.errors import TrueupError


@contextmanager
def full_precision() -> Iterator[None]:
    """Without the coarse products that GPUs use by default or on request."""
    backends: Any = torch.backends
    if hasattr(backends.cuda.matmul, "fp32_precision"):  # torch 2.9 and later
        name, exact = "fp32_precision", "ieee"
        places = [backends.cuda.matmul, backends.cudnn.conv]
    else:
        places, name, exact = [backends.cuda.matmul, backends.cudnn], "allow_tf32", cast(Any, False)
    before = [getattr(place, name) for place in places]
    try:
        for place in places:
            setattr(place, name, exact)
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            setattr(place, name, value)


@lru_cache(maxsize=64)
def dct_matrix(size: int) -> Tensor:
    """Orthonormal DCT-II, (frequency, position), float64; its transpose is its inverse.

    >>> C = dct_matrix(8)
    >>> bool(torch.allclose(C @ C.T, torch.eye(8, dtype=torch.float64)))
    True
    """
    with torch.inference_mode(False):  # cached: a first call under inference_mode must not poison autograd
        k = torch.arange(size, dtype=torch.float64)
        matrix = torch.cos(math.pi * (k[None, :] + 0.5) * k[:, None] / size) * math.sqrt(2.0 / size)
        matrix[0] /= math.sqrt(2.0)
    return matrix


def along_last_axes(x: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Apply matrices[i] (out_i, in_i) to the i-th of the last len(matrices) axes of x."""
    for axis, matrix in enumerate(matrices):
        back = axis - len(matrices)  # -rank .. -1
        if back == -1:
            x = x @ matrix.T
        elif back == -2:
            x = matrix @ x
        else:
            x = (x.movedim(back, -1) @ matrix.T).movedim(-1, back)
    return x


class Bands:
    """Radial frequency bands of a spatial grid.

    A coefficient's radius is its frequency in cycles per pixel, counted in half-cycles over the
    longest axis, so that non-square grids get round bands. Band 0 is the mean alone; band edges
    grow by about sqrt(2), finer at low frequencies where real corrections live.

    >>> bands = Bands((32, 32))
    >>> bands.count, bands.sizes.tolist()[:5]
    (12, [1, 3, 4, 5, 9])
    """

    def __init__(self, spatial: Sequence[int], edges: Sequence[float] | None = None):
        self.spatial = tuple(int(n) for n in spatial)
        if not self.spatial or min(self.spatial) < 1:
            raise TrueupError(f"needs at least one spatial axis of at least one pixel, got {self.spatial}")
        longest = max(self.spatial)
        squared = torch.zeros(self.spatial, dtype=torch.float64)
        for axis, size in enumerate(self.spatial):
            k = torch.arange(size, dtype=torch.float64) * (longest / size)
            squared += (k**2).reshape([-1 if i == axis else 1 for i in range(len(self.spatial))])
        radius = squared.sqrt()
        if edges is None:
            edges = default_edges(float(radius.max()))
        try:
            self.edges = tuple(float(edge) for edge in edges)
        except (TypeError, ValueError):
            raise TrueupError(f"band edges are rising numbers, not {edges!r}") from None
        if any(b <= a for a, b in zip(self.edges, self.edges[1:], strict=False)):
            raise TrueupError("band edges must rise")
        index = torch.bucketize(radius, torch.tensor(self.edges, dtype=torch.float64), right=True)
        # Between which edges a band lies, those with no member dropped; and each coefficient's, (*spatial).
        self.between, self.index = torch.unique(index, return_inverse=True)
        self.count = int(self.index.max()) + 1
        self.sizes = torch.bincount(self.index.flatten(), minlength=self.count)
        self._ready: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor], Tensor]] = {}
        self._sized: dict[tuple[int, ...], tuple[Bands, Tensor]] = {}
        order = self.index.flatten().argsort(stable=True)
        self.members = order.split(self.sizes.tolist())  # of each band, its coefficients

    def resized(self, spatial: Sequence[int]) -> tuple[Bands, Tensor]:
        """The bands of the same frequencies in cycles per pixel on another grid, and which of these each is.

        >>> bands, old = Bands((8, 8)).resized((4, 4))  # which has every second frequency
        >>> old.tolist(), bands.index[0].tolist()
        ([0, 2, 3, 4, 5, 6], [0, 1, 3, 4])
        """
        key = tuple(spatial)
        if key not in self._sized:
            if len(key) != len(self.spatial):
                raise TrueupError(f"bands of {len(self.spatial)} axes cannot be resized to {key}")
            ratio = max(key) / max(self.spatial)
            bands = Bands(key, [round(edge * ratio, 9) for edge in self.edges])  # there and back is the same
            self._sized[key] = bands, torch.searchsorted(self.between, bands.between, right=True) - 1
        return self._sized[key]

    def dct(self, x: Tensor) -> Tensor:
        """DCT over the spatial axes, (..., *spatial) -> (..., *spatial)."""
        return along_last_axes(x, self._on(x)[0])

    def idct(self, x: Tensor) -> Tensor:
        """Inverse DCT."""
        return along_last_axes(x, self._on(x)[1])

    def indicator(self, like: Tensor) -> Tensor:
        """Which coefficient is in which band, (K, bands), as `like` is: x @ indicator sums x into bands."""
        return self._on(like)[2]

    def _on(self, like: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """The matrices where they are needed, copied there once."""
        key = (like.device, like.dtype)
        if key not in self._ready:
            with torch.inference_mode(False):  # they may be part of a backward pass later
                forward = [dct_matrix(n).to(*key) for n in self.spatial]
                one_hot = torch.nn.functional.one_hot(self.index.flatten(), self.count).to(*key)
                self._ready[key] = (forward, [m.T.contiguous() for m in forward], one_hot)
        return self._ready[key]

    def sum(self, x: Tensor) -> Tensor:
        """Sum coefficients into bands, (..., K) -> (..., bands)."""
        out = x.new_zeros(*x.shape[:-1], self.count)
        return out.index_add_(-1, self.index.flatten().to(x.device), x)

    def coefficients(self, kept: Sequence[int]) -> Tensor:
        """Which coefficients some bands hold, one band after the other."""
        return torch.cat([self.members[0][:0], *(self.members[k] for k in kept)])

    def spread(self, x: Tensor) -> Tensor:
        """Give every coefficient its band's value, (..., bands) -> (..., K)."""
        return x[..., self.index.flatten().to(x.device)]


def resampled(z: Tensor, spatial: Sequence[int], onto: Sequence[int]) -> Tensor:
    """The same pictures on another grid, as their DCT: (..., K) of spatial -> (..., K') of onto.

    A coefficient keeps its half-cycles over the picture, and its amplitude in pixels; what the grid has no
    room for is dropped.

    >>> resampled(torch.tensor([2.0, 0.5, 0.0, 0.0]), (2, 2), (2, 8)).tolist()[:3]  # mean 1, and a slope
    [4.0, 1.0, 0.0]
    """
    scale = math.sqrt(math.prod(onto) / math.prod(spatial))
    shared: tuple[Any, ...] = (..., *(slice(min(n, m)) for n, m in zip(spatial, onto, strict=True)))
    made = z.new_zeros(*z.shape[:-1], *onto)
    made[shared] = scale * z.reshape(*z.shape[:-1], *spatial)[shared]
    return made.flatten(-len(onto))


def default_edges(largest_radius: float) -> list[float]:
    """0.5, 1.5, 2.5, 3.5, 5, 7, 10, 14, 20, 28, 40, ... up to the largest radius."""
    edges = [0.5, 1.5, 2.5, 3.5]
    pair = (5.0, 7.0)
    while edges[-1] < largest_radius:
        edges.append(pair[len(edges) % 2] * 2.0 ** ((len(edges) - 4) // 2))
    return [edge for edge in edges if edge < largest_radius] or [0.5]


def band_variance(bands: Bands, first: Tensor, second: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Variance of a coefficient, by channel and band, and its standard error, from sums by fold.

    first (F, C, K) and second (F, C, bands) are sums of z and z^2 over rows (F,) samples; single samples are
    folds of one. Of fewer than four folds the error is that of Gaussian data.

    >>> bands, z = Bands((8, 8)), torch.randn(400, 1, 64, generator=torch.Generator().manual_seed(0))
    >>> variance, error = band_variance(bands, z, bands.sum(z.square()), torch.ones(400))
    >>> bool(((variance - 1).abs() < 4 * error).all())
    True
    """
    used = rows > 0
    first, second, rows = first[used], second[used], rows[used]
    count, wide = rows.sum(), rows.reshape(-1, 1, 1)
    mean = first.sum(0) / count.clamp_min(1)
    # Sum over a fold of (z - mean)^2; the mean is that of all, which costs one degree of freedom.
    square = second - 2 * bands.sum(mean * first) + wide * bands.sum(mean**2)
    square = square / bands.sizes.to(square) * (count / (count - 1).clamp_min(1))
    variance = (square.sum(0) / count.clamp_min(1)).clamp_min(0.0)
    if len(rows) < 4:
        return variance, variance * (2 / count.clamp_min(1)).sqrt()
    share = wide / count
    scatter = (square / count - share * variance).square().sum(0) / (1 - share.square().sum(0))
    return variance, scatter.sqrt()
