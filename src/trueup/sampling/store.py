"""Keeping samples: a folder of PNGs, one grid, or one .npz; interrupted, the same command goes on.

What is drawn goes into a folder at once, with a `samples.json` that says how it was made and how far it got.
A folder of PNGs is that folder; for one file it lies beside it until the file is written.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from trueup.errors import TrueupError
from trueup.files import lock, write

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_OTHERS = (".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".npy", ".pt", ".safetensors", ".zip")
_LARGEST_GRID = 1024  # images; more are no longer a picture


class Kept:
    """Samples 0 to `done` in a folder, made with the settings its `samples.json` states."""

    def __init__(self, folder: Path, settings: dict[str, Any], *, force: bool = False):
        self.folder, self.done = folder, 0
        self.settings: dict[str, Any] | None = json.loads(json.dumps(settings, default=str))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = lock(folder)
            if handle is not None:
                weakref.finalize(self, os.close, handle)
            files = list(folder.iterdir())
        except OSError as error:
            raise TrueupError(f"cannot use {folder}: {error.strerror or error}") from None
        if files and self._note not in files:
            raise TrueupError(f"{folder} is not empty, and not by trueup: name another folder")
        made_with, done = self._read_note() if files else (None, 0)
        for leftover in folder.glob(".*.tmp-*"):  # of a process that was killed
            leftover.unlink(missing_ok=True)
        if made_with == self.settings:
            self.done = done
            return
        if done and not force:
            names = {*(made_with or {}), *(self.settings or {})}
            other = [n for n in sorted(names) if (made_with or {}).get(n) != (self.settings or {}).get(n)]
            raise TrueupError(
                f"{folder} holds samples made with another {' and another '.join(other)}: name another "
                "place, or pass force=True to replace them"
            )
        if files:
            self._save_note(None, 0)  # whatever happens now, nobody takes the old ones for new
            for file in (*folder.glob("*.png"), *folder.glob("*.safetensors")):
                file.unlink()
        self._save_note(self.settings, 0)

    def _read_note(self) -> tuple[dict[str, Any] | None, int]:
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            return note["settings"], int(note["done"])
        except (OSError, ValueError, LookupError, TypeError):
            raise TrueupError(f"{self._note} cannot be read: name another folder") from None

    @property
    def _note(self) -> Path:
        return self.folder / "samples.json"

    def _save_note(self, settings: dict[str, Any] | None, done: int) -> None:
        self.done = done
        write(self._note, json.dumps({"settings": settings, "done": done}, indent=1).encode())

    def file(self, index: int) -> Path:
        """The PNG of a sample."""
        return self.folder / f"{index:06d}.png"

    def add_pictures(self, index: Tensor, images: Tensor) -> None:
        """Keep a batch of pictures (B, C, H, W) as a PNG each."""
        for i, image in zip(index.tolist(), images, strict=True):
            write(self.file(i), png(image))
        self._save_note(self.settings, int(index[-1]) + 1)

    def add(self, index: Tensor, **tensors: Tensor) -> None:
        """Keep a batch, or whatever was made of it: tensors with a row for every sample."""
        rows = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        write(self.folder / f"{int(index[0]):06d}.safetensors", to_bytes(rows))
        self._save_note(self.settings, int(index[-1]) + 1)

    def tensors(self, count: int) -> dict[str, Tensor]:
        """The rows of the first `count` samples."""
        parts: list[dict[str, Tensor]] = []
        covered = 0
        for file in sorted(self.folder.glob("*.safetensors"), key=lambda file: int(file.stem)):
            try:
                part = load_file(file)
            except (SafetensorError, OSError) as error:
                raise TrueupError(
                    f"{file} cannot be read ({error}): delete {self.folder} to start over"
                ) from None
            first, rows = int(file.stem), len(next(iter(part.values())))
            if first + rows <= covered:
                continue  # written twice, in batches of other sizes
            if first > covered:
                break
            parts.append({name: tensor[covered - first :] for name, tensor in part.items()})
            covered = first + rows
        if covered < count:
            raise TrueupError(f"{self.folder} lacks sample {covered}: delete it to start over")
        return {name: torch.cat([part[name] for part in parts])[:count] for name in parts[0]}


class Output:
    """Where samples go, by name: a file that ends in .npz or .png (a grid), else a folder of PNGs."""

    def __init__(self, path: Path, count: int, settings: dict[str, Any], *, force: bool = False):
        self.path, self.count = path, count
        self.one_file = path.suffix.lower() in (".npz", ".png")
        if path.suffix.lower() in _OTHERS:
            raise TrueupError(f"{path}: samples go to a folder of PNGs, a .png (a grid) or a .npz file")
        if path.suffix.lower() == ".png" and count > _LARGEST_GRID:
            raise TrueupError(f"a grid of {count} images is too large: name a folder or a .npz file")
        if path.is_dir() and self.one_file:
            raise TrueupError(f"{path} is a directory: name a file")
        if path.exists() and not path.is_dir() and not self.one_file:
            raise TrueupError(f"{path} is a file: name a folder, or a file that ends in .npz or .png")
        if path.exists() and self.one_file and not force:
            raise TrueupError(f"{path} exists: pass force=True to replace it, or name another file")
        if not path.parent.is_dir():
            raise TrueupError(f"{path.parent} is not a directory: make it first")
        self.kept = Kept(Path(f"{path}.run") if self.one_file else path, settings, force=force)
        if not self.one_file:  # somebody may have taken one away
            there = (self.kept.file(i).exists() for i in range(self.kept.done))
            self.kept.done = next((i for i, found in enumerate(there) if not found), self.kept.done)

    def add(self, index: Tensor, images: Tensor) -> None:
        """Keep a batch."""
        if self.one_file:
            self.kept.add(index, images=images)
        else:
            self.kept.add_pictures(index, images)

    def finish(self) -> None:
        """Write the one file, and remove what it was made of."""
        if not self.one_file:
            return
        images = self.kept.tensors(self.count)["images"]
        if self.path.suffix.lower() == ".png":
            write(self.path, png(grid(images)))
        else:
            pictures = (
                images.permute(0, 2, 3, 1) if images.dtype == torch.uint8 and images.ndim == 4 else images
            )
            content = io.BytesIO()
            np.savez(content, images=pictures.numpy(), settings=np.array(json.dumps(self.kept.settings)))
            write(self.path, content.getvalue())
        shutil.rmtree(self.kept.folder)


def grid(images: Tensor, columns: int | None = None, gap: int = 2) -> Tensor:
    """Pictures (n, C, H, W) side by side on white, (C, height, width).

    >>> grid(torch.zeros(5, 1, 8, 8, dtype=torch.uint8), columns=3).shape
    torch.Size([1, 18, 28])
    """
    n, channels, height, width = images.shape
    columns = columns or math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    size = (rows * (height + gap) - gap, columns * (width + gap) - gap)
    sheet = torch.full((channels, *size), 255, dtype=torch.uint8)
    for i, image in enumerate(images):
        top, left = (i // columns) * (height + gap), (i % columns) * (width + gap)
        sheet[:, top : top + height, left : left + width] = image
    return sheet


def png(image: Tensor) -> bytes:
    """A picture (C, H, W) uint8 as a PNG file."""
    if image.ndim != 3 or image.shape[0] not in _MODES or image.dtype != torch.uint8:
        raise TrueupError(
            f"samples of shape {tuple(image.shape)} are not pictures: write them to a .npz file"
        )
    pixels = image.permute(1, 2, 0).numpy()
    content = io.BytesIO()
    Image.fromarray(pixels[..., 0] if image.shape[0] == 1 else pixels, _MODES[image.shape[0]]).save(
        content, "PNG"
    )
    return content.getvalue()
