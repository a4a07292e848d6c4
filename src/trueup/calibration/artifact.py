"""What is in a calibration file: one .safetensors, JSON metadata, no pickle. docs/format.md describes it."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import torch
from torch import Tensor

from trueup import __version__
from trueup.bands import Bands
from trueup.calibration.correction import Correction
from trueup.calibration.evidence import Evidence
from trueup.calibration.stored import (
    LARGEST,
    Bounds,
    check_tensors,
    kept_bands,
    nonzero_bands,
    pack,
    unpack,
    whole,
)
from trueup.calibration.trajectory import find
from trueup.denoiser import Binding
from trueup.errors import ArtifactError, TrueupError
from trueup.files import line
from trueup.parametrization import Parametrization
from trueup.process import from_settings
from trueup.statistics import Number

KIND = "a calibration"
_PARTS = ("value", "error", "low", "high")
_BY_LEVEL = ("loss", "eta2", "gain")
_TOTALS = ("bound_gain", "shift_bound_gain")
_NONSENSE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def pack_calibration(calibration: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A calibration as metadata and tensors; what could not be read again is refused."""
    correction, evidence = calibration.correction, calibration.evidence
    bands = correction.bands
    kept = nonzero_bands(correction.b, bands)
    tensors: dict[str, Tensor] = {
        "t": calibration.t,
        "lam": correction.lam,
        "b": correction.b[..., bands.coefficients(kept)].float(),
        "a": correction.a.float(),
        "d": correction.d.float(),
        "support": correction.support.float(),
        "scale": evidence.scale.float(),
        "shift_se": evidence.shift_se,
        "data_mean": calibration.data_mean.float(),
        "data_variance": calibration.data_variance.float(),
        "data_variance_se": calibration.data_variance_se.float(),
        "data_digests": calibration.data_digests,
        **{f"{n}.{part}": getattr(getattr(evidence, n), part) for n in _BY_LEVEL for part in _PARTS},
    }
    entries = []
    for i, trajectory in enumerate(calibration.trajectories):
        entry, more = pack(trajectory, f"trajectory.{i}")
        entries.append(entry)
        tensors |= more
    meta: dict[str, Any] = {
        "trueup": __version__,
        "family": calibration.family,
        "estimator": calibration.estimator,
        "shape": list(calibration.shape),
        "band_edges": list(bands.edges),
        "kept_bands": kept,
        "images": evidence.images,
        "folds": evidence.folds,
        **{n: [_json_float(getattr(getattr(evidence, n), part)) for part in _PARTS] for n in _TOTALS},
        "data_images": calibration.data_images,
        "provenance": calibration.provenance,
        "trajectories": entries,
        "identity": calibration.identity,
    }
    unpack_calibration(meta, tensors)
    return meta, tensors


def unpack_calibration(meta: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The fields of a calibration; anything inconsistent or unknown raises ArtifactError with the reason."""
    try:
        return _fields(meta, tensors)
    except ArtifactError:
        raise
    except (TrueupError, *_NONSENSE) as error:
        raise ArtifactError(f"damaged: {type(error).__name__}: {line(error)}") from None


def identity_of(correction: Correction, provenance: dict[str, Any]) -> str:
    """A short hash of what a calibration does, the same for one and for what was loaded from its file."""
    names = ("process", "parametrization", "binding")
    settings = [*(provenance.get(name) for name in names), correction.bands.edges, correction.bands.spatial]
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8)
    for part in (correction.lam, correction.b, correction.a, correction.d, correction.support):
        digest.update((part.to(torch.float32) + 0.0).contiguous().numpy().tobytes())  # -0.0 is 0.0
    return digest.hexdigest()


def _fields(meta: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    shape, (t, provenance) = tuple(meta["shape"]), (tensors["t"], meta["provenance"])
    if not 2 <= len(shape) <= 6 or not all(type(n) is int and 0 < n < 2**20 for n in shape):
        raise ArtifactError("its sample shape makes no sense")
    levels, channels, size = t.numel(), shape[0], math.prod(shape[1:])
    # Before anything is built: a map that is in the file, times levels that are, bounds what we allocate.
    check_tensors({"data_mean": tensors["data_mean"]}, {"data_mean": _map(channels, size)})
    if not 1 <= levels <= 10_000 or levels * channels * size * 8 > LARGEST:
        raise ArtifactError(f"{levels} levels of samples of shape {shape} make no sense")
    edges = meta["band_edges"]
    if not isinstance(edges, list) or not 1 <= len(edges) <= 1000:
        raise ArtifactError("its band edges make no sense")
    bands = Bands(shape[1:], edges)
    coefficients = bands.coefficients(kept_bands(meta, bands))
    by_trajectory = {name: tensor for name, tensor in tensors.items() if name.startswith("trajectory.")}
    check_tensors(
        {name: tensor for name, tensor in tensors.items() if name not in by_trajectory},
        _bounds(levels, channels, size, bands.count, len(coefficients), tensors["data_digests"].numel()),
    )
    process = from_settings(provenance["process"])
    Parametrization(**provenance["parametrization"])
    if provenance.get("binding") is not None:
        Binding.from_settings(provenance["binding"])
    if not all(
        isinstance(provenance.get(name, {}) or {}, dict) for name in ("weights", "generated", "transform")
    ):
        raise ArtifactError("its provenance makes no sense")
    if not isinstance(provenance.get("model", ""), str):
        raise ArtifactError("the model's name makes no sense")
    lam = tensors["lam"]
    if levels > 1 and not ((t.diff() > 0).all() and (lam.diff() < 0).all()):
        raise ArtifactError("its noise levels are out of order")
    if not torch.allclose(process.lam(t), lam, rtol=1e-6, atol=1e-6):
        raise ArtifactError("its noise levels do not belong to its noise process")
    b = torch.zeros(levels, channels, size, dtype=torch.float64)
    b[..., coefficients] = tensors["b"].double()
    mean = tensors["data_mean"].double()
    entries = meta["trajectories"]
    if not isinstance(entries, list) or {name.split(".")[1] for name in by_trajectory} != {
        str(i) for i in range(len(entries))
    }:
        raise ArtifactError("its trajectories are not those it lists")
    trajectories = tuple(
        unpack(entry, by_trajectory, f"trajectory.{i}", bands, mean) for i, entry in enumerate(entries)
    )
    if any(find(trajectories[:i], made.sampler) for i, made in enumerate(trajectories)):
        raise ArtifactError("two of its trajectories are for one sampler")
    parts = (tensors[name].double() for name in ("a", "d"))
    correction = Correction(lam, b, *parts, bands, tensors["support"].double())
    if identity_of(correction, provenance) != meta.get("identity"):
        raise ArtifactError("its correction is not the one that was saved")
    return {
        "correction": correction,
        "t": t,
        "shape": shape,
        "evidence": Evidence(
            images=whole(meta, "images", 1, 2**40),
            folds=whole(meta, "folds", 1, 1024),
            dimensions=channels * size,
            scale=tensors["scale"].double(),
            shift_se=tensors["shift_se"],
            **{n: Number(*(tensors[f"{n}.{part}"] for part in _PARTS)) for n in _BY_LEVEL},
            **{n: Number(*_floats(meta[n], n)) for n in _TOTALS},
        ),
        "family": _word(meta, "family"),
        "estimator": _word(meta, "estimator"),
        "data_mean": mean,
        "data_variance": tensors["data_variance"].double(),
        "data_variance_se": tensors["data_variance_se"].double(),
        "data_images": whole(meta, "data_images", 1, 2**40),
        "data_digests": tensors["data_digests"],
        "provenance": provenance,
        "trajectories": trajectories,
    }


def _map(channels: int, size: int) -> Bounds:
    return Bounds((channels, size), -1e9, 1e9, torch.float32)


def _bounds(
    levels: int, channels: int, size: int, bands: int, coefficients: int, digests: int
) -> dict[str, Bounds]:
    """Of every tensor; gains beyond a hundred and shifts beyond a million are no corrections."""
    single = torch.float32
    by_level = {
        f"{name}.{part}": Bounds(
            (levels,),
            0.0 if part == "error" or (name, part) == ("loss", "value") else -1e12,
            1e12,
            unknown=True,
        )
        for name in _BY_LEVEL
        for part in _PARTS
    }
    return {
        "t": Bounds((levels,), -1e9, 1e9),
        "lam": Bounds((levels,), -100.0, 100.0),
        "b": Bounds((levels, channels, coefficients), -1e6, 1e6, single),
        "a": Bounds((levels, channels, bands), -100.0, 100.0, single),
        "d": Bounds((levels, channels, bands), -100.0, 100.0, single),
        "support": Bounds((max(levels - 1, 0), bands), 0.0, 1.0, single),
        "scale": Bounds((levels, bands), 0.0, 1.0, single),
        "shift_se": Bounds((levels,), 0.0, 1e12, unknown=True),
        "data_mean": _map(channels, size),
        "data_variance": Bounds((channels, bands), 0.0, 1e12, single),
        "data_variance_se": Bounds((channels, bands), 0.0, 1e12, single),
        "data_digests": Bounds((digests,), dtype=torch.int64),
        **by_level,
    }


def _word(meta: dict[str, Any], name: str) -> str:
    value = meta[name]
    if not isinstance(value, str) or not 1 <= len(value) <= 40:
        raise ArtifactError(f"{name} is {str(value)[:20]!r}")
    return value


def _json_float(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _floats(values: Any, name: str) -> list[float]:
    plain = isinstance(values, list) and all(v is None or isinstance(v, (int, float)) for v in values)
    if not plain or len(values) != len(_PARTS) or (values[1] or 0.0) < 0:
        raise ArtifactError(f"{name} makes no sense")
    return [math.nan if v is None else float(v) for v in values]
