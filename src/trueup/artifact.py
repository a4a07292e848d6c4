"""The calibration file: one .safetensors, JSON metadata, no pickle. docs/format.md describes it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
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
from trueup.parametrization import Parametrization
from trueup.process import from_settings

FORMAT = 1
_PER_LEVEL = ("loss", "loss_se", "eta2", "eta2_se", "gain", "gain_se", "shift_se")
_LARGEST = 2**31  # bytes of one tensor; anything larger is not a calibration


def save(calibration: Calibration, path: str | PathLike[str]) -> None:
    """Write a calibration to a temporary file beside `path`, then rename it into place."""
    correction, evidence = calibration.correction, calibration.evidence
    bands = correction.bands
    kept = [k for k, members in enumerate(bands.members) if bool(correction.b[..., members].any())]
    coefficients = _coefficients(bands, kept)
    tensors = {
        "t": calibration.t,
        "lam": correction.lam,
        "b": correction.b[..., coefficients].to(torch.float32),
        "a": correction.a.to(torch.float32),
        "d": correction.d.to(torch.float32),
        "scale": evidence.scale.to(torch.float32),
        "data_mean": calibration.data_mean.to(torch.float32),
        "data_variance": calibration.data_variance.to(torch.float32),
        **{f"evidence.{name}": getattr(evidence, name) for name in _PER_LEVEL},
    }
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    meta = {
        "format": FORMAT,
        "trueup": __version__,
        "family": calibration.family,
        "estimator": calibration.estimator,
        "shape": list(calibration.shape),
        "band_edges": list(bands.edges),
        "kept_bands": kept,
        "images": evidence.images,
        "folds": evidence.folds,
        "bound_gain": [_json_float(v) for v in evidence.bound_gain],
        "shift_bound_gain": [_json_float(v) for v in evidence.shift_bound_gain],
        "data_images": calibration.data_images,
        "data_fingerprint": calibration.data_fingerprint,
        "provenance": calibration.provenance,
    }
    meta["checksum"] = _checksum(tensors, meta)
    _write(Path(path), to_bytes(tensors, {"trueup": json.dumps(meta, sort_keys=True, allow_nan=False)}))


def load(path: str | PathLike[str]) -> Calibration:
    """Read a calibration; anything damaged, inconsistent or unknown raises ArtifactError with the reason."""
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            meta = _meta(file.metadata(), path)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ArtifactError(f"{path} does not exist") from None
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError, OverflowError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ArtifactError(f"{path} cannot be read as a calibration: {reason}") from None
    try:
        return _build(meta, tensors)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from None
    except (TrueupError, KeyError, TypeError, ValueError, IndexError, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ArtifactError(f"{path} is damaged: {type(error).__name__}: {reason}") from None


def _meta(raw: Mapping[str, str] | None, path: Path) -> dict[str, Any]:
    if not raw or "trueup" not in raw:
        raise ArtifactError(f"{path} is not a trueup calibration")
    try:
        meta = json.loads(raw["trueup"])
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
    stated = meta.pop("checksum", None)
    if stated != _checksum(tensors, meta):
        raise ArtifactError("its checksum does not match: the file was damaged or edited")
    shape = tuple(meta["shape"])
    if len(shape) < 2 or not all(isinstance(n, int) and 0 < n < 2**20 for n in shape):
        raise ArtifactError("its sample shape makes no sense")
    if math.prod(shape) * 4 > _LARGEST:
        raise ArtifactError("its sample shape is too large")
    bands = Bands(shape[1:], meta["band_edges"])
    kept = meta["kept_bands"]
    if kept != sorted(set(kept)) or any(not 0 <= k < bands.count for k in kept):
        raise ArtifactError("its list of kept bands makes no sense")
    coefficients = _coefficients(bands, kept)
    levels, channels, size = len(tensors["t"]), shape[0], math.prod(shape[1:])
    expected = {
        "t": (levels,),
        "lam": (levels,),
        "b": (levels, channels, len(coefficients)),
        "a": (levels, channels, bands.count),
        "d": (levels, channels, bands.count),
        "scale": (levels, bands.count),
        "data_mean": (channels, size),
        "data_variance": (channels, bands.count),
        **{f"evidence.{name}": (levels,) for name in _PER_LEVEL},
    }
    if levels < 1 or set(tensors) != set(expected):
        raise ArtifactError("its tensors are not those of a calibration")
    for name, dims in expected.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != dims or not tensor.is_floating_point():
            raise ArtifactError(f"{name} has shape {tuple(tensor.shape)}, expected {dims}")
        if not name.startswith("evidence.") and not torch.isfinite(tensor).all():
            raise ArtifactError(f"{name} holds values that are not finite")
    t, lam = tensors["t"].double(), tensors["lam"].double()
    provenance = meta["provenance"]
    process = from_settings(provenance["process"])
    Parametrization(**provenance["parametrization"])
    if levels > 1 and not ((t.diff() > 0).all() and (lam.diff() < 0).all()):
        raise ArtifactError("its noise levels are out of order")
    if not torch.allclose(process.lam(t), lam, rtol=1e-6, atol=1e-6):
        raise ArtifactError("its noise levels do not belong to its noise process")
    b = torch.zeros(levels, channels, size, dtype=torch.float64)
    b[..., coefficients] = tensors["b"].double()
    evidence = Evidence(
        images=int(meta["images"]),
        folds=int(meta["folds"]),
        dimensions=channels * size,
        scale=tensors["scale"].double(),
        bound_gain=_pair(meta["bound_gain"]),
        shift_bound_gain=_pair(meta["shift_bound_gain"]),
        **{name: tensors[f"evidence.{name}"].double() for name in _PER_LEVEL},
    )
    return Calibration(
        correction=Correction(lam, b, tensors["a"].double(), tensors["d"].double(), bands),
        t=t,
        shape=shape,
        evidence=evidence,
        family=str(meta["family"]),
        estimator=str(meta["estimator"]),
        data_mean=tensors["data_mean"].double(),
        data_variance=tensors["data_variance"].double(),
        data_images=int(meta["data_images"]),
        data_fingerprint=str(meta["data_fingerprint"]),
        provenance=provenance,
    )


def _coefficients(bands: Bands, kept: list[int]) -> Tensor:
    return torch.cat([bands.members[k] for k in kept]) if kept else torch.zeros(0, dtype=torch.int64)


def _checksum(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(json.dumps(meta, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def _json_float(value: float) -> float | None:
    return None if math.isnan(value) else value


def _pair(values: list[float | None]) -> tuple[float, float]:
    first, second = (math.nan if v is None else float(v) for v in values)
    return first, second


def _write(path: Path, content: bytes) -> None:
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.tmp-")
    except OSError as error:
        raise ArtifactError(f"cannot write {path}: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)  # mkstemp files are private; ours are not secrets
        Path(name).replace(path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise ArtifactError(f"cannot write {path}: {error.strerror}") from None
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
