"""Decoding: whatever holds an image, as an array in the model's axis order, and in its size."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from trueup.errors import Argument, DataError, ImageError
from trueup.files import line

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def read_image(picture: Any, where: str) -> Image.Image:
    """A picture, or that of a file, decoded and turned as its EXIF data says; a damaged one is named."""
    try:
        if not isinstance(picture, Image.Image):
            with Image.open(picture) as image:
                raw = [str(tile[3]) for tile in image.tile]  # loading drops what says 16 bits
                image.load()
                image.info["raw modes"] = " ".join(raw)
            picture = image
        turned = ImageOps.exif_transpose(picture)  # a dataset's image may only be decoded here
    except Exception as error:  # decoders raise RuntimeError, TypeError and more on damaged files
        raise ImageError(f"{where} cannot be read as an image: {line(error)}") from None
    turned.info = {**picture.info, **turned.info}
    return turned


def refuse_other_depths(image: Image.Image, where: str) -> None:
    """Raise for a picture whose values are not 8 bits per channel: palettes, one bit, 16 bits, CMYK."""
    if image.mode in ("P", "PA", "1"):
        kind = "one-bit" if image.mode == "1" else "palette"
        raise ImageError(
            f"{where} is a {kind} image ({image.mode}): its values were quantized, and the likelihood "
            "would be that of the palette; use the original"
        )
    raw = str(image.info.get("raw modes", ""))
    depth = next((bits for bits in ("16", "2", "4") if f";{bits}" in raw), None)
    if depth is not None:
        raise ImageError(f"{where} has {depth} bits per channel; convert it to 8 bits first")
    if image.mode not in ("L", "LA", "RGB", "RGBA") and not image.mode.startswith(("I", "F")):
        raise ImageError(f"{where} is a {image.mode} image; convert it to RGB with 8 bits first")


def picture_to_array(image: Image.Image, channels: int, where: str) -> np.ndarray[Any, Any]:
    """A picture as 8-bit (channels, height, width); nothing is dropped to make it fit."""
    if image.mode.startswith(("I", "F")):
        raise ImageError(f"{where} is a {image.mode} image; convert it to 8 bits first")
    mode = _MODES.get(channels)
    if mode is None:
        raise ImageError(f"{where} is an image, the model takes {channels} channels: pass arrays instead")
    if channels == 1 and image.mode not in ("1", "L", "LA"):
        kind = f"a colour image ({image.mode})"
        raise ImageError(f"{where} is {kind}, the model takes one channel: convert it to grayscale")
    pixels = np.asarray(image.convert(mode))
    if channels != 4 and _has_transparency(image):
        raise ImageError(f"{where} has transparency ({image.mode}), the model takes {mode}: flatten it first")
    return pixels.reshape(image.height, image.width, channels).transpose(2, 0, 1)


def _has_transparency(image: Image.Image) -> bool:
    """An alpha channel, or a palette entry (or colour) marked transparent that some pixel has."""
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA"):
        return True
    return "transparency" in image.info and bool((np.asarray(image.convert("RGBA"))[..., 3] < 255).any())


def to_tensor(image: Any, where: str) -> Tensor:
    """Whatever a dataset calls an image, as a tensor."""
    try:
        if isinstance(image, np.ndarray):
            return torch.from_numpy(image.astype(image.dtype.newbyteorder("="), order="C"))
        return torch.as_tensor(image).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"{where} is a {type(image).__name__}; expected an image, an array or a tensor, alone, with a "
            "label as (image, label), or as a row with a column named 'image'"
        ) from None


def channels_first(array: Tensor, shape: tuple[int, ...], where: str) -> Tensor:
    """An array in the model's axis order, whichever of the two usual orders it came in."""
    if array.dim() == len(shape) - 1 and shape[0] == 1:
        array = array.unsqueeze(0)
    if array.dim() != len(shape):
        raise DataError(f"{where} has shape {tuple(array.shape)}, the model takes {shape}")
    if tuple(array.shape) == shape:
        return array
    moved = array.movedim(-1, 0)
    if moved.shape[0] == shape[0] and (array.shape[0] != shape[0] or tuple(moved.shape) == shape):
        return moved
    if array.shape[0] != shape[0]:
        raise DataError(f"{where} has shape {tuple(array.shape)}: the model takes {shape[0]} channels")
    return array


def stored_image(content: bytes, where: str) -> Any:
    """What a file's bytes hold: an array of .npy, or a picture."""
    if not content.startswith(b"\x93NUMPY"):
        return read_image(io.BytesIO(content), where)
    file = io.BytesIO(content)
    try:
        first = np.lib.format.read_magic(file) == (1, 0)
        header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(file)
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
        array = np.frombuffer(content, dtype, math.prod(shape), file.tell())
    except (ValueError, TypeError, OverflowError) as error:
        raise ImageError(f"{where} cannot be read as an array: {line(error)}") from None
    return array.reshape(shape, order="F" if fortran else "C")


def fitted(array: Tensor, shape: tuple[int, ...], resize: str | None, crop: str | None, where: str) -> Tensor:
    """A picture in the model's size, resized and cropped as was asked for."""
    size, wanted = tuple(array.shape[1:]), shape[1:]
    if len(wanted) != 2 or array.dtype != torch.uint8:
        raise ImageError(f"{where} is {size}, the model takes {wanted}: resize it before handing it over")
    if resize is None and crop is None:
        text = f"{where} is {size[0]}x{size[1]}, the model takes {wanted[0]}x{wanted[1]}"
        ways = Argument("resize", "shorter"), Argument("crop", "center"), Argument("resize", "exact")
        raise DataError(text, "pass {} (and {}) or {}", *ways)
    planes = [Image.fromarray(plane.numpy()) for plane in array]
    height, width = size
    if resize == "exact":
        height, width = wanted
    elif resize == "shorter":
        factor = max(wanted[0] / height, wanted[1] / width)
        height, width = max(wanted[0], round(height * factor)), max(wanted[1], round(width * factor))
    if (height, width) != size:
        planes = [plane.resize((width, height), Image.Resampling.BICUBIC) for plane in planes]
    if crop == "center" and height >= wanted[0] and width >= wanted[1]:
        top, left = (height - wanted[0]) // 2, (width - wanted[1]) // 2
        planes = [plane.crop((left, top, left + wanted[1], top + wanted[0])) for plane in planes]
    out = torch.stack([torch.from_numpy(np.array(plane)) for plane in planes])
    if tuple(out.shape) != shape:
        done = "resized" if resize else "cropped"  # both, or the exact size, always fit
        text = f"{where} is {height}x{width} when {done}, the model takes {wanted[0]}x{wanted[1]}"
        missing = Argument("crop", "center") if resize else Argument("resize", "shorter")
        raise ImageError(text, "pass {} too", missing)
    return out
