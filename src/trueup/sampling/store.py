"""Keeping samples: a folder of PNGs, one grid, or one .npz; interrupted, the same command goes on.

What is drawn goes into a folder at once. Its `samples.json` says how it was made and lists the files that are
ours, each before it is written: those are replaced or deleted when need be, nothing else there ever is.
A folder of PNGs is that folder; for one file it lies beside it until the file is written. Of ranks that work
together the first writes and reads.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trueup import distributed
from trueup.denoiser import Denoiser
from trueup.errors import Argument, ArtifactError, TrueupError
from trueup.files import Folder, line, load_tensors, printable, save_tensors, write

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_OTHERS = (
    *(".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".pdf", ".mp4", ".wav"),
    *(".npy", ".pt", ".safetensors", ".zip", ".txt", ".json", ".csv", ".html"),
)
_LARGEST_GRID = 1024  # images; more are no longer a picture
_NAME = re.compile(r"(\d{6,12})(?:-(\d{6,12}))?\.(png|safetensors)")  # a picture's, or those of first to last
NOTE = "samples.json"
_KIND = "part of a run"
_FORCE = Argument("force", True)


class Kept:
    """Samples 0 to `done` in a folder, made with the settings its `samples.json` states."""

    def __init__(self, folder: Path, settings: dict[str, Any], *, force: bool = False):
        self.folder = folder
        self.settings: dict[str, Any] = json.loads(json.dumps(settings, default=_told))
        self._files: dict[str, None] = {}  # those that are ours, in the order they were written
        self.done = distributed.by_first(lambda: self._open(force))

    def _open(self, force: bool) -> int:
        """Make the folder ours; how many samples are in it."""
        folder = self.folder
        if folder.is_symlink():
            raise TrueupError(f"{folder} is a symbolic link: name the folder itself")
        try:
            there = folder.is_dir() and any(_owner(path) != NOTE for path in folder.iterdir())
            if there and ((folder / NOTE).is_symlink() or not (folder / NOTE).is_file()):
                raise TrueupError(f"{folder} is not empty, and not by trueup: name another folder")
            self._lock = Folder(folder, clean=False)
            made_with = self._read_note() if there else None
            self._delete_leftovers()
        except OSError as error:
            raise TrueupError(f"cannot use {folder}: {error.strerror or error}") from None
        if made_with == self.settings:
            return self._count()
        if made_with is not None and self._count() and not force:
            names = sorted({*made_with, *self.settings})
            other = " and another ".join(n for n in names if made_with.get(n) != self.settings.get(n))
            text = f"{folder} holds samples made with another {printable(other)}"
            raise TrueupError(text, "name another place, or pass {} to replace them", _FORCE)
        if there:
            self._save_note(None)  # whatever happens now, nobody takes the old ones for new
            self._delete()
        self._save_note(self.settings)
        return 0

    def _read_note(self) -> dict[str, Any] | None:
        """The settings it was made with, None where those were being replaced."""
        path = self.folder / NOTE
        try:
            note = json.loads(path.read_text(encoding="utf-8"))
            made_with, names = note["settings"], note["files"]
            if note.get("checksum") != _checksum(made_with, names):
                raise ValueError("its checksum does not match: it was damaged or edited")
            if not all(_NAME.fullmatch(name) for name in names):
                raise ValueError("it lists files that are none of ours")
            if made_with is not None and not isinstance(made_with, dict):
                raise ValueError("its settings are none")
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise TrueupError(f"{path} cannot be read ({line(error, 80)}): name another folder") from None
        self._files = dict.fromkeys(names)
        return made_with

    def _save_note(self, settings: dict[str, Any] | None) -> None:
        names = list(self._files)
        note = {"settings": settings, "files": names, "checksum": _checksum(settings, names)}
        write(self.folder / NOTE, json.dumps(note, indent=1).encode())

    def _has(self, name: str) -> bool:
        """Whether a file of ours is there, whole; a link in its place is somebody else's."""
        path = self.folder / name
        return name in self._files and path.is_file() and not path.is_symlink()

    def _count(self) -> int:
        """How many samples there are without a gap, from the first on."""
        covered = 0
        for first, last in sorted(map(_rows, filter(self._has, self._files))):
            if first > covered:
                break
            covered = max(covered, last)
        return covered

    def _delete(self) -> None:
        """Delete the files that are ours."""
        for name in filter(self._has, self._files):
            (self.folder / name).unlink()
        self._files = {}

    def _delete_leftovers(self) -> None:
        """What a killed process left half written, of files that are ours."""
        names = {NOTE, *self._files}
        for path in self.folder.iterdir():
            if _owner(path) in names and not path.is_symlink():
                path.unlink()

    def _claim(self, names: list[str]) -> None:
        """List files as ours before they are there."""
        for name in names:
            path = self.folder / name
            if not self._has(name) and (path.exists() or path.is_symlink()):
                raise TrueupError(f"{path} is in the way, and not by trueup: move it, or name another folder")
        if not self._files.keys() >= set(names):
            self._files |= dict.fromkeys(names)
            self._save_note(self.settings)

    def add_pictures(self, index: Tensor, images: Tensor | list[bytes]) -> None:
        """Keep a batch of pictures (B, C, H, W) as a PNG each; or these."""
        self.done = max(self.done, int(index[-1]) + 1)
        if distributed.rank() > 0:
            return
        contents = [image if isinstance(image, bytes) else png(image) for image in images]
        files = {f"{i:06d}.png": content for i, content in zip(index.tolist(), contents, strict=True)}
        self._claim(list(files))
        for name, content in files.items():
            write(self.folder / name, content)

    def add(self, index: Tensor, **tensors: Tensor) -> None:
        """Keep a batch, or whatever was made of it: tensors with a row for every sample."""
        first, last = int(index[0]), int(index[-1])
        self.done = max(self.done, last + 1)
        if distributed.rank() > 0:
            return
        name = f"{first:06d}-{last:06d}.safetensors"
        self._claim([name])
        save_tensors(self.folder / name, _KIND, self._about(name), tensors)

    def _about(self, name: str) -> dict[str, Any]:
        """What a file says of itself: one of another run, or another's rows, is not taken for it."""
        return {"name": name, "settings": _checksum(self.settings, [])}

    def _read(self, name: str) -> dict[str, Tensor]:
        """What `add` kept in a file."""
        (first, last), file = _rows(name), self.folder / name
        try:
            about, part = load_tensors(file, _KIND)
            if not about.items() >= self._about(name).items():
                raise ArtifactError(f"{file} is of another run")
            if any(tensor.shape[:1] != (last - first,) for tensor in part.values()):
                raise ArtifactError(f"{file} does not hold {last - first} samples")
            if not all(torch.isfinite(tensor).all() for tensor in part.values()):
                raise ArtifactError(f"{file} holds values that are not finite")
        except ArtifactError as error:
            raise TrueupError(f"{error}: delete {self.folder} to start over") from None
        return part

    def tensors(self, count: int, *names: str) -> dict[str, Tensor]:
        """The rows of the first `count` samples, on every rank; `names` must be among them."""
        return distributed.by_first(lambda: self.read(count, *names))

    def read(self, count: int, *names: str) -> dict[str, Tensor]:
        """The same, for who has the folder."""
        parts: list[dict[str, Tensor]] = []
        covered = 0
        for name in sorted(filter(self._has, self._files), key=_rows):
            first, last = _rows(name)
            if last <= covered:
                continue  # written twice, in batches of other sizes
            if first > covered:
                break
            part = self._read(name)
            if parts and _form(part) != _form(parts[0]):
                other = "hold different things: delete it to start over"
                raise TrueupError(f"the files in {self.folder} {other}")
            parts.append({name: tensor[covered - first :] for name, tensor in part.items()})
            covered = last
        if covered < count:
            raise TrueupError(f"{self.folder} lacks sample {covered}: delete it to start over")
        missing = next((name for name in names if name not in parts[0]), None)
        if missing is not None:
            raise TrueupError(f"the files in {self.folder} lack {missing}: delete it to start over")
        return {name: torch.cat([part[name] for part in parts])[:count] for name in parts[0]}

    def remove(self) -> None:
        """Delete what is ours, and the folder if nothing else is in it."""
        self._delete()
        (self.folder / NOTE).unlink(missing_ok=True)
        self._lock.release()
        if not any(self.folder.iterdir()):
            self.folder.rmdir()


def _rows(name: str) -> tuple[int, int]:
    """The samples a file holds, from the first to before the last.

    >>> _rows("000008-000015.safetensors"), _rows("000003.png")
    ((8, 16), (3, 4))
    """
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[1]), int(found[2] or found[1]) + 1


def _form(part: dict[str, Tensor]) -> dict[str, Any]:
    """What must be the same in all parts of a run: which tensors, of what kind, how large a row."""
    return {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in part.items()}


def _checksum(settings: dict[str, Any] | None, names: list[str]) -> str:
    return hashlib.blake2b(json.dumps([settings, names]).encode(), digest_size=16).hexdigest()


def _owner(path: Path) -> str | None:
    """The file that `trueup.files.write` was writing when it left this one behind."""
    found = re.fullmatch(r"\.(.+)\.tmp-[0-9a-f]{8}", path.name)
    return None if found is None else found[1]


def _told(value: Any) -> Any:
    """Settings as JSON: all of a tensor counts, however long; what prints itself in part does not do."""
    if not hasattr(value, "tolist"):
        return repr(value)
    array = np.asarray(value.cpu() if isinstance(value, Tensor) else value)
    if array.size <= 64:
        return array.tolist()
    digest = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()
    return f"{array.dtype} {array.shape} {digest}"


class Output:
    """Where samples go, by name: a file that ends in .npz or .png (a grid), else a folder of PNGs."""

    def __init__(self, path: Path, count: int, settings: dict[str, Any], *, force: bool = False):
        self.path, self.count, self.kind = path, count, path.suffix.lower()
        self.one_file = self.kind in (".npz", ".png")
        if self.kind in _OTHERS:
            raise TrueupError(f"{path}: samples go to a folder of PNGs, a .png (a grid) or a .npz file")
        if self.kind == ".png" and count > _LARGEST_GRID:
            raise TrueupError(f"a grid of {count} images is too large: name a folder or a .npz file")
        if path.is_dir() and self.one_file:
            raise TrueupError(f"{path} is a directory: name a file")
        if path.exists() and not path.is_dir() and not self.one_file:
            raise TrueupError(f"{path} is a file: name a folder, or a file that ends in .npz or .png")
        if path.exists() and self.one_file and not force:
            raise TrueupError(f"{path} exists", "pass {} to replace it, or name another file", _FORCE)
        if not path.parent.is_dir():
            raise TrueupError(f"{path.parent} is not a directory: make it first")
        self.kept = Kept(Path(f"{path}.run") if self.one_file else path, settings, force=force)

    def prepared(self, images: Tensor) -> Any:
        """A batch as it is kept: the PNG of each, or for one file the batch itself."""
        return images if self.one_file else [png(image) for image in images]

    def add(self, index: Tensor, prepared: Any) -> None:
        """Keep a batch that was `prepared`."""
        if self.one_file:
            self.kept.add(index, images=prepared)
        else:
            self.kept.add_pictures(index, prepared)

    def finish(self) -> None:
        """Write the one file, and remove what it was made of."""
        if not self.one_file or distributed.rank() > 0:
            return
        images = self.kept.read(self.count, "images")["images"]
        if self.kind == ".png":
            if images.ndim != 4:
                hint = "samples that are none go to a .npz file"
                raise TrueupError(f"{self.kept.folder} holds no pictures: delete it to start over; {hint}")
            write(self.path, png(grid(images)))
        else:
            if images.dtype == torch.uint8 and images.ndim == 4:
                images = images.permute(0, 2, 3, 1)
            content = io.BytesIO()
            np.savez(content, images=images.numpy(), settings=np.array(json.dumps(self.kept.settings)))
            write(self.path, content.getvalue())
        self.kept.remove()


def grid(images: Tensor, columns: int | None = None, gap: int = 2) -> Tensor:
    """Pictures (n, C, H, W) side by side on white, (C, height, width).

    >>> grid(torch.zeros(5, 1, 8, 8, dtype=torch.uint8), columns=3).shape
    torch.Size([1, 18, 28])
    """
    columns = columns or math.ceil(math.sqrt(len(images)))
    room = (0, gap, 0, gap, 0, 0, 0, -len(images) % columns)  # to the right, below, and for missing images
    padded = torch.nn.functional.pad(images, room, value=255)
    rows = padded.unflatten(0, (-1, columns))  # (rows, columns, C, H + gap, W + gap)
    return rows.permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)[:, : -gap or None, : -gap or None]


def check_pictures(denoiser: Denoiser) -> None:
    """Raise unless samples of the model can be shown."""
    if denoiser.data_range is None and denoiser.autoencoder is not None:
        return
    if denoiser.data_range is None or len(denoiser.shape) != 3 or denoiser.shape[0] not in _MODES:
        raise _no_pictures(denoiser.shape)


def _no_pictures(shape: Sequence[int]) -> TrueupError:
    return TrueupError(f"samples of shape {tuple(shape)} are not pictures: write them to a .npz file")


def png(image: Tensor) -> bytes:
    """A picture (C, H, W) uint8 as a PNG file."""
    if image.ndim != 3 or image.shape[0] not in _MODES or image.dtype != torch.uint8:
        raise _no_pictures(image.shape)
    pixels = image[0] if len(image) == 1 else image.permute(1, 2, 0)
    content = io.BytesIO()
    Image.fromarray(pixels.numpy(), _MODES[len(image)]).save(content, "PNG")
    return content.getvalue()
