"""What lies beside pictures: captions and labels, from a table, text files or the names of folders."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from trueup.errors import Argument, DataError, ImageError
from trueup.files import line, printable

TEXT = ("text", "caption", "prompt")
CLASS = ("label", "class")
_FILE = ("file_name", "file", "image", "path")
_FOUND = ("metadata.csv", "metadata.jsonl")  # the convention of Hugging Face's imagefolder
WHOLE = re.compile("-?[0-9]{1,18}")


def labels_beside(
    folder: Path, files: Sequence[str], captions: str | os.PathLike[str] | None, *, text: bool
) -> Sequence[Any] | None:
    """A caption of each file, or with text=False its class number; None where nothing says any.

    In this order: the table that was named; metadata.csv or metadata.jsonl in the folder, if it has a column
    for them; for captions, a .txt beside every picture; for classes, the folders that pictures lie in.
    """
    if captions is not None:
        return _of_table(Path(captions), folder, files, text)
    there = [path for name in _FOUND if (path := folder / name).is_file()]
    if len(there) > 1:
        named = f"{folder} has both {' and '.join(_FOUND)}"
        raise DataError(printable(named), "say which with {}", Argument("captions"))
    if there and _column(_columns(there[0]), TEXT if text else CLASS) is not None:
        return _of_table(there[0], folder, files, text)
    return _text_files(folder, files) if text else _of_folders(folder, files)


def _of_table(path: Path, folder: Path, files: Sequence[str], text: bool) -> list[Any]:
    where = printable(str(path))
    columns = _columns(path)
    name, value = _column(columns, _FILE), _column(columns, TEXT if text else CLASS)
    if name is None or value is None:
        takes = "this network takes texts" if text else "this network takes class numbers"
        expected = _FILE if name is None else TEXT if text else CLASS
        needed = "files" if name is None else f"what is told, and {takes}"
        listed = f"expected one named {', '.join(expected)}, it has {', '.join(columns[:12]) or 'none'}"
        raise DataError(printable(f"{path} has no column for {needed}: {listed}"))
    names = _inside(folder, files)
    position = {file: k for k, file in enumerate(names)}
    found: list[Any] = [None] * len(files)
    seen: dict[int, int] = {}  # which row named a picture
    unknown = ""
    for number, row in _rows(path):
        said = row.get(name)
        if not isinstance(said, str) or not said:
            raise DataError(f"{where}, row {number}, names no file")
        place = position.get(said)
        if place is None:  # spelled otherwise, perhaps
            place = position.get(_relative(said, folder))
        if place is None:
            unknown = unknown or said
            continue
        if place in seen:
            twice = f"{path} has two rows for {said} ({seen[place]} and {number})"
            raise DataError(printable(f"{twice}: keep one of them"))
        seen[place] = number
        found[place] = (_text if text else _class)(row.get(value), f"{where}, row {number}")
    if not seen:
        named = f"it names {unknown}" if unknown else "it has no rows"
        raise DataError(printable(f"{path} names no image of {folder}: {named}, there is {names[0]}"))
    if len(seen) < len(files):
        missing = next(file for k, file in enumerate(names) if k not in seen)
        some = f"{len(files) - len(seen)} of {len(files)} images, {missing} for one"
        what, how = ("caption", " (an empty text for none)") if text else ("label", "")
        raise DataError(printable(f"{path} has no {what} for {some}: add what is missing{how}"))
    return found


def _column(columns: Sequence[str], wanted: Sequence[str]) -> str | None:
    return next((name for name in wanted if name in columns), None)


def _columns(path: Path) -> list[str]:
    """What the first row has."""
    first = next(_rows(path), None)
    return [] if first is None else [str(name) for name in first[1]]


def _class(value: Any, where: str) -> int:
    """A class number, however it is written."""
    if isinstance(value, str) and WHOLE.fullmatch(value.strip()):
        return int(value)
    if type(value) is int and abs(value) < 10**18:
        return value
    shown = printable(repr(value))[:60]
    raise DataError(f"{where}: the label {shown} is no whole number, and this network takes class numbers")


def _text(value: Any, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: a caption is a text, not {printable(repr(value))[:60]}")
    return value


def _inside(folder: Path, files: Sequence[str]) -> list[str]:
    """Files as paths within their folder."""
    start = 0 if folder == Path() else len(str(folder).rstrip(os.sep)) + len(os.sep)
    return [file[start:] for file in files]


def _relative(name: str, folder: Path) -> str:
    """A picture as the folder knows it, however a table spells it."""
    name = os.path.normpath(name)
    return os.path.relpath(name, folder.absolute()) if Path(name).is_absolute() else name


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows of a table with their numbers, one at a time."""
    where = printable(str(path))
    readers = {".csv": _csv_rows, ".jsonl": _json_rows, ".ndjson": _json_rows, ".json": _json_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{where} is neither .csv nor .jsonl, a table of files and their captions or labels")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from reader(file, where)
    except FileNotFoundError:
        raise DataError(f"{where} does not exist") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{where} cannot be read: {line(error)}") from None


def _csv_rows(file: Any, where: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(file, strict=True)
    names = [name.strip() for name in next(reader, [])]
    for row in reader:
        if not row:  # an empty line
            continue
        if len(row) != len(names):
            text = f"{where}, row {reader.line_num}, has {len(row)} values for {len(names)} columns"
            raise DataError(f"{text} (quote texts with commas)")
        yield reader.line_num, dict(zip(names, row, strict=True))


def _json_rows(file: Any, where: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}, row {number}, is not JSON: {line(error)}") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}, row {number}, is not a JSON object with a file and its caption")
        yield number, row


class _TextFiles(Sequence[str]):
    """The texts beside pictures, each read when it is asked for."""

    def __init__(self, files: Sequence[str]):
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return _TextFiles(self.files[index])
        path = Path(self.files[index]).with_suffix(".txt")
        try:
            return path.read_text(encoding="utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ImageError(printable(f"{path} cannot be read: {line(error)}")) from None


def _text_files(folder: Path, files: Sequence[str]) -> Sequence[str] | None:
    """Captions beside pictures: photo.txt of photo.jpg."""
    texts = {
        f"{place.rstrip(os.sep)}{os.sep}{name.removesuffix('.txt')}".removeprefix(f".{os.sep}")
        for place, _, names in os.walk(folder)
        for name in names
        if name.endswith(".txt")
    }
    without = [file for file in files if file.rpartition(".")[0] not in texts] if texts else list(files)
    if len(without) == len(files):
        return None
    if without:
        some = f"{len(files) - len(without)} of {len(files)} images have a text beside them, and {without[0]}"
        advice = "write what is missing (it may be empty), or name a table with {}"
        raise DataError(printable(f"{some} has none"), advice, Argument("captions"))
    return _TextFiles(files)


def _of_folders(folder: Path, files: Sequence[str]) -> list[int] | None:
    """Classes of pictures that all lie in folders: their names, if whole numbers, or their place in the order
    of names."""
    parts = [name.split(os.sep, 1) for name in _inside(folder, files)]
    names = sorted({part[0] for part in parts if len(part) > 1})
    if not names or any(len(part) == 1 for part in parts):
        return None
    numbers = [int(name) for name in names if name.isascii() and name.isdigit()]
    if len(numbers) < len(names):
        # An empty folder would have a number too, for whoever trained with it, and shift all that follow.
        others = (p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        empty = sorted(set(others) - set(names))
        if empty:
            problem = f"{folder / empty[0]} holds no image, and classes are numbered by their folders"
            raise DataError(printable(f"{problem}: fill it, or take it away"))
        numbers = list(range(len(names)))
        if len(names) == 1:  # one folder says nothing of classes
            return None
    if len(set(numbers)) < len(numbers):
        raise DataError(printable(f"two folders in {folder} name the same class: {', '.join(names[:6])}"))
    place = dict(zip(names, numbers, strict=True))
    return [place[part[0]] for part in parts]
