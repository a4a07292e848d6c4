"""Trajectories in a calibration file: tensors named `trajectory.I.*` and an entry of the metadata each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.errors import ArtifactError
from trueup.trajectory.maps import EVIDENCE, TOTALS, Sampler, Trajectory
from trueup.trajectory.states import States

_LARGEST = 2**33  # bytes of maps in memory


def pack(trajectory: Trajectory, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors; of the shift only the bands that have one."""
    bands = trajectory.bands
    kept = [k for k, members in enumerate(bands.members) if bool(trajectory.shift[..., members].any())]
    sampler, states = trajectory.sampler, trajectory.states
    meta = {
        "solver": sampler.name,
        "nfe": sampler.nfe,
        "guidance": sampler.guidance,
        "settings": sampler.settings,
        "kept_bands": kept,
        "trajectories": trajectory.trajectories,
        "provenance": trajectory.provenance,
    }
    tensors = {
        "t": states.t.double(),
        "alpha": states.alpha.double(),
        "sigma": states.sigma.double(),
        "shift": trajectory.shift[..., bands.coefficients(kept)].float(),
        "gain": trajectory.gain.float(),
        **{part: trajectory.evidence[part].double() for part in (*EVIDENCE, *TOTALS)},
    }
    return meta, {f"{name}.{part}": tensor for part, tensor in tensors.items()}


def unpack(
    meta: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str, bands: Bands, mean: Tensor
) -> Trajectory:
    """The trajectory, or ArtifactError if it makes no sense."""
    parts = ("t", "alpha", "sigma", "shift", "gain", *EVIDENCE, *TOTALS)
    found = {part: tensors.get(f"{name}.{part}") for part in parts}
    if any(tensor is None for tensor in found.values()):
        raise ArtifactError(f"{name} lacks {next(part for part in parts if found[part] is None)}")
    if {found for found in tensors if found.startswith(f"{name}.")} != {f"{name}.{part}" for part in parts}:
        raise ArtifactError(f"{name} has tensors that are not those of a trajectory")
    have: dict[str, Tensor] = {part: tensor for part, tensor in found.items() if tensor is not None}
    kept = meta["kept_bands"]
    if kept != sorted(set(kept)) or not all(type(k) is int and 0 <= k < bands.count for k in kept):
        raise ArtifactError(f"the kept bands of {name} make no sense")
    coefficients = bands.coefficients(kept)
    count, channels, size = have["t"].numel(), *mean.shape
    if count < 1 or count * channels * size * 8 > _LARGEST:
        raise ArtifactError(f"{count} states of {channels} x {size} values make no sense")
    shapes = {
        **dict.fromkeys(("t", "alpha", "sigma"), (count,)),
        "shift": (count, channels, len(coefficients)),
        "gain": (count, channels, bands.count),
        **dict.fromkeys(EVIDENCE, (count, bands.count)),
        **dict.fromkeys(TOTALS, (count,)),
    }
    for part, tensor in have.items():
        dtype = torch.float32 if part in ("shift", "gain") else torch.float64
        if tuple(tensor.shape) != shapes[part] or tensor.dtype != dtype:
            raise ArtifactError(
                f"{name}.{part} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shapes[part]}"
            )
        if part not in (*EVIDENCE, *TOTALS) and not torch.isfinite(tensor).all():
            raise ArtifactError(f"{name}.{part} holds values that are not finite")
    if (
        (have["gain"] <= 0).any()
        or (have["gain"] > 1e4).any()
        or (have["alpha"] < 0).any()
        or (have["sigma"] < 0).any()
    ):
        raise ArtifactError(f"{name} has a gain or a level that makes no sense")
    shift = torch.zeros(count, channels, size, dtype=torch.float64)
    shift[..., coefficients] = have["shift"].double()
    nfe, number, guidance = meta["nfe"], meta["trajectories"], meta["guidance"]
    if (
        type(nfe) is not int
        or nfe < 1
        or type(number) is not int
        or number < 1
        or type(guidance) is not float
    ):
        raise ArtifactError(f"what {name} is for makes no sense")
    if not isinstance(meta["settings"], dict) or not isinstance(meta["provenance"], dict):
        raise ArtifactError(f"what {name} is for makes no sense")
    return Trajectory(
        Sampler(str(meta["solver"]), nfe, meta["settings"], guidance),
        States(have["t"], have["alpha"], have["sigma"]),
        bands,
        mean,
        shift,
        have["gain"].double(),
        {part: have[part] for part in (*EVIDENCE, *TOTALS)},
        number,
        meta["provenance"],
    )
