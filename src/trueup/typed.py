"""The values of options: text in, a value or one clear line out."""

from __future__ import annotations

import argparse
import math
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from trueup.errors import TrueupError
from trueup.solvers import FITTED, NAMES, check_name, did_you_mean

FEATURES = ("inception", "efficientnet", "pixels")  # as `trueup.metrics` has them


def code(text: str) -> tuple[Path, str] | None:
    """The file and the name in it of `my_code.py:make_denoiser`; None for all else.

    >>> code("my_code.py:make_denoiser")[1], code("bundled:raw"), code("models:old")
    ('make_denoiser', None, None)
    """
    found = re.fullmatch(r"(.+\.py):([^:/\\]*)", text, re.DOTALL)
    return None if found is None or Path(text).is_dir() else (Path(found[1]), found[2])


def solver(text: str) -> str:
    """The name of a solver, or the class of a diffusers scheduler."""
    if text == FITTED:
        return text
    sampling = sys.modules.get("trueup.sampling")  # somebody may have registered one there
    try:
        check_name(text, known := NAMES if sampling is None else sampling.solver_names())
    except TrueupError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    found = None if text in known else find_spec("diffusers")  # not imported: that takes seconds
    if found is not None and found.origin is not None:
        classes = re.findall(r'"(\w+Scheduler)"', Path(found.origin).read_text(encoding="utf-8"))
        if classes and text not in classes:
            hint = did_you_mean(text, classes)
            raise argparse.ArgumentTypeError(f"diffusers has no scheduler {text}{hint}")
    return text


def shard(text: str) -> tuple[int, int]:
    """Which of how many.

    >>> shard("3/8")
    (3, 8)
    """
    found = re.fullmatch(r"([1-9]\d{0,4})/([1-9]\d{0,4})", text)
    if found is None or int(found[1]) > int(found[2]):
        limits = "K from 1 to N, and N at most 99,999"
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with {limits}, such as 3/8")
    return int(found[1]), int(found[2])


def features(text: str) -> str:
    """The name of features, or where somebody's own are."""
    if text not in FEATURES and not re.fullmatch("[^:]+:[^:]+", text):
        known = f"{', '.join(FEATURES)}, or package.module:attribute"
        raise argparse.ArgumentTypeError(f"no features are called {text!r}: use {known}")
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
        if not re.fullmatch("[0-9]{1,6}(-[0-9]{1,6})?", part):
            example = "for instance 0,1,2 or 0-9"
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of labels below a million, {example}")
        first, _, last = part.partition("-")
        labels += range(int(first), int(last or first) + 1)
    if not labels:
        raise argparse.ArgumentTypeError(f"{text!r} is an empty list of labels")
    return labels


def prompts(text: str) -> list[str]:
    """Prompts of a text file, one a line."""
    try:
        lines = Path(text).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problem = "is no text in UTF-8" if isinstance(error, UnicodeDecodeError) else "cannot be read"
        raise argparse.ArgumentTypeError(f"{text!r} {problem}: a text file with a prompt a line") from None
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} holds no prompt")
    return found


def size(text: str) -> tuple[int, int]:
    """HEIGHTxWIDTH."""
    if not re.fullmatch("[1-9][0-9]{0,4}x[1-9][0-9]{0,4}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not HEIGHTxWIDTH, for instance 512x768")
    height, width = map(int, text.split("x"))
    return height, width


def counts(text: str) -> list[int]:
    """Whole numbers: 5,10,.."""
    return [positive(part.strip()) for part in text.split(",")]


def seed(text: str) -> int:
    """A seed, as everything that draws noise takes it."""
    if not re.fullmatch("[0-9]{1,16}", text) or int(text) >= 2**53:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, at least 0 and below 2**53")
    return int(text)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch("0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def number(text: str, least: float = -sys.float_info.max, what: str = "a number") -> float:
    """A number that is finite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def positive_float(text: str) -> float:
    """A number of at least 0."""
    return number(text, 0.0, "a number of at least 0")


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
