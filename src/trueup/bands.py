"""Frequencies: the orthonormal DCT over any number of spatial axes, and its radial bands.

Means are kept by coefficient, and of large samples not of every one: `kept_frequencies` says which.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from trueup.errors import TrueupError

WHOLE = 2**16  # values of a sample up to which means are kept of every coefficient
MOST_PLACES = 2**22  # places of a grid: whoever opens a file makes tables of some 50 bytes each
KEPT = 16_000  # of larger ones: so many means, all channels together
_PERIODS = (16, 8, 4, 2)  # of patterns that repeat, as patches do
_COMB = 1 / 3  # of an axis's frequencies that may be theirs


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
            x = torch.nn.functional.linear(x, matrix)
        elif back == -2:
            x = matrix @ x
        else:
            x = (x.movedim(back, -1) @ matrix.T).movedim(-1, back)
    return x


def kept_frequencies(shape: Sequence[int]) -> list[list[int]] | None:
    """Along every axis the frequencies whose means are kept, of samples (C, *spatial); None: all of them.

    Of large samples those are the lowest, the same share of every axis, and those next to the harmonics of
    a pattern that repeats every 16 pixels, or 8, 4, 2 where there is room for fewer. Such a pattern lies on
    its harmonics where it is symmetric, and within one of them for the most part where it is not.

    >>> [len(axis) for axis in kept_frequencies((3, 1024, 1024))], kept_frequencies((4, 128, 128))
    ([73, 73], None)
    >>> kept_frequencies((16, 128, 128))[0][-10:]
    [31, 32, 33, 63, 64, 65, 95, 96, 97, 127]
    """
    channels, *spatial = shape
    if math.prod(shape) <= WHOLE:
        return None
    axes = []
    for size, room in zip(spatial, _rooms(spatial, KEPT // channels), strict=True):
        combs = (_harmonics(size, period) for period in _PERIODS)
        comb: set[int] = next((comb for comb in combs if len(comb) <= _COMB * room), set())
        low = itertools.filterfalse(comb.__contains__, range(size))
        axes.append(sorted(comb | set(itertools.islice(low, room - len(comb)))))
    return axes


def _rooms(spatial: Sequence[int], most: int) -> list[int]:
    """How many frequencies each axis keeps, at least one and about the same share, `most` together."""
    rooms = [1] * len(spatial)
    for steps in range(1, 1 + max(spatial)):
        wider = [max(1, size * steps // max(spatial)) for size in spatial]
        if math.prod(wider) > most:
            break
        rooms = wider
    return rooms


def _harmonics(size: int, period: int) -> set[int]:
    """Frequencies of the DCT next to those of a pattern that repeats."""
    places = (round(2 * j * size / period) + off for j in range(1, period // 2 + 1) for off in (-1, 0, 1))
    return {place for place in places if 0 <= place < size}


class Bands:
    """Radial frequency bands of a spatial grid.

    A coefficient's radius is its frequency in cycles per pixel, counted in half-cycles over the
    longest axis, so that non-square grids get round bands. Band 0 is the mean alone; band edges
    grow by about sqrt(2), finer at low frequencies where real corrections live.

    Maps are given by the coefficients at `frequencies`, K of them; without, that is all there are. `sum` and
    `spread` are of those; `sum_all` and `spread_all` of all.

    >>> bands = Bands((32, 32))
    >>> bands.count, bands.sizes.tolist()[:5]
    (12, [1, 3, 4, 5, 9])
    """

    def __init__(
        self,
        spatial: Sequence[int],
        edges: Sequence[float] | None = None,
        frequencies: Sequence[Sequence[int]] | None = None,
    ):
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
        self._ready: dict[tuple[torch.device, torch.dtype], _Matrices] = {}
        self._sized: dict[tuple[int, ...], tuple[Bands, Tensor]] = {}
        self.frequencies = [torch.tensor(axis) for axis in frequencies or map(range, self.spatial)]
        self.box = tuple(len(axis) for axis in self.frequencies)
        self.length = math.prod(self.box)  # K
        self.whole = self.box == self.spatial
        # Where in a grid of all coefficients each of the K is, its band, and how many of them a band has.
        self.places = torch.arange(self.index.numel())
        if not self.whole:
            self.places = self.places.reshape(self.spatial)[torch.meshgrid(*self.frequencies, indexing="ij")]
            self.places = self.places.flatten()
        self.band = self.index.flatten()[self.places]
        self.kept = torch.bincount(self.band, minlength=self.count)
        self.members = self.band.argsort(stable=True).split(self.kept.tolist())  # of each band, among the K

    @classmethod
    def of(cls, shape: Sequence[int], edges: Sequence[float] | None = None) -> Bands:
        """Those of samples (C, *spatial); of large ones not every coefficient has a mean."""
        if math.prod(shape[1:]) > MOST_PLACES:
            raise TrueupError(f"samples have at most {MOST_PLACES:,} places, not {math.prod(shape[1:]):,}")
        return _usual(tuple(shape)) if edges is None else cls(shape[1:], edges, kept_frequencies(shape))

    @property
    def share(self) -> Tensor:
        """The share of each band's coefficients that is kept, (bands,)."""
        return self.kept.double() / self.sizes

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
            edges = [round(edge * ratio, 9) for edge in self.edges]  # there and back is the same
            kept = None  # a large grid has no more to say than this one
            if not self.whole or math.prod(key) > WHOLE:
                axes = zip(self.frequencies, key, strict=True)
                kept = [axis[axis < size].tolist() for axis, size in axes]
            bands = Bands(key, edges, kept)
            self._sized[key] = bands, torch.searchsorted(self.between, bands.between, right=True) - 1
        return self._sized[key]

    def dct(self, x: Tensor) -> Tensor:
        """DCT over the spatial axes, (..., *spatial) -> (..., *spatial)."""
        return along_last_axes(x, self._on(x)[0])

    def idct(self, x: Tensor) -> Tensor:
        """Inverse DCT."""
        return along_last_axes(x, self._on(x)[1])

    def picture(self, x: Tensor) -> Tensor:
        """The maps whose coefficients these are, (..., K) -> (..., *spatial)."""
        matrices = self._on(x).backward
        if not self.whole:
            matrices = [m[:, axis.to(x.device)] for m, axis in zip(matrices, self.frequencies, strict=True)]
        return along_last_axes(x.reshape(*x.shape[:-1], *self.box), matrices)

    def keep(self, z: Tensor) -> Tensor:
        """Of all coefficients (..., *spatial) those that are kept, (..., K)."""
        z = z.flatten(-len(self.spatial))
        return z if self.whole else z[..., self.places.to(z.device)]

    def fill(self, x: Tensor) -> Tensor:
        """All coefficients, zero where none is kept, (..., K) -> (..., *spatial)."""
        made = x
        if not self.whole:
            made = x.new_zeros(*x.shape[:-1], self.index.numel())
            made[..., self.places.to(x.device)] = x
        return made.reshape(*x.shape[:-1], *self.spatial)

    def indicator(self, like: Tensor) -> Tensor:
        """Which coefficient of all is in which band, as `like` is: x @ indicator sums x into bands."""
        return self._on(like).indicator

    def _on(self, like: Tensor) -> _Matrices:
        """The matrices where they are needed, copied there once."""
        key = (like.device, like.dtype)
        if key not in self._ready:
            with torch.inference_mode(False):  # they may be part of a backward pass later
                forward = [dct_matrix(n).to(*key) for n in self.spatial]
                one_hot = torch.zeros(self.index.numel(), self.count, dtype=like.dtype)
                one_hot.scatter_(1, self.index.flatten()[:, None], 1.0)
                backward = [m.T.contiguous() for m in forward]
                self._ready[key] = _Matrices(forward, backward, one_hot.to(like.device))
        return self._ready[key]

    def sum(self, x: Tensor) -> Tensor:
        """Sum coefficients into bands, (..., K) -> (..., bands)."""
        return self._summed(x, self.band)

    def sum_all(self, x: Tensor) -> Tensor:
        """The same of all coefficients."""
        return self._summed(x, self.index.flatten())

    def _summed(self, x: Tensor, band: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.count).index_add_(-1, band.to(x.device), x)

    def coefficients(self, kept: Sequence[int]) -> Tensor:
        """Which of the K some bands hold, one band after the other."""
        return torch.cat([self.members[0][:0], *(self.members[k] for k in kept)])

    def spread(self, x: Tensor) -> Tensor:
        """Give every coefficient its band's value, (..., bands) -> (..., K)."""
        return x[..., self.band.to(x.device)]

    def spread_all(self, x: Tensor) -> Tensor:
        """The same to all coefficients, (..., bands) -> (..., *spatial)."""
        return x[..., self.index.to(x.device)]


@lru_cache(maxsize=8)
def _usual(shape: tuple[int, ...]) -> Bands:
    return Bands(shape[1:], None, kept_frequencies(shape))  # nobody changes them


class _Matrices(NamedTuple):
    forward: list[Tensor]
    backward: list[Tensor]
    indicator: Tensor


def resampled(z: Tensor, bands: Bands, onto: Bands) -> Tensor:
    """The same pictures on another grid, as their DCT: (..., K) of bands -> (..., K') of onto.

    A coefficient keeps its half-cycles over the picture, and its amplitude in pixels; what the grid has no
    room for is dropped.

    >>> z = torch.tensor([2.0, 0.5, 0.0, 0.0])  # mean 1, and a slope
    >>> resampled(z, Bands((2, 2)), Bands((2, 8))).tolist()[:3]
    [4.0, 1.0, 0.0]
    """
    scale = math.sqrt(math.prod(onto.spatial) / math.prod(bands.spatial))
    made = scale * z.reshape(*z.shape[:-1], *bands.box)
    for axis, (ours, theirs) in enumerate(zip(bands.frequencies, onto.frequencies, strict=True)):
        made = made.movedim(axis - len(bands.box), 0)
        kept = made.new_zeros(len(theirs), *made.shape[1:])
        kept[torch.isin(theirs, ours)] = made[torch.isin(ours, theirs)]
        made = kept.movedim(0, axis - len(bands.box))
    return made.flatten(-len(onto.box))


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
    folds of one. Where a coefficient's mean is not kept, it is taken to be 0. Of fewer than four folds the
    error is that of Gaussian data.

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
    square = square / bands.sizes.to(square) * (count / (count - bands.share.to(square)).clamp_min(1))
    variance = (square.sum(0) / count.clamp_min(1)).clamp_min(0.0)
    if len(rows) < 4:
        return variance, variance * (2 / (count.clamp_min(1) * bands.sizes.to(variance))).sqrt()
    share = wide / count
    scatter = (square / count - share * variance).square().sum(0) / (1 - share.square().sum(0))
    return variance, scatter.sqrt()
