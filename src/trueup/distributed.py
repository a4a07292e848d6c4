"""One job in many processes: which rank this is, and what all ranks tell each other.

Within `together()` the ranks of torch.distributed do the same, and share what takes long: who has many
batches gives them to `dealt`, which lets each rank work on one and has what came out on all ranks, in order.
Elsewhere a process works for itself. What ranks exchange goes through a gloo group of ours, on the CPU,
whatever the group of the job is. An error on one rank becomes the same error on all: a rank that fails says
so in place of whatever the others are about to say (`gather`).
"""

from __future__ import annotations

import os
import secrets
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from trueup import progress
from trueup.errors import TrueupError
from trueup.files import line

T = TypeVar("T")
Item = TypeVar("Item")
_PATIENCE = timedelta(days=7)  # ranks wait for the slowest; one that died ends the job through its launcher
_MEETING = 1800.0  # seconds until all must be there, as torch has it
_ours: dict[Any, Any] = {}  # our group, by that of the job
_joined = False  # whether the group of the job is ours to end
_depth = 0  # of `together`


def rank() -> int:
    """Of this process among those that work together; the first is 0."""
    return dist.get_rank() if _depth and _initialized() else 0


def size() -> int:
    """How many ranks work together."""
    return dist.get_world_size() if _depth and _initialized() else 1


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def join() -> None:
    """Meet the other ranks that a launcher started, as it says in the environment; each takes its own GPU."""
    global _joined
    if _initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        store, own, count = next(iter(rendezvous("env://")))
        dist.init_process_group("gloo", store=_corner(store, own, count), rank=own, world_size=count)
    except (RuntimeError, ValueError, OSError) as error:
        raise TrueupError(f"the ranks of this job cannot meet ({line(error, 200)})") from None
    _joined = True


def _corner(store: Any, own: int, count: int) -> Any:
    """A part of the launcher's store that those ranks alone know that are here now.

    torchrun starts ranks again with the store of those that died. What these have left in it would be taken
    for the word of the living; and how often they were started, nodes do not agree.
    """
    name = secrets.token_hex(8)
    if own > 0:
        store.set(f"trueup/here/{own}", name)
        corner = store.get(f"trueup/corner/{name}").decode()  # waits
        store.set(f"trueup/heard/{corner}/{own}", "")
        return PrefixStore(corner, store)
    left, last = set(range(1, count)), time.monotonic() + _MEETING
    while left:
        for other in sorted(left):
            if store.check([f"trueup/here/{other}"]):  # this one's word, or that of the dead before it
                store.set(f"trueup/corner/{store.get(f'trueup/here/{other}').decode()}", name)
            if store.check([f"trueup/heard/{name}/{other}"]):
                left.discard(other)
        if time.monotonic() > last:
            raise RuntimeError(f"rank {min(left)} did not come")
        time.sleep(0.02)
    return PrefixStore(name, store)


def leave() -> None:
    """Part from the ranks that `join` met, without waiting for them; else their threads abort the process."""
    global _joined
    if _joined:
        _ours.clear()
        dist.destroy_process_group()
        _joined = False


class _Failed(NamedTuple):
    error: TrueupError


def _failed(error: Exception) -> _Failed:
    if isinstance(error, TrueupError):
        return _Failed(error)
    if os.environ.get("TRUEUP_DEBUG"):
        traceback.print_exception(error)
    kind = f"{type(error).__name__}: {line(error, 300)}"
    return _Failed(TrueupError(f"{kind} (TRUEUP_DEBUG=1 shows where)"))


def gather(value: Any) -> list[Any]:
    """What every rank says, by rank, on every rank; if one of them failed, its error."""
    return _gather(value) if size() > 1 else [value]


def _gather(value: Any) -> list[Any]:
    said: list[Any] = [None] * dist.get_world_size()
    with _heard():
        dist.all_gather_object(said, value, group=_group())
    failed = [(k, one.error) for k, one in enumerate(said) if isinstance(one, _Failed)]
    if failed:
        first, error = failed[0]
        if len({str(other) for _, other in failed}) > 1 or len(failed) < len(said):
            error.problem = f"rank {first}: {error.problem}"
        error.rank = dist.get_rank()
        raise error
    return said


@contextmanager
def _heard() -> Iterator[None]:
    """What goes wrong while ranks speak: one of them is gone, and there is nobody to tell."""
    try:
        yield
    except RuntimeError as error:
        gone = TrueupError(f"the ranks of this job have lost each other ({line(error, 120)})")
        gone.rank = dist.get_rank()
        raise gone from None


def wait() -> None:
    """Until all ranks of the job are here, as far as they live."""
    with suppress(TrueupError):
        if _initialized():
            _gather(None)


def agree(given: Mapping[str, Any]) -> None:
    """Raise, on every rank, if one of them was given something else than the first."""
    said = gather(dict(given)) if size() > 1 else []
    for other, theirs in enumerate(said):
        names = [name for name in said[0] | theirs if said[0].get(name) != theirs.get(name)]
        if names:
            problem = f"rank {other} was given another {' and another '.join(names)} than rank 0"
            raise TrueupError(f"{problem}: start all ranks with the same command, model and images")


def add(sums: Iterable[Tensor]) -> None:
    """Add up tensors of all ranks, on the CPU, in place."""
    for tensor in sums if size() > 1 else ():
        with _heard():
            dist.all_reduce(tensor, group=_group())


@contextmanager
def together() -> Iterator[None]:
    """In here all ranks of the process group do the same, and share the work; without one nothing changes.

    What fails on one rank fails on all of them, when they next listen or at the end.
    """
    global _depth
    _depth += 1
    speaks, progress.speaks = progress.speaks, rank() == 0
    try:
        try:
            yield
        except BrokenPipeError:  # nobody reads what this rank prints: that is no failure of the job
            gather(None)
            raise
        except Exception as error:
            if size() == 1 or getattr(error, "rank", None) is not None:
                raise
            gather(_failed(error))
        gather(None)
    finally:
        _depth -= 1
        progress.speaks = speaks


def dealt(items: Iterable[Item], work: Callable[[Item], T]) -> Iterator[tuple[Item, T]]:
    """Every item and what `work` makes of it, in order and on every rank; each is worked on by one of them.

    All ranks must see the same items. What is made has to be on the CPU.

    >>> list(dealt("ab", str.upper))
    [('a', 'A'), ('b', 'B')]
    """
    ranks, own, left = size(), rank(), iter(items)
    while some := list(islice(left, ranks)):
        if ranks == 1:
            yield some[0], work(some[0])
            continue
        made: Any = None
        if own < len(some):
            try:
                made = work(some[own])
            except Exception as error:  # now, so that all ranks raise it in the same place
                made = _failed(error)
        yield from zip(some, gather(made), strict=False)


def in_turn(mine: list[T]) -> list[T]:
    """What ranks have made, each of every n-th item: all of it, in order, on every rank.

    >>> in_turn(["A", "B"])
    ['A', 'B']
    """
    said = gather(mine)
    return [theirs[k] for k in range(len(said[0])) for theirs in said if k < len(theirs)]


def by_first(make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank."""
    if size() == 1:
        return make()
    with together():
        made = [make() if rank() == 0 else None]
    with _heard():
        dist.broadcast_object_list(made, src=0, group=_group())
    return made[0]  # type: ignore[return-value]


def _group() -> Any:
    job = dist.group.WORLD
    if job not in _ours:
        _ours.clear()
        _ours[job] = dist.new_group(backend="gloo", timeout=_PATIENCE)
    return _ours[job]
