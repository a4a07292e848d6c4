"""What a measure is, and all there are: each lies in a file of its own and registers itself.

    @measure("spread", "spread of the features", more_is_better=True)
    def spread(generated: FeatureBatch, reference: Reference) -> Number:
        ...

From then on `evaluate`, its table and its JSON have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trueup.errors import TrueupError
from trueup.metrics.features import FeatureBatch
from trueup.metrics.reference import Reference
from trueup.statistics import Number

Function = Callable[[FeatureBatch, Reference], Number | None]
Notes = Callable[[FeatureBatch, Reference], list[str]]


@dataclass(frozen=True)
class Measure:
    """Generated images' features (n, ...) against those of the data, as a Number.

    It carries what every generated image did to it (`influence`), so that two sets of images from the same
    seeds have a paired difference. None: these features do not allow it.
    """

    name: str
    title: str  # in a table
    more_is_better: bool
    function: Function
    notes: Notes | None = None  # what a reader of the number should know


MEASURES: dict[str, Measure] = {}  # in the order shown


def measure(
    name: str, title: str, *, more_is_better: bool = False, notes: Notes | None = None
) -> Callable[[Function], Function]:
    """Make a function of (FeatureBatch, Reference) a measure."""

    def register(function: Function) -> Function:
        if name in MEASURES:
            raise TrueupError(f"there is a measure called {name!r} already")
        MEASURES[name] = Measure(name, title, more_is_better, function, notes)
        return function

    return register


def measures(generated: FeatureBatch, reference: Reference) -> tuple[dict[str, Number], list[str]]:
    """Every measure that the features at hand allow, and what to know about them, in words."""
    generated = FeatureBatch._make(rows if rows is None else rows.cpu() for rows in generated)
    found: dict[str, Number] = {}
    notes: list[str] = []
    for each in MEASURES.values():
        number = each.function(generated, reference)
        if number is not None:
            found[each.name] = number
            notes += [] if each.notes is None else each.notes(generated, reference)
    return found, notes
