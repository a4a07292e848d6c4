"""The data's side of every comparison, made once and kept in a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from trueup.errors import ArtifactError, DataError, MismatchError
from trueup.files import line, load_tensors, save_tensors
from trueup.metrics.features import FeatureBatch, Features, look_at
from trueup.metrics.gaussian import GaussianStatistics
from trueup.stored import Bounds, check_tensors, whole

KIND = "a reference"
LIMIT = 10_000  # rows kept for the measures that need every pair
_MOST = 2**16  # dimensions of features, channels of images
_TEXTS = ("features", "preprocessing", "fingerprint", "made_of")
_NONSENSE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass
class Reference:
    """What of the data generated images are compared with, and the network it was seen by."""

    features: str
    preprocessing: str
    weights: str | None
    fingerprint: str
    made_of: str  # "pictures", or what else was looked at
    pooled: GaussianStatistics
    spatial: GaussianStatistics | None
    rows: Tensor  # (kept, d) float32, the first of the pooled features
    colours: Tensor  # (n, C) float64, mean of each channel of each image
    images: Any = None  # it was made from, until it is kept in a file

    @property
    def count(self) -> int:
        """How many images it was made from."""
        return self.pooled.count

    @classmethod
    def build(
        cls, features: Features, batches: Iterable[Tensor], *, fingerprint: str = "", limit: int = LIMIT
    ) -> Reference:
        """Pass batches of images (B, C, H, W) through `features`; `fingerprint` says which data it is.

        >>> from trueup.metrics.features import Pixels
        >>> batches = [torch.rand(5, 1, 2, 2), torch.rand(5, 1, 2, 2)]
        >>> Reference.build(Pixels(), batches, fingerprint="random").count
        10
        """
        seen = (look_at(batch, features) for batch in batches)
        return cls.of(features, seen, fingerprint=fingerprint, limit=limit)

    @classmethod
    def of(
        cls, features: Features, seen: Iterable[FeatureBatch], *, fingerprint: str = "", limit: int = LIMIT
    ) -> Reference:
        """The same of what `features` made of batches of images, with their colours (`look_at`)."""
        pooled, spatial = GaussianStatistics(), GaussianStatistics()
        rows, colours = [], []
        for found in seen:
            rows.append(found.pooled[: max(0, limit - pooled.count)].float())
            pooled.update(found.pooled)
            if found.spatial is not None:
                spatial.update(found.spatial)
            assert found.colours is not None
            colours.append(found.colours)
        if pooled.count < 2:
            raise DataError(f"a reference needs two images or more, got {pooled.count}")
        some = spatial if spatial.count else None
        seen_by = _seen_by(features)
        return cls(*seen_by, fingerprint, "pictures", pooled, some, torch.cat(rows), torch.cat(colours))

    def check(self, features: Features) -> None:
        """Refuse features other than those it was made with."""
        ours, theirs = (self.features, self.preprocessing, self.weights), _seen_by(features)
        if ours != theirs:
            made = f"this reference was made with {_describe(*ours)}, not with {_describe(*theirs)}"
            advice = "distances across features mean nothing. Make the reference again with these"
            raise MismatchError(f"{made}: {advice}")

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to one .safetensors with JSON metadata, atomically."""
        tensors = {"rows": self.rows, "colours": self.colours}
        for name, statistics in (("pooled", self.pooled), ("spatial", self.spatial)):
            if statistics is not None:
                tensors[f"{name}.mean"] = statistics.mean
                tensors[f"{name}.covariance"] = statistics.covariance
        meta = {name: getattr(self, name) for name in (*_TEXTS, "weights", "count")}
        save_tensors(path, KIND, meta, tensors)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Reference:
        """Read one; anything damaged, inconsistent or unknown raises ArtifactError with the reason."""
        meta, tensors = load_tensors(path, KIND)
        try:
            return cls(**_fields(meta, tensors))
        except ArtifactError as error:
            raise ArtifactError(f"{path}: {error}") from None
        except _NONSENSE as error:
            raise ArtifactError(f"{path} is damaged: {line(error)}") from None


def _seen_by(features: Features) -> tuple[str, str, str | None]:
    return features.name, features.preprocessing, features.weights


def _describe(name: str, preprocessing: str, weights: str | None) -> str:
    return f"{name} ({preprocessing}; weights {(weights or 'none')[:8]})"


def _fields(meta: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The fields of a reference, every number within its range."""
    count = whole(meta, "count", 2, 2**40)
    texts = {name: meta[name] for name in (*_TEXTS, "weights")}
    for name, text in texts.items():
        if not isinstance(text, str) and (name, text) != ("weights", None):
            raise ArtifactError(f"{name} is no text")
    names = ("pooled", "spatial") if "spatial.mean" in tensors else ("pooled",)
    sizes = {name: tensors[f"{name}.mean"].numel() for name in names}
    kept, channels = len(tensors["rows"]), tensors["colours"].shape[-1]
    if not 1 <= kept <= count or not all(1 <= n <= _MOST for n in (*sizes.values(), channels)):
        raise ArtifactError(f"{kept} rows of {count} images, {sizes} dimensions, {channels} channels")
    bounds = {
        "rows": Bounds((kept, sizes["pooled"]), -1e12, 1e12, torch.float32),
        "colours": Bounds((count, channels), -1e9, 1e9),
    }
    for name, size in sizes.items():
        bounds[f"{name}.mean"] = Bounds((size,), -1e12, 1e12)
        bounds[f"{name}.covariance"] = Bounds((size, size), -1e24, 1e24)
    check_tensors(tensors, bounds)
    gaussians: dict[str, GaussianStatistics | None] = {"spatial": None}
    for name in names:
        covariance = tensors[f"{name}.covariance"]
        scale = covariance.diag().clamp_min(0.0).sqrt()
        most = scale[:, None] * scale  # but for rounding, by Cauchy and Schwarz
        apart = (covariance - covariance.T).abs() > 1e-6 * most
        if (covariance.diag() < 0).any() or apart.any() or (covariance.abs() > (1 + 1e-6) * most).any():
            raise ArtifactError(f"{name}.covariance is the covariance of nothing")
        gaussians[name] = GaussianStatistics(tensors[f"{name}.mean"], covariance * (count - 1), count)
    return {"rows": tensors["rows"], "colours": tensors["colours"], **texts, **gaussians}
