"""The members of a tar file, found by its headers alone: contents are seeked over, nothing is unpacked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trueup.errors import DataError
from trueup.files import line, printable

_BLOCK = 512
_LONGEST_NAME = 2**16  # bytes of a header that holds a long name or other attributes
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstandard"}


class Member(NamedTuple):
    """A file within a tar file, and where its content is."""

    name: str
    offset: int
    size: int


def members(path: Path) -> Iterator[Member]:
    """Every plain file of a tar file, in its order; a damaged or truncated one raises DataError."""
    where = printable(str(path))
    try:
        with path.open("rb", buffering=0) as file:
            yield from _members(file, where)
    except OSError as error:
        raise DataError(f"{where} cannot be read: {error.strerror or line(error)}") from None


def _members(file: Any, where: str) -> Iterator[Member]:
    end, place = file.seek(0, 2), 0
    said: dict[str, Any] = {}  # of the next member, by the headers before it
    while place < end:
        file.seek(place)
        header = file.read(_BLOCK)
        if not header.strip(b"\0"):  # the end, which some writers leave out
            return
        if len(header) < _BLOCK:
            raise DataError(f"{where} is truncated: it ends within a header, at byte {end:,}")
        size = said["size"] if "size" in said else _number(header[124:136])
        if size is None or size < 0 or _number(header[148:156]) not in _sums(header):
            raise DataError(_no_header(header, place, where))
        content, kind = place + _BLOCK, header[156:157]
        place = content + -(-size // _BLOCK) * _BLOCK
        if content + size > end:
            missing = f"{content + size - end:,} bytes of its last member are missing"
            raise DataError(f"{where} is truncated: {missing}")
        if kind in (b"L", b"x"):  # what does not fit into a header: GNU's way, and that of POSIX
            if size > _LONGEST_NAME:
                raise DataError(f"{where} has a member name of {size:,} bytes, which is no name")
            text = file.read(size)
            said |= {"name": text.rstrip(b"\0")} if kind == b"L" else _attributes(text)
            continue
        if kind in (b"0", b"\0", b"7"):
            name, prefix = (part.split(b"\0")[0] for part in (header[:100], header[345:500]))
            if prefix and header[257:263] == b"ustar\0":
                name = prefix + b"/" + name
            yield Member(said.get("name", name).decode("utf-8", "replace"), content, size)
        if kind != b"g":
            said = {}


def _no_header(header: bytes, place: int, where: str) -> str:
    packed = next((name for start, name in _COMPRESSED.items() if header.startswith(start)), None)
    if place == 0 and packed is not None:
        return f"{where} is compressed ({packed}): store it as a plain .tar, whose members can be found"
    return f"{where} is no tar file" if place == 0 else f"{where} is damaged: no header at byte {place:,}"


def _number(field: bytes) -> int | None:
    """A number of a header: octal digits, or bytes where it is too large for them."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        return None


def _sums(header: bytes) -> tuple[int, int]:
    """What the checksum of a header may be; some writers took bytes for signed."""
    counted = header[:148] + b" " * 8 + header[156:]
    return sum(counted), sum(counted) - 256 * sum(byte > 127 for byte in counted)


def _attributes(text: bytes) -> dict[str, Any]:
    """Name and size of the next member, where POSIX's "length key=value" lines have them."""
    found: dict[str, Any] = {}
    while text:
        digits, _, rest = text.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        key, _, value = rest[: length - len(digits) - 2].partition(b"=")
        if key == b"path":
            found["name"] = value
        elif key == b"size":
            with suppress(ValueError):
                found["size"] = int(value)
        if not length:
            break
        text = text[length:]
    return found
