"""Samples out of images: in a fixed order, handed on in batches; nothing else is kept."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trueup.errors import Argument, DataError
from trueup.files import bundled
from trueup.images import loading, sources
from trueup.images.batch import Batch, stacked, told
from trueup.images.beside import labels_beside
from trueup.images.choosing import Choosing, Outcome, Ranks, to_check
from trueup.images.columns import Pair, one_by_one
from trueup.images.images import as_images
from trueup.images.reading import Reader, Row, digest_of, size_of
from trueup.images.shards import Shards
from trueup.noise import hashed, mix

if TYPE_CHECKING:
    from trueup.denoiser import Denoiser

_HEADERS = 64  # of pictures, to see whether their sizes fit
_AT_ONCE = 16  # rows of an array that are read together: they are quickly read
_AHEAD = 2**27  # values that are read ahead, at most


def open_images(data: Any, denoiser: Denoiser, *, count: int | None = None, exact: bool = False) -> Samples:
    """`Images`, or `count` of anything that holds some, as samples of a model."""
    images = as_images(data, count)
    autoencoder = denoiser.autoencoder if denoiser.data_range is None else None
    how: dict[str, Any] = {"autoencoder": autoencoder, "exact": exact, "conditional": denoiser.conditional}
    how |= {"vocabulary": denoiser.vocabulary, "pin": denoiser.device.type == "cuda"}
    if images.captions is not None and not denoiser.conditional:
        raise DataError("the network takes no condition", "leave out {}", Argument("captions"))
    return Samples(images, denoiser.shape, denoiser.data_range, **how)


class Samples(Choosing):
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
        conditional: bool | None = None,
        vocabulary: Any = None,
        pin: bool = False,
    ):
        images = as_images(images)
        super().__init__(images, tuple(shape), exact)
        self.model_range = model_range
        self.autoencoder = autoencoder  # makes latents of pictures
        self.encode = encode  # or leaves them pictures, in -1..1
        # Whether labels are wanted: classes, or what `vocabulary` knows; None: such as there are.
        self.conditional = bool(conditional)
        self.vocabulary = vocabulary  # makes numbers of texts
        self.pin = pin  # whether batches go to a GPU
        opened = sources.open_source(images, text=vocabulary is not None)
        self.source, self.labels, self.name = opened.items, opened.labels, opened.name
        self.columns, self.shuffled = opened.columns, opened.shuffled
        if images.labels is not None:
            self.labels = images.labels
        elif conditional:
            self._look_beside()
        self.indexed = sources.is_indexed(self.source)
        for name, values in (("labels", self.labels), ("groups", images.groups)):
            count = len(values) if self.indexed and isinstance(values, Sized) else None
            if count is not None and count != len(self.source):
                raise DataError(f"{self.name} holds {len(self.source)} images, and there are {count} {name}")
        known = (images, self.shape, model_range, autoencoder, exact, self.columns, self.labels, self.name)
        self._reader = Reader(*known, noted=conditional is not False)
        self._once: Iterator[tuple[int, Any]] | None = None  # a generator, which gives nothing twice
        if isinstance(self.source, Iterator):
            self._once = enumerate(self._unbatched(self.source))
        self._gone: set[int] = set()  # indices of a generator's samples that were handed out

    def _look_beside(self) -> None:
        """Find the captions or classes of a folder's pictures; shards have theirs in them."""
        given, named = self.images.source, self.images.captions
        folder = bundled(given) if isinstance(given, (str, Path)) else None
        if folder is not None and folder.is_dir() and not isinstance(self.source, Shards):
            self.labels = labels_beside(folder, self.source, named, text=self.vocabulary is not None)
        elif named is not None:
            problem = f"{self.name} is no folder of images, and captions are those of files"
            raise DataError(problem, "leave out {}, and give labels with the images", Argument("captions"))

    @property
    def labelled(self) -> bool | None:
        """Whether something is said of the images; None: it shows when they are read."""
        if isinstance(self.source, Shards) and self.labels is None:
            return self.source.told
        return True if self.labels is not None or self.columns.label is not None else None

    def chosen(self) -> str:
        """Which images are used, in words."""
        return sources.chosen(self.images, self.source, self.shuffled)

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
        ranks: Ranks | None = None,
    ) -> Iterator[Batch]:
        """As many samples as were asked for, `limit` at most, in batches; what comes next is read ahead.

        skip: indices that are done with, and count; with their digests, some of a stream's are checked.
        without: digests of images not to use. unique: an image that was read before is not used again. A
        stream is read from its beginning each time; a generator, which cannot be, on from where it was left,
        if all it gave is to be skipped. A sample that cannot be used raises, or with skip_bad is noted in
        `skipped`.

        mine: which blocks to hand out, each as one batch; asked, in order, for every block with something
        left to do. Block b holds samples b size to (b + 1) size of those that would be used, whatever is
        done: who shares the work has the batches of one who does it alone. ranks: these call this together,
        with a `mine` each; then a rank reads its own images alone, and none is used twice.
        """
        if size < 1:
            raise DataError(f"a batch holds at least one sample, not {size}")
        check = to_check(skip) if not self.indexed else ()
        if ranks is not None and ranks.size > 1:
            assert isinstance(skip, Mapping)
            assert mine is not None
            rows = self._together(size, skip, ranks, mine, without, check)
            mine = None  # it was asked
            blocks = True
        else:
            rows, blocks = self._alone(size, skip, without, limit, unique, check), mine is not None
        with closing(rows):
            yield from map(self._batch, _parts(rows, size, blocks, mine))

    def places(self, indices: Tensor) -> Tensor:
        """Where samples, by their global indices, stand in the order in which they are used."""
        own = indices - self.images.offset
        return own if not self.indexed or self._drawn is None else self._rank[own]

    def other_size(self) -> tuple[int, ...] | None:
        """What size pictures are made for the autoencoder, if some of the first have another."""
        if self.autoencoder is None or not self.indexed:
            return None
        wanted = self.autoencoder.picture_shape(self.shape)[1:]
        for index, _ in zip(self._order(), range(_HEADERS), strict=False):
            image = self.columns.split(self.source[index])[0]
            size = size_of(image)
            if size is not None and sorted(size) != sorted(wanted):
                return wanted
            if getattr(image, "dtype", None) in (np.uint8, torch.uint8) and not {*wanted} <= {*image.shape}:
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
        return self._batch([self._reader.read(own, self.source[own])])

    def _outcomes(
        self,
        done: Collection[int],
        wanted: Callable[[], float],
        size: int,
        *,
        mine: Callable[[int], bool] | None = None,
        check: Collection[int] = (),
    ) -> Generator[Outcome]:
        if self._once is not None and not all(index + self.images.offset in done for index in self._gone):
            gone = f"{self.name} can be read only once, and {len(self._gone)} samples of it are gone"
            raise DataError(f"{gone}: pass a list or a dataset instead")

        def entries() -> Iterator[tuple[int, int, Any]]:
            place = 0
            for index, item in self._items(done):
                key = index + self.images.offset
                if key in done:
                    if key in check:
                        yield -1, index, item
                    continue
                if mine is None or mine(place):
                    yield place, index, self.source[index] if self.indexed else item
                elif not self.indexed:
                    yield place, index, _Unread(item)
                place += 1

        return self._ahead(entries(), wanted, size)

    def _read_again(self, index: int, unread: Any) -> Row:
        return self._reader.read(index, unread.item if isinstance(unread, _Unread) else self.source[index])

    def _items(self, done: Collection[int]) -> Iterator[tuple[int, Any]]:
        """Indices of what there is, in order, and what a stream yields."""
        if self.indexed:
            yield from ((index, None) for index in self._order())
        elif self._once is not None:
            yield from self._once
        else:
            first = 0
            if one_by_one(self.source, self.columns):  # it can be asked to begin later
                first = next(i for i in itertools.count() if i + self.images.offset not in done)
                first = max(0, first - 1)  # with one to look at
            yield from enumerate(self._unbatched(self.source.skip(first) if first else self.source), first)

    def _ahead(
        self, entries: Iterator[tuple[int, int, Any]], wanted: Callable[[], float], size: int
    ) -> Generator[Outcome]:
        """What entries hold, read ahead of time; of a generator, which gives nothing twice, each in turn."""

        def read(entry: tuple[int, int, Any]) -> Outcome:
            place, index, item = entry
            try:
                return place, index, item if isinstance(item, _Unread) else self._reader.read(index, item)
            except DataError as error:
                return place, index, error

        if self._once is not None:
            yield from map(read, entries)
            return
        # Rows of an array that fit as they are take next to nothing but Python: more threads than one fight
        # for the interpreter with each other and with the one that launches the network. Pictures are
        # decoded, and resized, outside of it.
        array = isinstance(self.source, (Tensor, np.ndarray))
        ready = array and self.images.resize is None and self.autoencoder is None
        threads, together = (1 if ready else loading.workers()), (_AT_ONCE if array else 1)
        groups = iter(lambda: list(itertools.islice(entries, together)), [])
        depth = max(2, 2 * threads, min(2 * size, _AHEAD // math.prod(self.shape)) // together)
        how: dict[str, Any] = {"wanted": lambda: wanted() / together, "depth": depth, "threads": threads}
        with closing(loading.ahead(groups, lambda group: [read(entry) for entry in group], **how)) as found:
            for group in found:
                yield from group

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

    def _unbatched(self, stream: Iterable[Any]) -> Iterator[Pair]:
        """A stream may yield samples or, as a DataLoader does, batches of them."""
        for item in stream:
            image, label = self.columns.split(item)
            if isinstance(image, (Tensor, np.ndarray)) and image.ndim == len(self.shape) + 1:
                labelled = isinstance(label, (list, tuple)) or getattr(label, "ndim", 0) > 0
                if labelled and len(label) != len(image):
                    raise DataError(f"a batch of {self.name} has {len(image)} images, {len(label)} labels")
                yield from map(Pair, image, label if labelled else [None] * len(image))
            else:
                yield Pair(image, label)

    def _batch(self, rows: list[Row]) -> Batch:
        own = [row.index for row in rows]
        if self._once is not None:
            self._gone.update(own)
        y = told([row.y for row in rows], self.vocabulary, self.conditional, self.name)
        group = self.grouped(own)
        if group is None and self.indexed and self._drawn is not None:
            # Dealt in the order drawn, folds are filled evenly.
            group = self._rank[torch.tensor(own)]
        digests = torch.tensor([row.digest for row in rows])
        x0 = stacked(rows, self.autoencoder if self.encode else None, self.shape, self.pin)
        return Batch(torch.tensor(own) + self.images.offset, x0, y, digests, group)

    def grouped(self, own: list[int]) -> Tensor | None:
        """Keys of the groups that samples were put in; None where they were not."""
        if self.images.groups is None:
            return None
        return torch.tensor([digest_of(repr(self._group(index)).encode()) for index in own])

    def _group(self, index: int) -> Any:
        """The key of a sample's group; numpy's and torch's numbers as Python's, so that equal ones agree."""
        keys = self.images.groups
        try:
            key: Any = keys(index) if callable(keys) else keys[index]  # type: ignore[index]
        except IndexError:
            raise DataError(f"sample {index} of {self.name} has no group: there are fewer of them") from None
        return key.tolist() if hasattr(key, "tolist") else key


class _Unread(NamedTuple):
    """What a stream gave that another rank reads."""

    item: Any


def _parts(
    rows: Iterator[tuple[int, Row]], size: int, blocks: bool, mine: Callable[[int], bool] | None
) -> Iterator[list[Row]]:
    """Rows as batches are made of them: as they come, or those of a block together."""
    if not blocks:
        yield from iter(lambda: [row for _, row in itertools.islice(rows, size)], [])
        return
    part: list[Row] = []
    block, own = -1, True
    for position, row in rows:
        if position // size != block:
            if part:
                yield part
            block, part = position // size, []
            own = mine is None or mine(block)
        if own:
            part.append(row)
    if part:
        yield part
