"""Reads tensors out of torch.save files without unpickling: a pickle is a program, and we do not run it.

The opcodes are read one by one by a machine that knows how to build dicts, lists, tuples and numbers, and
the names of OrderedDict, of torch's tensors, parameters and storages. Anything else is refused unread.
"""

from __future__ import annotations

import io
import math
import pickletools
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from trueup.errors import ArtifactError

_MAGIC = 0x1950A86A20F9469CFC6C  # opens the older format, from before torch 1.6
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_NONSENSE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error)


class _Storage(NamedTuple):
    """Which bytes a tensor looks at."""

    dtype: torch.dtype
    key: str
    size: int


class _View(NamedTuple):
    """A tensor before its bytes are there."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The dict of tensors (a state dict) in a file that torch.save wrote, of either format.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"weight": torch.ones(2)}, Path(folder, "a.pth"))
    ...     read_tensors(Path(folder, "a.pth"))
    {'weight': tensor([1., 1.])}
    """
    try:
        with path.open("rb") as file:
            return _read_zip(file) if zipfile.is_zipfile(file) else _read_stream(file)
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror or error}") from None
    except (ArtifactError, zipfile.BadZipFile, MemoryError, *_NONSENSE) as error:
        reason = " ".join(str(error).split())[:200]
        raise ArtifactError(f"{path} is not a plain file of weights: {reason}") from None


def _read_zip(file: BinaryIO) -> dict[str, Tensor]:
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        (index,) = (name for name in names if name.count("/") == 1 and name.endswith("/data.pkl"))
        folder = index.removesuffix("data.pkl")
        if folder + "byteorder" in names and archive.read(folder + "byteorder") != b"little":
            raise ArtifactError("its numbers are big-endian")
        tree = _interpret(io.BytesIO(archive.read(index)))
        return _tensors(tree, lambda storage: archive.read(f"{folder}data/{storage.key}"))


def _read_stream(file: BinaryIO) -> dict[str, Tensor]:
    """The older format: five pickles in a row, then each storage's length and bytes."""
    file.seek(0)
    if _interpret(file) != _MAGIC:
        raise ArtifactError("it does not begin as one of torch's does")
    _interpret(file)  # protocol version
    if not _interpret(file)["little_endian"]:
        raise ArtifactError("its numbers are big-endian")
    tree = _interpret(file)
    sizes = {view.storage.key: view.storage for view in _views(tree).values()}
    content = {}
    for key in _interpret(file):
        (size,) = struct.unpack("<q", file.read(8))
        if size != sizes[key].size:
            raise ArtifactError(f"a storage of {size} numbers where {sizes[key].size} are used")
        content[key] = file.read(size * sizes[key].dtype.itemsize)
    return _tensors(tree, lambda storage: content[storage.key])


def _views(tree: Any) -> dict[str, _View]:
    if not isinstance(tree, dict) or not all(
        isinstance(name, str) and isinstance(view, _View) for name, view in tree.items()
    ):
        raise ArtifactError("it holds something other than a dict of tensors")
    return tree


def _tensors(tree: Any, read: Callable[[_Storage], bytes]) -> dict[str, Tensor]:
    tensors, loaded = {}, {}
    for name, (storage, offset, shape, stride) in _views(tree).items():
        if storage not in loaded:
            content = read(storage)
            if len(content) != storage.size * storage.dtype.itemsize:
                raise ArtifactError(f"{name} is cut short")
            empty = torch.empty(0, dtype=storage.dtype)
            loaded[storage] = torch.frombuffer(bytearray(content), dtype=storage.dtype) if content else empty
        if math.prod(shape) > storage.size:
            raise ArtifactError(f"{name} is larger than its storage")
        # torch checks that the view stays inside the storage.
        tensors[name] = torch.as_strided(loaded[storage], shape, stride, offset).clone()
    return tensors


def _name(module: str, name: str) -> Callable[..., Any] | torch.dtype:
    """What stands for a name in the pickle; nothing is ever imported."""
    if (module, name) == ("collections", "OrderedDict"):
        return OrderedDict
    if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
        return lambda storage, offset, shape, stride, *_: _View(storage, offset, shape, stride)
    if (module, name) == ("torch._utils", "_rebuild_parameter"):
        return lambda view, *_: view
    if module == "torch" and name in _STORAGES:
        return _STORAGES[name]
    raise ArtifactError(f"it asks for {module}.{name}, which no file of weights needs")


def _storage(identity: Any) -> _Storage:
    kind, dtype, key, _, size = identity[:5]
    if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(size, int):
        raise ArtifactError("it refers to something other than a storage")
    if len(identity) > 5 and identity[5] is not None:
        raise ArtifactError("it uses views of storages, which we do not read")
    return _Storage(dtype, str(key), size)


def _interpret(file: BinaryIO) -> Any:
    """Follow one pickle's opcodes as far as data goes."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        start = marks.pop()
        values = stack[start:]
        del stack[start:]
        return values

    operations: Iterator[tuple[Any, Any, Any]] = pickletools.genops(file)
    for opcode, argument, _ in operations:
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                marks.append(len(stack))
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[opcode.name]())
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "APPEND":
                value = stack.pop()
                stack[-1].append(value)
            case "APPENDS":
                values = since_mark()
                stack[-1].extend(values)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                stack[-1][key] = value
            case "SETITEMS":
                values = since_mark()
                stack[-1].update(zip(values[::2], values[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_name(*argument.split(" ", 1)))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(function(*arguments))  # one of those that `_name` gives
            case "BUILD":
                stack.pop()  # a state dict's _metadata: versions of layers, which we do not need
            case _:
                raise ArtifactError(f"it uses the opcode {opcode.name}, which no file of weights needs")
    raise ArtifactError("it ends too soon")
