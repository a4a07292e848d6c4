"""What images to use, and how each becomes a sample: the argument that every command shares."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trueup.errors import DataError


@dataclass(frozen=True, eq=False)
class Images:
    """Images from anywhere.

    source: a folder, .npy or .npz (images under `image`, labels under `label`), tar shards (one, a folder of
    them, "shards/{000..127}.tar"), an array (n, ...), a torch or Hugging Face dataset, any iterable; of
    images, of (image, label) pairs or of rows with columns so named.
    count: use so many, picked at random (the same ones for the same seed; of a stream the first, for which
    Hugging Face's are shuffled); None: all.
    resize: None (sizes must match), "shorter" (shorter side to the model's size, aspect kept) or "exact"
    (both sides), bicubic with antialiasing. crop: None or "center". Where neither is given and the model has
    an autoencoder, pictures of another size are resized by their shorter side and cropped. flip: mirror every
    second sample, picked by its index, for networks trained with random flips. data_range: the range of
    floating point input, for instance (0, 1); 8-bit images are always 0..255. labels: one per image, where
    the source has none. captions: a .csv or .jsonl table of a folder's files with a text or a label for each;
    without it metadata.csv or metadata.jsonl in the folder, a .txt beside every picture, or for classes the
    names of its folders are found. groups: what belongs together (frames of a video, crops of a picture), a
    key per image or a function of its index: images of a group never vouch for each other. offset: added to
    every index; shards of one data set need indices of their own, since an image's noise is that of its
    index. skip_bad: leave out what is unusable. image_column, label_column: names of a dataset's columns,
    where they are not found by name or type; of tar shards the endings of members, or for a label a key of
    their .json. index: a file that keeps what was found in tar shards, so that they are listed once.

    >>> Images("photos", count=200, resize="shorter", crop="center").count
    200
    """

    source: Any
    count: int | None = None
    resize: str | None = None
    crop: str | None = None
    flip: bool = False
    data_range: tuple[float, float] | None = None
    labels: Sequence[Any] | None = None
    captions: str | os.PathLike[str] | None = None
    groups: Sequence[Any] | Callable[[int], Any] | None = None
    offset: int = 0
    seed: int = 0
    skip_bad: bool = False
    image_column: str | None = None
    label_column: str | None = None
    index: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        counted = [] if self.count is None else [("count", self.count, 1)]
        for name, value, least in (*counted, ("offset", self.offset, 0)):
            if not isinstance(value, (int, np.integer)) or value is True or value is False or value < least:
                raise DataError(f"{name} is a whole number of at least {least}, not {value!r}")
            if value > 2**53:  # indices are added to it
                raise DataError(f"{name} is at most 2**53, not {value}")
        if self.resize not in (None, "shorter", "exact"):
            raise DataError(f"resize is None, 'shorter' or 'exact', not {self.resize!r}")
        if self.crop not in (None, "center"):
            raise DataError(f"crop is None or 'center', not {self.crop!r}")
        if self.captions is not None and self.labels is not None:
            raise DataError("labels and captions are two sources of the same: leave one out")
        if self.data_range is not None:
            ends = self.data_range if isinstance(self.data_range, (tuple, list)) else ()
            if len(ends) != 2 or not -math.inf < ends[0] < ends[1] < math.inf:
                raise DataError(f"data_range is (low, high) with low < high, not {self.data_range!r}")

    def transform(self) -> dict[str, Any]:
        """How an image becomes a sample, as plain values."""
        data_range = None if self.data_range is None else list(self.data_range)
        return {"resize": self.resize, "crop": self.crop, "flip": self.flip, "data_range": data_range}


def as_images(data: Any, count: int | None = None) -> Images:
    """Images from images, or `count` of anything that holds some."""
    return data if isinstance(data, Images) else Images(data, count=count)
