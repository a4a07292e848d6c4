"""The values of options: text in, a value or one clear line out."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from trueup.errors import TrueupError
from trueup.solvers import NAMES, check_name


def solver(text: str) -> str:
    """The name of a solver, or the class of a diffusers scheduler."""
    sampling = sys.modules.get("trueup.sampling")  # somebody may have registered one there
    try:
        check_name(text, NAMES if sampling is None else sampling.solver_names())
    except TrueupError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def solvers(text: str) -> list[str]:
    """Solvers: a,b,.."""
    names = [solver(part.strip()) for part in text.split(",") if part.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no solver")
    return names


def labels(text: str) -> list[int]:
    """Labels: 3, or 0,1,2, or 0-9."""
    labels: list[int] = []
    for part in text.split(","):
        if not re.fullmatch("[0-9]+(-[0-9]+)?", part):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of labels, for instance 0,1,2 or 0-9")
        first, _, last = part.partition("-")
        labels += range(int(first), int(last or first) + 1)
    if not labels:
        raise argparse.ArgumentTypeError(f"{text!r} is an empty list of labels")
    return labels


def counts(text: str) -> list[int]:
    """Whole numbers: 5,10,.."""
    return [positive(part.strip()) for part in text.split(",")]


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch("0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positive_float(text: str) -> float:
    """A number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def share(text: str) -> float:
    """A number between 0 and 1, without the ends."""
    value = positive_float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 1")
    return value


def value_range(text: str) -> tuple[float, float]:
    """LOW,HIGH."""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW,HIGH, for instance 0,1") from None
    if not -float("inf") < low < high < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: LOW must be below HIGH")
    return low, high


def picture(text: str) -> Path:
    """A file that a figure can be drawn to."""
    if Path(text).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png, .svg or .pdf")
    return Path(text)
