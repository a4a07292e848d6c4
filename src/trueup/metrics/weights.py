"""Where networks' weights come from: a path, or a download that is checked before it is read."""

from __future__ import annotations

import hashlib
import os
import tempfile
from os import PathLike
from pathlib import Path
from urllib.request import urlopen

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from trueup.errors import TrueupError
from trueup.metrics.torch_file import read_tensors

_CHUNK = 2**20
_TIMEOUT = 30  # seconds without a byte


def load_weights(path: Path, sha256: str) -> tuple[dict[str, Tensor], str]:
    """Tensors and SHA-256 of a file of weights; a .pth must have the checksum `sha256`.

    A .safetensors file is taken as it is: whoever made it vouches for it, and its hash is in every result.
    """
    found = file_hash(path)
    if path.suffix == ".safetensors":
        try:
            return load_file(path), found
        except (SafetensorError, OSError, ValueError) as error:
            raise TrueupError(f"{path} cannot be read as weights: {' '.join(str(error).split())}") from None
    if found != sha256:
        raise TrueupError(
            f"{path} is another file: its SHA-256 begins {found[:8]}, expected {sha256[:8]}. "
            "It may be cut short: delete it and fetch it again"
        )
    return read_tensors(path), found


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise TrueupError(f"cannot read {path}: {error.strerror or error}") from None
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where downloads are kept: $TRUEUP_CACHE, or ~/.cache/trueup."""
    return Path(os.environ.get("TRUEUP_CACHE") or Path.home() / ".cache" / "trueup")


def find_or_download(url: str, sha256: str, weights: str | PathLike[str] | None = None) -> Path:
    """`weights` if given, else the file of that URL in the cache, downloaded on first use."""
    if weights is not None:
        return Path(weights)
    path = cache_folder() / url.rsplit("/", 1)[-1]
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.tmp-")
        try:
            with os.fdopen(handle, "wb") as file, urlopen(url, timeout=_TIMEOUT) as answer:
                total = int(answer.headers.get("Content-Length") or 0) or None
                with tqdm(desc=path.name, total=total, unit="B", unit_scale=True, disable=None) as bar:
                    while chunk := answer.read(_CHUNK):
                        file.write(chunk)
                        bar.update(len(chunk))
            found = file_hash(Path(name))
            if found != sha256:
                raise TrueupError(
                    f"{url} gave another file: its SHA-256 begins {found[:8]}, expected {sha256[:8]}. "
                    "Nothing was kept; try again, or pass weights=PATH"
                )
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:  # urllib's errors are among these
        reason = " ".join(str(getattr(error, "reason", None) or error).split())
        raise TrueupError(
            f"cannot download {url} ({reason}). Fetch it elsewhere and put it at {path}, or pass weights=PATH"
        ) from None
    return path
