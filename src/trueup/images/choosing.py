"""Which of the images are used: not those that are done, that occurred before, or that are unusable."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import closing
from typing import Any, NamedTuple

from trueup.errors import DataError
from trueup.images.images import Images
from trueup.images.reading import InOrder, Row
from trueup.noise import mix

Meet = Callable[[Any], list[Any]]  # what every rank says, by rank
Outcome = tuple[int, int, Row | DataError | None]  # (place among those to be used, index, what was read)
_IN_A_ROUND = 64  # images of a rank whose digests are exchanged at once, unless they are large
_ROUND_VALUES = 2**26
_LOOKED_AT = 16  # of a stream's samples that are done, to see that they are what they were


class _Said(NamedTuple):
    """What a rank tells the others of an image."""

    number: int
    digest: int
    problem: str | None
    where: str
    span: tuple[float, float] | None


class Choosing:
    """Goes through images in their order and chooses."""

    def __init__(self, images: Images, shape: tuple[int, ...], exact: bool):
        self.images, self.shape = images, shape
        self.model_range: tuple[float, float] | None = None
        self.name = ""
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

    def _outcomes(
        self,
        done: Collection[int],
        wanted: Callable[[], float],
        size: int,
        *,
        mine: Callable[[int], bool] = lambda _: True,
        keep_done: bool = False,
        check: Collection[int] = (),
    ) -> Generator[Outcome]:
        """What was read, in order: what is not done and, by its place among that, is `mine`.

        keep_done: what is done is passed on, unread, as None. check: done, but read all the same.
        """
        raise NotImplementedError

    def _alone(
        self,
        size: int,
        skip: Collection[int],
        without: Collection[int],
        limit: int | None,
        unique: bool,
        share: tuple[int, int],
        check: Collection[int],
    ) -> Generator[Row]:
        """Rows to use, by a process that reads everything itself; share: every so-many-th of them."""
        left = self.images.count if self.images.count is not None else math.inf
        # Who has a share counts what others use, and what is done, on the way.
        left = min(left - (len(skip) if share[1] == 1 else 0), math.inf if limit is None else limit)
        known = set(without)
        seen = known | (set(skip.values()) if unique and isinstance(skip, Mapping) else set())
        position, self.walked = 0, 0
        how: dict[str, Any] = {"keep_done": share[1] > 1, "check": check}
        with closing(self._outcomes(skip, lambda: left, size, **how)) as outcomes:
            for _, index, row in outcomes if left > 0 else ():
                done, digest = index + self.images.offset in skip, 0
                if done and isinstance(skip, Mapping):
                    digest = skip[index + self.images.offset]
                if isinstance(row, DataError):
                    self._left_out(row)
                    continue
                if row is not None:
                    try:
                        self._look(row.eight_bit, row.span, row.where)
                    except DataError as error:
                        self._left_out(error)
                        continue
                    if done and row.digest != digest:
                        raise DataError(f"sample {index} of {self.name} is not what it was before")
                    digest = row.digest
                if done and share[1] == 1:
                    continue
                if not done and self._seen(digest, known, seen):
                    continue
                if unique:
                    seen.add(digest)
                left -= 1
                position += 1
                self.walked = mix(self.walked ^ mix(index) ^ digest)
                if not done and row is not None and (position - 1) % share[1] == share[0] - 1:
                    yield row
                if left <= 0:
                    break

    def _together(
        self, size: int, skip: Mapping[int, int], share: tuple[int, int], meet: Meet, check: Collection[int]
    ) -> Generator[Row]:
        """Rows to use, each read by one rank alone: ranks tell each other digests, and choose alike.

        Images that are not done are dealt in blocks of `size`; which occur twice is known before they are
        used.
        """
        done: dict[int, int] = {}
        for theirs in meet(dict(skip)):
            done |= theirs
        left = math.inf if self.images.count is None else self.images.count - len(done)
        known = set(done.values())
        seen, start, taken, self.walked = set(known), 0, 0, 0
        (rank, ranks), cycle = share, size * share[1]

        def own(places: float) -> float:
            """How many of so many places are dealt to this rank."""
            if math.isinf(places):
                return places
            return places // cycle * size + min(max(places % cycle - (rank - 1) * size, 0), size)

        def wanted() -> float:
            return own(start + left) - taken

        def mine(place: int) -> bool:
            return place // size % ranks == rank - 1

        together = size * max(1, min(_IN_A_ROUND, _ROUND_VALUES // math.prod(self.shape)) // size)
        with closing(self._outcomes(done, wanted, size, mine=mine, check=check)) as outcomes:
            while left > 0:
                stop = start + min(together * ranks, left)
                rows: dict[int, Row] = {}
                said: dict[int, _Said] = {}
                while taken < own(stop) and (outcome := next(outcomes, None)) is not None:
                    place, index, row = outcome
                    if isinstance(row, DataError):
                        if not self.images.skip_bad:
                            raise row
                        said[place] = _Said(index, 0, str(row), "", None)
                    elif row is not None and place < 0:  # done, and looked at
                        if row.digest != done[index + self.images.offset]:
                            raise DataError(f"sample {index} of {self.name} is not what it was before")
                        continue
                    elif row is not None:
                        rows[place] = row
                        said[place] = _Said(index, row.digest, None, row.where, row.span)
                    taken += 1
                heard: dict[int, _Said] = {}
                for theirs in meet(said):
                    heard |= theirs
                # The data ends where some rank, asked for more, had no more.
                ended = len(heard) < stop - start
                if ended and set(heard) != set(range(start, start + len(heard))):
                    raise DataError(
                        f"ranks do not read the same images of {self.name}: give all ranks the same"
                    )
                for place in sorted(heard):
                    start = place + 1
                    index, digest, problem, where, span = heard[place]
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
                    self.walked = mix(self.walked ^ mix(index) ^ digest)
                    if place in rows:
                        yield rows.pop(place)
                if ended:
                    break

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
