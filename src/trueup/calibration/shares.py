"""Shares of the images that were measured apart: which of how many something is made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from trueup.errors import Argument, ArtifactError, TrueupError
from trueup.stored import part, whole

MOST_SHARES = 99_999
_SHOWN = 8  # stretches of numbers that are written out


class Shares(NamedTuple):
    """Some of the shares of one set of images; what is of all of them, or was never dealt, has none."""

    held: tuple[int, ...]  # counted from 1, rising
    of: int
    batch: int  # images in each of the blocks that were dealt
    images: str  # a digest of which images those were

    @classmethod
    def noted(cls, provenance: Mapping[str, Any]) -> Shares | None:
        """What a provenance says of them, if anything; ArtifactError if it makes no sense."""
        if provenance.get("shares") is None:
            return None
        said = part(provenance, "shares", dict)
        held, of = part(said, "held", list), whole(said, "of", 1, MOST_SHARES)
        known = all(type(k) is int and 1 <= k <= of for k in held)
        if not held or not known or held != sorted(set(held)):
            raise ArtifactError(f"its list of shares holds other than some of 1 to {of:,}, rising")
        batch, images = whole(said, "batch", 1, 2**40), said.get("images")
        if not isinstance(images, str) or not re.fullmatch("[0-9a-f]{1,64}", images):
            raise ArtifactError("the digest of the images that were dealt makes no sense")
        return cls(tuple(held), of, batch, images)

    def settings(self) -> dict[str, Any]:
        """As a provenance has it."""
        return {**self._asdict(), "held": list(self.held)}

    @property
    def missing(self) -> tuple[int, ...]:
        """Those that are not held."""
        return tuple(sorted(set(range(1, self.of + 1)) - set(self.held)))

    def __str__(self) -> str:
        return named(self.held, self.of)


def joined(one: Shares | None, other: Shares | None) -> Shares | None:
    """The shares of both; raises if they do not belong together, or hold the same one."""
    if one is None and other is None:
        return None
    if one is None or other is None:
        alone = one or other
        raise TrueupError(f"{alone} cannot be added to what is no share")
    if one.of != other.of:
        raise TrueupError(f"shares of {one.of:,} and of {other.of:,} do not belong together")
    if one.batch != other.batch:
        apart = f"{one} was dealt in batches of {one.batch:,}, {other} of {other.batch:,}"
        how = "measure one again with the other's {}"
        raise TrueupError(f"{apart}, so that images are in neither", how, Argument("batch_size", ...))
    if one.images != other.images:
        raise TrueupError(
            f"{one} and {other} are not of the same images: measure one again, of the other's folder, "
            "number of images and seed"
        )
    twice = sorted(set(one.held) & set(other.held))
    if twice:
        raise TrueupError(f"both hold {named(twice, one.of)}: count it once")
    return one._replace(held=tuple(sorted(one.held + other.held)))


def named(numbers: Iterable[int], of: int) -> str:
    """Shares by their numbers.

    >>> named([3], 8), named([1, 2, 3, 5], 8)
    ('share 3 of 8', 'shares 1-3 and 5 of 8')
    """
    numbers = list(numbers)
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in ends]
    if len(texts) > _SHOWN:
        texts = [*texts[: _SHOWN - 1], "others"]
    words = " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
    return f"share{'s' * (len(numbers) > 1)} {words} of {of:,}"
