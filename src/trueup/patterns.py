"""Names of tar shards: 'shards/{000..127}.tar', 'shards/*.tar'. Imports nothing heavy."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from trueup.errors import DataError
from trueup.files import printable

MOST = 1_000_000  # shards


def is_shards(source: str | PathLike[str]) -> bool:
    """Whether a path names tar shards: one, or a pattern."""
    text = str(source)
    return Path(text).suffix == ".tar" or (_has_pattern(text) and not Path(text).exists())


def _has_pattern(text: str) -> bool:
    return any(c in text for c in "{*?")


def shard_files(source: str | PathLike[str]) -> list[Path]:
    """The files that a path or a pattern names, 'shards/{000..127}.tar' or 'shards/*.tar'."""
    text = str(source)
    found: list[Path] = []
    if Path(text).is_file():  # whatever is in its name
        return [Path(text)]
    if re.match(r"[a-z0-9]{2,}:", text):  # one letter is a drive
        raise DataError(printable(f"{text} is no file: fetch the shards first, or pass an iterable"))
    for name in _expanded(text):
        if len(found) > MOST:
            raise DataError(printable(f"{text} names more than {MOST:,} shards"))
        if _has_pattern(name) and not Path(name).exists():
            found += sorted(Path(path) for path in glob.glob(name, recursive=True))  # noqa: PTH207
        else:
            found.append(Path(name))
    if not found:
        raise DataError(printable(f"{text} matches no file"))
    missing = [path for path in found if not path.is_file()]
    if missing:
        named = f", nor are {len(missing) - 1} more of {len(found)} shards" if len(missing) > 1 else ""
        raise DataError(printable(f"{missing[0]} is not there{named}"))
    other = next((path for path in found if path.suffix != ".tar"), None)
    if other is not None:
        raise DataError(printable(f"{other} is no .tar, and a pattern names tar shards"))
    if len(set(found)) < len(found):
        raise DataError(printable(f"{text} names the same shard twice"))
    return found


def _expanded(text: str) -> Iterator[str]:
    """What a shell makes of {a,b} and {000..127}.

    >>> list(_expanded("{a,b}/{08..10}.tar"))
    ['a/08.tar', 'a/09.tar', 'a/10.tar', 'b/08.tar', 'b/09.tar', 'b/10.tar']
    >>> list(_expanded("{0..10}"))[-2:]
    ['9', '10']
    """
    found = re.search(r"\{([^{}]*)\}", text)
    if found is None:
        yield text
        return
    numbers = re.fullmatch(r"([0-9]{1,12})\.\.([0-9]{1,12})", found[1])
    if numbers is not None:
        first, last = int(numbers[1]), int(numbers[2])
        if last - first >= MOST:
            raise DataError(printable(f"{text} names more than {MOST:,} shards"))
        padded = any(len(end) > 1 and end.startswith("0") for end in numbers.groups())
        width = max(map(len, numbers.groups())) if padded else 0
        parts: Any = (f"{k:0{width}}" for k in range(first, last + 1))
    elif "," in found[1]:
        parts = found[1].split(",")
    else:
        raise DataError(printable(f"{text}: {found[0]} is neither a range {{000..127}} nor a list {{a,b}}"))
    before, after = text[: found.start()], text[found.end() :]
    for part in parts:
        yield from _expanded(f"{before}{part}{after}")
