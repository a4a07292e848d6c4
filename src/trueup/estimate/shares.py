"""Shares of the images: of the ranks of one job, or of processes that never meet.

Whole batches of one process are dealt: blocks of images in the order in which it would use them. An image has
its noise from its index, so that what a network says of an image is the same to the bit, however many shares
there are. Only the order differs in which sums are added. Ranks read their own images alone and tell each
other digests; processes that never meet each read all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import torch

from trueup import distributed
from trueup.calibration.shares import MOST_SHARES, Shares, named
from trueup.errors import Argument, DataError, TrueupError
from trueup.estimate.moments import Moments
from trueup.estimate.stored import SUMS
from trueup.images import Samples

_LOOKED_AT = 16  # images that ranks compare before they begin; all of them when they are done


def checked_share(share: Any) -> tuple[int, int]:
    """(k, n), k from 1 to n."""
    whole = isinstance(share, (tuple, list)) and len(share) == 2 and all(type(v) is int for v in share)
    if not whole or not 1 <= share[0] <= share[1] <= MOST_SHARES:
        limits = f"with k from 1 to n, and n at most {MOST_SHARES:,}"
        raise DataError(f"a share is (k, n), the k-th of n, {limits}, not {share!r}")
    return share[0], share[1]


def dealing(share: tuple[int, int]) -> Callable[[int], bool]:
    """Which blocks are this process's: those of a share by their number, of ranks every n-th that is left."""
    if share[1] > 1:
        return lambda block: block % share[1] == share[0] - 1
    turn, rank, size = count(), distributed.rank(), distributed.size()
    return lambda block: next(turn) % size == rank


def in_share(expected: int, size: int, share: tuple[int, int]) -> int:
    """How many of the images are in a share, of blocks of this size.

    >>> in_share(10, 4, (1, 2)), in_share(10, 4, (2, 2))
    (6, 4)
    """
    return sum(
        min(size, expected - first) for first in range((share[0] - 1) * size, expected, share[1] * size)
    )


def in_order(moments: Moments) -> Moments:
    """With samples listed by index, whoever measured which and when."""
    order = moments.indices.argsort()
    return replace(moments, indices=moments.indices[order], digests=moments.digests[order])


def merge(parts: Sequence[Moments], *, partial: bool = False) -> Moments:
    """The moments of shares together; they must be of one model, measured alike, and share no image.

    partial: some of the shares will do; which they are stays in the provenance.
    """
    if not parts:
        raise TrueupError("there is nothing to merge")
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    held, provenance = Shares.noted(total.provenance), dict(total.provenance)
    if held is not None and held.missing and not partial:
        problem = f"{named(held.missing, held.of)} {'are' if len(held.missing) > 1 else 'is'} missing"
        raise TrueupError(problem, "add what is missing, or pass {} to do without", Argument("partial", True))
    if held is not None and not held.missing:
        del provenance["shares"]
    skipped = list(dict.fromkeys(total.skipped))  # each saw all that were left out
    return in_order(replace(total, skipped=skipped, provenance=provenance))


def of_all_ranks(moments: Moments, samples: Samples) -> Moments:
    """The moments of all ranks, the same on each; sums are added in place."""
    mine = (moments.indices, moments.digests, moments.provenance.get("binding"), samples.walked)
    said = distributed.gather(mine)
    other = next((rank for rank, (*_, walked) in enumerate(said) if walked != said[0][3]), None)
    if other is not None:
        raise DataError(f"rank {other} has read other images than rank 0: give all ranks the same")
    indices, digests = (torch.cat([one[i] for one in said]) for i in (0, 1))
    if len(indices.unique()) != len(indices):
        raise DataError("an image was measured by two ranks: give all ranks the same images")
    distributed.add(getattr(moments, name) for name in SUMS)
    if moments.conditions is not None:
        distributed.add(moments.conditions.tensors)
    provenance = dict(moments.provenance)
    if len(indices):  # a rank without images cannot tell how the network is called
        provenance["binding"] = next(one[2] for one in said if len(one[0]))
    digest = sum(digests.tolist()) & ((1 << 64) - 1)
    noted: dict[str, Any] = {"indices": indices, "digests": digests, "data_digest": digest}
    return replace(moments, provenance=provenance, **noted)


def told_of(samples: Samples) -> dict[str, Any]:
    """What can be said of the data before it is read: which images, and a look at some of them."""
    images = samples.images
    found: dict[str, Any] = {"choice of images": (images.count, images.seed, images.offset, images.skip_bad)}
    if not samples.indexed:
        return found
    found["number of images"] = len(samples.source)
    last, seen = len(samples.source) - 1, hashlib.blake2b(digest_size=8)
    for row in sorted({round(i * last / (_LOOKED_AT - 1)) for i in range(_LOOKED_AT)}) if last >= 0 else ():
        try:
            seen.update(samples.at(row + images.offset).digests.numpy().tobytes())
        except DataError:  # said when it is measured, or left out
            seen.update(b"bad")
    found["set of images"] = seen.hexdigest()
    if samples.labels is not None:
        try:
            said = np.asarray(samples.labels)
            content = said.tobytes() if said.dtype.kind in "iufb" else repr(said.tolist()).encode()
        except (TypeError, ValueError):  # of all kinds: nobody can tell
            return found
        found["set of labels"] = hashlib.blake2b(content, digest_size=8).hexdigest()
    return found
