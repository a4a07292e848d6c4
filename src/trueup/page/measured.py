"""What was measured elsewhere: JSON of `check`, `samplers`, `evaluate` and `likelihood`, read with care."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from trueup.calibration import Calibration
from trueup.errors import DataError, MismatchError, TrueupError
from trueup.files import line, printable
from trueup.metrics import MEASURES
from trueup.statistics import Number

_LARGEST = 2**26  # bytes of such a file
_MOST = 2000  # rows of a table
_LONGEST = 300
_EXPECTED = "expected what trueup check, samplers, evaluate or likelihood wrote with -o"


@dataclass
class Change:
    """One measure before and after."""

    name: str  # as the measure is called in a table
    before: Number
    after: Number
    difference: Number
    more_is_better: bool = False


@dataclass
class Compared:
    """One solver at one number of evaluations, of `trueup evaluate`."""

    solver: str
    nfe: int | None
    uncalibrated: str | None
    changes: dict[str, Change]


@dataclass
class Comparison:
    """What `trueup evaluate` wrote."""

    rows: list[Compared]
    samples: int
    seed: int
    features: str
    images: int
    notes: list[str]


@dataclass
class Sampled:
    """One sampler on one grid, of `trueup samplers`."""

    sampler: str
    grid: str
    nfe: int
    error: Number


@dataclass
class Samplers:
    """What `trueup samplers` wrote."""

    rows: list[Sampled]
    trajectories: int
    calibrated: bool


@dataclass
class Likelihood:
    """What `trueup likelihood` wrote."""

    method: str
    description: str
    images: int
    of: str
    terms: dict[str, dict[str, Number]]  # "total" last; before, after, difference
    notes: list[str]


@dataclass
class Found:
    """One finding of `trueup check`."""

    kind: str
    sentence: str
    advice: str


@dataclass
class Diagnosis:
    """What `trueup check` wrote of its findings."""

    findings: list[Found]
    images: int
    healthy: bool
    limits: dict[str, float | None]  # the smallest share of the loss that would have been seen, by kind
    notes: list[str]


@dataclass
class Measured:
    """All of it."""

    diagnoses: list[Diagnosis] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    samplers: list[Samplers] = field(default_factory=list)
    likelihoods: list[Likelihood] = field(default_factory=list)

    @classmethod
    def of(cls, given: Iterable[Any], calibration: Calibration) -> Measured:
        """Files, or what the functions of those names return, of this calibration's network."""
        found = cls()
        seen: list[Any] = []
        for one in given:
            name, values = _values(one)
            if values in seen:  # named twice
                continue
            seen.append(values)
            try:
                found._add(values, calibration, name)
            except TrueupError:
                raise
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise DataError(f"{name} makes no sense ({line(error, 80)}): {_EXPECTED}") from None
        return found

    def as_json(self) -> dict[str, Any]:
        """Plain values of what was read, single images aside; what is not known is null."""
        return _plain(self)

    def _add(self, values: Mapping[str, Any], calibration: Calibration, name: str) -> None:
        if isinstance(values.get("diagnosis"), dict):  # beside all else that `check` says
            values = values["diagnosis"]
        settings: dict[str, Any] = {}
        if isinstance(values.get("settings"), dict):
            settings = values["settings"]
        if {"rows", "features", "reference", "calibration"} <= values.keys():
            made = values["calibration"].get("identity")
            _check_whose(name, settings, made, calibration, always=True)
            self.comparisons.append(_comparison(values))
        elif {"samplers", "trajectories", "calibrated"} <= values.keys():
            _check_whose(name, settings, settings.get("calibration"), calibration)
            self.samplers.append(_samplers(values))
        elif {"method", "terms", "total", "dimensions"} <= values.keys():
            _check_whose(name, settings, settings.get("calibration"), calibration)
            self.likelihoods.append(_likelihood(values))
        elif {"findings", "would_have_been_seen", "healthy"} <= values.keys():
            _check_whose(name, settings, None, calibration)
            self.diagnoses.append(_diagnosis(values))
        else:
            raise DataError(f"{name} is something else: {_EXPECTED}")


def _values(one: Any) -> tuple[str, dict[str, Any]]:
    """The name and the plain values of a file or of a result."""
    if not isinstance(one, (str, PathLike)):
        if not hasattr(one, "as_json"):
            raise DataError(f"a {type(one).__name__} is no measurement: {_EXPECTED}")
        return type(one).__name__, one.as_json()
    path = Path(one)
    name = printable(str(path))
    try:
        if path.stat().st_size > _LARGEST:
            raise DataError(f"{name} is larger than {_LARGEST >> 20} MB: {_EXPECTED}")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise DataError(f"{name} is no JSON: {_EXPECTED}") from None
    if not isinstance(values, dict):
        raise DataError(f"{name} is something else: {_EXPECTED}")
    return name, values


def _check_whose(
    name: str, settings: Any, made: Any, calibration: Calibration, *, always: bool = False
) -> None:
    """Raise for a measurement of another network, or with another calibration."""
    weights = settings.get("weights")
    if not isinstance(weights, dict) or not calibration.fits(weights):
        raise MismatchError(f"{name} was measured on another network than this calibration: leave it out")
    if made != calibration.identity and (made is not None or always):
        raise MismatchError(f"{name} was measured with another calibration of this network: measure it again")


def _comparison(values: Mapping[str, Any]) -> Comparison:
    rows = []
    for row in _listed(values["rows"]):
        changes = {}
        for key, change in row["changes"].items():
            known = MEASURES.get(key)
            name = _text(key) if known is None else known.title
            before, after, difference = (_number(change[side]) for side in ("before", "after", "difference"))
            more = known is not None and known.more_is_better
            changes[_text(key)] = Change(name, before, after, difference, more)
        nfe = None if row["evaluations"] is None else _whole(row["evaluations"])
        other = None if row.get("uncalibrated") is None else _text(row["uncalibrated"])
        rows.append(Compared(_text(row["solver"]), nfe, other, changes))
    counts = (_whole(values["samples"]), _whole(values["seed"]))
    seen_by, images = _text(values["features"]["name"]), _whole(values["reference"]["images"])
    return Comparison(rows, *counts, seen_by, images, _notes(values))


def _samplers(values: Mapping[str, Any]) -> Samplers:
    rows = []
    for row in _listed(values["samplers"]):
        error = _number({"value": row["error"], "low": row["low"], "high": row["high"]})
        rows.append(Sampled(_text(row["sampler"]), _text(row["grid"]), _whole(row["nfe"]), error))
    return Samplers(rows, _whole(values["trajectories"]), values["calibrated"] is True)


def _likelihood(values: Mapping[str, Any]) -> Likelihood:
    named = {**values["terms"], "total": values["total"]}
    terms = {
        _text(key): {
            side: _number(found[side]) for side in ("before", "after", "difference") if side in found
        }
        for key, found in named.items()
    }
    about = (_text(values["method"]), _text(values["description"]), _whole(values["images"]))
    return Likelihood(*about, _text(values["of"]), terms, _notes(values))


def _diagnosis(values: Mapping[str, Any]) -> Diagnosis:
    findings = [
        Found(_text(one["kind"], 40), _text(one["sentence"], 600), _text(one["advice"], 600))
        for one in _listed(values["findings"], least=0)
    ]
    limits: dict[str, float | None] = {}
    for kind, limit in list(values["would_have_been_seen"].items())[:50]:
        found = _number({"value": limit, "low": None, "high": None}).value
        limits[_text(kind, 40)] = None if math.isnan(found) else found
    healthy = values["healthy"] is True and not findings
    return Diagnosis(findings, _whole(values["images"]), healthy, limits, _notes(values))


def _listed(rows: Any, least: int = 1) -> list[Any]:
    if not isinstance(rows, list) or not least <= len(rows) <= _MOST:
        raise ValueError(f"no list of {least} to {_MOST} rows")
    return rows


def _notes(values: Mapping[str, Any]) -> list[str]:
    return [_text(note, 1000) for note in values.get("notes", [])[:20]]


def _text(value: Any, longest: int = _LONGEST) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:20]!r} where a name belongs")
    return printable(value)[:longest]


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) > 2**53:
        raise ValueError(f"{str(value)[:20]} where a whole number belongs")
    return value


def _number(values: Mapping[str, Any]) -> Number:
    """A number with its interval; null is unknown."""
    found = []
    for name in ("value", "low", "high"):
        value = values[name]
        value = math.nan if value is None else value
        if type(value) not in (int, float) or abs(value) > 1e300:
            raise ValueError(f"{str(value)[:20]} where a number belongs")
        found.append(float(value))
    value, low, high = found
    return Number(value, math.nan, low, high)


def _plain(value: Any) -> Any:
    if isinstance(value, Number):
        return value.as_json()
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value
