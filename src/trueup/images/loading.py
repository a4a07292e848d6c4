"""Reading ahead: what comes next is fetched and decoded while the network works, in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")
_END = object()
_leaving: set[Thread] = set()  # threads that fetch one more item, for nobody, and end


def workers() -> int:
    """How many threads decode: as many as there are processors for this process, within reason."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, count))


def ahead(
    items: Iterator[Item],
    make: Callable[[Item], Made],
    *,
    wanted: Callable[[], float],
    depth: int,
    threads: int | None = None,
) -> Generator[Made]:
    """make(item) of every item, in order, with as many as `depth` begun before they are asked for.

    Items come from one thread, one after the other, since nobody knows whether a dataset can be asked by
    several; `make` runs in `threads`, by default many. wanted: how many will be asked for at most; no more
    are begun. Who closes this does not wait for an item that is slow to come; who reads on does, so that
    still one asks at a time.
    """
    pending: deque[Future[Future[Made] | None]] = deque()
    asked: SimpleQueue[Future[Future[Made] | None] | None] = SimpleQueue()
    pool, before = ThreadPoolExecutor(threads or workers()), list(_leaving)

    def fetch() -> None:
        for other in before:
            other.join()
        for begun in iter(asked.get, None):
            if not begun.set_running_or_notify_cancel():
                continue
            try:
                item: Any = next(items, _END)
                begun.set_result(None if item is _END else pool.submit(make, item))
            except BaseException as error:  # said when its turn comes
                begun.set_exception(error)
        _leaving.discard(fetching)

    fetching = Thread(target=fetch, daemon=True)  # which the end of the process does not wait for
    fetching.start()
    try:
        while True:
            while len(pending) < min(depth, wanted()):
                pending.append(Future())
                asked.put(pending[-1])
            if not pending:
                return
            found = pending.popleft().result()
            if found is None:
                return
            yield found.result()
    finally:
        for begun in pending:
            begun.cancel()
        _leaving.add(fetching)
        asked.put(None)
        pool.shutdown(wait=False, cancel_futures=True)
