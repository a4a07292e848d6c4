"""Writing files so that nothing is lost: to a temporary file first, then renamed into place."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trueup.errors import TrueupError

BUNDLED = Path(__file__).parent / "bundled"


def bundled(name: str | Path) -> Path:
    """A path, or something that comes with trueup.

    >>> bundled("bundled:images").name
    'images.npy'
    """
    known = {"bundled:raw": "raw", "bundled:ema": "ema", "bundled:images": "images.npy"}
    name = str(name)
    if name.startswith("bundled:") and name not in known:
        raise TrueupError(f"nothing named {name} comes with trueup: there are {', '.join(known)}")
    return BUNDLED / known[name] if name in known else Path(name)


def write(path: Path, content: bytes, error: type[TrueupError] = TrueupError) -> None:
    """Replace `path` by `content`, on the disk before the old file is gone; failures raise `error`."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.tmp-")
    except OSError as reason:
        raise error(f"cannot write {path}: {reason.strerror or reason}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)  # mkstemp files are private; ours are not secrets
        Path(name).replace(path)
        _sync_directory(path.parent)
    except OSError as reason:
        Path(name).unlink(missing_ok=True)
        raise error(f"cannot write {path}: {reason.strerror or reason}") from None
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _sync_directory(folder: Path) -> None:
    """So that the rename, too, outlives a power cut; not every system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def lock(folder: Path) -> int | None:
    """Hold a folder for this process alone until the handle is closed; None where that cannot be done."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise TrueupError(f"another process is working in {folder}: wait for it, or stop it") from None
    except OSError:  # a file system that cannot lock
        pass
    return handle


def remove_leftovers(path: Path) -> None:
    """Delete temporary files of `write` that a killed process left beside `path`."""
    for leftover in path.parent.glob(f".{path.name}.tmp-*"):
        leftover.unlink(missing_ok=True)
