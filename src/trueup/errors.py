"""What can go wrong, in words that say what to do.

An error states a problem and, where there is a way out, the arguments that lead there. The library calls an
argument `resize='shorter'`, the command line `--resize shorter`: each phrases the same error its own way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Argument(NamedTuple):
    """Something a caller may pass.

    >>> str(Argument("data_range", (0, 1))), Argument("data_range", (0, 1)).option()
    ('data_range=(0, 1)', '--data-range 0,1')
    """

    name: str
    value: Any = ...  # of no particular value
    said: str | None = None  # in Python, where that is another argument

    def __str__(self) -> str:
        return self.said or (self.name if self.value is ... else f"{self.name}={self.value!r}")

    def option(self) -> str:
        """As it is typed."""
        flag = f"--{self.name.replace('_', '-')}"
        if self.value is ... or self.value is True:
            return flag
        value = self.value
        return f"{flag} {','.join(f'{v:g}' for v in value) if isinstance(value, tuple) else value}"


class TrueupError(Exception):
    """Base of every error this library raises on purpose.

    >>> error = TrueupError("a.png is 9x9, the model takes 8x8", "pass {}", Argument("resize", "exact"))
    >>> str(error)
    "a.png is 9x9, the model takes 8x8: pass resize='exact'"
    >>> error.phrased(Argument.option)
    'a.png is 9x9, the model takes 8x8: pass --resize exact'
    """

    one_image = False  # whether a single image is to blame, which could be left out
    rank: int | None = None  # of this process, where all ranks of a job raise the same error

    def __init__(self, problem: str, advice: str = "", *arguments: Argument):
        self.problem, self.advice, self.arguments = problem, advice, arguments
        super().__init__(problem, advice, *arguments)

    def phrased(self, argument: Callable[[Argument], str]) -> str:
        """In the words of whoever speaks to the person."""
        if not self.advice:
            return self.problem
        return f"{self.problem}: {self.advice.format(*map(argument, self.arguments))}"

    def __str__(self) -> str:
        return self.phrased(str)


class ModelError(TrueupError):
    """The network, its schedule or what it predicts cannot be used as given."""


class DataError(TrueupError):
    """The images cannot be used as given."""


class ImageError(DataError):
    """One image cannot be used."""

    one_image = True


class ArtifactError(TrueupError):
    """A file of ours is damaged, of an unknown version, or inconsistent."""


class MismatchError(TrueupError):
    """A calibration does not belong to this model."""


class AttachError(TrueupError):
    """A calibration cannot be put on, or taken off, this model."""
