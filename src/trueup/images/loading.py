"""Reading ahead: what comes next is fetched and decoded while the network works, in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")
_END = object()


def workers() -> int:
    """How many threads decode: as many as there are processors for this process, within reason."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, count))


def ahead(
    items: Iterator[Item], make: Callable[[Item], Made], *, wanted: Callable[[], float], depth: int
) -> Generator[Made]:
    """make(item) of every item, in order, with as many as `depth` begun before they are asked for.

    Items come from one thread, one after the other, since nobody knows whether a dataset can be asked by
    several; `make` runs in many. wanted: how many will be asked for at most; no more are begun.
    """
    pending: deque[tuple[Future[Any], Future[Any]]] = deque()

    def made(item: Future[Any]) -> Any:
        found = item.result()
        return _END if found is _END else make(found)

    with (
        ThreadPoolExecutor(1) as fetching,
        ThreadPoolExecutor(workers()) as pool,
    ):
        try:
            while True:
                while len(pending) < min(depth, wanted()):
                    item = fetching.submit(next, items, _END)
                    pending.append((item, pool.submit(made, item)))
                if not pending:
                    return
                found = pending.popleft()[1].result()
                if found is _END:
                    return
                yield found
        finally:
            for both in pending:
                for future in both:
                    future.cancel()
