"""The calibration file: one .safetensors, JSON metadata, no pickle. docs/format.md describes it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from trueup import __version__
from trueup.bands import Bands
from trueup.calibration import Calibration, Evidence
from trueup.correction import Correction
from trueup.errors import ArtifactError, TrueupError
from trueup.files import write
from trueup.parametrization import Parametrization
from trueup.process import from_settings
from trueup.statistics import Number
from trueup.trajectory.maps import find
from trueup.trajectory.stored import pack, unpack

FORMAT = 2
_NUMBERS = ("loss", "eta2", "gain")
_PARTS = ("value", "error", "low", "high")
_PER_LEVEL = (*(f"{name}.{part}" for name in _NUMBERS for part in _PARTS), "shift_se")
_NAMES = ("t", "lam", "b", "a", "d", "support", "scale", "data_mean", "data_variance")
_SINCE_2 = ("data_variance_se",)
_LARGEST = 2**33  # bytes of one tensor in memory; anything larger is not a calibration
_NONSENSE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def save(calibration: Calibration, path: str | PathLike[str]) -> None:
    """Write a calibration to a temporary file beside `path`, then rename it into place.

    What `load` would refuse is refused here, before a good file is replaced by it.
    """
    correction, evidence = calibration.correction, calibration.evidence
    bands = correction.bands
    kept = [k for k, members in enumerate(bands.members) if bool(correction.b[..., members].any())]
    coefficients = bands.coefficients(kept)
    tensors = {
        "t": calibration.t,
        "lam": correction.lam,
        "b": correction.b[..., coefficients],
        "a": correction.a,
        "d": correction.d,
        "support": torch.ones(len(correction.lam) - 1, bands.count) if correction.support is None else correction.support,
        "scale": evidence.scale,
        "data_mean": calibration.data_mean,
        "data_variance": calibration.data_variance,
        "data_variance_se": calibration.data_variance_se,
        **{f"evidence.{n}.{part}": getattr(getattr(evidence, n), part) for n in _NUMBERS for part in _PARTS},
        "evidence.shift_se": evidence.shift_se,
    }
    trajectories = []
    for i, trajectory in enumerate(calibration.trajectories):
        entry, more = pack(trajectory, f"trajectory.{i}")
        trajectories.append(entry)
        tensors |= more
    # Copies: tensors that share memory, as unknown errors do, cannot be written.
    tensors = {
        name: tensor.to(
            tensor.dtype if name.startswith("trajectory.") else _dtype(name), copy=True
        ).contiguous()
        for name, tensor in tensors.items()
    }
    meta: dict[str, Any] = {
        "format": FORMAT,
        "trueup": __version__,
        "family": calibration.family,
        "estimator": calibration.estimator,
        "shape": list(calibration.shape),
        "band_edges": list(bands.edges),
        "kept_bands": kept,
        "images": evidence.images,
        "folds": evidence.folds,
        "bound_gain": _json_number(evidence.bound_gain),
        "shift_bound_gain": _json_number(evidence.shift_bound_gain),
        "data_images": calibration.data_images,
        "data_fingerprint": calibration.data_fingerprint,
        "provenance": calibration.provenance,
        "trajectories": trajectories,
    }
    try:
        meta = json.loads(json.dumps(meta, allow_nan=False, default=_plain))  # as `load` will see it
        _build(meta, tensors)
        meta["checksum"] = _checksum(tensors, meta)
        content = to_bytes(tensors, {"trueup": json.dumps(meta, sort_keys=True)})
    except (TrueupError, *_NONSENSE) as error:
        raise ArtifactError(f"cannot save this calibration: {_reason(error)}") from None
    write(Path(path), content, ArtifactError)


def load(path: str | PathLike[str]) -> Calibration:
    """Read a calibration; anything damaged, inconsistent or unknown raises ArtifactError with the reason."""
    path = Path(path)
    if path.is_dir():
        raise ArtifactError(f"{path} is a directory, not a calibration file")
    try:
        with safe_open(path, framework="pt") as file:
            meta = _meta(file.metadata(), path)
            # Copies: what safe_open returns stays tied to the file, and changes or crashes with it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ArtifactError(f"{path} does not exist") from None
    except (SafetensorError, OSError, *_NONSENSE) as error:
        raise ArtifactError(f"{path} cannot be read as a calibration: {_reason(error)}") from None
    try:
        stated = meta.pop("checksum", None)
        if stated != _checksum(tensors, meta):
            raise ArtifactError("its checksum does not match: the file was damaged or edited")
        return _build(meta, tensors)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from None
    except (TrueupError, *_NONSENSE) as error:
        raise ArtifactError(f"{path} is damaged: {type(error).__name__}: {_reason(error)}") from None


def _meta(raw: Mapping[str, str] | None, path: Path) -> dict[str, Any]:
    if not raw or "trueup" not in raw:
        raise ArtifactError(f"{path} is not a trueup calibration")
    try:
        meta = json.loads(raw["trueup"], parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ArtifactError(f"{path} has unreadable metadata") from None
    if not isinstance(meta, dict) or not isinstance(meta.get("format"), int):
        raise ArtifactError(f"{path} has unreadable metadata")
    if meta["format"] > FORMAT:
        raise ArtifactError(
            f"{path} has format {meta['format']}; trueup {__version__} reads up to {FORMAT}: upgrade trueup"
        )
    if meta["format"] < 1:
        raise ArtifactError(f"{path} has an unknown format {meta['format']}")
    return meta


def _build(meta: dict[str, Any], tensors: dict[str, Tensor]) -> Calibration:
    shape = tuple(meta["shape"])
    if len(shape) < 2 or not all(type(n) is int and 0 < n < 2**20 for n in shape):
        raise ArtifactError("its sample shape makes no sense")
    tensors, of_trajectories = (
        {name: tensor for name, tensor in tensors.items() if name.startswith("trajectory.") is wanted}
        for wanted in (False, True)
    )
    names = {*_NAMES, *(_SINCE_2 if meta["format"] > 1 else ()), *(f"evidence.{name}" for name in _PER_LEVEL)}
    if set(tensors) != names:
        raise ArtifactError("its tensors are not those of a calibration")
    levels, channels, size = len(tensors["t"]), shape[0], math.prod(shape[1:])
    # Before anything is built: a map that is in the file, times levels that are, bounds what we allocate.
    _check(tensors, {"data_mean": (channels, size), "t": (levels,)})
    if levels < 1 or levels * channels * size * 8 > _LARGEST:
        raise ArtifactError(f"{levels} levels of samples of shape {shape} make no sense")
    bands = Bands(shape[1:], meta["band_edges"])
    kept = meta["kept_bands"]
    if kept != sorted(set(kept)) or not all(type(k) is int and 0 <= k < bands.count for k in kept):
        raise ArtifactError("its list of kept bands makes no sense")
    coefficients = bands.coefficients(kept)
    expected = {
        "lam": (levels,),
        "b": (levels, channels, len(coefficients)),
        "a": (levels, channels, bands.count),
        "d": (levels, channels, bands.count),
        "scale": (levels, bands.count),
        "support": (levels - 1, bands.count),
        "data_variance": (channels, bands.count),
        **{f"evidence.{name}": (levels,) for name in _PER_LEVEL},
    }
    if meta["format"] > 1:
        expected["data_variance_se"] = (channels, bands.count)
    _check(tensors, expected)
    t, lam = tensors["t"], tensors["lam"]
    provenance = meta["provenance"]
    process = from_settings(provenance["process"])
    Parametrization(**provenance["parametrization"])
    if levels > 1 and not ((t.diff() > 0).all() and (lam.diff() < 0).all()):
        raise ArtifactError("its noise levels are out of order")
    if not torch.allclose(process.lam(t), lam, rtol=1e-6, atol=1e-6):
        raise ArtifactError("its noise levels do not belong to its noise process")
    if not isinstance(provenance.get("weights", {}), dict):
        raise ArtifactError("its fingerprint of the weights makes no sense")
    b = torch.zeros(levels, channels, size, dtype=torch.float64)
    b[..., coefficients] = tensors["b"].double()
    evidence = Evidence(
        images=_count(meta, "images"),
        folds=_count(meta, "folds"),
        dimensions=channels * size,
        scale=tensors["scale"].double(),
        bound_gain=Number(*_floats(meta["bound_gain"], 4)),
        shift_bound_gain=Number(*_floats(meta["shift_bound_gain"], 4)),
        shift_se=tensors["evidence.shift_se"],
        **{n: Number(*(tensors[f"evidence.{n}.{part}"] for part in _PARTS)) for n in _NUMBERS},
    )
    images = _count(meta, "data_images")
    variance, mean = tensors["data_variance"].double(), tensors["data_mean"].double()
    # Format 1 did not say how well the variance is known: as Gaussian data, a band counted as one number.
    error = (
        tensors["data_variance_se"].double() if meta["format"] > 1 else variance * (2 / max(images, 1)) ** 0.5
    )
    if (error < 0).any():
        raise ArtifactError("its error of the variance is negative")
    entries = meta.get("trajectories", []) if meta["format"] > 1 else []
    if len({name.split(".")[1] for name in of_trajectories}) != len(entries):
        raise ArtifactError("its trajectories are not those it lists")
    trajectories = tuple(
        unpack(entry, of_trajectories, f"trajectory.{i}", bands, mean) for i, entry in enumerate(entries)
    )
    if any(find(trajectories[:i], made.sampler) for i, made in enumerate(trajectories)):
        raise ArtifactError("two of its trajectories are for one sampler")
    return Calibration(
        correction=Correction(
            lam, b, tensors["a"].double(), tensors["d"].double(), bands, tensors["support"].double().clamp(0, 1)
        ),
        t=t,
        shape=shape,
        evidence=evidence,
        family=str(meta["family"]),
        estimator=str(meta["estimator"]),
        data_mean=mean,
        data_variance=variance,
        data_variance_se=error,
        data_images=images,
        data_fingerprint=str(meta["data_fingerprint"]),
        provenance=provenance,
        trajectories=trajectories,
    )


def _check(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, dims in expected.items():
        tensor, dtype = tensors[name], _dtype(name)
        if tuple(tensor.shape) != dims or tensor.dtype != dtype:
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ArtifactError(f"{name} is {found}, expected {dtype} {dims}")
        if not name.startswith("evidence.") and not torch.isfinite(tensor).all():
            raise ArtifactError(f"{name} holds values that are not finite")


def _dtype(name: str) -> torch.dtype:
    return torch.float64 if name in ("t", "lam") or name.startswith("evidence.") else torch.float32


def _count(meta: Mapping[str, Any], name: str) -> int:
    value = meta[name]
    if type(value) is not int or value < 0:
        raise ArtifactError(f"its number of {name} is {value!r}")
    return value


def _checksum(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(json.dumps(meta, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """A numpy or torch number as a Python one."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r} cannot be written as JSON")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _json_number(number: Number) -> list[float | None]:
    values = (getattr(number, part) for part in _PARTS)
    return [None if math.isnan(value) else value for value in values]


def _floats(values: list[float | None], count: int) -> Any:
    if len(values) != count:
        raise ArtifactError("its totals make no sense")
    return tuple(math.nan if v is None else float(v) for v in values)
