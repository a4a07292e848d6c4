"""Charts as inline SVG: lines with bands, axes that can be read on a phone, text that can be copied.

Colours and fonts are the page's, by class, so that a chart is right in the dark and on paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from trueup.page.markup import Html, tag

WIDTH, HEIGHT = 300, 206
Place = Callable[[float], float]
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 8, 8, 42


@dataclass
class Axis:
    """What runs along a side; log: in powers of ten, of values above 0 alone."""

    label: str
    log: bool = False
    ticks: Sequence[float] | None = None
    least: float | None = None  # that must be in sight
    most: float | None = None


@dataclass
class Line:
    """A curve, with its 95% band where there is one."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    kind: str = "plain"  # or "accent", "faint"
    low: Sequence[float] = field(default_factory=list)
    high: Sequence[float] = field(default_factory=list)
    dashed: bool = False


def chart(title: str, lines: Sequence[Line], x: Axis, y: Axis, *, level: float | None = None) -> Html:
    """A chart; level: a value of y to compare with, drawn across."""
    drawn = [line for line in (_finite(line, x, y) for line in lines) if line.x]
    if not drawn:
        return tag("p", f"{title}: there is nothing to draw.", class_="missing")
    across = [v for line in drawn for v in line.x]
    up = [v for line in drawn for v in (*line.y, *line.low, *line.high)] + ([] if level is None else [level])
    place_x, ticks_x = _scale(across, x, _LEFT, WIDTH - _RIGHT)
    place_y, ticks_y = _scale(up, y, HEIGHT - _BOTTOM, _TOP, whole=True)
    parts: list[Html] = []
    for value in ticks_y:
        at = _round(place_y(value))
        parts.append(tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(tag("text", told(value), x=_LEFT - 6, y=_round(place_y(value) + 4), class_="end"))
    for value in ticks_x:
        at = _round(place_x(value))
        parts.append(tag("line", x1=at, x2=at, y1=HEIGHT - _BOTTOM, y2=HEIGHT - _BOTTOM + 4, class_="axis"))
        parts.append(tag("text", told(value), x=at, y=HEIGHT - _BOTTOM + 17, class_="middle"))
    base = HEIGHT - _BOTTOM
    parts.append(tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=base, y2=base, class_="axis"))
    if level is not None:
        at = _round(place_y(level))
        parts.append(tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=at, y2=at, class_="level-line"))
    order = {"faint": 0, "plain": 1, "accent": 2}
    for line in sorted(drawn, key=lambda line: order[line.kind]):
        parts += _drawn(line, place_x, place_y)
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(tag("text", x.label, x=middle, y=HEIGHT - 8, class_="middle label"))
    svg = tag(
        "svg", tag("title", title), parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title
    )
    up_label = f"{y.label}, in powers of ten" if y.log else y.label
    return tag("div", tag("p", up_label, class_="label"), svg, _legend(drawn), class_="chart")


def _drawn(line: Line, place_x: Place, place_y: Place) -> list[Html]:
    points = [(place_x(a), place_y(b)) for a, b in zip(line.x, line.y, strict=True)]
    parts = []
    if line.low:
        edge = [*zip(line.x, line.high, strict=True), *reversed([*zip(line.x, line.low, strict=True)])]
        corners = " ".join(f"{_round(place_x(a))},{_round(place_y(b))}" for a, b in edge)
        parts.append(tag("polygon", points=corners, class_=f"band {line.kind}"))
    spots = " ".join(f"{_round(a)},{_round(b)}" for a, b in points)
    dashes = " dashed" if line.dashed else ""
    parts.append(tag("polyline", tag("title", line.name), points=spots, class_=f"line {line.kind}{dashes}"))
    if line.kind != "faint":
        parts += [
            tag("circle", cx=_round(a), cy=_round(b), r=2.2, class_=f"dot {line.kind}") for a, b in points
        ]
    return parts


def _legend(lines: Sequence[Line]) -> Html | None:
    named = [line for line in lines if line.name and line.kind != "faint"]
    others = len([line for line in lines if line.kind == "faint"])
    if len(named) < 2 and not others:
        return None
    entries = [
        tag("li", tag("span", class_=f"key {line.kind}{' dashed' if line.dashed else ''}"), line.name)
        for line in named
    ]
    if others:
        entries.append(tag("li", tag("span", class_="key faint"), f"{others} more"))
    return tag("ul", entries, class_="legend")


def _finite(line: Line, x: Axis, y: Axis) -> Line:
    """The points that can be drawn; on a logarithmic axis a band that nears 0 is cut off below."""
    low, high = line.low or line.y, line.high or line.y
    rows = [
        (a, b, lo if math.isfinite(lo) else b, hi if math.isfinite(hi) else b)
        for a, b, lo, hi in zip(line.x, line.y, low, high, strict=True)
        if math.isfinite(a) and math.isfinite(b) and (not x.log or a > 0) and (not y.log or b > 0)
    ]
    if y.log:
        rows = [(a, b, max(lo, b / 3), hi) for a, b, lo, hi in rows]
    across, up, below, above = ([row[k] for row in rows] for k in range(4))
    if not line.low:
        below, above = [], []
    return replace(line, x=across, y=up, low=below, high=above)


def _scale(
    values: Sequence[float], axis: Axis, start: float, end: float, *, whole: bool = False
) -> tuple[Place, list[float]]:
    """Where a value lies, and the values at the ticks; whole: from tick to tick, where they are even."""
    low, high = min(values), max(values)
    low = low if axis.least is None else min(low, axis.least)
    high = high if axis.most is None else max(high, axis.most)
    if not high > low:
        low, high = (
            (low / 2, high * 2) if axis.log else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)
        )
    ticks = list(axis.ticks or (_log_ticks if axis.log else linear_ticks)(low, high))
    if whole and not axis.log:
        low, high = min(low, *ticks), max(high, *ticks)
    slack = 1e-9 * (high - low)
    ticks = [tick for tick in ticks if low - slack <= tick <= high + slack]

    def along(value: float) -> float:
        return math.log(value) if axis.log else value

    first, reach = along(low), along(high) - along(low)
    return (lambda value: start + (end - start) * (along(value) - first) / reach), ticks


def linear_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers from below low to above high.

    >>> linear_ticks(0.03, 0.92)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(k * power for k in (1, 2, 2.5, 5, 10) if k * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, and where those are few, twice and five times as much.

    >>> _log_ticks(0.03, 2.5), _log_ticks(1e-7, 10.0)
    ([0.05, 0.1, 0.2, 0.5, 1.0, 2.0], [1e-07, 1e-05, 0.001, 0.1, 10.0])
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)

    def ticks(*steps: int) -> list[float]:
        return [m * 10.0**k for k in decades for m in steps if low <= m * 10.0**k <= high]

    found = ticks(1, 2, 5)
    found = found if len(found) <= 6 else ticks(1)
    return found[:: math.ceil(len(found) / 6)] or [low, high]


def told(value: float) -> str:
    """A number at a tick.

    >>> [told(v) for v in (0.0, 0.25, 20000.0, 1e-07, 1000.0)]
    ['0', '0.25', '20k', '1e-7', '1000']
    """
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        mantissa, power = (
            f"{value:.2g}".partition("e")[::2] if "e" in f"{value:.2g}" else (f"{value:.2g}", "")
        )
        return f"{mantissa}e{int(power)}" if power else f"{value:.2g}"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.6g}"


def _round(value: float) -> str:
    return f"{value:.1f}"
