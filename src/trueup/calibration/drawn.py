"""Samples that judged a calibration, as a page shows them: how their bands are, and a few small pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.calibration.correction import GAINS
from trueup.errors import ArtifactError
from trueup.stored import Bounds, check_tensors, whole

PICTURES = 16  # of each set
SIDE = 64  # pixels, at most
MOST = 16  # sets in a file
_BANDS = ("variance", "variance_se", "off")
_PLAIN = ("gains", "fitted", "nfe", "samples", "seed")
_LARGEST = 2**53  # as JSON readers agree on


@dataclass(eq=False, repr=False)
class Drawn:
    """Samples of one network from the noise of one seed: sets of the same seed start from the same noise."""

    gains: str  # form of the correction; "none" is the network as it is
    fitted: bool  # by the calibration's solver for nfe evaluations; else near the limit
    nfe: int
    samples: int
    seed: int
    variance: Tensor  # (C, bands) of one coefficient
    variance_se: Tensor  # (C, bands)
    off: Tensor  # (C, bands) mean square of what the mean is off the data's; unbiased, may be below 0
    pictures: Tensor | None = None  # (n, 1 or 3, H, W) uint8: the first few, as they are shown

    @property
    def before(self) -> bool:
        """Whether these are of the network as it is, near its limit."""
        return self.gains == "none" and not self.fitted


def small(x: Tensor) -> Tensor:
    """Maps (..., H, W) with no side above SIDE: averaged over the area that a pixel stands for."""
    height, width = x.shape[-2:]
    shrink = max(height, width) / SIDE
    if shrink <= 1:
        return x
    size = [max(1, round(n / shrink)) for n in (height, width)]
    flat = x.reshape(-1, 1, height, width).double()
    return torch.nn.functional.interpolate(flat, size=size, mode="area").reshape(*x.shape[:-2], *size).to(x)


def small_maps(z: Tensor, bands: Bands) -> Tensor:
    """Maps (L, C, K) by their coefficients, as small pictures; one level at a time, as they may be large."""
    return torch.stack([small(bands.picture(level)) for level in z])


def pack_drawn(drawn: Sequence[Drawn]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """As metadata and tensors."""
    entries: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for i, one in enumerate(drawn):
        entries.append({name: getattr(one, name) for name in _PLAIN})
        tensors |= {f"drawn.{i}.{name}": getattr(one, name).float() for name in _BANDS}
        if one.pictures is not None:
            tensors[f"drawn.{i}.pictures"] = one.pictures
    return entries, tensors


def unpack_drawn(entries: Any, tensors: Mapping[str, Tensor], channels: int, bands: int) -> tuple[Drawn, ...]:
    """The sets of a file; ArtifactError for anything that is not one."""
    known = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not known or len(entries) > MOST:
        raise ArtifactError("its list of drawn samples makes no sense")
    found: list[Drawn] = []
    bounds: dict[str, Bounds] = {}
    for i, entry in enumerate(entries):
        if entry.get("gains") not in GAINS or not isinstance(entry.get("fitted"), bool):
            raise ArtifactError(f"how its samples {i} were drawn makes no sense")
        lows = dict(zip(_BANDS, (0.0, 0.0, -1e12), strict=True))
        bounds |= {
            f"drawn.{i}.{name}": Bounds((channels, bands), low, 1e12, torch.float32)
            for name, low in lows.items()
        }
        pictures = tensors.get(f"drawn.{i}.pictures")
        if pictures is not None:
            bounds[f"drawn.{i}.pictures"] = Bounds(_picture_shape(pictures, i), 0, 255, torch.uint8)
        found.append(
            Drawn(
                gains=entry["gains"],
                fitted=entry["fitted"],
                nfe=whole(entry, "nfe", 1, 10_000),
                samples=whole(entry, "samples", 2, 2**40),
                seed=whole(entry, "seed", -_LARGEST, _LARGEST),
                **{name: tensors.get(f"drawn.{i}.{name}") for name in (*_BANDS, "pictures")},  # type: ignore[arg-type]
            )
        )
    check_tensors(tensors, bounds)
    for one in found:
        one.variance, one.variance_se, one.off = (getattr(one, name).double() for name in _BANDS)
    return tuple(found)


def _picture_shape(pictures: Tensor, i: int) -> tuple[int, ...]:
    """Its own shape, if pictures can have it."""
    shape = tuple(pictures.shape)
    most = (PICTURES, 3, SIDE, SIDE)
    fits = len(shape) == 4 and all(1 <= n <= m for n, m in zip(shape, most, strict=True)) and shape[1] != 2
    if not fits:
        raise ArtifactError(f"pictures of its samples {i} are {shape}, expected at most {most}")
    return shape


def pack_maps(maps: Tensor | None) -> dict[str, Tensor]:
    """Maps (L, C, H, W) in a byte a value, each level in units of its largest."""
    if maps is None:
        return {}
    largest = maps.abs().amax((1, 2, 3))  # (L,)
    units = maps / largest.clamp_min(1e-300)[:, None, None, None]
    return {"expected": (127 * units).round().to(torch.int8), "expected_largest": largest.double()}


def unpack_maps(tensors: Mapping[str, Tensor], levels: int, channels: int) -> Tensor | None:
    """The maps, in float32; none if the file has none."""
    if not tensors:
        return None
    shape = tuple(tensors["expected"].shape) if "expected" in tensors else ()
    if len(shape) != 4 or not all(1 <= n <= SIDE for n in shape[2:]):
        raise ArtifactError(f"its expected predictions are {shape}, no maps of at most {SIDE} a side")
    bounds = {"expected": Bounds((levels, channels, *shape[2:]), -127, 127, torch.int8)}
    check_tensors(tensors, {**bounds, "expected_largest": Bounds((levels,), 0.0, 1e12)})
    return tensors["expected"].float() * (tensors["expected_largest"] / 127).float()[:, None, None, None]
