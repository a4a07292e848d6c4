"""Reading images: one at a time, in a fixed order, handed on in batches; nothing else is kept."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trueup.errors import Argument, DataError, ImageError
from trueup.files import bundled, printable
from trueup.images import sources
from trueup.images.beside import labels_beside
from trueup.images.images import as_images
from trueup.noise import hashed, mix

if TYPE_CHECKING:
    from trueup.denoiser import Denoiser

_LOOKED_AT = 64  # headers of pictures, to see whether their sizes fit


@dataclass
class _Row:
    """One image, read."""

    index: int
    x0: Tensor
    y: Any
    digest: int
    group: Any
    encode: bool  # a picture, and the model takes latents


@dataclass
class Batch:
    """Samples with their positions in the data, and their labels where the data has them."""

    index: Tensor  # (B,) int64, global
    x0: Tensor  # (B, *shape) float32
    y: Tensor | None
    digests: Tensor  # (B,) int64, of what was read
    group: Tensor | None = None  # (B,) int64 keys

    def __len__(self) -> int:
        return len(self.index)

    def rows(self, part: slice | Tensor) -> Batch:
        """Some of them."""
        parts = {name: v[part] for name, v in vars(self).items() if v is not None}
        return replace(self, **parts)

    def to(self, device: torch.device) -> Batch:
        """On another device; digests stay where they are."""
        parts = {name: v for name, v in vars(self).items() if v is not None and name != "digests"}
        return replace(self, **{name: v.to(device) for name, v in parts.items()})


def open_images(data: Any, denoiser: Denoiser, *, count: int | None = None, exact: bool = False) -> Samples:
    """`Images`, or `count` of anything that holds some, as samples of a model."""
    images = as_images(data, count)
    autoencoder = denoiser.autoencoder if denoiser.data_range is None else None
    how: dict[str, Any] = {"autoencoder": autoencoder, "exact": exact, "conditional": denoiser.conditional}
    how["vocabulary"] = denoiser.vocabulary
    if images.captions is not None and not denoiser.conditional:
        raise DataError("the network takes no condition", "leave out {}", Argument("captions"))
    return Samples(images, denoiser.shape, denoiser.data_range, **how)


class Samples:
    """Batches of samples of one shape out of anything that holds images.

    >>> data = Samples(torch.zeros(5, 1, 4, 4, dtype=torch.uint8), (1, 4, 4), (-1.0, 1.0))
    >>> [(len(batch), float(batch.x0.mean())) for batch in data.batches(3)]
    [(3, -1.0), (2, -1.0)]
    """

    def __init__(
        self,
        images: Any,
        shape: Sequence[int],
        model_range: tuple[float, float] | None,
        *,
        autoencoder: Any = None,
        encode: bool = True,
        exact: bool = False,
        conditional: bool = False,
        vocabulary: Any = None,
    ):
        self.images = images = as_images(images)
        self.exact = exact  # whether pictures must be what they seem: 8 bits per channel, all of one kind
        self.eight_bit: bool | None = None  # what the samples read so far were, before scaling
        self.skipped: list[str] = []  # what was wrong with each sample left out
        self.duplicates = 0  # samples that had been read before, and were not used again
        self.held_back = 0  # samples that were not to be used
        self.walked = 0  # a digest of all samples that the last `batches` went past, done or not
        self.shape, self.model_range = tuple(shape), model_range
        self.autoencoder = autoencoder  # makes latents of pictures
        self.encode = encode  # or leaves them pictures, in -1..1
        self.conditional = conditional  # whether labels are wanted: classes, or what `vocabulary` knows
        self.vocabulary = vocabulary  # makes numbers of texts
        self.source, self.labels, self.name = sources.open_source(images.source)
        if images.labels is not None:
            self.labels = images.labels
        elif conditional:
            self._look_beside()
        self.indexed = sources.is_indexed(self.source)
        for name, values in (("labels", self.labels), ("groups", images.groups)):
            count = len(values) if self.indexed and isinstance(values, Sized) else None
            if count is not None and count != len(self.source):
                raise DataError(f"{self.name} holds {len(self.source)} images, and there are {count} {name}")
        self.signed = False  # whether float samples have shown that they use the model's range
        once = isinstance(self.source, Iterator)
        self._once: Iterator[tuple[int, Any]] | None = enumerate(self._unbatched()) if once else None
        self._gone: set[int] = set()  # indices of a generator's samples that were handed out

    def _look_beside(self) -> None:
        """Find the captions or classes of a folder's pictures."""
        given = self.images.source
        folder = bundled(given) if isinstance(given, (str, Path)) else None
        if folder is not None and folder.is_dir():
            how = {"text": self.vocabulary is not None}
            self.labels = labels_beside(folder, self.source, self.images.captions, **how)
        elif self.images.captions is not None:
            problem = f"{self.name} is no folder of images, and captions are those of files"
            raise DataError(problem, "leave out {}, and give labels with the images", Argument("captions"))

    def __len__(self) -> int:
        """How many samples will be used, bad ones included; raises TypeError for a stream."""
        if not self.indexed:
            raise TypeError(f"{self.name} is a stream: it does not say how many samples it holds")
        return min(len(self.source), self.images.count or len(self.source))

    def expected(self, limit: int | None = None) -> int | None:
        """How many samples there will be, if that can be known."""
        known = [n for n in (len(self) if self.indexed else None, self.images.count, limit) if n is not None]
        return min(known) if known else None

    def batches(
        self,
        size: int,
        *,
        skip: Collection[int] = (),
        without: Collection[int] = (),
        limit: int | None = None,
        unique: bool = False,
        mine: Callable[[int], bool] | None = None,
        partly: bool = False,
    ) -> Iterator[Batch]:
        """As many samples as were asked for, `limit` at most, in batches.

        skip: indices that are done with, and count; with their digests, a stream is checked. without: digests
        of images not to use. unique: an image that was read before is not used again. A stream is read from
        its beginning each time; a generator, which cannot be, on from where it was left, if all it gave is to
        be skipped. A sample that cannot be used raises, or with skip_bad is noted in `skipped`.

        mine: which blocks to hand out, each as one batch; asked, in order, for every block with something
        left to do. Block b holds samples b size to (b + 1) size of those that would be used, whatever is
        done: who shares the work has the batches of one who does it alone. partly: `skip` does not know
        what others have done.
        """
        if size < 1:
            raise DataError(f"a batch holds at least one sample, not {size}")
        rows: list[_Row] = []
        left = self.images.count if self.images.count is not None else math.inf
        # Who knows of one share alone counts what others use, and what is done, on the way.
        left = min(left - (0 if partly else len(skip)), math.inf if limit is None else limit)
        position, self.walked = 0, 0
        own: tuple[int, bool] = (-1, True)  # the last block that was asked for, and the answer
        known = set(without)
        seen = set(known)
        for index, item in self._items(skip) if left > 0 else ():
            key = index + self.images.offset
            done, checked = key in skip, isinstance(skip, Mapping)
            row = None
            if not done or (checked and not self.indexed):
                try:
                    row = self._row(index, item)
                except DataError as error:
                    if not self.images.skip_bad:
                        raise
                    if str(error) not in self.skipped:  # or it is read again after an interruption
                        self.skipped.append(str(error))
                    continue
            digest = skip[key] if done and checked else 0 if row is None else row.digest  # type: ignore[index]
            if row is not None and row.digest != digest:
                raise DataError(f"sample {index} of {self.name} is not what it was before")
            if not done and digest in seen:
                self.duplicates += digest not in known
                self.held_back += digest in known
                continue
            if unique:
                seen.add(digest)
            if not done and mine is not None and own[0] != position // size:
                own = position // size, mine(position // size)
            if not done and row is not None and own[1]:
                rows.append(row)
            left -= not done or partly
            position += 1
            self.walked = mix(self.walked ^ mix(index) ^ digest)
            full = len(rows) == size if mine is None else position % size == 0
            if rows and (full or left <= 0):
                yield self._batch(rows)
                rows = []
            if left <= 0:
                break
        if rows:
            yield self._batch(rows)

    def other_size(self) -> tuple[int, ...] | None:
        """What size pictures are made for the autoencoder, if some of the first have another."""
        if self.autoencoder is None or not self.indexed:
            return None
        wanted = self.autoencoder.picture_shape(self.shape)[1:]
        for index, _ in zip(self._order(), range(_LOOKED_AT), strict=False):
            image = self.source[index]
            if isinstance(image, (str, Path)):
                with suppress(OSError), Image.open(image) as picture:  # said elsewhere
                    if sorted(picture.size) != sorted(wanted):
                        return wanted
            elif getattr(image, "dtype", None) in (np.uint8, torch.uint8) and not {*wanted} <= {*image.shape}:
                return wanted
        return None

    def first(self, count: int) -> Batch | None:
        """The first samples, as if they had not been read: a generator will give them again."""
        rest = self._once
        head = [] if rest is None else list(itertools.islice(rest, count))
        self._once, gone = None if rest is None else iter(head), set(self._gone)
        try:
            return next(self.batches(count, limit=count), None)
        finally:
            self._once, self._gone = None if rest is None else itertools.chain(head, rest), gone
            self.skipped.clear()

    def at(self, index: int) -> Batch:
        """One sample, by its global index, of data that is not a stream."""
        own = index - self.images.offset
        return self._batch([self._row(own, self.source[own])])

    def _items(self, skip: Collection[int]) -> Iterator[tuple[int, Any]]:
        if self.indexed:
            for index in self._order():
                yield index, self.source[index]
            return
        if not all(index + self.images.offset in skip for index in self._gone):
            gone = f"{self.name} can be read only once, and {len(self._gone)} samples of it are gone"
            raise DataError(f"{gone}: pass a list or a dataset instead")
        yield from enumerate(self._unbatched()) if self._once is None else self._once

    def _order(self) -> Iterable[int]:
        return range(len(self.source)) if self._drawn is None else self._drawn.tolist()

    @cached_property
    def _drawn(self) -> Tensor | None:
        """All indices, where only some images are used, in an order that is drawn, and always the same."""
        if self.images.count is None:
            return None
        return hashed(torch.arange(len(self.source)), mix(self.images.seed)).argsort(stable=True)

    @cached_property
    def _rank(self) -> Tensor:
        """Where each index stands in the order that was drawn."""
        assert self._drawn is not None
        return self._drawn.argsort()

    def _unbatched(self) -> Iterator[Any]:
        """A stream may yield samples or, as a DataLoader does, batches of them."""
        for item in self.source:
            image, label = sources.split_row(item, self.vocabulary is not None)
            if isinstance(image, (Tensor, np.ndarray)) and image.ndim == len(self.shape) + 1:
                labelled = isinstance(label, (list, tuple)) or getattr(label, "ndim", 0) > 0
                if labelled and len(label) != len(image):
                    raise DataError(f"a batch of {self.name} has {len(image)} images, {len(label)} labels")
                yield from zip(image, label if labelled else [None] * len(image), strict=True)
            else:
                yield image, label

    def _batch(self, rows: list[_Row]) -> Batch:
        own, labels = [row.index for row in rows], [row.y for row in rows]
        if self._once is not None:
            self._gone.update(own)
        y = self._told(labels)
        group = None
        if self.images.groups is not None:
            group = torch.tensor([_digest(repr(_plain(row.group)).encode()) for row in rows])
        elif self.indexed and self._drawn is not None:  # dealt in the order drawn, folds are filled evenly
            group = self._rank[torch.tensor(own)]
        digests = torch.tensor([row.digest for row in rows])
        index = torch.tensor(own) + self.images.offset
        return Batch(index, self._stacked(rows), y, digests, group)

    def _told(self, labels: list[Any]) -> Tensor | None:
        """What the network is told of each sample."""
        texts = [label for label in labels if isinstance(label, str)]
        if self.vocabulary is not None and all(isinstance(one, (str, NoneType, Mapping)) for one in labels):
            return self.vocabulary.numbers(labels)
        if texts and self.conditional:
            problem = f"the label of a sample of {self.name} is the text {texts[0][:40]!r}"
            raise DataError(printable(f"{problem}, and this network takes class numbers"))
        try:
            return None if any(label is None for label in labels) else torch.as_tensor(np.asarray(labels))
        except (TypeError, ValueError):  # names, boxes: nothing a network takes as its class
            return None

    def _stacked(self, rows: list[_Row]) -> Tensor:
        """Samples, those of pictures encoded where the model takes latents."""
        pictures = [row.x0 for row in rows if row.encode]
        if not pictures or not self.encode:
            return torch.stack([row.x0 for row in rows])
        latents = self.autoencoder.encode(torch.stack(pictures)).cpu()
        if tuple(latents.shape[1:]) != self.shape:
            made = tuple(latents.shape[1:])
            raise DataError(f"the autoencoder makes latents of shape {made}, the model takes {self.shape}")
        encoded = iter(latents)
        return torch.stack([next(encoded) if row.encode else row.x0 for row in rows])

    def _row(self, index: int, item: Any) -> _Row:
        """One image as a sample, with the digest of what was read."""
        image, label = sources.split_row(item, self.vocabulary is not None)
        label = label if self.labels is None else self._of(self.labels, index, "label")
        keys = self.images.groups
        group = keys(index) if callable(keys) else self._of(keys, index, "group")
        file = image if isinstance(image, (str, Path)) else getattr(image, "filename", None)
        where = printable(str(file or f"sample {index} of {self.name}"))
        pictured = isinstance(image, (str, Path, Image.Image))
        pixels: Any = sources.read_image(image, where) if pictured else sources.to_tensor(image, where)
        shape, model_range = self.shape, self.model_range
        encode = self.autoencoder is not None and (pictured or pixels.dtype == torch.uint8)
        if encode:
            shape, model_range = self.autoencoder.picture_shape(self.shape), (-1.0, 1.0)
        if pictured:
            if self.exact:
                sources.refuse_other_depths(pixels, where)
            pixels = sources.to_tensor(sources.picture_to_array(pixels, shape[0], where), where)
        array = sources.channels_first(pixels, shape, where)
        digest = _digest(array.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        if self.exact:
            self._note_depth(array.dtype == torch.uint8, where)
        if tuple(array.shape) != shape:
            array = self._resize(array, shape, where, encode)
        x0 = self._scale(array, model_range, where)
        if not torch.isfinite(x0).all():
            raise ImageError(f"{where} holds values that are not finite")
        if self.images.flip and mix(index + self.images.offset) & 1:
            x0 = x0.flip(-1)
        return _Row(index, x0, label, digest, group, encode)

    def _of(self, values: Any, index: int, name: str) -> Any:
        """What belongs to one image, of one per image."""
        try:
            return None if values is None else values[index]
        except IndexError:
            raise DataError(f"sample {index} of {self.name} has no {name}: there are fewer of them") from None

    def _note_depth(self, eight_bit: bool, where: str) -> None:
        if self.eight_bit is not None and self.eight_bit != eight_bit:
            kinds = ("floating point", "8-bit")
            text = f"{where} is {kinds[eight_bit]}, the samples before it are {kinds[not eight_bit]}"
            raise DataError(f"{text}: a likelihood is that of one or of the other")
        self.eight_bit = eight_bit

    def _resize(self, array: Tensor, shape: tuple[int, ...], where: str, encode: bool) -> Tensor:
        size, wanted = tuple(array.shape[1:]), shape[1:]
        resize, crop = self.images.resize, self.images.crop
        if len(wanted) != 2 or array.dtype != torch.uint8:
            raise ImageError(f"{where} is {size}, the model takes {wanted}: resize it before handing it over")
        if resize is None and crop is None and encode:  # photographs, which are of any size
            resize, crop = "shorter", "center"
        if resize is None and crop is None:
            text = f"{where} is {size[0]}x{size[1]}, the model takes {wanted[0]}x{wanted[1]}"
            ways = Argument("resize", "shorter"), Argument("crop", "center"), Argument("resize", "exact")
            raise DataError(text, "pass {} (and {}) or {}", *ways)
        planes = [Image.fromarray(plane.numpy()) for plane in array]
        height, width = size
        if resize == "exact":
            height, width = wanted
        elif resize == "shorter":
            factor = max(wanted[0] / height, wanted[1] / width)
            height, width = max(wanted[0], round(height * factor)), max(wanted[1], round(width * factor))
        if (height, width) != size:
            planes = [plane.resize((width, height), Image.Resampling.BICUBIC) for plane in planes]
        if crop == "center" and height >= wanted[0] and width >= wanted[1]:
            top, left = (height - wanted[0]) // 2, (width - wanted[1]) // 2
            planes = [plane.crop((left, top, left + wanted[1], top + wanted[0])) for plane in planes]
        out = torch.stack([torch.from_numpy(np.array(plane)) for plane in planes])
        if tuple(out.shape) != shape:
            done = "resized" if resize else "cropped"  # both, or the exact size, always fit
            text = f"{where} is {height}x{width} when {done}, the model takes {wanted[0]}x{wanted[1]}"
            missing = Argument("crop", "center") if resize else Argument("resize", "shorter")
            raise ImageError(text, "pass {} too", missing)
        return out

    def _scale(self, array: Tensor, model_range: tuple[float, float] | None, where: str) -> Tensor:
        x0, eight_bit = array.to(torch.float32), array.dtype == torch.uint8
        if model_range is None:
            if eight_bit:
                raise DataError(
                    f"{where} is an 8-bit picture, and the model takes latents: encode it with the model's "
                    "autoencoder first (a pipeline, or a directory with its vae beside it, does that itself)"
                )
            return x0
        if not eight_bit and not array.is_floating_point():
            raise DataError(f"{where} holds {array.dtype} values; expected 8-bit or floating point")
        low, high = (0.0, 255.0) if eight_bit else self.images.data_range or model_range
        if not eight_bit:
            self._check_range(x0, low, high, where)
        bottom, top = model_range
        if (low, high) == (bottom, top):
            return x0  # not even rounded
        return (x0 - low) * ((top - bottom) / (high - low)) + bottom

    def _check_range(self, x0: Tensor, low: float, high: float, where: str) -> None:
        """Refuse a float image that is not in its range, or that may be in another.

        One without a single value below zero is most likely in [0, 1], but we cannot know; unless one before
        it went far below zero, farther than resampling takes images in [0, 1].
        """
        least, most, slack = float(x0.min()), float(x0.max()), 1e-3 * (high - low)
        if self.images.data_range is None:
            self.signed = self.signed or least < low / 2
            if low < 0 and not self.signed and least >= 0 and most <= high:
                text = (
                    f"{where} is floating point with no value below 0, and the model takes {low:g}..{high:g}"
                )
                ranges = Argument("data_range", (0, 1)), Argument("data_range", (low, high))
                raise DataError(text, "pass {}, or {} if that is how it is meant", *ranges)
        if least < low - slack or most > high + slack:
            text = f"{where} spans {least:.3g}..{most:.3g}, outside {low:g}..{high:g}"
            others = "data that are no pictures (latents, fields) take a Denoiser with data_range=None"
            raise DataError(text, f"say what range it is in with {{}}; {others}", Argument("data_range"))


def _digest(content: bytes) -> int:
    """A 64-bit digest."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def _plain(key: Any) -> Any:
    """A numpy or torch number as a Python one, so that equal keys are one group."""
    return key.tolist() if hasattr(key, "tolist") else key
