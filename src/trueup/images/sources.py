"""Where samples come from: folders of pictures, array files, arrays, datasets, streams."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import IterableDataset

from trueup.errors import DataError, ImageError
from trueup.files import bundled, line, printable
from trueup.images.beside import TEXT

_IMAGE_KEYS = ("image", "img", "pixel_values", "images", "x")
_LABEL_KEYS = ("label", "labels", "class_labels", "y")
_MOST_PACKED = 2000  # times; deflate cannot do better than about 1032
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
# Pillow names these formats, and does not decode them.
_NOT_PICTURES = ("BUFR", "EPS", "GRIB", "HDF5", "IPTC", "MPEG", "WMF")


def open_source(source: Any) -> tuple[Any, Any, str]:
    """(samples, labels or None, a name for error messages)."""
    if isinstance(source, (str, Path)):
        path = bundled(source)
        if path.is_dir():
            return _list_images(path), None, printable(str(path))
        if path.suffix in (".npy", ".npz") and path.is_file():
            return (*_open_numpy(path), printable(str(path)))
        problem = "not a folder, .npy or .npz" if path.exists() else "not there"
        raise DataError(printable(f"{path} is {problem}"), "pass a folder of images or an array file")
    if isinstance(source, (Tensor, np.ndarray)):
        if source.ndim < 2:
            raise DataError(f"an array of samples is (samples, *shape), got {tuple(source.shape)}")
        return source, None, "the array"
    if isinstance(source, Mapping):
        raise DataError("pass one split of the dataset, for instance dataset['train']")
    if hasattr(source, "__getitem__") or isinstance(source, Iterable):
        return source, None, type(source).__name__
    raise DataError(f"cannot read images from {type(source).__name__}")


def is_indexed(source: Any) -> bool:
    """Whether samples can be asked for by number."""
    if isinstance(source, IterableDataset):  # inherits a __getitem__ that only raises
        return False
    return hasattr(source, "__getitem__") and hasattr(source, "__len__")


def _list_images(folder: Path) -> list[str]:
    """Every image below a folder, sorted; hidden files (thumbnails, ._ files) are left out."""
    formats = Image.registered_extensions()
    known = {end for end, kind in formats.items() if kind in Image.OPEN and kind not in _NOT_PICTURES}
    found = (p for p in folder.rglob("*") if p.suffix.lower() in known and p.is_file())
    files = sorted(p for p in found if not any(n.startswith(".") for n in p.relative_to(folder).parts))
    if not files:
        raise DataError(printable(f"{folder} holds no image that Pillow can read"))
    return [str(file) for file in files]  # as strings: a million of them fit in memory


def _open_numpy(path: Path) -> tuple[Any, Any]:
    where = printable(str(path))
    if path.suffix == ".npz" and not zipfile.is_zipfile(path):
        raise DataError(f"{where} is not an .npz archive")
    try:
        if path.suffix == ".npy":
            return open_source(np.lib.format.open_memmap(path, mode="r"))[0], None
        _check_sizes(path)
        with np.load(path, allow_pickle=False) as archive:
            names = list(archive.files)
            image = next((n for n in (*_IMAGE_KEYS, "arr_0") if n in names), None)
            if image is None:
                raise DataError(f"{where} has arrays {names}; expected one named {', '.join(_IMAGE_KEYS)}")
            label = next((n for n in _LABEL_KEYS if n in names), None)
            images, labels = archive[image], archive[label] if label else None
    except DataError:
        raise
    except MemoryError:
        raise DataError(f"{where} does not fit into memory: save its images as a .npy file") from None
    except Exception as error:  # zipfile, zlib and numpy have many ways to say that a file is damaged
        raise DataError(f"{where} cannot be read: {line(error)}") from None
    if labels is not None and labels.shape[:1] != images.shape[:1]:
        raise DataError(f"{where} has images of shape {images.shape} and labels of shape {labels.shape}")
    return open_source(images)[0], labels


def _check_sizes(path: Path) -> None:
    """Raise for an archive whose arrays claim to be larger than what is in it, or than memory."""
    memory = _memory()
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if not info.filename.endswith(".npy"):
                continue
            with archive.open(info) as file:
                first = np.lib.format.read_magic(file) == (1, 0)
                header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
                shape, _, dtype = header(file)
            claimed = math.prod(shape) * dtype.itemsize
            if claimed > info.file_size or info.file_size > _MOST_PACKED * max(info.compress_size, 1):
                where = printable(f"{path}: {info.filename}")
                raise DataError(f"{where} claims {claimed:,} bytes that are not in the file")
            if claimed > memory:  # a few megabytes of zeros unpack to gigabytes
                raise MemoryError


def _memory() -> float:
    """Bytes of memory this machine has, if it says."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf


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


def split_row(item: Any, text: bool = False) -> tuple[Any, Any]:
    """(image, label) of whatever a dataset yields; text: a caption, where there is one."""
    if isinstance(item, Mapping):
        key = next((k for k in _IMAGE_KEYS if k in item), None)
        if key is None:
            names = sorted(map(str, item))
            raise DataError(f"the dataset's rows have {names}; expected a column named 'image'")
        told = (*TEXT, *_LABEL_KEYS) if text else _LABEL_KEYS
        return item[key], next((item[k] for k in told if k in item), None)
    if isinstance(item, (tuple, list)) and len(item) in (1, 2) and not isinstance(item[0], (int, float)):
        return item[0], item[1] if len(item) == 2 else None
    return item, None


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
