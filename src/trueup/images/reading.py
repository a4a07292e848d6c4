"""One image as a sample: decoded, made to fit and scaled, by any thread; and what needs their order."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from trueup.errors import Argument, DataError, ImageError
from trueup.files import printable
from trueup.images import pictures
from trueup.images.columns import Columns
from trueup.images.images import Images
from trueup.images.shards import Notes, Stored
from trueup.noise import mix


@dataclass
class Row:
    """One image, read."""

    index: int
    x0: Tensor
    y: Any
    digest: int
    encode: bool  # a picture, and the model takes latents
    where: str
    eight_bit: bool
    span: tuple[float, float] | None  # of floating point values, before scaling


@dataclass
class Reader:
    """How an item of the data becomes a sample of a shape."""

    images: Images
    shape: tuple[int, ...]
    model_range: tuple[float, float] | None
    autoencoder: Any
    exact: bool
    columns: Columns
    labels: Any
    name: str
    noted: bool  # whether notes on images are read

    def read(self, index: int, item: Any) -> Row:
        """One image as a sample, with the digest of what was read."""
        image, label = self.columns.split(item)
        label = label if self.labels is None else self._label(index)
        if isinstance(label, Notes):
            label = self.columns.told(label.read()) if self.noted else None
        image, where = _opened(image, index, self.name)
        pictured = isinstance(image, (str, Path, Image.Image))
        pixels: Any = pictures.read_image(image, where) if pictured else pictures.to_tensor(image, where)
        shape, model_range = self.shape, self.model_range
        encode = self.autoencoder is not None and (pictured or pixels.dtype == torch.uint8)
        if encode:
            shape, model_range = self.autoencoder.picture_shape(self.shape), (-1.0, 1.0)
        if pictured:
            if self.exact:
                pictures.refuse_other_depths(pixels, where)
            pixels = pictures.to_tensor(pictures.picture_to_array(pixels, shape[0], where), where)
        array = pictures.channels_first(pixels, shape, where)
        values = array.float() if array.is_floating_point() else array  # the same in double precision
        digest = digest_of(values.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        if tuple(array.shape) != shape:
            resize, crop = self.images.resize, self.images.crop
            if resize is None and crop is None and encode:  # photographs, which are of any size
                resize, crop = "shorter", "center"
            array = pictures.fitted(array, shape, resize, crop, where)
        x0, span = self._scale(array, model_range, where)
        if not torch.isfinite(x0).all():
            raise ImageError(f"{where} holds values that are not finite")
        if self.images.flip and mix(index + self.images.offset) & 1:
            x0 = x0.flip(-1)
        return Row(index, x0, label, digest, encode, where, array.dtype == torch.uint8, span)

    def _label(self, index: int) -> Any:
        try:
            return self.labels[index]
        except IndexError:
            raise DataError(f"sample {index} of {self.name} has no label: there are fewer of them") from None

    def _scale(
        self, array: Tensor, model_range: tuple[float, float] | None, where: str
    ) -> tuple[Tensor, tuple[float, float] | None]:
        """In the model's range, and what values were spanned where that is to be looked at."""
        x0, eight_bit = array.to(torch.float32), array.dtype == torch.uint8
        if model_range is None:
            if eight_bit:
                raise DataError(
                    f"{where} is an 8-bit picture, and the model takes latents: encode it with the model's "
                    "autoencoder first (a pipeline, or a directory with its vae beside it, does that itself)"
                )
            return x0, None
        if not eight_bit and not array.is_floating_point():
            raise DataError(f"{where} holds {array.dtype} values; expected 8-bit or floating point")
        low, high = (0.0, 255.0) if eight_bit else self.images.data_range or model_range
        span = None if eight_bit else (float(x0.min()), float(x0.max()))
        bottom, top = model_range
        if (low, high) != (bottom, top):  # or not even rounded
            x0 = (x0 - low) * ((top - bottom) / (high - low)) + bottom
        return x0, span


@dataclass
class InOrder:
    """What can only be said of images one after the other."""

    images: Images
    exact: bool  # whether pictures must be what they seem: 8 bits per channel, all of one kind
    signed: bool = False  # whether float samples have shown that they use the model's range
    eight_bit: bool | None = None  # what the samples read so far were, before scaling

    def check_depth(self, eight_bit: bool, where: str) -> None:
        """Refuse a mixture of kinds, where that matters."""
        if self.exact and self.eight_bit is not None and self.eight_bit != eight_bit:
            kinds = ("floating point", "8-bit")
            text = f"{where} is {kinds[eight_bit]}, the samples before it are {kinds[not eight_bit]}"
            raise DataError(f"{text}: a likelihood is that of one or of the other")
        self.eight_bit = eight_bit if self.exact else None

    def check_range(self, span: tuple[float, float], model_range: tuple[float, float], where: str) -> None:
        """Refuse a float image that is not in its range, or that may be in another.

        One without a single value below zero is most likely in [0, 1], but we cannot know; unless one before
        it went far below zero, farther than resampling takes images in [0, 1].
        """
        low, high = self.images.data_range or model_range
        least, most, slack = *span, 1e-3 * (high - low)
        if self.images.data_range is None:
            self.signed = self.signed or least < low / 2
            if low < 0 and not self.signed and least >= 0 and most <= high:
                text = (
                    f"{where} is floating point with no value below 0, and the model takes {low:g}..{high:g}"
                )
                ranges = Argument("data_range", (0, 1)), Argument("data_range", (low, high))
                raise DataError(text, "pass {}, or {} if that is how it is meant", *ranges)
        if least < low - slack or most > high + slack:
            text = f"{where} spans {least:.3g}..{most:.3g}, outside {low:g}..{high:g}"
            others = "data that are no pictures (latents, fields) take a Denoiser with data_range=None"
            raise DataError(text, f"say what range it is in with {{}}; {others}", Argument("data_range"))


def _opened(image: Any, index: int, name: str) -> tuple[Any, str]:
    """An image, and how to call it; one that is stored somewhere is read."""
    if isinstance(image, Stored):
        where = printable(str(image))
        return pictures.stored_image(image.read(), where), where
    where = printable(f"sample {index} of {name}")
    if isinstance(image, Mapping) and (image.get("bytes") or image.get("path")):  # as Hugging Face stores it
        content, path = image.get("bytes"), image.get("path")
        where = f"{where} ({printable(str(path))})" if path else where
        return (pictures.stored_image(content, where), where) if content else (str(path), where)
    file = image if isinstance(image, (str, Path)) else getattr(image, "filename", None)
    return image, printable(str(file)) if file else where


def size_of(image: Any) -> tuple[int, int] | None:
    """Of a picture in a file, by its header."""
    if not isinstance(image, (str, Path, Stored)):
        return None
    try:
        with Image.open(io.BytesIO(image.read()) if isinstance(image, Stored) else image) as picture:
            return picture.size
    except (OSError, DataError, Image.DecompressionBombError):  # said when it is read, if it is
        return None


def digest_of(content: bytes) -> int:
    """A 64-bit digest."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
