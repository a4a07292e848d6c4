"""Where networks' weights come from: a path, or a download that is checked before it is read."""

from __future__ import annotations

import hashlib
import io
import os
from os import PathLike
from pathlib import Path
from urllib.request import urlopen

import torch
from safetensors.torch import load as from_bytes
from torch import Tensor

from trueup.errors import Argument, TrueupError
from trueup.files import line, write
from trueup.progress import Progress

_CHUNK = 2**20
_TIMEOUT = 30  # seconds without a byte


def load_weights(path: Path, sha256: str) -> tuple[dict[str, Tensor], str]:
    """Tensors and SHA-256 of a file of weights; a .pth must have the checksum `sha256`.

    A .safetensors file is taken as it is: whoever made it vouches for it, and its hash is in every result.
    A .pth is opened only if every byte of it is known, and even then no pickle is run: torch's
    `weights_only` builds tensors and plain containers of them, and refuses to call anything else.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TrueupError(f"cannot read {path}: {error.strerror or error}") from None
    found = hashlib.sha256(content).hexdigest()
    plain = path.suffix == ".safetensors"
    if not plain and found != sha256:
        problem = f"{path} is another file: its SHA-256 begins {found[:8]}, expected {sha256[:8]}"
        raise TrueupError(f"{problem}. It may be cut short: delete it and fetch it again")
    try:
        file = io.BytesIO(content)
        tensors = from_bytes(content) if plain else torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
            raise ValueError("it holds something other than a dict of tensors")
    except Exception as error:  # torch's reader raises whatever it stumbles over
        raise TrueupError(f"{path} cannot be read as weights: {line(error)}") from None
    return tensors, found


def find_or_download(url: str, sha256: str, weights: str | PathLike[str] | None = None) -> Path:
    """`weights`, or the file of that URL in $TRUEUP_CACHE or ~/.cache/trueup, downloaded on first use."""
    if weights is not None:
        return Path(weights)
    folder = Path(os.environ.get("TRUEUP_CACHE") or Path.home() / ".cache" / "trueup")
    path = folder / url.rsplit("/", 1)[-1]
    if path.exists():
        return path
    content = bytearray()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):  # better known before than after the download
            raise PermissionError(f"{folder} cannot be written to")
        with urlopen(url, timeout=_TIMEOUT) as answer:
            total = int(answer.headers.get("Content-Length") or 0) / _CHUNK or None
            with Progress(total, f"downloading {path.name}", unit="MB") as bar:
                while chunk := answer.read(_CHUNK):
                    content += chunk
                    bar.update(len(chunk) / _CHUNK)
    except OSError as error:  # urllib's errors are among these
        problem = f"cannot download {url} to {path} ({line(error)})"
        advice = "fetch it elsewhere and put it there, or say with {} where it is"
        raise TrueupError(problem, advice, Argument("weights")) from None
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        problem = f"{url} gave another file: its SHA-256 begins {found[:8]}, expected {sha256[:8]}"
        raise TrueupError(problem, "try again, or say with {} where the file is", Argument("weights"))
    write(path, bytes(content))
    return path
