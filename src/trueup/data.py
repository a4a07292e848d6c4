"""Calibration images: folders, arrays, tensors, datasets, iterables -> samples in the model's range.

Samples are read one at a time, in a fixed order, and handed on in batches; nothing else is kept.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trueup.errors import DataError
from trueup.noise import mix
from trueup.sources import (
    channels_first,
    is_indexed,
    open_source,
    picture_to_array,
    read_image,
    refuse_other_depths,
    split_row,
    to_tensor,
)


@dataclass(frozen=True)
class Transform:
    """How an image becomes a sample; nothing happens that is not asked for.

    resize: None (sizes must match), "shorter" (shorter side to the model's size, aspect kept) or "exact"
    (both sides, aspect not kept), bicubic with antialiasing. crop: None or "center". flip: mirror every
    second sample, picked by its index, for networks trained with random flips. data_range: the range of
    float input, for instance (0, 1); 8-bit images are always 0..255.
    """

    resize: str | None = None
    crop: str | None = None
    flip: bool = False
    data_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.resize not in (None, "shorter", "exact"):
            raise DataError(f"resize is None, 'shorter' or 'exact', not {self.resize!r}")
        if self.crop not in (None, "center"):
            raise DataError(f"crop is None or 'center', not {self.crop!r}")
        if self.data_range is not None:
            finite = len(self.data_range) == 2 and all(map(math.isfinite, self.data_range))
            if not finite or self.data_range[0] >= self.data_range[1]:
                raise DataError(f"data_range is (low, high) with low < high, not {self.data_range!r}")


@dataclass
class Batch:
    """Samples with their positions in the data, and their labels where the data has them."""

    index: Tensor  # (B,) int64
    x0: Tensor  # (B, *shape) float32
    y: Tensor | None

    @cached_property
    def digests(self) -> list[int]:
        """A 64-bit digest of every sample."""
        return digests(self.x0)


class Samples:
    """Batches of samples of one shape out of anything that holds images.

    >>> data = Samples(torch.zeros(5, 1, 4, 4, dtype=torch.uint8), (1, 4, 4), (-1.0, 1.0))
    >>> [(len(batch.index), float(batch.x0.mean())) for batch in data.batches(3)]
    [(3, -1.0), (2, -1.0)]
    """

    def __init__(
        self,
        source: Any,
        shape: Sequence[int],
        model_range: tuple[float, float] | None,
        transform: Transform | None = None,
        skip_bad: bool = False,
        exact: bool = False,
    ):
        self.skip_bad = skip_bad
        self.exact = exact  # whether pictures must be what they seem: 8 bits per channel, all of one kind
        self.eight_bit: bool | None = None  # what the samples read so far were, before scaling
        self.skipped: list[str] = []  # what was wrong with each sample left out
        self.shape = tuple(shape)
        self.model_range = model_range
        self.transform = transform or Transform()
        self.source, self.labels, self.name = open_source(source)
        self.indexed = is_indexed(self.source)
        self.signed = False  # whether float samples have shown that they use the model's range
        self._once = enumerate(self._unbatched()) if isinstance(self.source, Iterator) else None
        self._position = 0  # how far a generator was read
        self.position = 0  # the first sample not yet read, bad ones included

    def __len__(self) -> int:
        """How many samples there are; raises TypeError for a stream."""
        if not self.indexed:
            raise TypeError(f"{self.name} is a stream: it does not say how many samples it holds")
        return len(self.source)

    def batches(
        self, size: int, start: int = 0, stop: int | None = None, *, limit: int | None = None
    ) -> Iterator[Batch]:
        """Samples start..stop, `limit` of them at most, in batches.

        A stream is read from its beginning each time, a generator on from where it was left. A sample that
        cannot be used raises, or with skip_bad is left out and noted in `skipped`.
        """
        if size < 1:
            raise DataError(f"a batch holds at least one sample, not {size}")
        rows: list[tuple[int, Tensor, Any]] = []
        left = math.inf if limit is None else limit
        for index, item in self._items(start, stop) if left > 0 else ():
            self.position = index + 1
            image, label = split_row(item)
            if self.labels is not None:
                label = self.labels[index]
            try:
                rows.append((index, self._sample(image, index), label))
            except DataError as error:
                if not self.skip_bad:
                    raise
                self.skipped.append(str(error))
                continue
            left -= 1
            if len(rows) == size:
                yield _stack(rows)
                rows = []
            if left <= 0:
                break
        if rows:
            yield _stack(rows)

    def at(self, index: int) -> Tensor:
        """One sample of data that is not a stream."""
        return self._sample(split_row(self.source[index])[0], index)

    def label(self, index: int) -> Any:
        """One sample's label, or None."""
        return self.labels[index] if self.labels is not None else split_row(self.source[index])[1]

    def _items(self, start: int, stop: int | None) -> Iterator[tuple[int, Any]]:
        if self.indexed:
            end = len(self.source) if stop is None else min(stop, len(self.source))
            for index in range(start, end):
                yield index, self.source[index]
        elif self._once is not None:
            if start < self._position:
                raise DataError(
                    f"{self.name} can be read only once, and {self._position} samples of it are gone: "
                    "pass a list or a dataset instead"
                )
            left = None if stop is None else max(stop, self._position) - self._position
            for index, item in islice(self._once, start - self._position, left):
                self._position = index + 1
                yield index, item
        else:
            yield from islice(enumerate(self._unbatched()), start, stop)

    def _unbatched(self) -> Iterator[Any]:
        """A stream may yield samples or, as a DataLoader does, batches of them."""
        for item in self.source:
            image, label = split_row(item)
            if isinstance(image, (Tensor, np.ndarray)) and image.ndim == len(self.shape) + 1:
                labelled = isinstance(label, (list, tuple)) or getattr(label, "ndim", 0) > 0
                if labelled and len(label) != len(image):
                    raise DataError(f"a batch of {self.name} has {len(image)} images, {len(label)} labels")
                yield from zip(image, label if labelled else [None] * len(image), strict=True)
            else:
                yield image, label

    def _sample(self, image: Any, index: int) -> Tensor:
        where = getattr(image, "filename", None) or f"sample {index} of {self.name}"
        if isinstance(image, (str, Path)):
            where, image = str(image), read_image(Path(image))
        if isinstance(image, Image.Image):
            if self.exact:
                refuse_other_depths(image, where)
            image = picture_to_array(image, self.shape[0], where)
        array = channels_first(to_tensor(image, where), self.shape, where)
        if self.exact:
            self._note_depth(array.dtype == torch.uint8, where)
        if tuple(array.shape) != self.shape:
            array = self._resize(array, where)
        x0 = self._scale(array, where)
        if not torch.isfinite(x0).all():
            raise DataError(f"{where} holds values that are not finite")
        if self.transform.flip and mix(index) & 1:
            x0 = x0.flip(-1)
        return x0

    def _note_depth(self, eight_bit: bool, where: str) -> None:
        if self.eight_bit is not None and self.eight_bit != eight_bit:
            kinds = ("floating point", "8-bit")
            raise DataError(
                f"{where} is {kinds[eight_bit]}, the samples before it are {kinds[not eight_bit]}: "
                "a likelihood is that of one or of the other"
            )
        self.eight_bit = eight_bit

    def _resize(self, array: Tensor, where: str) -> Tensor:
        size, wanted = tuple(array.shape[1:]), self.shape[1:]
        transform = self.transform
        if len(wanted) != 2 or array.dtype != torch.uint8:
            raise DataError(f"{where} is {size}, the model takes {wanted}: resize it before handing it over")
        if transform.resize is None and transform.crop is None:
            raise DataError(
                f"{where} is {size[0]}x{size[1]}, the model takes {wanted[0]}x{wanted[1]}: "
                "pass resize='shorter' (and crop='center') or resize='exact'"
            )
        planes = [Image.fromarray(plane.numpy()) for plane in array]
        height, width = size
        if transform.resize == "exact":
            height, width = wanted
        elif transform.resize == "shorter":
            factor = max(wanted[0] / height, wanted[1] / width)
            height, width = max(wanted[0], round(height * factor)), max(wanted[1], round(width * factor))
        if (height, width) != size:
            planes = [plane.resize((width, height), Image.Resampling.BICUBIC) for plane in planes]
        if transform.crop == "center" and height >= wanted[0] and width >= wanted[1]:
            top, left = (height - wanted[0]) // 2, (width - wanted[1]) // 2
            planes = [plane.crop((left, top, left + wanted[1], top + wanted[0])) for plane in planes]
        out = torch.stack([torch.from_numpy(np.array(plane)) for plane in planes])
        if tuple(out.shape) != self.shape:
            raise DataError(
                f"{where} is {out.shape[1]}x{out.shape[2]} after resize={transform.resize!r} and "
                f"crop={transform.crop!r}; the model takes {wanted[0]}x{wanted[1]}"
            )
        return out

    def _scale(self, array: Tensor, where: str) -> Tensor:
        if self.model_range is None:
            if array.dtype == torch.uint8:
                raise DataError(f"{where} is an 8-bit picture, and the model takes latents: encode it first")
            return array.to(torch.float32)
        if array.dtype == torch.uint8:
            low, high = 0.0, 255.0
        elif array.is_floating_point():
            x0 = array.to(torch.float32)
            if self.transform.data_range is None:
                self._refuse_ambiguous(x0, where)
                low, high = self.model_range
            else:
                low, high = self.transform.data_range
            slack = 1e-3 * (high - low)
            if float(x0.min()) < low - slack or float(x0.max()) > high + slack:
                raise DataError(
                    f"{where} spans {float(x0.min()):.3g}..{float(x0.max()):.3g}, outside {low:g}..{high:g}: "
                    "say what range it is in with data_range=(low, high)"
                )
        else:
            raise DataError(f"{where} holds {array.dtype} values; expected 8-bit or floating point")
        bottom, top = self.model_range
        if (low, high) == (bottom, top):
            return array.to(torch.float32)  # not even rounded
        return (array.to(torch.float32) - low) * ((top - bottom) / (high - low)) + bottom

    def _refuse_ambiguous(self, x0: Tensor, where: str) -> None:
        """A float image without a single value below zero is most likely in [0, 1], but we cannot know.

        Unless one before it went far below zero, farther than resampling takes images in [0, 1].
        """
        assert self.model_range is not None
        low, high = self.model_range
        self.signed = self.signed or float(x0.min()) < low / 2
        if low < 0 and not self.signed and float(x0.min()) >= 0 and float(x0.max()) <= high:
            raise DataError(
                f"{where} is floating point with no value below 0, and the model takes {low:g}..{high:g}: "
                f"pass data_range=(0, 1), or data_range=({low:g}, {high:g}) if that is how it is meant"
            )


def digests(x0: Tensor) -> list[int]:
    """A 64-bit digest of every sample of a batch."""
    rows = x0.cpu().contiguous()
    return [
        int.from_bytes(hashlib.blake2b(row.numpy().tobytes(), digest_size=8).digest(), "little")
        for row in rows
    ]


def _stack(rows: list[tuple[int, Tensor, Any]]) -> Batch:
    labels = [label for _, _, label in rows]
    try:
        y = None if any(label is None for label in labels) else torch.as_tensor(np.asarray(labels))
    except (TypeError, ValueError):  # names, boxes: nothing a network takes as its class
        y = None
    return Batch(torch.tensor([i for i, _, _ in rows]), torch.stack([x for _, x, _ in rows]), y)
