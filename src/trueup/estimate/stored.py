"""Moments in a file: what is written, and what a reader believes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands, kept_frequencies
from trueup.calibration.artifact import check_provenance
from trueup.calibration.conditions import KIND as EMBEDDING
from trueup.calibration.pictures import KIND as PICTURE
from trueup.errors import ArtifactError
from trueup.estimate.conditions import Conditions, unpack_conditions
from trueup.estimate.pictures import Pictures, unpack_pictures
from trueup.process import from_settings
from trueup.stored import Bounds, check_tensors, part, sample_shape, whole

KIND = "moments"
VECTORS = ("residual", "departure", "u")
PAIRS = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))  # of these
SUMS = ("rows", "squares", "first", "second", "data_rows", "data_first", "data_second")
LEVELS = ("t", "lam", "alpha", "sigma")
_AGREE = 1e-3  # of the size of what is compared
_ROUNDING = 1e-5  # products are summed from float32


def dimensions(shape: Sequence[int], levels: int, bands: Bands) -> dict[str, tuple[int, ...]]:
    """Of each of SUMS, after class and fold."""
    of_map, of_bands = (shape[0], bands.length), (shape[0], bands.count)
    by_level = [(levels,), (levels,), (levels, 3, *of_map), (levels, len(PAIRS), *of_bands)]
    return dict(zip(SUMS, [*by_level, (), of_map, of_bands], strict=True))


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
    tensors = {name: getattr(moments, name).cpu() for name in (*LEVELS, *SUMS, "indices", "digests")}
    if moments.conditions is not None:
        meta["condition"], more = moments.conditions.pack()
        tensors |= more
    return meta, tensors


def unpack(meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The fields of moments: every number has a range, and what is out of it is named."""
    shape, classes, provenance = sample_shape(meta), tuple(meta["classes"]), part(meta, "provenance", dict)
    if not all(type(y) is int and abs(y) < 2**63 for y in classes) or len(set(classes)) != len(classes):
        raise ArtifactError("its classes make no sense")
    t, first, data_rows, indices = (part(tensors, n, Tensor) for n in ("t", "first", "data_rows", "indices"))
    cells, levels, count = (max(len(classes), 1), data_rows.shape[-1]), t.numel(), indices.numel()
    # Before anything is built: what is in the file bounds what we allocate.
    kept = kept_frequencies(shape)
    length = math.prod(shape[1:] if kept is None else map(len, kept))
    if not levels or not cells[1] or first.shape[-1] != length:
        raise ArtifactError("its sums do not belong to its sample shape")
    bands = Bands.of(shape, meta["band_edges"])
    bounds = {n: Bounds((*cells, *size)) for n, size in dimensions(shape, levels, bands).items()}
    for name in ("rows", "squares", "data_rows"):
        bounds[name] = bounds[name]._replace(low=0.0, high=2.0**53)  # nobody counts further
    bounds["data_second"] = bounds["data_second"]._replace(low=0.0)
    bounds |= dict.fromkeys(LEVELS, Bounds((levels,)))
    bounds |= dict.fromkeys(("indices", "digests"), Bounds((count,), dtype=torch.int64))
    of_conditions = {name: tensor for name, tensor in tensors.items() if name.startswith("condition.")}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in of_conditions}
    check_tensors(tensors, bounds)
    conditions: Conditions | Pictures | None = None
    if of_conditions:
        about = part(meta, "condition", dict)
        kinds: dict[Any, Any] = {EMBEDDING: unpack_conditions, PICTURE: unpack_pictures}
        if about.get("kind") not in kinds:
            raise ArtifactError("its conditions are of no known kind")
        conditions = kinds[about["kind"]](about, of_conditions, (cells[1], levels), shape[0], bands)
    _check_levels(provenance, tensors)
    _check_sums(bands, tensors)
    if isinstance(conditions, Conditions):
        _check_conditions(conditions, bands, tensors)
    if isinstance(conditions, Pictures):
        _check_pictures(conditions, bands, tensors)
    _check_data(tensors)
    skipped = part(meta, "skipped", list)
    if not all(isinstance(reason, str) for reason in skipped):
        raise ArtifactError("skipped is no list of reasons")
    mean_only, data_digest = whole(meta, "mean_only", 0, count), int(meta["data_digest"], 16)
    if len(indices.unique()) != count:
        raise ArtifactError("indices: a sample is in it twice")
    if count and float(data_rows.sum()) > count * (1 + 1e-9):
        raise ArtifactError(f"data_rows counts more samples than the {count} it names")
    if count and data_digest != sum(tensors["digests"].tolist()) & ((1 << 64) - 1):
        raise ArtifactError("data_digest is not that of its digests")
    if not 0 <= data_digest < 1 << 64:
        raise ArtifactError("data_digest makes no sense")
    return {
        "shape": shape,
        "bands": bands,
        "classes": classes,
        "mean_only": mean_only,
        "data_digest": data_digest,
        "skipped": skipped,
        "provenance": dict(provenance),
        "conditions": conditions,
        **tensors,
    }


def _check_levels(provenance: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    check_provenance(provenance)
    process, t = from_settings(provenance["process"]), tensors["t"]
    if not (t.diff() > 0).all():
        raise ArtifactError("t: its noise levels are out of order")
    for name in ("lam", "alpha", "sigma"):
        if not torch.allclose(getattr(process, name)(t), tensors[name], rtol=1e-9, atol=1e-12):
            raise ArtifactError(f"{name} does not belong to its noise process")


def _check_sums(bands: Bands, tensors: Mapping[str, Tensor]) -> None:
    """Sums of squares are not negative, and no product is larger than its factors allow (Cauchy-Schwarz)."""
    rows, squares = tensors["rows"], tensors["squares"]
    if (squares > rows * (1 + 1e-9)).any() or ((squares > 0) != (rows > 0)).any():
        raise ArtifactError("squares are not those of weights between 0 and 1")
    products = dict(zip(PAIRS, tensors["second"].movedim(3, 0), strict=True))  # of (G, F, L, C, bands)
    for i, name in enumerate(VECTORS):
        if (products[i, i] < 0).any():
            raise ArtifactError(f"second: the sum of {name}^2 is negative")
        if _above(bands.sum(tensors["first"][:, :, :, i].square()), rows[..., None, None] * products[i, i]):
            raise ArtifactError(f"first: the sum of {name} is larger than its squares allow")
    for (i, j), product in products.items():
        if _above(product.square(), products[i, i] * products[j, j]):
            raise ArtifactError(f"second: the sum of {VECTORS[i]} {VECTORS[j]} is larger than squares allow")
    most = tensors["data_rows"][..., None, None] * tensors["data_second"]
    if _above(bands.sum(tensors["data_first"].square()), most):
        raise ArtifactError("data_first is larger than data_second allows")


def _check_conditions(of: Conditions, bands: Bands, tensors: Mapping[str, Tensor]) -> None:
    """The same of features: of themselves, of their sums, and of their products with the three vectors."""
    power = torch.diagonal(of.gram, dim1=-2, dim2=-1)  # (F, L, Q)
    rows, second = tensors["rows"].sum(0)[..., None], tensors["second"].sum(0)  # of all classes
    squares = torch.stack([second[:, :, PAIRS.index((i, i)), :, : of.bands] for i in range(3)], 2)
    band = bands.band[bands.coefficients(range(of.bands))]
    products = of.sums.new_zeros(*of.sums.shape[:-1], of.bands).index_add_(-1, band, of.sums.square())
    most = power[..., None, None, None] * squares[:, :, None]  # (F, L, Q, 3, C, bands)
    sizes = (power[..., None] * power[..., None, :]).clamp_min(0.0)
    if ((of.gram - of.gram.mT).abs() > 1e-9 * sizes.sqrt()).any():  # ranks and GPUs add in any order
        raise ArtifactError("condition.gram is not symmetric")
    for name, value, largest in (
        ("total", of.total.square(), rows * power),
        ("gram", of.gram.square(), sizes),
        ("sums", products, most),
    ):
        if _above(value, largest):
            raise ArtifactError(f"condition.{name} is larger than its squares allow")


def _check_pictures(of: Pictures, bands: Bands, tensors: Mapping[str, Tensor]) -> None:
    """The same of pictures, in every band."""
    rows, second = tensors["rows"].sum(0)[..., None, None], tensors["second"].sum(0)
    power = torch.diagonal(of.gram, dim1=2, dim2=3).movedim(-1, 2)  # (F, L, M, bands)
    squares = torch.stack([second[:, :, PAIRS.index((i, i))] for i in range(3)], 2)  # (F, L, 3, C, bands)
    if (power < 0).any():
        raise ArtifactError("condition.gram: a sum of squares is negative")
    sizes = power[:, :, :, None] * power[:, :, None]
    if ((of.gram - of.gram.transpose(2, 3)).abs() > _ROUNDING * sizes.sqrt()).any():
        raise ArtifactError("condition.gram is not symmetric")
    for name, value, largest in (
        ("first", bands.sum(of.first.square()), rows * power),
        ("gram", of.gram.square(), sizes),
        ("sums", of.sums.square(), power[..., None, None, :] * squares[:, :, None]),
    ):
        if _above(value, largest):
            raise ArtifactError(f"condition.{name} is larger than its squares allow")


def _check_data(tensors: Mapping[str, Tensor]) -> None:
    """u - eps = (alpha/sigma) x0: where every sample is at every level, both say the same of the data."""
    rows, alpha, sigma = tensors["rows"], tensors["alpha"], tensors["sigma"]
    if not torch.equal(rows, tensors["data_rows"][..., None].expand_as(rows)):
        return
    one = torch.ones_like(alpha)
    weights = torch.stack([one, -one, alpha**2 / (alpha**2 + sigma**2)])  # of residual, departure and u
    ratio, wide = (alpha / sigma)[:, None, None], weights[..., None, None]  # (L, 1, 1), (3, L, 1, 1)
    second = zip(PAIRS, tensors["second"].movedim(3, 0), strict=True)
    parts = [wide[i] * wide[j] * product * (1 if i == j else 2) for (i, j), product in second]
    vectors = [wide[i] * vector for i, vector in enumerate(tensors["first"].movedim(3, 0))]
    for name, terms, factor in (("first", vectors, ratio), ("second", parts, ratio**2)):
        data = factor * tensors[f"data_{name}"][:, :, None]
        size = sum(term.abs() for term in terms) + data.abs()
        if ((sum(terms) - data).abs() > _AGREE * (size + size.mean())).any():
            raise ArtifactError(f"{name} is not of the samples that data_{name} is of")


def _above(value: Tensor, most: Tensor) -> bool:
    """Whether anything is larger than it can be, rounding aside."""
    return bool((value > most * (1 + _ROUNDING) + 1e-30).any())
