"""The sufficient statistics of everything we fit: streaming, float64, mergeable.

Per noise level we keep, in the DCT domain, the sums of three vectors and the sums of their products:

    residual   eps_hat - eps
    eps_hat    the network's output, read as noise
    u          its input, x_t / sigma

First moments are kept per coefficient, second moments per channel and frequency band. eps and x0 are
linear in these three, so every estimator (plain, paired, regressed) and both families are functions of
this one object. Samples are dealt to a fixed number of folds by their index: the folds are what the
uncertainty and the held-out checks are made from, and adding two `Moments` adds their samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.data import Batch
from trueup.errors import TrueupError

RESIDUAL, EPS_HAT, U = 0, 1, 2
PAIRS = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))


def default_folds(dimensions: int) -> int:
    """16, or fewer for samples so large that 16 maps per level would not fit in memory."""
    return 16 if dimensions <= 2**16 else 8 if dimensions <= 2**17 else 4


@dataclass(eq=False, repr=False)
class Moments:
    """Sums over samples, by fold and noise level. See the module's text."""

    t: Tensor  # (L,) float64, rising
    lam: Tensor  # (L,) float64, falling
    alpha: Tensor  # (L,)
    sigma: Tensor  # (L,)
    shape: tuple[int, ...]
    bands: Bands
    rows: Tensor  # (F,) evaluations per level, by fold
    first: Tensor  # (F, L, 3, C, K)
    second: Tensor  # (F, L, 6, C, bands), in the order of PAIRS
    images: int = 0
    draws: int = 1  # noise draws per image: 2 with antithetic noise
    data_rows: int = 0  # images behind the two sums below; may exceed `images`
    data_first: Tensor = field(default_factory=lambda: _zeros(0))  # (C, K) sum of dct(x0)
    data_second: Tensor = field(default_factory=lambda: _zeros(0))  # (C, bands) sum of dct(x0)^2
    data_digest: int = 0
    skipped: list[str] = field(default_factory=list)  # samples left out, and why
    provenance: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def empty(
        cls,
        t: Tensor,
        lam: Tensor,
        alpha: Tensor,
        sigma: Tensor,
        shape: Sequence[int],
        *,
        folds: int | None = None,
        edges: Sequence[float] | None = None,
        draws: int = 1,
        provenance: dict[str, Any] | None = None,
    ) -> Moments:
        """No samples yet."""
        shape = tuple(shape)
        bands = Bands(shape[1:], edges)
        folds = folds or default_folds(math.prod(shape))
        channels, size, levels = shape[0], math.prod(shape[1:]), len(t)
        if levels < 1:
            raise TrueupError("needs at least one noise level")
        if levels > 1 and not (t.diff() > 0).all():
            raise TrueupError("noise levels must be given by rising, distinct times")
        t, lam, alpha, sigma = (v.to(torch.float64).cpu() for v in (t, lam, alpha, sigma))
        return cls(
            t=t,
            lam=lam,
            alpha=alpha,
            sigma=sigma,
            shape=shape,
            bands=bands,
            rows=_zeros(folds),
            first=_zeros(folds, levels, 3, channels, size),
            second=_zeros(folds, levels, len(PAIRS), channels, bands.count),
            draws=draws,
            data_first=_zeros(channels, size),
            data_second=_zeros(channels, bands.count),
            provenance=dict(provenance or {}),
        )

    @property
    def levels(self) -> int:
        """How many noise levels."""
        return len(self.t)

    @property
    def folds(self) -> int:
        """How many folds samples are dealt to."""
        return len(self.rows)

    def add(self, levels: slice, index: Tensor, eps_hat: Tensor, eps: Tensor, u: Tensor) -> None:
        """Add a batch at some levels, (levels, B, C, *spatial) each; once at all of them, `count_rows`.

        Everything stays on the device of the sums, and nothing waits for it.
        """
        vectors = torch.stack([eps_hat - eps, eps_hat, u], 2)  # (l, B, 3, C, *spatial)
        z = self.bands.dct(vectors.float()).flatten(4)  # (l, B, 3, C, K)
        fold = (index % self.folds).to(self.first.device, non_blocking=True)
        member = (torch.arange(self.folds, device=fold.device)[:, None] == fold).to(self.first)  # (F, B)
        products = torch.cat([z[:, :, i : i + 1] * z[:, :, i:] for i in range(3)], 2)  # in the order of PAIRS
        products = products @ self.bands.indicator(z)  # (l, B, 6, C, bands)
        sums = (self.first, self.second)
        added = [member @ terms.to(self.first).flatten(2) for terms in (z, products)]  # (l, F, ...)
        for total, more in zip(sums, added, strict=True):  # all of it, or, out of memory, nothing
            total[:, levels] += more.transpose(0, 1).reshape(total[:, levels].shape)

    def to(self, device: torch.device | str) -> Moments:
        """The same sums on another device."""
        return replace(self, first=self.first.to(device), second=self.second.to(device))

    def count_rows(self, index: Tensor) -> None:
        """Count a batch of samples that went through `add` at every level."""
        fold = (index % self.folds).cpu()
        self.rows.index_add_(0, fold, torch.full((len(fold),), float(self.draws), dtype=torch.float64))
        self.images += len(index)

    def add_data(self, batch: Batch) -> None:
        """Add a batch to the data's own moments, which need no network."""
        z = self.bands.dct(batch.x0.float()).flatten(2).to("cpu", torch.float64)  # (B, C, K)
        self.data_rows += len(batch.x0)
        self.data_first += z.sum(0)
        self.data_second += self.bands.sum(z.square()).sum(0)
        self.data_digest = (self.data_digest + sum(batch.digests)) & ((1 << 64) - 1)

    def __add__(self, other: Moments) -> Moments:
        """The moments of both sets of samples, which must not overlap: later images, or another rank's."""
        same = (
            self.shape == other.shape
            and self.bands.edges == other.bands.edges
            and self.folds == other.folds
            and self.draws == other.draws
            and self.levels == other.levels
            and torch.allclose(self.t, other.t, rtol=0, atol=0)
            and self.provenance == other.provenance
        )
        if not same:
            raise TrueupError("moments measured with other settings cannot be added")
        sums = ("rows", "first", "second", "images", "data_rows", "data_first", "data_second", "skipped")
        added = {name: getattr(self, name) + getattr(other, name) for name in sums}
        return replace(self, **added, data_digest=(self.data_digest + other.data_digest) & ((1 << 64) - 1))

    def without(self, fold: int) -> Moments:
        """Everything but one fold: what a held-out check is fitted on."""
        keep = torch.arange(self.folds) != fold
        return self._select(keep)

    def only(self, fold: int) -> Moments:
        """One fold alone: what it is checked on."""
        return self._select(torch.arange(self.folds) == fold)

    def used(self) -> Moments:
        """Only the folds that hold samples."""
        return self._select(self.rows > 0)

    def _select(self, keep: Tensor) -> Moments:
        rows = self.rows[keep]
        images = round(float(rows.sum()) / self.draws)
        r, o, u = self.first[~keep, 0].sum(0)  # x0 = (sigma/alpha) (u - eps), and eps = eps_hat - residual
        dropped = float(self.sigma[0] / self.alpha[0]) * (u - o + r) / self.draws
        return replace(
            self,
            rows=rows,
            first=self.first[keep],
            second=self.second[keep],
            images=images,
            data_rows=self.data_rows - (self.images - images),
            data_first=self.data_first - dropped,
        )


def _zeros(*dims: int) -> Tensor:
    return torch.zeros(*dims, dtype=torch.float64)
