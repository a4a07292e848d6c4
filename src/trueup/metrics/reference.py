"""The data's side of every comparison, made once and kept in a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from trueup.errors import ArtifactError, DataError, MismatchError
from trueup.files import write
from trueup.metrics.colour import colours
from trueup.metrics.features import Features
from trueup.metrics.gaussian import GaussianStatistics
from trueup.metrics.store import FeatureStore

FORMAT = 1
LIMIT = 10_000  # rows kept for the measures that need every pair
_TEXTS = ("features", "preprocessing", "fingerprint")
_NONSENSE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass
class Reference:
    """What of the data generated images are compared with, and the network it was seen by."""

    features: str
    preprocessing: str
    weights: str | None
    fingerprint: str
    pooled: GaussianStatistics
    spatial: GaussianStatistics | None
    rows: Tensor  # (kept, d) float32, the first of the pooled features
    colours: Tensor  # (n, C) float64, mean of each channel of each image

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
        pooled, spatial, store = GaussianStatistics(), GaussianStatistics(), FeatureStore(limit)
        channels = []
        for images in batches:
            batch = features(images)
            pooled.update(batch.pooled.cpu())  # not every device has float64
            store.update(batch.pooled)
            if batch.spatial is not None:
                spatial.update(batch.spatial.cpu())
            channels.append(colours(images.cpu()))
        if pooled.count < 2:
            raise DataError(f"a reference needs two images or more, got {pooled.count}")
        return cls(
            features=features.name,
            preprocessing=features.preprocessing,
            weights=features.weights,
            fingerprint=fingerprint,
            pooled=pooled,
            spatial=spatial if spatial.count else None,
            rows=store.rows,
            colours=torch.cat(channels),
        )

    def check(self, features: Features) -> None:
        """Refuse features other than those it was made with."""
        ours = (self.features, self.preprocessing, self.weights)
        theirs = (features.name, features.preprocessing, features.weights)
        if ours != theirs:
            raise MismatchError(
                f"this reference was made with {_describe(*ours)}, not with {_describe(*theirs)}: "
                "distances across features mean nothing. Make the reference again with these"
            )

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to one .safetensors with JSON metadata, atomically."""
        tensors = {"rows": self.rows, "colours": self.colours, **_gaussian("pooled", self.pooled)}
        if self.spatial is not None:
            tensors.update(_gaussian("spatial", self.spatial))
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        meta: dict[str, Any] = {"format": FORMAT, "weights": self.weights, "count": self.count}
        meta.update((name, getattr(self, name)) for name in _TEXTS)
        meta["checksum"] = _checksum(tensors, meta)
        content = to_bytes(tensors, {"trueup-reference": json.dumps(meta, sort_keys=True)})
        write(Path(path), content, ArtifactError)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Reference:
        """Read one; anything damaged, inconsistent or unknown raises ArtifactError with the reason."""
        path = Path(path)
        if not path.is_file():
            raise ArtifactError(f"{path} is not a file: make a reference first")
        try:
            with safe_open(path, framework="pt") as file:
                meta = _meta(file.metadata())
                # Copies: what safe_open returns stays tied to the file, and changes with it.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            if meta.pop("checksum", None) != _checksum(tensors, meta):
                raise ArtifactError("its checksum does not match: the file was damaged or edited")
            return _build(meta, tensors)
        except ArtifactError as error:
            raise ArtifactError(f"{path}: {error}") from None
        except (SafetensorError, OSError, *_NONSENSE) as error:
            reason = " ".join(str(error).split())[:200]
            raise ArtifactError(f"{path} cannot be read as a reference: {reason}") from None


def _describe(name: str, preprocessing: str, weights: str | None) -> str:
    return f"{name} ({preprocessing}; weights {(weights or 'none')[:8]})"


def _gaussian(name: str, statistics: GaussianStatistics) -> dict[str, Tensor]:
    return {f"{name}.mean": statistics.mean, f"{name}.covariance": statistics.covariance}


def _meta(raw: dict[str, str] | None) -> dict[str, Any]:
    if not raw or "trueup-reference" not in raw:
        raise ArtifactError("this is not a trueup reference")
    meta = json.loads(raw["trueup-reference"])
    if not isinstance(meta, dict) or not isinstance(meta.get("format"), int):
        raise ArtifactError("its metadata is unreadable")
    if meta["format"] != FORMAT:
        raise ArtifactError(f"it has format {meta['format']}, and this trueup reads {FORMAT}: make it again")
    return meta


def _build(meta: dict[str, Any], tensors: dict[str, Tensor]) -> Reference:
    count, weights = meta["count"], meta["weights"]
    texts = {name: meta[name] for name in _TEXTS}
    if type(count) is not int or count < 2 or not all(isinstance(text, str) for text in texts.values()):
        raise ArtifactError("its metadata makes no sense")
    if not isinstance(weights, str | None):
        raise ArtifactError("its weights' hash makes no sense")
    dimensions = len(tensors["pooled.mean"])
    expected: dict[str, tuple[int, ...]] = {
        "rows": (min(len(tensors["rows"]), count), dimensions),
        "colours": (count, tensors["colours"].shape[1]),
    }
    for name in ("pooled", "spatial") if "spatial.mean" in tensors else ("pooled",):
        size = len(tensors[f"{name}.mean"])
        expected.update({f"{name}.mean": (size,), f"{name}.covariance": (size, size)})
    if set(tensors) != set(expected):
        raise ArtifactError("its tensors are not those of a reference")
    for name, shape in expected.items():
        tensor, dtype = tensors[name], torch.float32 if name == "rows" else torch.float64
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not torch.isfinite(tensor).all():
            raise ArtifactError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}, finite"
            )
    gaussians = {
        name: GaussianStatistics(tensors[f"{name}.mean"], tensors[f"{name}.covariance"] * (count - 1), count)
        for name in ("pooled", "spatial")
        if f"{name}.mean" in tensors
    }
    return Reference(
        weights=weights,
        pooled=gaussians["pooled"],
        spatial=gaussians.get("spatial"),
        rows=tensors["rows"],
        colours=tensors["colours"],
        **texts,
    )


def _checksum(tensors: dict[str, Tensor], meta: dict[str, Any]) -> str:
    digest = hashlib.blake2b(json.dumps(meta, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name}{tensors[name].dtype}{tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
