"""Running out of memory: work is done in parts, and the parts halved until they fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from trueup.errors import ModelError

Part = TypeVar("Part")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whatever device."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    words = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
    return known or any(word in str(error) for word in words)


def in_parts(
    work: Callable[[slice], Part], rows: int, at_once: int | None = None
) -> tuple[list[Part], int | None]:
    """`work(slice)` over all rows, `at_once` of them at a time, fewer if they do not fit.

    Returns what it made of each part, and how many rows to ask for next time: `at_once` if they fitted.

    >>> in_parts(lambda part: part.stop - part.start, 5, at_once=2)
    ([2, 2, 1], 2)
    """
    size, done = max(1, min(at_once or rows, rows)), 0
    made: list[Part] = []
    while done < rows or not made:
        part = slice(done, min(done + size, rows))
        try:
            made.append(work(part))
            done = part.stop
            continue
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if size == 1:
                raise ModelError("not enough memory to evaluate the network on a single sample") from None
        at_once = size = (size + 1) // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return made, at_once
