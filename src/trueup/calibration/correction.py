"""The correction itself: a map and two gains per band at each noise level, in eps space (equation 12)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trueup.bands import Bands, resampled
from trueup.errors import TrueupError

GAINS = ("least-squares", "sqrt", "response", "none")
CHANGED = GAINS[1:3]  # those that need to know the innovation
_LEAST_SIGNAL = 0.01  # of an innovation: below it the square root, whose slope is infinite at 0, is a line
LEVEL_SPACING = 0.4  # in lam, between levels; docs/results.md shows what interpolating over it costs


def check_gains(form: str) -> str:
    """The form, if it is one."""
    if form not in GAINS:
        raise TrueupError(f"gains are one of {', '.join(GAINS)}, not {form!r}")
    return form


@dataclass(eq=False, repr=False)
class Innovation:
    """What a network adds to the best response to u: its mean 0 part is eps_hat - rho u - mean (DCT)."""

    rho: Tensor  # (L, C, bands), what eps_hat takes of u
    mean: Tensor  # (L, C, K), E[eps_hat - rho u]
    support: Tensor | None = None  # (2, L - 1, bands), of the corrections in CHANGED form; None: the same


@dataclass(eq=False, repr=False)
class Correction:
    """eps_corrected = eps_hat - b - idct(a dct(eps_hat) + d dct(u)), with b kept as its DCT."""

    lam: Tensor  # (L,) float64, falling
    b: Tensor  # (L, C, K), of the coefficients that the bands keep
    a: Tensor  # (L, C, bands)
    d: Tensor  # (L, C, bands)
    bands: Bands
    support: Tensor | None = None  # (L - 1, bands) in [0, 1], how far neighbours agree; None: wholly
    innovation: Innovation | None = None  # what a multiplies; needed where a is not 0 to change its form

    @property
    def empty(self) -> bool:
        """Whether it does nothing at all."""
        return not (self.b.any() or self.a.any() or self.d.any())

    def scaled(self, scale: Tensor) -> Correction:
        """Scaled per level and band, scale (L, bands)."""
        wide = scale[:, None, :]
        return replace(self, b=self.b * self.bands.spread(wide), a=self.a * wide, d=self.d * wide)

    def at_levels(self, keep: Tensor) -> Correction:
        """Some of its levels alone, (L,) true for each that stays."""
        b, a, d = (part[keep] for part in (self.b, self.a, self.d))
        made = Correction(self.lam[keep], b, a, d, self.bands)
        if self.innovation is not None:
            made.innovation = Innovation(self.innovation.rho[keep], self.innovation.mean[keep])
        return made

    def with_levels(self, where: Tensor, other: Correction) -> Correction:
        """Another's levels in the place of its own, (L,) true for each of them."""
        if where.all():
            return other
        both, beside = where[1:] & where[:-1], where.nonzero().flatten().diff() == 1  # neighbours in each

        def at(own: Tensor, theirs: Tensor) -> Tensor:
            made = own.clone()
            made[where] = theirs
            return made

        def between(own: Tensor, theirs: Tensor) -> Tensor:
            made = own.clone()
            made[..., both, :] = theirs[..., beside, :]
            return made

        b, a, d = (at(getattr(self, name), getattr(other, name)) for name in ("b", "a", "d"))
        (support, changed, ours), (their_support, their_changed, theirs) = self.filled(), other.filled()
        innovation = Innovation(at(ours.rho, theirs.rho), at(ours.mean, theirs.mean))
        innovation.support = between(changed, their_changed)
        return Correction(self.lam, b, a, d, self.bands, between(support, their_support), innovation)

    def resized(self, spatial: Sequence[int], data_mean: Tensor | None = None) -> Correction:
        """The same correction on another grid; equation 63.

        Gains belong to frequencies in cycles per pixel. The mean of what is taken off is a picture, and is
        resampled. data_mean (C, K) is the data's, in the DCT (0 if not given).
        """
        if tuple(spatial) == self.bands.spatial:
            return self
        bands, old = self.bands.resized(spatial)
        u = torch.zeros_like(self.b) if data_mean is None else self.lam.exp()[:, None, None] * data_mean
        rho, rest = torch.zeros_like(self.a), torch.zeros_like(self.b)
        if self.innovation is not None:
            rho, rest = self.innovation.rho, self.innovation.mean

        def moved(x: Tensor) -> Tensor:
            return resampled(x, self.bands, bands)

        eps_hat = rest + self.bands.spread(rho) * u  # its mean
        off = self.b + self.bands.spread(self.a) * eps_hat + self.bands.spread(self.d) * u
        eps_hat, off, u = moved(eps_hat), moved(off), moved(u)
        a, d, rho = (gain[..., old] for gain in (self.a, self.d, rho))
        made = Correction(self.lam, off - bands.spread(a) * eps_hat - bands.spread(d) * u, a, d, bands)
        made.support = None if self.support is None else self.support[..., old]
        if self.innovation is not None:
            forms = self.innovation.support
            forms = None if forms is None else forms[..., old]
            made.innovation = Innovation(rho, eps_hat - bands.spread(rho) * u, forms)
        return made

    def filled(self) -> tuple[Tensor, Tensor, Innovation]:
        """Support, that of the CHANGED forms, and innovation; where there is none, one that says nothing."""
        support = self.support
        if support is None:
            support = torch.ones(len(self.lam) - 1, self.bands.count, dtype=torch.float64)
        found = self.innovation or Innovation(torch.zeros_like(self.a), torch.zeros_like(self.b))
        of_forms = support.expand(len(CHANGED), -1, -1) if found.support is None else found.support
        return support, of_forms, found

    def then(self, after: Correction) -> Correction:
        """This correction, and then another of what it made, as one."""
        kept = 1 - after.a
        b = self.bands.spread(kept) * self.b + after.b
        return Correction(self.lam, b, 1 - kept * (1 - self.a), kept * self.d + after.d, self.bands)

    def with_gains(self, form: str) -> Correction:
        """The same mean output and response to u, with another gain on the innovation; equations 53 and 54.

        "least-squares" is the lowest loss, 1 - a. "sqrt", the root of that, leaves the innovation the
        variance of what is signal in it, which is what samples are made of. "response" leaves the innovation
        as it is. And "none" corrects nothing.
        """
        check_gains(form)
        if form == "none":
            b, a, d = (torch.zeros_like(part) for part in (self.b, self.a, self.d))
            return replace(self, b=b, a=a, d=d, innovation=None)
        if form == "least-squares" or not self.a.any():
            return self
        if self.innovation is None:
            raise TrueupError(f"this correction does not say what the innovation is, which {form} gains need")
        # The signal's share of the innovation's variance; where it is above 1 there is none to remove.
        signal = (1 - self.a).clamp_min(0.0)
        kept = signal / signal.clamp(_LEAST_SIGNAL, 1.0).sqrt() if form == "sqrt" else torch.ones_like(signal)
        change = self.a - (1 - kept)
        b = self.b + self.bands.spread(change) * self.innovation.mean
        d = self.d + change * self.innovation.rho
        of_forms = self.innovation.support
        support = self.support if of_forms is None else of_forms[CHANGED.index(form)]
        return replace(self, b=b, a=1 - kept, d=d, support=support, innovation=None)

    def shift_map(self) -> Tensor:
        """The constant part as images, (L, C, *spatial)."""
        return self.bands.picture(self.b)

    def refined(self) -> Correction:
        """What it is at every lam: levels between which it is linear, beyond which it is zero; equation 27.

        At a measured level it is whole. Halfway between two it is their mean times `support`, what both of
        them say. And it is whole up to LEVEL_SPACING from the nearest measured level, gone at twice that.
        """
        lam, weights = refinement(self.lam)  # (R,), (R, L)
        kept = torch.ones(len(lam), self.bands.count, dtype=torch.float64)  # (R, bands)
        if self.support is not None and len(self.lam) > 1:
            # 0 at a level and 1 halfway to the next: how much of `support` a point is subject to.
            halfway = 2 * torch.minimum(weights[:, :-1], weights[:, 1:])  # (R, L - 1)
            kept = kept - halfway @ (1 - self.support)
        distance = (lam[:, None] - self.lam).abs().amin(1)
        kept = kept * (2 - distance / LEVEL_SPACING).clamp(0.0, 1.0)[:, None]
        return self._mixed(weights, lam).scaled(kept)

    def at(self, lam: Tensor) -> Correction:
        """What it is at each of falling lam (B,), as levels of their own."""
        fine = self.refined()
        weights = interpolation_weights(fine.lam, lam).to(self.b)  # (B, R)
        return fine._mixed(weights, lam)

    def _mixed(self, weights: Tensor, lam: Tensor) -> Correction:
        """Weighted sums of its levels, weights (N, L), as levels at lam (N,)."""
        b, a, d = (torch.einsum("nl,l...->n...", weights, part) for part in (self.b, self.a, self.d))
        return Correction(lam, b, a, d, self.bands)

    def apply(self, eps_hat: Tensor, u: Tensor, lam: Tensor) -> Tensor:
        """The corrected noise prediction, one lam per row: the definition, written for reading and testing.

        `attach` runs the same thing fused and in the network's own space.
        """
        return eps_hat - self.at(lam).delta(eps_hat, u).to(eps_hat)

    def delta(self, eps_hat: Tensor, u: Tensor) -> Tensor:
        """What is taken off, where every row is at a level of its own, or all are at the only one."""
        a, d = (self.bands.spread_all(part) for part in (self.a, self.d))
        z, x = (self.bands.dct(v.to(self.b)) for v in (eps_hat, u))
        return self.bands.idct(self.bands.fill(self.b) + a * z + d * x)

    def each(self, device: torch.device) -> list[Correction]:
        """Its levels one by one, on a device."""
        parts = (self.lam, *(part.to(device) for part in (self.b, self.a, self.d)))
        levels = zip(*(part.split(1) for part in parts), strict=True)
        return [Correction(lam, b, a, d, self.bands) for lam, b, a, d in levels]


def refinement(levels: Tensor) -> tuple[Tensor, Tensor]:
    """Where the course of a correction bends, falling (R,), and the linear interpolation there, (R, L).

    Those are the levels, the middle between two, and the ends of where it is whole and where it is gone.

    >>> [round(lam, 6) for lam in refinement(torch.tensor([1.0, 0.5]))[0].tolist()]
    [1.8, 1.4, 1.0, 0.75, 0.5, 0.1, -0.3]
    """
    levels = levels.double()
    reaches = LEVEL_SPACING * torch.tensor([1.0, 2.0], dtype=torch.float64)
    middle = 0.5 * (levels[1:] + levels[:-1])
    half = 0.5 * (levels[:-1] - levels[1:])
    points = [levels[0] + reaches, levels, middle, levels[-1] - reaches]
    for reach in reaches:
        far = half > reach * (1 + 1e-9)
        points += [levels[:-1][far] - reach, levels[1:][far] + reach]
    lam = torch.unique(torch.cat(points)).flip(0)
    return lam, interpolation_weights(levels, lam)


def interpolation_weights(levels: Tensor, lam: Tensor) -> Tensor:
    """Linear interpolation over falling levels, constant beyond them, (B, L).

    >>> interpolation_weights(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1.25, 9.0])).tolist()
    [[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]]
    """
    index = torch.arange(len(levels), device=lam.device, dtype=lam.dtype)
    return (1.0 - (level_position(levels, lam)[..., None] - index).abs()).clamp_min(0.0)


def level_position(levels: Tensor, lam: Tensor) -> Tensor:
    """Where lam lies among falling levels, as a fractional index."""
    if len(levels) == 1:
        return torch.zeros_like(lam)
    rising = -levels
    right = torch.searchsorted(rising, -lam.contiguous()).clamp(1, len(levels) - 1)
    left = right - 1
    return left + ((-lam - rising[left]) / (rising[right] - rising[left])).clamp(0.0, 1.0)
