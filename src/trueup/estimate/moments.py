"""The sufficient statistics of everything we fit: streaming, float64, mergeable.

Per noise level we keep, in the DCT domain, the sums of three vectors and the sums of their products:

    residual    eps_hat - eps
    departure   eps_hat - k u, the network's output, read as noise, less what a linear filter would say
    u           its input, x_t / sigma

with k = sigma^2 / (alpha^2 + sigma^2), the best filter of data of variance one. At high noise eps_hat is
nearly u, and all that can be corrected is in their difference: its sums must not be lost in those of u. First
moments are kept per coefficient, of large samples of some of them (`trueup.bands.kept_frequencies`), second
moments per channel and frequency band, of all. Where no first moment is kept, means are taken to be 0: gains
are then fitted without a constant, and what is said of them is exact all the same. eps_hat, eps and x0 are
linear in these three, so every estimator (plain, paired, regressed) and both families are functions of
this one object. An evaluation is one row: any sample at any level, in any order. Samples are dealt to
folds by a hash: the folds are what the uncertainty and the held-out checks are made from. Adding two
`Moments` adds their samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands, full_precision
from trueup.calibration.correction import Correction
from trueup.calibration.shares import Shares, joined
from trueup.errors import TrueupError
from trueup.estimate.conditions import Conditions
from trueup.estimate.levels import check_classes
from trueup.estimate.pictures import Pictures
from trueup.estimate.stored import KIND, LEVELS, SUMS, dimensions, pack, unpack
from trueup.files import load_as, save_tensors, unpacked
from trueup.noise import hashed
from trueup.process import NoiseProcess
from trueup.stored import LARGEST

RESIDUAL, DEPARTURE, U = 0, 1, 2
FOLDS = 16
_AT_ONCE = 2**21  # values of large samples that are added together
_BY_LEVEL, _DATA, _NOTES = SUMS[:4], SUMS[4:], ("indices", "digests")
_DEAL = 0x5EED0F0F01D5  # so that dealing has nothing to do with drawing noise
_WRAP = (1 << 64) - 1
# What may differ between moments that are added; another machine may keep the model elsewhere.
_APART: dict[str, Any] = dict.fromkeys(("chosen", "shares", "name", "base_model"))
_NONE = torch.zeros(0, dtype=torch.int64)


def fold_of(key: Tensor, folds: int) -> Tensor:
    """The fold of each int64 key: the rank of its hash among those of its block of `folds` keys.

    Nothing periodic in the data survives it, and consecutive keys still fill the folds evenly. A hash alone
    leaves a quarter of 16 folds empty at 20 images: intervals of |eta|^2 become 1.8 times as wide.

    >>> fold_of(torch.arange(16), 16).sort().values.tolist() == list(range(16))
    True
    """
    block = key - key % folds
    keys = block[..., None] + torch.arange(folds, device=key.device)  # (..., folds)
    hashes = hashed(keys, _DEAL)
    own = hashes.gather(-1, (key % folds)[..., None])
    return (hashes < own).sum(-1)


@dataclass(eq=False, repr=False)
class Moments:
    """Sums over evaluations, by class, fold and noise level. See the module's text."""

    t: Tensor  # (L,) float64, rising
    lam: Tensor  # (L,) float64, falling
    alpha: Tensor  # (L,)
    sigma: Tensor  # (L,)
    shape: tuple[int, ...]
    bands: Bands
    classes: tuple[int, ...]  # empty: one unnamed class, G = 1
    rows: Tensor  # (G, F, L) sum of weights
    squares: Tensor  # (G, F, L) sum of squared weights: `rows`, unless something was decayed
    first: Tensor  # (G, F, L, 3, C, K)
    second: Tensor  # (G, F, L, 6, C, bands), in the order of PAIRS
    data_rows: Tensor  # (G, F) samples behind the two sums below
    data_first: Tensor  # (G, F, C, K) sum of dct(x0)
    data_second: Tensor  # (G, F, C, bands) sum of dct(x0)^2
    indices: Tensor = field(default_factory=lambda: _NONE)  # (n,) the samples'
    digests: Tensor = field(default_factory=lambda: _NONE)  # (n,) what was in them
    mean_only: int = 0  # of these samples, read for the data's own sums alone
    data_digest: int = 0  # sum of all digests, modulo 2^64
    skipped: list[str] = field(default_factory=list)  # samples left out, and why
    duplicates: int = 0  # samples that occurred before, and count once; not kept in files
    conditions: Conditions | Pictures | None = None  # sums of what embeddings or pictures say, if looked at
    provenance: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def empty(
        cls,
        process: NoiseProcess,
        t: Tensor | Sequence[float],
        shape: Sequence[int],
        *,
        folds: int | None = None,
        edges: Sequence[float] | None = None,
        classes: Sequence[int] = (),
        provenance: dict[str, Any] | None = None,
    ) -> Moments:
        """No samples yet, at rising times `t` of a process."""
        shape, classes = tuple(shape), check_classes(classes)
        t = torch.as_tensor(t, dtype=torch.float64).cpu()
        bands = Bands.of(shape, edges)
        if not len(t) or not (t.diff() > 0).all():
            raise TrueupError("needs at least one noise level, given by rising, distinct times")
        if len(set(classes)) != len(classes):
            raise TrueupError("a class is named twice")
        cells = (max(len(classes), 1), folds or FOLDS)
        dims = dimensions(shape, len(t), bands)
        needed = 8 * math.prod(cells) * sum(math.prod(d) for d in dims.values())
        if needed > LARGEST:
            many = f"{len(classes)} classes at {len(t)} levels" if classes else f"{len(t)} levels"
            raise TrueupError(f"the sums of {many} would take {needed / 2**30:.0f} GiB: ask for fewer")
        zeros: dict[str, Any] = {n: torch.zeros(*cells, *d, dtype=torch.float64) for n, d in dims.items()}
        provenance = {"process": process.settings(), **(provenance or {})}
        levels = (t, process.lam(t), process.alpha(t), process.sigma(t))
        return cls(*levels, shape, bands, classes, **zeros, provenance=provenance)

    @property
    def levels(self) -> int:
        """How many noise levels."""
        return len(self.t)

    @property
    def folds(self) -> int:
        """How many folds samples are dealt to."""
        return self.rows.shape[1]

    @property
    def filter_gain(self) -> Tensor:
        """The k of every level, (L,): eps_hat = departure + k u."""
        return 1 / (1 + (2 * self.lam).exp())

    @property
    def effective(self) -> Tensor:
        """How many evaluations of equal weight each level's sums are worth, (L,)."""
        rows, squares = self.rows.sum((0, 1)), self.squares.sum((0, 1))
        return rows.square() / squares.clamp_min(1e-300)

    @property
    def images(self) -> int:
        """How many samples were evaluated; where they were not noted, what the best level's are worth."""
        if len(self.indices):
            return len(self.indices) - self.mean_only
        return round(float(self.effective.max()))

    @property
    def data_images(self) -> int:
        """How many samples are behind the data's own sums."""
        return len(self.indices) or round(float(self.data_rows.sum()))

    @full_precision()
    def add(
        self,
        level: Tensor,
        index: Tensor,
        eps_hat: Tensor,
        eps: Tensor,
        u: Tensor,
        *,
        y: Tensor | None = None,
        group: Tensor | None = None,
        weight: Tensor | float = 1.0,
        cell: Tensor | None = None,
    ) -> None:
        """Add evaluations, a row each: level (B,) among the L, global sample index (B,), (B, C, *spatial).

        Samples of one `group` (B,) share a fold; each counts `weight` times, one number or (B,). Everything
        happens on the device of the sums, and nothing waits for it but the check that labels `y` are among
        `classes`. Who knows where rows belong says so: `cell` (B,), the class's position * folds + fold.
        """
        level = level.to(self.first.device, torch.int64, non_blocking=True)
        if level.device.type == "cpu" and not ((level >= 0) & (level < self.levels)).all():
            raise TrueupError(f"level is a position among the {self.levels} noise levels, counted from 0")
        cell = (self._cell(index, y, group) if cell is None else cell) * self.levels + level
        w = _weights(weight, cell)  # (B,)
        if self.conditions is not None and y is None:
            raise TrueupError("these moments are kept by condition: every sample needs its own (y)")
        rows = max(1, len(cell) if self.bands.whole else _AT_ONCE // math.prod(self.shape))
        for start in range(0, len(cell), rows):
            part = slice(start, start + rows)
            seen = None if y is None or self.conditions is None else y[part]
            self._add(cell[part], level[part], w[part], eps_hat[part], eps[part], u[part], seen)

    def _add(
        self,
        cell: Tensor,
        level: Tensor,
        w: Tensor,
        eps_hat: Tensor,
        eps: Tensor,
        u: Tensor,
        y: Tensor | None,
    ) -> None:
        k = self.filter_gain.to(level.device, torch.float32, non_blocking=True)[level].reshape(
            -1, *[1] * (u.dim() - 1)
        )
        vectors = torch.stack([eps_hat - eps, eps_hat - k * u, u], 1)  # (B, 3, C, *spatial)
        z = self.bands.dct(vectors.to(self.first.device).float())  # (B, 3, C, *spatial)
        z, every = self.bands.keep(z), z.flatten(3)  # (B, 3, C, K), and all there are
        products = torch.cat([every[:, i : i + 1] * every[:, i:] for i in range(3)], 1)  # in order of PAIRS
        products = products @ self.bands.indicator(z)  # (B, 6, C, bands)
        wide = w[:, None, None, None]
        # all of them, or, out of memory, nothing is added
        terms = (w, w.square(), wide * z.double(), wide * products.double())
        for name, term in zip(_BY_LEVEL, terms, strict=True):
            getattr(self, name).flatten(0, 2).index_add_(0, cell, term)
        if self.conditions is not None:
            assert y is not None
            self.conditions.add(cell, w, y, z, every, self.bands)

    @full_precision()
    def add_samples(
        self,
        index: Tensor,
        x0: Tensor,
        digests: Sequence[int] | Tensor | None,
        *,
        y: Tensor | None = None,
        group: Tensor | None = None,
        weight: Tensor | float = 1.0,
        cell: Tensor | None = None,
        mean_only: bool = False,
    ) -> None:
        """Add samples (B, C, *spatial) to the data's own sums, and note them by index and digest.

        digests None: samples are not tracked, as in a training loop that sees them again and again. The rest
        is as in `add`.
        """
        cell = self._cell(index, y, group) if cell is None else cell
        weights = _weights(weight, cell)
        rows = max(1, len(cell) if self.bands.whole else _AT_ONCE // math.prod(self.shape))
        for start in range(0, len(cell), rows):
            part = slice(start, start + rows)
            every = self.bands.dct(x0[part].to(self.first.device).float()).double()  # (B, C, *spatial)
            squares = every.flatten(2).square() @ self.bands.indicator(every)
            w, wide = weights[part], weights[part, None, None]
            terms = (w, wide * self.bands.keep(every), wide * squares)
            for name, term in zip(_DATA, terms, strict=True):
                getattr(self, name).flatten(0, 1).index_add_(0, cell[part], term)
        if digests is not None:
            values = [value - (1 << 64) if value >> 63 == 1 else value for value in map(int, digests)]
            self.indices = torch.cat([self.indices, index.to("cpu", torch.int64)])
            self.digests = torch.cat([self.digests, torch.tensor(values, dtype=torch.int64)])
            self.mean_only += len(values) if mean_only else 0
            self.data_digest = (self.data_digest + sum(values)) & _WRAP

    def _cell(self, index: Tensor, y: Tensor | None, group: Tensor | None) -> Tensor:
        """Class and fold of each row, as one number."""
        key = (index if group is None else group).to(self.first.device, torch.int64, non_blocking=True)
        fold = fold_of(key, self.folds)
        if not self.classes:
            return fold
        if y is None:
            raise TrueupError("these moments are kept by class: every sample needs its label y")
        same = y.reshape(-1, 1) == torch.tensor(self.classes, device=y.device)  # (B, G)
        if not same.any(1).all():
            stray = y.flatten()[~same.any(1)][0].item()
            raise TrueupError(f"label {stray} is not among the classes {_few(self.classes)}")
        return same.int().argmax(1).to(key.device) * self.folds + fold

    def to(self, device: torch.device | str) -> Moments:
        """The same sums on another device."""
        conditions = None if self.conditions is None else self.conditions.to(device)
        return replace(self, conditions=conditions, **{name: getattr(self, name).to(device) for name in SUMS})

    def decay(self, factor: float) -> None:
        """Let everything so far count `factor` times as much, in place: what a moving average forgets."""
        if not 0 < factor <= 1:
            raise TrueupError(f"a decay is above 0 and at most 1, not {factor!r}")
        for name in SUMS:
            getattr(self, name).mul_(factor**2 if name == "squares" else factor)
        if self.conditions is not None:
            self.conditions.decay(factor)

    def __add__(self, other: Moments) -> Moments:
        """The moments of both sets of samples: later images, or another machine's. They must not overlap."""
        ours, theirs = (m._settings() for m in (self, other))
        apart = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if apart:
            differ = f"another {' and another '.join(apart)}"
            raise TrueupError(f"moments measured with other settings cannot be added: these have {differ}")
        shares = joined(Shares.noted(self.provenance), Shares.noted(other.provenance))
        noted = [bool(len(part.indices)) for part in (self, other) if part.rows.any() or part.data_rows.any()]
        if len(set(noted)) > 1:
            raise TrueupError("only one of these moments says which samples it holds: they may overlap")
        shared = self.indices[torch.isin(self.indices, other.indices)]
        if len(shared):
            raise TrueupError(f"both hold sample {int(shared[0])}: shards need indices of their own")
        if torch.isin(self.digests, other.digests).any():
            raise TrueupError("the same image is in both: count it once")
        other = other.to(self.first.device)
        summed = (*SUMS, "mean_only", "skipped", "duplicates")
        added = {name: getattr(self, name) + getattr(other, name) for name in summed}
        added |= {name: torch.cat([getattr(self, name), getattr(other, name)]) for name in _NOTES}
        if self.conditions is not None and other.conditions is not None:
            added["conditions"] = self.conditions + other.conditions  # type: ignore[operator]
        chosen = dict.fromkeys(m.provenance.get("chosen") for m in (self, other))
        provenance = dict(self.provenance)
        if name := other.provenance.get("base_model"):
            provenance["base_model"] = name
        if len(chosen) > 1:
            provenance["chosen"] = "; ".join(map(str, chosen))[:1000]
        if shares is not None:
            provenance["shares"] = shares.settings()
        return replace(
            self, **added, provenance=provenance, data_digest=(self.data_digest + other.data_digest) & _WRAP
        )

    def _settings(self) -> dict[str, Any]:
        """What must be the same of moments that are added."""
        own = {"shape": self.shape, "set of bands": self.bands.edges, "number of folds": self.folds}
        own |= {"set of classes": self.classes, "set of levels": self.t.tolist()}
        return {**self.provenance, **_APART, **own}

    def pooled(self) -> Moments:
        """All classes as one."""
        if not self.classes:
            return self
        return replace(self, classes=(), **{name: getattr(self, name).sum(0, keepdim=True) for name in SUMS})

    def of_class(self, y: int) -> Moments:
        """The samples of one class alone."""
        if y not in self.classes:
            raise TrueupError(f"label {y} is not among the classes {_few(self.classes)}")
        one = [self.classes.index(y)]
        return self._unnoted(classes=(), **{name: getattr(self, name)[one] for name in SUMS})

    def without_class(self, y: int | None) -> Moments:
        """All classes but one; all, if it is none of them."""
        if y not in self.classes:
            return self
        others = [i for i, label in enumerate(self.classes) if label != y]
        classes = tuple(self.classes[i] for i in others)
        return replace(self, classes=classes, **{name: getattr(self, name)[others] for name in SUMS})

    def corrected(self, correction: Correction) -> Moments:
        """What the moments of the network with a correction, at these levels, would have been: exactly."""
        bands, b, a = self.bands, correction.b, correction.a  # (L, C, K), (L, C, bands)
        d = correction.d + a * self.filter_gain[:, None, None]  # a eps_hat + d u = a departure + this u
        rows = self.rows[..., None, None]
        r, o, u = self.first.unbind(3)  # (G, F, L, C, K)
        rr, ro, ru, oo, ou, uu = self.second.unbind(3)  # (G, F, L, C, bands)
        change = bands.spread(a) * o + bands.spread(d) * u + rows * b
        # Products of the change with residual, departure, u and itself.
        cr, co, cu = (
            a * on_o + d * on_u + bands.sum(b * first)
            for on_o, on_u, first in ((ro, ru, r), (oo, ou, o), (ou, uu, u))
        )
        cc = a * co + d * cu + bands.sum(b * change)
        second = (rr - 2 * cr + cc, ro - cr - co + cc, ru - cu, oo - 2 * co + cc, ou - cu, uu)
        first = torch.stack([r - change, o - change, u], 3)
        return replace(self, first=first, second=torch.stack(second, 3))

    def used(self) -> Moments:
        """Classes pooled, and only the folds that hold samples at some level."""
        pooled = self.pooled()
        held = (pooled.rows > 0).any(2)[0]
        return pooled if held.all() else replace(pooled, **_sums(pooled, held))

    def only(self, fold: int) -> Moments:
        """One fold alone: what a held-out fit is checked on."""
        return self._unnoted(**_sums(self, slice(fold, fold + 1)))

    def without(self, fold: int) -> Moments:
        """Everything but one fold, as one: what a held-out check is fitted on."""
        others = torch.arange(self.folds, device=self.rows.device) != fold
        return self._unnoted(**{name: v.sum(1, keepdim=True) for name, v in _sums(self, others).items()})

    def at_levels(self, keep: Tensor) -> Moments:
        """Some of the levels alone."""
        of_levels = {name: getattr(self, name)[keep] for name in LEVELS}
        return replace(self, **of_levels, **{name: getattr(self, name)[:, :, keep] for name in _BY_LEVEL})

    def of_equal_weight(self) -> Moments:
        """The same means, with the sum of weights at each level the number of samples it is worth."""
        if torch.equal(self.rows, self.squares):
            return self
        scale = self.effective / self.rows.sum((0, 1)).clamp_min(1e-300)  # (L,)
        wide = scale[:, None, None, None]
        rows = self.rows * scale
        return replace(self, rows=rows, squares=rows, first=self.first * wide, second=self.second * wide)

    def _unnoted(self, **changed: Any) -> Moments:
        """A part of the samples; which ones is not known."""
        return replace(self, indices=_NONE, digests=_NONE, mean_only=0, data_digest=0, **changed)

    def save(self, path: str | PathLike[str]) -> None:
        """Write one file, from which `load` makes the same moments."""
        meta, tensors = pack(self)
        unpacked(unpack, meta, tensors, "cannot save these moments")
        save_tensors(path, KIND, meta, tensors)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Moments:
        """Read moments; what is damaged or makes no sense raises ArtifactError with the reason."""
        return cls(**load_as(path, KIND, unpack))


def _sums(moments: Moments, folds: Tensor | slice) -> dict[str, Any]:
    return {name: getattr(moments, name)[:, folds] for name in SUMS}


def _weights(weight: Tensor | float, rows: Tensor) -> Tensor:
    """A weight per row, (B,), float64."""
    if isinstance(weight, Tensor):
        return weight.to(rows.device, torch.float64, non_blocking=True).expand(len(rows))
    return torch.full((len(rows),), weight, dtype=torch.float64, device=rows.device)


def _few(classes: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, classes[:8]))
    return shown + (f", ... ({len(classes)} in all)" if len(classes) > 8 else "")
