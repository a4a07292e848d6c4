"""Where samples come from: folders of pictures, tar shards, array files, arrays, datasets, streams."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from trueup.errors import DataError
from trueup.files import bundled, line, printable
from trueup.images.columns import BUFFER, IMAGE_KEYS, LABEL_KEYS, Columns, of_features, shuffled, undecoded
from trueup.images.images import Images
from trueup.images.shards import LISTED, Shards, open_shards
from trueup.patterns import is_shards, shard_files

_MOST_PACKED = 2000  # times; deflate cannot do better than about 1032
# Pillow names these formats, and does not decode them.
_NOT_PICTURES = ("BUFR", "EPS", "GRIB", "HDF5", "IPTC", "MPEG", "WMF")


@dataclass(frozen=True)
class Source:
    """Images, before anything is read."""

    items: Any  # asked for by number, or iterated
    labels: Any  # one per item, or None
    name: str  # for error messages
    columns: Columns
    shuffled: bool = False  # a stream that comes in an order that was drawn


def open_source(images: Images, *, text: bool) -> Source:
    """Whatever `Images` were made of; text: captions are wanted, where there are some."""
    source, columns = images.source, Columns(images.image_column, images.label_column, text)
    if isinstance(source, (str, Path)):
        return _open_path(bundled(source), images, columns)
    if isinstance(source, (Tensor, np.ndarray)):
        return Source(_checked(source), None, "the array", columns)
    if isinstance(source, Mapping):
        raise DataError("pass one split of the dataset, for instance dataset['train']")
    if not hasattr(source, "__getitem__") and not isinstance(source, Iterable):
        raise DataError(f"cannot read images from {type(source).__name__}")
    name, columns = type(source).__name__, of_features(source, columns)
    drawn = None if images.count is None else shuffled(source, images.seed)
    return Source(
        undecoded(source if drawn is None else drawn, columns), None, name, columns, drawn is not None
    )


def _open_path(path: Path, images: Images, columns: Columns) -> Source:
    where = printable(str(path))
    if path.is_dir():
        files, tars = _list_images(path), _list_files(path, {".tar"})
        if files and tars:
            raise DataError(f"{where} holds both images and tar shards: name the shards ('{where}/*.tar')")
        if files:
            return Source(files, None, where, columns)
        if not tars:
            raise DataError(f"{where} holds no image that Pillow can read, and no .tar")
        return Source(_shards(list(map(Path, tars)), images), None, where, Columns(text=columns.text))
    if path.suffix in (".npy", ".npz") and path.is_file():
        return Source(*_open_numpy(path), where, columns)
    if is_shards(path):
        return Source(_shards(shard_files(images.source), images), None, where, Columns(text=columns.text))
    problem = "not a folder, .npy, .npz or .tar" if path.exists() else "not there"
    raise DataError(f"{where} is {problem}", "pass a folder of images, tar shards or an array file")


def _shards(paths: list[Path], images: Images) -> Shards:
    draw = None if images.count is None else images.seed
    how: dict[str, Any] = {"image": images.image_column, "label": images.label_column, "index": images.index}
    found = open_shards(paths, draw=draw, **how)
    if images.count is not None and len(found) < images.count and found.available > len(paths[:LISTED]):
        held = f"{LISTED:,} of {found.available:,} shards, as many as are listed, hold {len(found):,} images"
        raise DataError(f"{held}, and {images.count:,} were asked for: join shards, or name fewer of them")
    return found


def _checked(array: Any) -> Any:
    if array.ndim < 2:
        raise DataError(f"an array of samples is (samples, *shape), got {tuple(array.shape)}")
    return array


def is_indexed(source: Any) -> bool:
    """Whether samples can be asked for by number."""
    if isinstance(source, IterableDataset):  # inherits a __getitem__ that only raises
        return False
    return hasattr(source, "__getitem__") and hasattr(source, "__len__")


def chosen(images: Images, items: Any, drawn: bool) -> str:
    """Which of them are used, in words; drawn: a stream whose order is."""
    if not is_indexed(items):
        way = f"shuffled with seed {images.seed} ({BUFFER:,} rows at a time)" if drawn else "as it comes"
        return f"the first of a stream, {way}"
    of, picked = f"{len(items):,} images", images.count is not None and images.count < len(items)
    if isinstance(items, Shards):
        listed = len(items.paths)
        of += f" in {listed:,}{f' of {items.available:,}' if items.available > listed else ''} shards"
        picked = picked or items.available > listed
    return f"drawn with seed {images.seed} from {of}" if picked else f"all of {of}"


def _list_images(folder: Path) -> list[str]:
    """Every image below a folder."""
    formats = Image.registered_extensions()
    return _list_files(
        folder, {end for end, kind in formats.items() if kind in Image.OPEN and kind not in _NOT_PICTURES}
    )


def _list_files(folder: Path, endings: set[str]) -> list[str]:
    """Every file below a folder with such an ending, sorted, without hidden ones (thumbnails, ._ files)."""
    found = (p for p in folder.rglob("*") if p.suffix.lower() in endings and p.is_file())
    files = sorted(p for p in found if not any(n.startswith(".") for n in p.relative_to(folder).parts))
    return [str(file) for file in files]  # as strings: a million of them fit in memory


def _open_numpy(path: Path) -> tuple[Any, Any]:
    where = printable(str(path))
    if path.suffix == ".npz" and not zipfile.is_zipfile(path):
        raise DataError(f"{where} is not an .npz archive")
    try:
        if path.suffix == ".npy":
            return _checked(np.lib.format.open_memmap(path, mode="r")), None
        _check_sizes(path)
        with np.load(path, allow_pickle=False) as archive:
            names = list(archive.files)
            image = next((n for n in (*IMAGE_KEYS, "arr_0") if n in names), None)
            if image is None:
                raise DataError(f"{where} has arrays {names}; expected one named {', '.join(IMAGE_KEYS)}")
            label = next((n for n in LABEL_KEYS if n in names), None)
            images, labels = archive[image], archive[label] if label else None
    except DataError:
        raise
    except MemoryError:
        raise DataError(f"{where} does not fit into memory: save its images as a .npy file") from None
    except Exception as error:  # zipfile, zlib and numpy have many ways to say that a file is damaged
        raise DataError(f"{where} cannot be read: {line(error)}") from None
    if labels is not None and labels.shape[:1] != images.shape[:1]:
        raise DataError(f"{where} has images of shape {images.shape} and labels of shape {labels.shape}")
    return _checked(images), labels


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
