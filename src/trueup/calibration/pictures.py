"""A correction that depends on a picture that a network is told: super-resolution, inpainting, the sciences.

The condition's own frequencies are further regressors beside the network's output and its input: gains by
channel, by channel of the condition and by band, on what those two do not say of it already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands, dct_matrix
from trueup.calibration.correction import LEVEL_SPACING, Correction, interpolation_weights, refinement
from trueup.errors import ArtifactError
from trueup.statistics import Number
from trueup.stored import Bounds, check_tensors, kept_coefficients, packed, total, whole

KIND = "picture"
MOST_CHANNELS = 16  # of a condition
FAR = 3.0  # times its usual size: what is larger is of no condition like those measured, and fades to nothing
_SPACING = 0.05  # in lam: between them a product of three interpolated parts is as good as linear


def size_of_picture(y: Any, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The size (M, *spatial) of conditions that are pictures; None if they are something else.

    shape: of the samples (C, *spatial). With one axis a condition must be as long as they are, since
    embeddings of tokens have that form too.
    """
    if not isinstance(y, Tensor) or not (y.is_floating_point() or y.dtype in (torch.uint8, torch.bool)):
        return None
    size = tuple(y.shape[1:])
    if len(size) != len(shape) or not size[0] <= MOST_CHANNELS or min(size, default=0) < 1:
        return None
    return None if len(shape) == 2 and size[1:] != tuple(shape[1:]) else size


def onto(spatial: Sequence[int], grid: Sequence[int], box: Sequence[int]) -> list[Tensor]:
    """The DCT of a picture as that of the same picture on another grid, its first coefficients alone.

    A coefficient keeps its half-cycles over the picture, and values stay what they are.
    """
    made = []
    for size, wide, count in zip(spatial, grid, box, strict=True):
        matrix = torch.zeros(count, size, dtype=torch.float64)
        there = min(count, size)
        matrix[:there] = dct_matrix(size)[:there] * math.sqrt(wide / size)
        made.append(matrix)
    return made


def scale(lam: Tensor) -> Tensor:
    """sigma / sqrt(alpha^2 + sigma^2)."""
    return (1 + (2 * lam).exp()).rsqrt()


def fine(levels: Tensor) -> Tensor:
    """Falling lam at which a correction by pictures is tabulated."""
    bends = refinement(levels)[0]
    steps = torch.arange(float(bends[-1]), float(bends[0]), _SPACING, dtype=torch.float64)
    return torch.unique(torch.cat([bends, steps])).flip(0)


@dataclass(frozen=True, eq=False, repr=False)
class OfPictures:
    """What is taken off beside `Calibration.correction`, in the DCT: sum_m gains_m (y_m - what is known).

    Known of it is on_departure (eps_hat - k u) + on_u u and its mean, with k as in the moments: what is
    taken off is uncorrelated with output and input, and of mean zero. It is for the size that was measured:
    at others nobody knows what output and input say of a condition. gain: of the likelihood bound, in nats a
    sample, over the correction alone, held out.
    """

    lam: Tensor  # (L,) falling, the correction's
    gains: Tensor  # (L, C, M, bands)
    on: Tensor  # (2, L, C, M, bands): on_departure and on_u
    known: Tensor  # (2, L, C, K), means of departure and u, of the very samples that `mean` is of
    mean: Tensor  # (M, K), of conditions, as they are on the samples' grid
    size: Tensor  # (L,) mean square of what is taken off a sample
    support: Tensor  # (L - 1, bands), how far neighbouring levels agree
    bands: Bands
    conditions: int  # samples that it was fitted on
    gain: Number

    @property
    def channels(self) -> int:
        """Of a condition."""
        return self.gains.shape[2]

    @property
    def empty(self) -> bool:
        """Whether it does nothing."""
        return not self.gains.any()

    @property
    def tensors(self) -> list[Tensor]:
        """All it consists of."""
        return [self.gains, self.on, self.known, self.mean, self.size, self.support]

    def at(self, lam: Tensor) -> tuple[Tensor, Correction, Tensor]:
        """At falling lam (R,): gains (R, C, M, bands), what goes with them in output and u, the size (R,).

        Gains grow with the weight of the picture in x_t, and what output and u say of it falls as they grow:
        both are interpolated times what makes them even, before they are multiplied.
        """
        level, there = (scale(part)[:, None, None] for part in (self.lam, lam))
        nothing = self.gains[:, :, 0] * 0
        none = torch.zeros_like(self.known[0])
        of = Correction(self.lam, none, nothing, nothing, self.bands, self.support)
        gains = torch.stack([replace(of, a=level * one).at(lam).a / there for one in self.gains.unbind(2)], 2)
        # The difference of two large parts is known near a level alone, and hardly beyond the last.
        distance = (lam[:, None] - self.lam).abs().amin(1)
        beyond = (lam > self.lam[0]) | (lam < self.lam[-1])
        distance = torch.where(beyond, 2 * distance + LEVEL_SPACING / 2, distance)
        gains = gains * (2 - 2 * distance / LEVEL_SPACING).clamp(0.0, 1.0)[:, None, None, None]
        weights = interpolation_weights(self.lam, lam)  # (R, L)
        on = torch.einsum("rl,vlcmb->vrcmb", weights, self.on / level[..., None]) * there[..., None]
        departure, u = torch.einsum(
            "rl,vlck->vrck", weights, self.known * torch.stack([level * 0 + 1, level])
        )
        a, on_u = (-torch.einsum("rcmb,rcmb->rcb", gains, one) for one in on)
        d = on_u - a / (1 + (2 * lam).exp())[:, None, None]  # departure = eps_hat - k u
        spread = self.bands.spread
        b = -torch.einsum("rcmk,mk->rck", spread(gains), self.mean)
        b = b - spread(a) * departure - spread(on_u) * u / there
        return gains, Correction(lam, b, a, d, self.bands), weights @ self.size


def pack_pictures(of: OfPictures, bands: Bands) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As metadata and tensors."""
    (kept, known), (of_mean, mean) = (packed(part, bands) for part in (of.known, of.mean))
    tensors = {"gains": of.gains, "on": of.on, "known": known, "mean": mean}
    tensors |= {"size": of.size, "support": of.support}
    meta: dict[str, Any] = {"kind": KIND, "channels": of.channels, "kept_bands": kept, "mean_bands": of_mean}
    meta |= {"conditions": of.conditions, "gain": of.gain.plain()}
    return meta, {f"condition.{name}": tensor.float() for name, tensor in tensors.items()}


def unpack_pictures(
    meta: Mapping[str, Any], tensors: Mapping[str, Tensor], pooled: Correction, channels: int
) -> OfPictures:
    """From metadata and tensors; what makes no sense raises ArtifactError."""
    bands, levels = pooled.bands, len(pooled.lam)
    count = whole(meta, "channels", 1, MOST_CHANNELS)
    kept, of_mean = (kept_coefficients(meta, bands, name) for name in ("kept_bands", "mean_bands"))
    gains = Bounds((levels, channels, count, bands.count), -1e6, 1e6, torch.float32)
    bounds = {
        "gains": gains,
        "on": gains._replace(shape=(2, *gains.shape), low=-1e9, high=1e9),
        "known": gains._replace(shape=(2, levels, channels, len(kept)), low=-1e9, high=1e9),
        "mean": gains._replace(shape=(count, len(of_mean)), low=-1e12, high=1e12),
        "size": Bounds((levels,), 0.0, 1e12, torch.float32),
        "support": Bounds((levels - 1, bands.count), 0.0, 1.0, torch.float32),
    }
    own = {name.split(".", 1)[1]: tensor for name, tensor in tensors.items()}
    check_tensors(own, bounds)
    own = {name: tensor.double() for name, tensor in own.items()}
    if not own["gains"].any():
        raise ArtifactError("what depends on its conditions is nothing")
    known, mean = pooled.b.new_zeros(2, *pooled.b.shape), pooled.b.new_zeros(count, bands.length)
    known[..., kept], mean[..., of_mean] = own["known"], own["mean"]
    parts = (own["gains"], own["on"], known, mean, own["size"], own["support"])
    return OfPictures(pooled.lam, *parts, bands, whole(meta, "conditions", 1, 2**40), total(meta, "gain"))
