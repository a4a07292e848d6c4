"""One job in many processes: which rank this is, and what all ranks tell each other.

Ranks are those of torch.distributed. What they exchange is small and on the CPU, so it goes through a gloo
group of ours, whatever the group of the job is. An error on one rank becomes the same error on all: a rank
that fails says so in place of whatever the others are about to say (`gather`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trueup.errors import TrueupError
from trueup.files import line

T = TypeVar("T")
_PATIENCE = timedelta(days=7)  # ranks wait for the slowest; one that died ends the job through its launcher
_ours: dict[Any, Any] = {}  # our group, by that of the job
_joined = False  # whether the group of the job is ours to end


def rank() -> int:
    """Of this process."""
    return dist.get_rank() if _initialized() else 0


def size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if _initialized() else 1


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
        dist.init_process_group("gloo")
    except (RuntimeError, ValueError, OSError) as error:
        raise TrueupError(f"the ranks of this job cannot meet ({line(error, 200)})") from None
    _joined = True


def leave() -> None:
    """Part from the ranks that `join` met, without waiting for them; else their threads abort the process."""
    global _joined
    if _joined:
        _ours.clear()
        dist.destroy_process_group()
        _joined = False


class _Failed(NamedTuple):
    error: TrueupError


def gather(value: Any) -> list[Any]:
    """What every rank says, by rank, on every rank; if one of them failed, its error."""
    if size() == 1:
        return [value]
    said: list[Any] = [None] * size()
    dist.all_gather_object(said, value, group=_group())
    failed = [(k, one.error) for k, one in enumerate(said) if isinstance(one, _Failed)]
    if failed:
        first, error = failed[0]
        if len({str(other) for _, other in failed}) > 1 or len(failed) < size():
            error.problem = f"rank {first}: {error.problem}"
        error.rank = rank()
        raise error
    return said


def add(sums: Iterable[Tensor]) -> None:
    """Add up tensors of all ranks, on the CPU, in place."""
    for tensor in sums if size() > 1 else ():
        dist.all_reduce(tensor, group=_group())


@contextmanager
def together() -> Iterator[None]:
    """What fails in here on one rank fails on all of them, when they next listen or at the end."""
    try:
        yield
    except Exception as error:
        if size() == 1 or getattr(error, "rank", None) is not None:
            raise
        known = isinstance(error, TrueupError)
        gather(_Failed(error if known else TrueupError(f"{type(error).__name__}: {line(error, 300)}")))  # type: ignore[arg-type]
    gather(None)


def by_first(make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank."""
    if size() == 1:
        return make()
    with together():
        made: T = gather(make() if rank() == 0 else None)[0]
    return made


def _group() -> Any:
    job = dist.group.WORLD
    if job not in _ours:
        _ours.clear()
        _ours[job] = dist.new_group(backend="gloo", timeout=_PATIENCE)
    return _ours[job]
