"""Which of the images are used: not those that are done, that occurred before, or that are unusable."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import closing
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trueup.errors import DataError
from trueup.images.images import Images
from trueup.images.reading import InOrder, Row
from trueup.noise import mix

Outcome = tuple[int, int, Any]  # (place among what is not done, index, a Row, a DataError or what is unread)
_IN_A_ROUND = 64  # images of a rank whose digests are exchanged at once, unless they are large
_ROUND_VALUES = 2**26
_LOOKED_AT = 16  # of a stream's samples that are done, to see that they are what they were


class Ranks(NamedTuple):
    """Processes that read images together."""

    rank: int
    size: int
    gather: Callable[[Any], list[Any]]  # what every rank says, by rank


class _Said(NamedTuple):
    """What a rank tells the others of an image."""

    number: int
    digest: int
    problem: str | None
    where: str
    span: tuple[float, float] | None


class Choosing(ABC):
    """Goes through images in their order and chooses."""

    def __init__(self, images: Images, shape: tuple[int, ...], exact: bool):
        self.images, self.shape = images, shape
        self.model_range: tuple[float, float] | None = None
        self.name, self.indexed = "", False
        self.in_order = InOrder(images, exact)
        self.skipped: list[str] = []  # what was wrong with each sample left out
        self.duplicates = 0  # samples that had been read before, and were not used again
        self.held_back = 0  # samples that were not to be used
        self.walked = 0  # a digest of all samples that the last `batches` went past, done or not

    @property
    def eight_bit(self) -> bool | None:
        """What the samples read so far were, before scaling, where all must be of one kind."""
        return self.in_order.eight_bit

    @property
    def signed(self) -> bool:
        """Whether float samples have shown that they use the model's range."""
        return self.in_order.signed

    @signed.setter
    def signed(self, value: bool) -> None:
        self.in_order.signed = value

    @abstractmethod
    def places(self, indices: Tensor) -> Tensor:
        """Where samples, by their global indices, stand in the order in which they are used."""

    @abstractmethod
    def _outcomes(
        self,
        done: Collection[int],
        wanted: Callable[[], float],
        size: int,
        *,
        mine: Callable[[int], bool] | None = None,
        check: Collection[int] = (),
    ) -> Generator[Outcome]:
        """What was read of what is not done, in order, and of that only what is `mine`, by its place in it.

        check: done, but read all the same; its place is -1. What is not mine is passed on unread by streams.
        """

    @abstractmethod
    def _read_again(self, index: int, unread: Any) -> Row:
        """An image that another rank has read, or that a stream gave unread."""

    def _alone(
        self,
        size: int,
        skip: Collection[int],
        without: Collection[int],
        limit: int | None,
        unique: bool,
        check: Collection[int],
    ) -> Generator[tuple[int, Row]]:
        """Rows to use, with their positions among all that are used, by a process that reads everything."""
        left = math.inf if self.images.count is None else self.images.count - len(skip)
        left = min(left, math.inf if limit is None else limit)
        known = set(without)
        seen = known | (set(skip.values()) if unique and isinstance(skip, Mapping) else set())
        position, self.walked = self._positions(skip), 0
        if left <= 0:
            return
        with closing(self._outcomes(skip, lambda: left, size, check=check)) as outcomes:
            for place, index, row in outcomes:
                try:
                    row = row_of(row)
                    self._look(row.eight_bit, row.span, row.where)
                except DataError as error:
                    self._left_out(error)
                    continue
                if place < 0:
                    self._check_done(row, skip)
                    continue
                if self._seen(row.digest, known, seen):
                    continue
                if unique:
                    seen.add(row.digest)
                left -= 1
                self.walked = mix(self.walked ^ mix(index) ^ row.digest)
                yield position(index), row
                if left <= 0:
                    break

    def _together(
        self,
        size: int,
        skip: Mapping[int, int],
        ranks: Ranks,
        mine: Callable[[int], bool],
        without: Collection[int],
        check: Collection[int],
    ) -> Generator[tuple[int, Row]]:
        """Rows to use, each read by one rank: ranks tell each other digests, choose alike, and use their own.

        What is not done is read in blocks of `size`, by one rank after the other. After an image that is not
        used, blocks that are used begin later than those that were read: whoever has use for an image that
        another has read reads it again.
        """
        done: dict[int, int] = {}
        for theirs in ranks.gather(dict(skip)):
            done |= theirs
        left = math.inf if self.images.count is None else self.images.count - len(done)
        known = set(done.values()) | set(without)
        seen, start, taken, self.walked = set(known), 0, 0, 0
        position, cycle, owned = self._positions(done), size * ranks.size, (-1, False)

        def own(places: float) -> float:
            """How many of so many places are read by this rank."""
            if math.isinf(places) or not self.indexed:
                return places
            return places // cycle * size + min(max(places % cycle - ranks.rank * size, 0), size)

        def wanted() -> float:
            return own(start + left) - taken

        def reads(place: int) -> bool:
            return place // size % ranks.size == ranks.rank

        together = size * max(1, min(_IN_A_ROUND, _ROUND_VALUES // math.prod(self.shape)) // size)
        with closing(self._outcomes(done, wanted, size, mine=reads, check=check)) as outcomes:
            while left > 0:
                stop = start + min(together * ranks.size, left)
                here: dict[int, Any] = {}  # what was read, and of a stream what was not
                said: dict[int, _Said] = {}
                while taken < own(stop) and (outcome := next(outcomes, None)) is not None:
                    place, index, row = outcome
                    if place < 0:
                        self._check_done(row_of(row), done)
                        continue
                    taken += 1
                    here[place] = row
                    if isinstance(row, DataError):
                        if not self.images.skip_bad:
                            raise row
                        said[place] = _Said(index, 0, str(row), "", None)
                    elif isinstance(row, Row):
                        said[place] = _Said(index, row.digest, None, row.where, row.span)
                heard: dict[int, _Said] = {}
                for theirs in ranks.gather(said):
                    heard |= theirs
                # The data ends where some rank, asked for more, had no more.
                ended = len(heard) < stop - start
                if ended and set(heard) != set(range(start, start + len(heard))):
                    raise DataError(f"ranks read other images of {self.name}: give all ranks the same")
                for place in sorted(heard):
                    start = place + 1
                    number, digest, problem, where, span = heard[place]
                    try:
                        if problem is not None:
                            raise DataError(problem)
                        self._look(None, span, where)
                    except DataError as error:
                        self._left_out(error)
                        continue
                    if self._seen(digest, known, seen):
                        continue
                    seen.add(digest)
                    left -= 1
                    self.walked = mix(self.walked ^ mix(number) ^ digest)
                    block = position(number) // size
                    if block != owned[0]:  # asked once for each
                        owned = block, mine(block)
                    if owned[1]:
                        row = here.get(place)
                        row = row if isinstance(row, Row) else self._read_again(number, row)
                        if row.digest != digest:
                            raise DataError(f"{row.where} is not the same for all ranks: give all the same")
                        yield block * size, row
                if ended:
                    break

    def _positions(self, done: Collection[int]) -> Callable[[int], int]:
        """Where the next sample stands among all that are used: after those of them that are done."""
        keys = torch.tensor(sorted(done), dtype=torch.int64)
        before, more = self.places(keys).sort().values.tolist(), count()

        def position(index: int) -> int:
            place = int(self.places(torch.tensor([index + self.images.offset])))
            return bisect_left(before, place) + next(more)

        return position

    def _check_done(self, row: Row, done: Collection[int]) -> None:
        if isinstance(done, Mapping) and row.digest != done[row.index + self.images.offset]:
            raise DataError(f"sample {row.index} of {self.name} is not what it was before")

    def _look(self, eight_bit: bool | None, span: tuple[float, float] | None, where: str) -> None:
        if eight_bit is not None:
            self.in_order.check_depth(eight_bit, where)
        if span is not None and self.model_range is not None:
            self.in_order.check_range(span, self.model_range, where)

    def _left_out(self, error: DataError) -> None:
        """Note a sample that cannot be used, or raise."""
        if not self.images.skip_bad:
            raise error
        if str(error) not in self.skipped:  # or it is read again after an interruption
            self.skipped.append(str(error))

    def _seen(self, digest: int, known: Collection[int], seen: Collection[int]) -> bool:
        """Whether an image occurred before, or is not to be used."""
        if digest not in seen:
            return False
        self.duplicates += digest not in known
        self.held_back += digest in known
        return True


def to_check(done: Collection[int]) -> set[int]:
    """Some of what is done, to look at again where a stream passes it anyway."""
    last, places = len(done) - 1, sorted(done) if isinstance(done, Mapping) else []
    return {places[round(i * last / (_LOOKED_AT - 1))] for i in range(_LOOKED_AT)} if places else set()


def row_of(outcome: Any) -> Row:
    """What was read, or why it was not."""
    if isinstance(outcome, DataError):
        raise outcome
    assert isinstance(outcome, Row)
    return outcome
