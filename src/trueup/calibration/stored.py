"""What a file may hold: every tensor its dtype, shape and range, every number its bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.calibration.trajectory import EVIDENCE, TOTALS, Sampler, States, Trajectory
from trueup.errors import ArtifactError

Part = TypeVar("Part")
LARGEST = 2**33  # bytes of maps in memory; anything larger is not a calibration


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
    if not 2 <= len(shape) <= 6 or not all(type(n) is int and 0 < n < 2**20 for n in shape):
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


def pack(trajectory: Trajectory, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A trajectory as metadata and tensors; of the shift only the bands that have one."""
    kept, shift = packed(trajectory.shift, trajectory.bands)
    meta = {
        **trajectory.sampler.as_json(),
        "kept_bands": kept,
        "trajectories": trajectory.trajectories,
        "provenance": trajectory.provenance,
        "identity": trajectory.identity,
    }
    tensors = {
        **{part: getattr(trajectory.states, part).double() for part in ("t", "alpha", "sigma")},
        "shift": shift,
        "gain": trajectory.gain.float(),
        **{part: trajectory.evidence[part].double() for part in (*EVIDENCE, *TOTALS)},
    }
    return meta, {f"{name}.{part}": tensor for part, tensor in tensors.items()}


def unpack(
    meta: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str, bands: Bands, mean: Tensor
) -> Trajectory:
    """The trajectory, or ArtifactError if it makes no sense."""
    have = {full.removeprefix(f"{name}."): v for full, v in tensors.items() if full.startswith(f"{name}.")}
    coefficients = kept_coefficients(meta, bands)
    count, (channels, size) = have["t"].numel() if "t" in have else 0, mean.shape
    if count < 1 or count * channels * size * 8 > LARGEST:
        raise ArtifactError(f"{name} has {count} states of {channels} x {size} values")
    bounds = {
        "t": Bounds((count,), -1e9, 1e9),
        **dict.fromkeys(("alpha", "sigma"), Bounds((count,), 0.0, 1e6)),
        "shift": Bounds((count, channels, len(coefficients)), -1e9, 1e9, torch.float32),
        "gain": Bounds((count, channels, bands.count), 1e-4, 1e4, torch.float32),
        **dict.fromkeys(EVIDENCE[::2], Bounds((count, bands.count), -1e12, 1e12, unknown=True)),
        **dict.fromkeys(EVIDENCE[1::2], Bounds((count, bands.count), 0.0, 1e12, unknown=True)),
        **dict.fromkeys(TOTALS, Bounds((count,), 0.0, 1e12, unknown=True)),
    }
    check_tensors(have, bounds)
    shift = torch.zeros(count, channels, size, dtype=torch.float64)
    shift[..., coefficients] = have["shift"].double()
    (guidance,) = numbers([meta.get("guidance")], "guidance", -1e4, 1e4)
    made = Trajectory(
        Sampler(word(meta, "solver"), whole(meta, "nfe", 1, 10**6), part(meta, "settings", dict), guidance),
        States(have["t"], have["alpha"], have["sigma"]),
        bands,
        mean,
        shift,
        have["gain"].double(),
        {part: have[part] for part in (*EVIDENCE, *TOTALS)},
        whole(meta, "trajectories", 1, 10**9),
        part(meta, "provenance", dict),
    )
    if made.identity != meta.get("identity"):
        raise ArtifactError(f"{name} is not the one that was saved")
    return made
