"""Moments in a file: what is written, and what a reader believes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.calibration.artifact import check_provenance
from trueup.errors import ArtifactError, TrueupError
from trueup.files import line
from trueup.process import from_settings

KIND = "moments"
PAIRS = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))  # of residual, departure and u
SUMS = ("rows", "squares", "first", "second", "data_rows", "data_first", "data_second")
LEVELS = ("t", "lam", "alpha", "sigma")
_AGREE = 1e-3  # of the size of what is compared
_ROUNDING = 1e-5  # products are summed from float32
_TENSORS = (*LEVELS, *SUMS, "indices", "digests")
_NONSENSE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def pack(moments: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Moments as metadata and tensors."""
    meta = {
        "shape": list(moments.shape),
        "band_edges": list(moments.bands.edges),
        "classes": list(moments.classes),
        "mean_only": moments.mean_only,
        "data_digest": f"{moments.data_digest:016x}",
        "skipped": list(moments.skipped),
        "provenance": moments.provenance,
    }
    return meta, {name: getattr(moments, name).cpu() for name in _TENSORS}


def unpack(meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The fields of moments; what is damaged or makes no sense raises ArtifactError with the reason."""
    try:
        return _fields(meta, tensors)
    except ArtifactError:
        raise
    except (TrueupError, *_NONSENSE) as error:
        raise ArtifactError(f"damaged: {line(error)}") from None


def _fields(meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Every number has a range, and what is out of it is named."""
    shape, classes = tuple(meta["shape"]), tuple(meta["classes"])
    if len(shape) < 2 or not all(type(n) is int and 0 < n < 2**20 for n in shape):
        raise ArtifactError("its sample shape makes no sense")
    if not all(type(y) is int and abs(y) < 2**63 for y in classes) or len(set(classes)) != len(classes):
        raise ArtifactError("its classes make no sense")
    if set(tensors) != set(_TENSORS):
        raise ArtifactError("its tensors are not those of moments")
    for name, tensor in tensors.items():
        whole = name in ("indices", "digests")
        if tensor.dtype != (torch.int64 if whole else torch.float64):
            raise ArtifactError(f"{name} is {tensor.dtype}")
        if not whole and not torch.isfinite(tensor).all():
            raise ArtifactError(f"{name} holds values that are not finite")
    groups, folds, levels = max(len(classes), 1), tensors["data_rows"].shape[-1], tensors["t"].numel()
    channels, size = shape[0], math.prod(shape[1:])
    if not levels or not folds or tensors["first"].shape[-1] != size:
        raise ArtifactError("its sums do not belong to its sample shape")
    bands = Bands(shape[1:], meta["band_edges"])
    cells = (groups, folds)
    expected = {
        **dict.fromkeys(LEVELS, (levels,)),
        "rows": (*cells, levels),
        "squares": (*cells, levels),
        "first": (*cells, levels, 3, channels, size),
        "second": (*cells, levels, len(PAIRS), channels, bands.count),
        "data_rows": cells,
        "data_first": (*cells, channels, size),
        "data_second": (*cells, channels, bands.count),
        "indices": (tensors["indices"].numel(),),
        "digests": (tensors["indices"].numel(),),
    }
    for name, dims in expected.items():
        if tuple(tensors[name].shape) != dims:
            raise ArtifactError(f"{name} has the shape {tuple(tensors[name].shape)}, expected {dims}")
    _check_levels(meta["provenance"], tensors)
    _check_sums(bands, tensors)
    _check_data(tensors)
    _check_samples(meta, tensors)
    return {
        "shape": shape,
        "bands": bands,
        "classes": classes,
        "mean_only": meta["mean_only"],
        "data_digest": int(meta["data_digest"], 16),
        "skipped": [str(reason) for reason in meta["skipped"]],
        "provenance": dict(meta["provenance"]),
        **tensors,
    }


def _check_levels(provenance: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    check_provenance(provenance)
    process, t = from_settings(provenance["process"]), tensors["t"]
    if len(t) > 1 and not (t.diff() > 0).all():
        raise ArtifactError("t: its noise levels are out of order")
    for name in ("lam", "alpha", "sigma"):
        if not torch.allclose(getattr(process, name)(t), tensors[name], rtol=1e-9, atol=1e-12):
            raise ArtifactError(f"{name} does not belong to its noise process")


def _check_sums(bands: Bands, tensors: Mapping[str, Tensor]) -> None:
    """Sums of squares are not negative, and no product is larger than its factors allow (Cauchy-Schwarz)."""
    rows, squares, data_rows = tensors["rows"], tensors["squares"], tensors["data_rows"]
    for name in ("rows", "squares", "data_rows", "data_second"):
        if (tensors[name] < 0).any():
            raise ArtifactError(f"{name} is negative")
    if (rows > 2.0**53).any() or (data_rows > 2.0**53).any():
        raise ArtifactError("rows: nobody counts that far")
    if (squares > rows * (1 + 1e-9)).any() or ((squares > 0) != (rows > 0)).any():
        raise ArtifactError("squares are not those of weights between 0 and 1")
    second = tensors["second"].movedim(3, 0)  # (6, G, F, L, C, bands)
    power = {i: second[PAIRS.index((i, i))] for i in range(3)}
    names = ("residual", "departure", "u")
    for (i, j), product in zip(PAIRS, second, strict=True):
        if i == j and (product < 0).any():
            raise ArtifactError(f"second: the sum of {names[i]}^2 is negative")
    for (i, j), product in zip(PAIRS, second, strict=True):
        if i != j and _above(product.square(), power[i] * power[j]):
            raise ArtifactError(
                f"second: the sum of {names[i]} {names[j]} is larger than their squares allow"
            )
    for i, first in enumerate(tensors["first"].movedim(3, 0)):
        if _above(bands.sum(first.square()), rows[..., None, None] * power[i]):
            raise ArtifactError(f"first: the sum of {names[i]} is larger than its squares allow")
    if _above(bands.sum(tensors["data_first"].square()), data_rows[..., None, None] * tensors["data_second"]):
        raise ArtifactError("data_first is larger than data_second allows")


def _check_data(tensors: Mapping[str, Tensor]) -> None:
    """u - eps = (alpha/sigma) x0: where every sample is at every level, both say the same of the data."""
    rows, alpha, sigma = tensors["rows"], tensors["alpha"], tensors["sigma"]
    if not torch.equal(rows, tensors["data_rows"][..., None].expand_as(rows)):
        return
    one = torch.ones_like(alpha)
    weights = torch.stack([one, -one, alpha**2 / (alpha**2 + sigma**2)])  # of residual, departure and u
    ratio, wide = (alpha / sigma)[:, None, None], weights[..., None, None]  # (L, 1, 1), (3, L, 1, 1)
    first = tensors["first"].movedim(3, 0)  # (3, G, F, L, C, K)
    second = dict(zip(PAIRS, tensors["second"].movedim(3, 0), strict=True))
    parts = [wide[i] * wide[j] * second[i, j] * (1 if i == j else 2) for i, j in PAIRS]
    for name, terms, data in (
        ("first", [wide[i] * first[i] for i in range(3)], ratio * tensors["data_first"][:, :, None]),
        ("second", parts, ratio**2 * tensors["data_second"][:, :, None]),
    ):
        size = sum(term.abs() for term in terms) + data.abs()
        if ((sum(terms) - data).abs() > _AGREE * (size + size.mean())).any():
            raise ArtifactError(f"{name} is not of the samples that data_{name} is of")


def _above(value: Tensor, most: Tensor) -> bool:
    """Whether anything is larger than it can be, rounding aside."""
    return bool((value > most * (1 + _ROUNDING) + 1e-30).any())


def _check_samples(meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    indices, digests = tensors["indices"], tensors["digests"]
    count, mean_only = len(indices), meta["mean_only"]
    if type(mean_only) is not int or not 0 <= mean_only <= count:
        raise ArtifactError(f"mean_only is {mean_only!r} of {count} samples")
    if len(indices.unique()) != count:
        raise ArtifactError("indices: a sample is in it twice")
    if count and float(tensors["data_rows"].sum()) > count * (1 + 1e-9):
        raise ArtifactError(f"data_rows counts more samples than the {count} it names")
    if count and int(meta["data_digest"], 16) != sum(digests.tolist()) & ((1 << 64) - 1):
        raise ArtifactError("data_digest is not that of its digests")
    if not 0 <= int(meta["data_digest"], 16) < 1 << 64:
        raise ArtifactError("data_digest makes no sense")
