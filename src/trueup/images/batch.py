"""Batches: samples that were read, made tensors of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup.errors import DataError
from trueup.files import printable
from trueup.images.reading import Row


@dataclass
class Batch:
    """Samples with their positions in the data, and their labels where the data has them."""

    index: Tensor  # (B,) int64, global
    x0: Tensor  # (B, *shape) float32
    y: Tensor | None
    digests: Tensor  # (B,) int64, of what was read
    group: Tensor | None = None  # (B,) int64 keys

    def __len__(self) -> int:
        return len(self.index)

    def rows(self, part: slice | Tensor) -> Batch:
        """Some of them."""
        parts = {name: v[part] for name, v in vars(self).items() if v is not None}
        return replace(self, **parts)

    def to(self, device: torch.device) -> Batch:
        """On another device, which a GPU is not waited for; digests stay where they are."""
        parts = {name: v for name, v in vars(self).items() if v is not None and name != "digests"}
        return replace(self, **{name: sent(v, device) for name, v in parts.items()})


def sent(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Values on a device, without waiting for what a GPU is doing: what it reads later is copied first."""
    quick = device.type == "cuda" and values.device.type == "cpu"
    return values.to(device, dtype or values.dtype, non_blocking=quick)


def told(labels: Sequence[Any], vocabulary: Any, conditional: bool, name: str) -> Tensor | None:
    """What the network is told of each sample."""
    texts = [label for label in labels if isinstance(label, str)]
    if vocabulary is not None and all(isinstance(one, (str, NoneType, Mapping)) for one in labels):
        numbers: Tensor = vocabulary.numbers(labels)
        return numbers
    if texts and conditional:
        problem = f"the label of a sample of {name} is the text {texts[0][:40]!r}"
        raise DataError(printable(f"{problem}, and this network takes class numbers"))
    try:
        return None if any(label is None for label in labels) else torch.as_tensor(np.asarray(labels))
    except (TypeError, ValueError):  # names, boxes: nothing a network takes as its class
        if conditional:
            kind = type(labels[0]).__name__
            problem = f"the labels of {name} ({kind}) do not fit into one tensor, which this network takes"
            raise DataError(f"{problem}: give every sample a number, or an array of one shape") from None
        return None


def stacked(rows: Sequence[Row], autoencoder: Any, shape: tuple[int, ...], pin: bool) -> Tensor:
    """Samples, those of pictures encoded where there is an autoencoder; pin: where GPUs copy from."""
    pictures = [row.x0 for row in rows if row.encode]
    if not pictures or autoencoder is None:
        x0 = torch.stack([row.x0 for row in rows])
        return x0.pin_memory() if pin else x0
    latents = autoencoder.encode(torch.stack(pictures)).cpu()
    if tuple(latents.shape[1:]) != shape:
        made = tuple(latents.shape[1:])
        raise DataError(f"the autoencoder makes latents of shape {made}, the model takes {shape}")
    encoded = iter(latents)
    return torch.stack([next(encoded) if row.encode else row.x0 for row in rows])
