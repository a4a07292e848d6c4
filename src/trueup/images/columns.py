"""Which part of a dataset's row is the image, and which is what the network is told of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, NamedTuple

from trueup.errors import Argument, DataError
from trueup.files import printable
from trueup.images.beside import TEXT

IMAGE_KEYS = ("image", "img", "pixel_values", "images", "x")
LABEL_KEYS = ("label", "labels", "class_labels", "y")
_PICTURE, _CLASS = "Image", "ClassLabel"  # types of Hugging Face's features
BUFFER = 1000  # rows that a stream's shuffling holds


class Pair(NamedTuple):
    """An image and its label, known as such."""

    image: Any
    label: Any


@dataclass(frozen=True)
class Columns:
    """The names of an image and of its label, where they were given or guessed; else by the usual ones."""

    image: str | None = None
    label: str | None = None
    text: bool = False  # a caption is wanted, where there is one

    def split(self, item: Any) -> tuple[Any, Any]:
        """(image, label) of whatever a dataset yields."""
        if isinstance(item, Pair):
            return item
        if isinstance(item, Mapping):
            return self._named(item)
        if self.image is not None or self.label is not None:
            problem = f"the data yields {type(item).__name__}, not rows with columns"
            named = "image_column" if self.label is None else "label_column"
            raise DataError(problem, "leave out {}", Argument(named))
        if isinstance(item, (tuple, list)) and len(item) in (1, 2) and not isinstance(item[0], (int, float)):
            return item[0], item[1] if len(item) == 2 else None
        return item, None

    def _named(self, row: Mapping[str, Any]) -> tuple[Any, Any]:
        images = IMAGE_KEYS if self.image is None else (self.image,)
        key = next((k for k in images if k in row), None)
        if key is None:
            names = sorted(map(str, row))
            problem = printable(f"the dataset's rows have {names}; expected a column named {images[0]!r}")
            raise DataError(problem, "or say which with {}", Argument("image_column"))
        if self.label is not None and self.label not in row:
            names = sorted(map(str, row))
            raise DataError(printable(f"the dataset's rows have {names}, and no {self.label!r}"))
        if self.label is not None:
            return row[key], row[self.label]
        return row[key], self.told(row)

    def told(self, row: Mapping[str, Any]) -> Any:
        """The label, or the caption where one is wanted, by the usual names."""
        names = (*TEXT, *LABEL_KEYS) if self.text else LABEL_KEYS
        return next((row[k] for k in names if k in row), None)


def of_features(source: Any, columns: Columns) -> Columns:
    """Columns that nobody named, by the types that a Hugging Face dataset says they have."""
    features = getattr(source, "features", None)
    if not isinstance(features, Mapping):
        return columns
    for name in (columns.image, columns.label):
        if name is not None and name not in features:
            have = ", ".join(map(str, features))
            raise DataError(printable(f"the dataset has no column {name!r}: it has {have}"))
    image = columns.image or _one(features, IMAGE_KEYS, _PICTURE, "image_column")
    texts = [name for name, kind in features.items() if getattr(kind, "dtype", None) == "string"]
    label = columns.label
    if label is None and columns.text:
        label = next((k for k in TEXT if k in features), None) or (texts[0] if len(texts) == 1 else None)
    if label is None:
        label = _one(features, LABEL_KEYS, _CLASS, "label_column")
    return replace(columns, image=image, label=label)


def _one(features: Mapping[str, Any], usual: Iterable[str], kind: str, argument: str) -> str | None:
    """The column of a usual name, or the only one of this type."""
    named = next((name for name in usual if name in features), None)
    typed = [name for name, feature in features.items() if type(feature).__name__ == kind]
    if named is None and len(typed) > 1:
        problem = f"the dataset has several columns that could be meant: {', '.join(map(str, typed))}"
        raise DataError(printable(problem), "say which with {}", Argument(argument, typed[0]))
    return named or (typed[0] if typed else None)


def undecoded(source: Any, columns: Columns) -> Any:
    """A Hugging Face dataset of these columns alone, pictures as they are stored: we decode many at once."""
    features = getattr(source, "features", None)
    feature = features.get(columns.image) if isinstance(features, Mapping) else None
    if type(feature).__name__ != _PICTURE or not is_dataclass(feature) or isinstance(feature, type):
        return source
    form = getattr(source, "format", None)
    formatted = form.get("type") if isinstance(form, Mapping) else getattr(source, "_formatting", None)
    if formatted is not None or not getattr(feature, "decode", False):
        return source
    wanted = [name for name in (columns.image, columns.label) if name is not None]
    return source.select_columns(wanted).cast_column(columns.image, replace(feature, decode=False))


def shuffled(source: Any, seed: int) -> Any | None:
    """A Hugging Face stream in an order that is drawn: shards, and rows within a buffer; None: no such."""
    if not all(hasattr(source, name) for name in ("features", "shuffle", "skip", "take")):
        return None
    if hasattr(source, "__len__"):  # it can be asked for any row
        return None
    return source.shuffle(seed=seed, buffer_size=BUFFER)


def one_by_one(source: Any, columns: Columns) -> bool:
    """Whether a stream yields one row at a time, and can be asked to begin later."""
    features = getattr(source, "features", None)
    feature = features.get(columns.image) if isinstance(features, Mapping) else None
    return hasattr(source, "skip") and type(feature).__name__ == _PICTURE
