"""What a file may hold: every tensor its dtype, shape and range, every number its bounds."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from trueup.bands import MOST_PLACES, Bands
from trueup.errors import ArtifactError
from trueup.statistics import Number

Part = TypeVar("Part")
LARGEST = 2**33  # bytes of maps in memory; anything larger is not a calibration
LARGEST_LABEL = 2**62


class Bounds(NamedTuple):
    """What a tensor of a file must be."""

    shape: tuple[int, ...]
    low: float = -math.inf
    high: float = math.inf
    dtype: torch.dtype = torch.float64
    unknown: bool = False  # whether nan is allowed


def check_tensors(tensors: Mapping[str, Tensor], bounds: Mapping[str, Bounds]) -> None:
    """Raise for the first tensor that is not what it must be, by name."""
    for name, bound in bounds.items():
        tensor = part(tensors, name, Tensor)
        found, expected = f"{tensor.dtype} {tuple(tensor.shape)}", f"{bound.dtype} {bound.shape}"
        if found != expected:
            raise ArtifactError(f"{name} is {found}, expected {expected}")
        values = tensor[~tensor.isnan()] if bound.unknown else tensor
        if not (torch.isfinite(values) & (values >= bound.low) & (values <= bound.high)).all():
            raise ArtifactError(f"{name} holds values out of range, {bound.low:g} to {bound.high:g}")
    others = sorted(set(tensors) - set(bounds))
    if others:
        raise ArtifactError(f"{others[0][:40]!r} is no tensor of such a file")


def whole(meta: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """A whole number of a file, within bounds."""
    value = meta.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ArtifactError(f"{name} is {str(value)[:20]}, expected a whole number from {low} to {high:,}")
    return value


def part(meta: Mapping[str, Any], name: str, kind: type[Part]) -> Part:
    """A list, an object or a tensor of a file."""
    if name not in meta:
        raise ArtifactError(f"it lacks {name}")
    if not isinstance(meta[name], kind):
        raise ArtifactError(f"{name} is {str(meta[name])[:20]!r}, expected a {kind.__name__}")
    return meta[name]


def sample_shape(meta: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a sample, (C, *spatial)."""
    shape = part(meta, "shape", list)
    known = 2 <= len(shape) <= 6 and all(type(n) is int and 0 < n < 2**20 for n in shape)
    if not known or math.prod(shape[1:]) > MOST_PLACES:
        raise ArtifactError("its sample shape makes no sense")
    return tuple(shape)


def numbers(
    values: Any, name: str, low: float, high: float, *, least: int = 1, most: int = 1, unknown: bool = False
) -> list[float]:
    """Numbers of a file, within bounds; unknown: or null, which is nan."""
    if not isinstance(values, (list, tuple)) or not least <= len(values) <= most:
        raise ArtifactError(f"{name} is no list of {least} to {most} numbers")
    values = [math.nan if unknown and value is None else value for value in values]
    for value in values:
        if type(value) not in (int, float) or not (low <= value <= high or (unknown and value != value)):
            raise ArtifactError(f"{name} holds {str(value)[:20]}, expected numbers from {low:g} to {high:g}")
    return [float(value) for value in values]


def word(meta: Mapping[str, Any], name: str) -> str:
    """A short name of a file, without room for a sentence."""
    value = meta.get(name)
    if not isinstance(value, str) or not re.fullmatch(r"[\w.+-]{1,60}", value):
        raise ArtifactError(f"{name} is {str(value)[:20]!r}, expected a name")
    return value


def kept_coefficients(meta: Mapping[str, Any], bands: Bands, name: str = "kept_bands") -> Tensor:
    """Which coefficients of a map are in the file."""
    kept = meta.get(name)
    if not isinstance(kept, list) or not all(type(k) is int and 0 <= k < bands.count for k in kept):
        raise ArtifactError(f"its list of {name.replace('_', ' ')} makes no sense")
    if kept != sorted(set(kept)):
        raise ArtifactError(f"its list of {name.replace('_', ' ')} is out of order")
    return bands.coefficients(kept)


def packed(maps: Tensor, bands: Bands) -> tuple[list[int], Tensor]:
    """The bands in which maps (..., K) are not zero, and their coefficients."""
    kept = [k for k, members in enumerate(bands.members) if bool(maps[..., members].any())]
    return kept, maps[..., bands.coefficients(kept)].float()


def digest_of(settings: Any, parts: Iterable[Tensor]) -> str:
    """A short hash of plain values and of tensors, in the precision that files keep them in."""
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8)
    for part in parts:
        digest.update((part.cpu() + 0.0).contiguous().numpy().tobytes())  # files do not keep -0
    return digest.hexdigest()


def total(meta: Mapping[str, Any], name: str) -> Number:
    """A number of a file with its error and interval."""
    value, error, low, high = numbers(meta.get(name), name, -1e12, 1e12, least=4, most=4, unknown=True)
    if error < 0 or low > high:
        raise ArtifactError(f"{name} has an impossible error")
    return Number(value, error, low, high)
