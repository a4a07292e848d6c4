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

from trueup.bands import Bands, dct_matrix, resampled
from trueup.calibration.correction import Correction
from trueup.errors import ArtifactError
from trueup.statistics import Number
from trueup.stored import LARGEST, Bounds, check_tensors, kept_coefficients, numbers, packed, total, whole

KIND = "picture"
MOST_CHANNELS = 16  # of a condition


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


def onto(spatial: Sequence[int], box: Sequence[Tensor]) -> list[Tensor]:
    """The DCT of a picture as that of the same picture on another grid, (len(box_i), spatial_i) each.

    box: the frequencies that are wanted, in half-cycles over the picture, of a grid whose size is `onto`'s
    caller's to scale for.
    """
    made = []
    for size, wanted in zip(spatial, box, strict=True):
        matrix = torch.zeros(len(wanted), size, dtype=torch.float64)
        there = wanted < size
        matrix[there] = dct_matrix(size)[wanted[there]]
        made.append(matrix)
    return made


def grid_scale(spatial: Sequence[int], grid: Sequence[int]) -> float:
    """What coefficients of a picture are multiplied with on another grid: values stay what they are."""
    return math.sqrt(math.prod(grid) / math.prod(spatial))


def scale(lam: Tensor) -> Tensor:
    """sigma / sqrt(alpha^2 + sigma^2)."""
    return (1 + (2 * lam).exp()).rsqrt()


@dataclass(frozen=True, eq=False, repr=False)
class OfPictures:
    """eps_corrected = (what `Calibration.correction` makes) - rest(eps_hat, u) - idct(sum gains_m dct(y_m)).

    rest takes out what output and input say of the condition, and its mean, so that what is subtracted is
    uncorrelated with both and of mean zero. gain: of the likelihood bound, in nats a sample, over the
    correction alone, held out.
    """

    size: tuple[int, ...]  # (M, *spatial) of a condition
    gains: Tensor  # (L, C, M, bands)
    rest: Correction  # at the levels, and with the bands, of the correction
    mean: Tensor  # (M, K), of conditions, as they are on the samples' grid
    conditions: int  # samples that it was fitted on
    gain: Number

    @property
    def empty(self) -> bool:
        """Whether it does nothing."""
        return not self.gains.any()

    @property
    def tensors(self) -> list[Tensor]:
        """All it consists of."""
        rest = self.rest
        return [self.gains, rest.b, rest.a, rest.d, rest.filled()[0], self.mean]

    def resized(self, spatial: Sequence[int], bands: Bands, data_mean: Tensor) -> OfPictures:
        """On another grid than that of bands, with conditions as much larger; see `Correction.resized`."""
        grid, old = bands.resized(spatial)
        ratios = [new / was for new, was in zip(spatial, bands.spatial, strict=True)]
        size = [max(1, round(r * n)) for r, n in zip(ratios, self.size[1:], strict=True)]
        made, mean = self.rest.resized(spatial, data_mean), resampled(self.mean, bands, grid)
        gains = self.gains[..., old]
        of_mean = torch.einsum("lcmk,mk->lck", bands.spread(self.gains), self.mean)
        b = made.b + resampled(of_mean, bands, grid)
        made.b = b - torch.einsum("lcmk,mk->lck", grid.spread(gains), mean)
        return replace(self, size=(self.size[0], *size), gains=gains, rest=made, mean=mean)

    def refined(self) -> tuple[Correction, Tensor]:
        """The rest, and the gains (R, C, M, bands), where their course over lam bends.

        Gains and map times `scale`: those on a picture grow with its weight in x_t, and what is left of it
        beside output and input is the difference of two large parts.
        """
        at = scale(self.rest.lam)[:, None, None]
        rest = replace(self.rest, b=at * self.rest.b).refined()
        gains = [replace(self.rest, a=at * one).refined().a for one in self.gains.unbind(2)]
        return rest, torch.stack(gains, 2)


def pack_pictures(of: OfPictures, bands: Bands) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As metadata and tensors."""
    kept, mean = packed(of.mean, bands)
    of_map, b = packed(of.rest.b, bands)
    tensors = {"gains": of.gains, "b": b, "a": of.rest.a, "d": of.rest.d, "mean": mean}
    tensors["support"] = of.rest.filled()[0]
    meta: dict[str, Any] = {"kind": KIND, "size": list(of.size), "kept_bands": of_map, "mean_bands": kept}
    meta |= {"conditions": of.conditions, "gain": of.gain.plain()}
    return meta, {f"condition.{name}": tensor.float() for name, tensor in tensors.items()}


def unpack_pictures(
    meta: Mapping[str, Any], tensors: Mapping[str, Tensor], pooled: Correction, channels: int
) -> OfPictures:
    """From metadata and tensors; what makes no sense raises ArtifactError."""
    bands, levels = pooled.bands, len(pooled.lam)
    axes = len(bands.spatial) + 1
    size = tuple(map(int, numbers(meta.get("size"), "size", 1, 2**20, least=axes, most=axes)))
    if list(size) != meta["size"] or size[0] > MOST_CHANNELS or math.prod(size) * 8 > LARGEST:
        raise ArtifactError("the size of its conditions makes no sense")
    of_map, of_mean = (kept_coefficients(meta, bands, name) for name in ("kept_bands", "mean_bands"))
    gains = Bounds((levels, channels, bands.count), -1e6, 1e6, torch.float32)
    bounds = {
        "gains": gains._replace(shape=(levels, channels, size[0], bands.count)),
        "b": gains._replace(shape=(levels, channels, len(of_map)), low=-1e9, high=1e9),
        **dict.fromkeys(("a", "d"), gains),
        "mean": gains._replace(shape=(size[0], len(of_mean)), low=-1e12, high=1e12),
        "support": Bounds((levels - 1, bands.count), 0.0, 1.0, torch.float32),
    }
    own = {name.split(".", 1)[1]: tensor for name, tensor in tensors.items()}
    check_tensors(own, bounds)
    own = {name: tensor.double() for name, tensor in own.items()}
    b, mean = torch.zeros_like(pooled.b), pooled.b.new_zeros(size[0], bands.length)
    b[..., of_map], mean[..., of_mean] = own["b"], own["mean"]
    rest = Correction(pooled.lam, b, own["a"], own["d"], bands, own["support"])
    count = whole(meta, "conditions", 1, 2**40)
    return OfPictures(size, own["gains"], rest, mean, count, total(meta, "gain"))
