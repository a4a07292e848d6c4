"""Tar shards, as WebDataset has them: samples are members that share a name up to its first dot.

A shard is listed by its headers, and its pictures are read where they lie, each when it is asked for.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from trueup.errors import Argument, ArtifactError, DataError, ImageError
from trueup.files import line, load_tensors, printable, save_tensors
from trueup.images.beside import CLASS, TEXT, WHOLE
from trueup.images.columns import Pair
from trueup.images.tars import members
from trueup.noise import hashed, mix

LISTED = 1024  # shards that are listed to draw some images from; more only if all images are used
KIND = "a list of shards"
_TOLD = {"cls": "class", "class": "class", "txt": "text", "text": "text", "caption": "text"}
_TOLD |= {"json": "json", "jsn": "json"}
_KINDS = ("image", "json", "class", "text")  # what a file of its own says counts more
_FIELDS = (("text", TEXT), ("label", CLASS))
_known: dict[Any, tuple[Tensor, list[str]]] = {}  # a command opens its images more than once
_LARGEST_NOTE = 2**20  # bytes of a caption, or of what says it


@dataclass(frozen=True)
class Stored:
    """A member of a shard, read when it is asked for."""

    path: str
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"

    def read(self) -> bytes:
        """What it holds."""
        try:
            with Path(self.path).open("rb") as file:  # opened each time, by whatever thread it is
                file.seek(self.offset)
                content = file.read(self.size)
        except OSError as error:
            raise ImageError(printable(f"{self} cannot be read: {error.strerror or line(error)}")) from None
        if len(content) < self.size:
            raise ImageError(printable(f"{self} cannot be read: the file has become shorter"))
        return content


@dataclass(frozen=True)
class Notes:
    """What is said of a sample, read when it is asked for."""

    stored: tuple[tuple[str, Stored], ...]  # of each kind
    label: str | None

    def read(self) -> dict[str, Any]:
        """A `label` and a `text`, where there are such."""
        row: dict[str, Any] = {}
        for kind, note in self.stored:
            row |= _read_note(note, kind, self.label)
        return row


class Shards:
    """The samples of some shards: pairs of a stored image and the notes on it."""

    def __init__(
        self, paths: Sequence[str], places: Tensor, names: list[str], label: str | None, available: int
    ):
        self.paths, self.names = paths, names
        self.places = (
            places  # (n, 1 + 2 kinds): which shard, then offset and size of each kind, size -1: none
        )
        self.label = label  # which part of a .json is told, if not one of the usual names
        self.available = available  # shards there were to choose from

    def __len__(self) -> int:
        return len(self.names)

    @property
    def told(self) -> bool:
        """Whether something is said of the pictures."""
        return bool(len(self)) and bool((self.places[0, 4::2] >= 0).any())

    def __getitem__(self, index: int) -> Pair:
        shard, *spans = self.places[index].tolist()
        path, key = self.paths[shard], self.names[index]
        notes = [
            (kind, Stored(path, f"{key}, its {kind}", *spans[2 * k : 2 * k + 2]))
            for k, kind in enumerate(_KINDS[1:], 1)
            if spans[2 * k + 1] >= 0
        ]
        return Pair(Stored(path, key, *spans[:2]), Notes(tuple(notes), self.label))


def _read_note(note: Stored, kind: str, column: str | None) -> dict[str, Any]:
    """What is said of a sample."""
    where = printable(str(note))
    if note.size > _LARGEST_NOTE:
        raise ImageError(f"{where} has {note.size:,} bytes, which is no caption and no label")
    try:
        text = note.read().decode("utf-8-sig").strip()
        if kind == "text":
            return {"text": text}
        if kind == "class":
            return {"label": int(text) if WHOLE.fullmatch(text) else text}
        said = json.loads(text)
    except UnicodeDecodeError as error:
        raise ImageError(f"{where} cannot be read: {line(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ImageError(f"{where} is not JSON: {line(error)}") from None
    if not isinstance(said, dict):
        return {"label": said}  # a class alone
    if column is not None:
        return {"text" if isinstance(said[column], str) else "label": said[column]} if column in said else {}
    found = {name: next((said[key] for key in keys if key in said), None) for name, keys in _FIELDS}
    return {name: value for name, value in found.items() if value is not None}


def open_shards(
    paths: Sequence[Path],
    *,
    draw: int | None = None,
    image: str | None = None,
    label: str | None = None,
    index: str | PathLike[str] | None = None,
) -> Shards:
    """The samples of shards; draw: the seed with which some are chosen, where there are very many.

    image: what ends the names of the images ("left.png"), where samples have several. label: which part of a
    .json, or of the members, is told. index: a file that keeps the list.
    """
    available = len(paths)
    if draw is not None and available > LISTED:
        drawn = hashed(torch.arange(available), mix(draw)).argsort(stable=True)[:LISTED]
        paths = [paths[k] for k in sorted(drawn.tolist())]
    files = tuple((str(path), *_stamp(path)) for path in paths)
    places, names = _listed(files, image, label, index)
    return Shards([path for path, _, _ in files], places, names, label, available)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        said = path.stat()
    except OSError as error:
        raise DataError(printable(f"{path} cannot be read: {error.strerror or line(error)}")) from None
    return said.st_size, said.st_mtime_ns


def _listed(
    files: tuple[tuple[str, int, int], ...],
    image: str | None,
    label: str | None,
    index: str | PathLike[str] | None,
) -> tuple[Tensor, list[str]]:
    """Where everything is, and what it is called; known from before, or kept in a file, or found."""
    asked = {"image": image or "", "label": label or ""}
    same = (asked, [Path(path).absolute().as_posix() for path, _, _ in files])
    stamps = torch.tensor([stamp for _, *stamp in files], dtype=torch.int64)
    key = (files, image, label)
    kept = None if index is None else _kept(Path(index), *same, stamps)
    found = kept or _known.get(key) or _list(files, image, label)
    if key not in _known and len(_known) == 4:
        _known.pop(next(iter(_known)))
    _known[key] = found
    if index is not None and kept is None:
        _keep(Path(index), *same, stamps, *found)
    return found


def _list(
    files: Sequence[tuple[str, int, int]], image: str | None, label: str | None
) -> tuple[Tensor, list[str]]:
    with ThreadPoolExecutor(8) as pool:  # other machines' disks answer late
        parts = list(pool.map(lambda file: _list_shard(Path(file[0]), image, label), files))
    rows = [(shard, *spans) for shard, (found, _) in enumerate(parts) for _, spans in found]
    if not rows:
        seen = sorted({ending for _, others in parts for ending in others})[:8]
        wanted = f"no member that ends in .{image}" if image else "no images"
        where = f"{files[0][0]} and {len(files) - 1} more hold" if len(files) > 1 else f"{files[0][0]} holds"
        held = f"members end in {', '.join(f'.{end}' for end in seen)}" if seen else "nothing else either"
        raise DataError(printable(f"{where} {wanted}: {held}"))
    return torch.tensor(rows, dtype=torch.int64), [key for found, _ in parts for key, _ in found]


def _list_shard(
    path: Path, image: str | None, label: str | None
) -> tuple[list[tuple[str, tuple[int, ...]]], set[str]]:
    """(name, where things are) of every sample of a shard, and what its members' names end in."""
    pictures = {end.removeprefix(".") for end in Image.registered_extensions()} | {"npy"}
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    for name, offset, size in members(path):
        folder, slash, base = name.rpartition("/")
        key, dot, ending = base.partition(".")
        if not key or not dot:  # hidden, or nothing that a sample has
            continue
        held = samples.setdefault(f"{folder}{slash}{key}", {})
        if ending.lower() in held:
            raise DataError(printable(f"{path} has two members named {name}"))
        held[ending.lower()] = offset, size
    found, named = [], (label or "").lower()
    endings: set[str] = set()
    for key, held in samples.items():
        endings |= held.keys()
        shown = [e for e in held if (e == image.lower() if image else e.rpartition(".")[2] in pictures)]
        plain = [e for e in shown if "." not in e] if len(shown) > 1 else shown
        if len(plain) > 1 or (shown and not plain):
            several = f"{path}: {key} has several images ({', '.join(sorted(shown)[:4])})"
            raise DataError(printable(several), "say which with {}", Argument("image_column", min(shown)))
        if not plain:
            continue
        spans = {"image": held[plain[0]]}
        for ending, span in held.items():
            kind = _TOLD.get(ending.rpartition(".")[2] if named in held else ending)
            if kind is not None and (named not in held or ending == named):
                spans[kind] = span
        name = f"{key}.{plain[0]}"
        found.append((name, tuple(itertools.chain(*(spans.get(kind, (0, -1)) for kind in _KINDS)))))
    return found, endings


def _keep(
    index: Path, asked: dict[str, str], known: list[str], stamps: Tensor, places: Tensor, names: list[str]
) -> None:
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(printable(f"cannot write {index}: {error.strerror or error}")) from None
    texts = {"files": _packed(known), "names": _packed(names)}
    save_tensors(index, KIND, asked, {"stamps": stamps, "places": places, **texts})


def _kept(
    index: Path, asked: dict[str, str], known: list[str], stamps: Tensor
) -> tuple[Tensor, list[str]] | None:
    """What was found before, if these are the same shards; otherwise they are listed anew."""
    if not index.is_file():
        return None
    try:
        meta, tensors = load_tensors(index, KIND)
        texts = {name: bytes(tensors[name].numpy()).decode().split("\n") for name in ("files", "names")}
        places = tensors["places"]
        same = texts["files"] == known and torch.equal(tensors["stamps"], stamps)
        whole = places.shape == (len(texts["names"]), 1 + 2 * len(_KINDS)) and places.dtype == torch.int64
    except (ArtifactError, KeyError, UnicodeDecodeError, TypeError):
        return None
    same = same and whole and all(meta.get(name) == value for name, value in asked.items())
    return (places, texts["names"]) if same else None


def _packed(names: list[str]) -> Tensor:
    return torch.frombuffer(bytearray("\n".join(map(printable, names)).encode()), dtype=torch.uint8)
