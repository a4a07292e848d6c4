"""Files that can be trusted: written whole or not at all, and read only if nothing in them was changed.

Everything we keep (calibrations, moments, runs, references) is one .safetensors file with a JSON text that
says its kind, format and checksum. Numbers and strings of a file are believed only within bounds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError, safe_open

from trueup.errors import ArtifactError, TrueupError

if TYPE_CHECKING:  # the command line names files long before it needs torch
    from torch import Tensor

Made = TypeVar("Made")
FORMAT = 3  # of all kinds; 1 and 2 were never released
BUNDLED = Path(__file__).parent / "bundled"
_LARGEST_NUMBER = 2.0**53  # whole numbers beyond are not what JSON readers agree on
_LONGEST_TEXT = 1000
_DEEPEST = 6
_NONSENSE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


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


def is_hub_name(name: Any) -> bool:
    """Whether something looks like a repository on the Hugging Face Hub, owner/name, and not like a file.

    >>> is_hub_name("google/ddpm-cifar10-32"), is_hub_name("./my/model"), is_hub_name("out/a.safetensors")
    (True, False, False)
    """
    text = name.as_posix() if isinstance(name, Path) else name
    if not isinstance(text, str) or not re.fullmatch(r"(?a:\w[\w.-]{0,95}/\w[\w.-]{0,95})", text):
        return False
    files = (".safetensors", ".json", ".git", ".", "-")
    return "--" not in text and ".." not in text and not text.endswith(files)


def is_bare_name(name: Any) -> bool:
    """Whether something can be the name of a directory, and is no path.

    >>> is_bare_name("my-model"), is_bare_name("/home/me/my-model"), is_bare_name("..")
    (True, False, False)
    """
    return isinstance(name, str) and name.strip(". ") != "" and not {"/", "\\"} & set(name)


def printable(text: str) -> str:
    r"""A text that does nothing to a terminal but appear.

    >>> printable("a\x1b[2Jb\nc")
    'a\\x1b[2Jb\\nc'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def line(error: BaseException | str, longest: int = 200) -> str:
    """What an error says, on one line."""
    return printable(" ".join(str(error).split()))[:longest]


def save_tensors(
    path: str | PathLike[str], kind: str, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write tensors and plain values as one file; what `load_tensors` would refuse is refused here."""
    from safetensors.torch import save as to_bytes

    try:
        plain = json.loads(json.dumps(dict(meta), allow_nan=False, default=_plain))
        plain = {**_escaped(plain), "kind": kind, "format": FORMAT}
        _check_values(plain)
        # Copies: tensors that share memory cannot be written.
        held = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        plain["checksum"] = _checksum(held, plain)
        content = to_bytes(held, {"trueup": json.dumps(plain, sort_keys=True)})
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ArtifactError(f"cannot write {path}: {line(error)}") from None
    write(Path(path), content, ArtifactError)


def load_tensors(path: str | PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The values and tensors of a file of ours; anything damaged, changed or unknown raises ArtifactError."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device may never end
            raise ArtifactError(f"{path} is a directory or a device, not a file")
        path.open("rb").close()  # safetensors says of a file that may not be read that it does not exist
        with safe_open(path, framework="pt") as file:
            raw = (file.metadata() or {}).get("trueup")
            if raw is None:
                raise ArtifactError(f"{path} is not a file of trueup's")
            meta = json.loads(raw)
            found = meta.get("format") if isinstance(meta, dict) else None
            if type(found) is not int or not 0 < found <= _LARGEST_NUMBER:
                raise ArtifactError(f"{path} has unreadable metadata")
            if found != FORMAT:
                other = "upgrade trueup" if found > FORMAT else "make it again"
                raise ArtifactError(f"{path} has format {found}, this trueup reads {FORMAT}: {other}")
            if meta.get("kind") != kind:
                raise ArtifactError(f"{path} holds {printable(str(meta.get('kind')))[:40]}, not {kind}")
            # Copies: what safe_open returns stays tied to the file, and changes or crashes with it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if meta.pop("checksum", None) != _checksum(tensors, meta):
            raise ArtifactError(f"{path}: its checksum does not match: the file was damaged or edited")
        _check_values(meta)
    except FileNotFoundError:
        raise ArtifactError(f"{path} does not exist") from None
    except SafetensorError:
        why = "it is no file of trueup's, or was damaged or cut short"
        raise ArtifactError(f"{path} cannot be read: {why}") from None
    except (OSError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise ArtifactError(f"{path} cannot be read: {line(e)}") from None
    return meta, tensors


def load_as(
    path: str | PathLike[str], kind: str, unpack: Callable[[dict[str, Any], dict[str, Tensor]], Made]
) -> Made:
    """What `unpack` makes of a file's values and tensors; whatever is wrong raises ArtifactError."""
    return unpacked(unpack, *load_tensors(path, kind), str(path))


def unpacked(
    unpack: Callable[[dict[str, Any], dict[str, Tensor]], Made],
    meta: dict[str, Any],
    tensors: dict[str, Tensor],
    where: str,
) -> Made:
    """unpack(meta, tensors), and whatever it stumbles over is an ArtifactError that begins with `where`."""
    try:
        return unpack(meta, tensors)
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {error}") from None
    except (TrueupError, *_NONSENSE) as error:
        raise ArtifactError(f"{where}: damaged: {type(error).__name__}: {line(error)}") from None


def _checksum(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> str:
    import torch

    digest = hashlib.blake2b(json.dumps(meta, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _check_values(value: Any, name: str = "metadata", depth: int = 0) -> None:
    """Raise for anything in a file's JSON that no file of ours has."""
    if depth > _DEEPEST:
        raise ValueError(f"{printable(name)[:40]} is nested too deeply")
    if isinstance(value, dict):
        for key, part in value.items():
            _check_values(key, "a name in its metadata", depth + 1)
            _check_values(part, key, depth + 1)
    elif isinstance(value, list):
        for part in value:
            _check_values(part, name, depth + 1)
    elif isinstance(value, str):
        if len(value) > _LONGEST_TEXT or not value.isprintable():
            raise ValueError(f"{printable(name)[:40]} is a text that is too long or not printable")
    elif isinstance(value, (int, float)) and not abs(value) <= _LARGEST_NUMBER:
        raise ValueError(f"{printable(name)[:40]} is {str(value)[:20]}, out of range")


def _escaped(value: Any) -> Any:
    """The same, with every text printable and not too long."""
    if isinstance(value, dict):
        return {printable(key): _escaped(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_escaped(part) for part in value]
    return printable(value)[:_LONGEST_TEXT] if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    """A numpy or torch number as a Python one."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r} cannot be written as JSON")


def write(path: Path, content: bytes, error: type[TrueupError] = TrueupError) -> None:
    """Replace `path` by `content`, on the disk before the old file is gone; failures raise `error`."""
    temporary = path.parent / f".{path.name}.tmp-{secrets.token_hex(4)}"
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as reason:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(reason, OSError):
            raise error(f"cannot write {path}: {reason.strerror or reason}") from None
        raise
    _sync_directory(path.parent)


def _sync_directory(folder: Path) -> None:
    """So that the rename, too, outlives a power cut; not every system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class Folder:
    """A folder of ours, made if need be and held by this process alone until `release`.

    clean: everything in it is ours, and what a killed process left half written is removed. hold: False for a
    process of a job that another process holds it for.
    """

    def __init__(self, path: str | PathLike[str], *, clean: bool = True, hold: bool = True):
        self.path = Path(path)
        self._handle: int | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._handle = _lock(self.path) if hold else None
            for leftover in self.path.glob(f".*.tmp-{'[0-9a-f]' * 8}") if clean and hold else ():
                leftover.unlink(missing_ok=True)
        except OSError as error:
            raise TrueupError(f"cannot use {self.path}: {error.strerror or error}") from None

    def release(self) -> None:
        """Let others use it; done by itself when the process ends, however it does."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        try:
            self.release()
        except Exception:  # half made, or the interpreter is half gone: the lock goes with the process
            pass


def _lock(folder: Path) -> int | None:
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
