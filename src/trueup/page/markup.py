"""HTML that cannot say more than it was meant to: whatever is not `Html` is escaped where it is put."""

from __future__ import annotations

import html
import json
import math
import re
from typing import Any

from trueup.files import printable
from trueup.statistics import Number

_VOID = ("img", "input", "link", "meta")


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def escaped(value: Any) -> Html:
    r"""A value as text in a page or a quoted attribute; what would not show, or turn the line, is spelt out.

    >>> print(escaped("</script><b a='\x07'>\u202e"))
    &lt;/script&gt;&lt;b a=&#x27;\x07&#x27;&gt;\u202e
    """
    return value if isinstance(value, Html) else Html(html.escape(printable(str(value))))


def joined(*parts: Any) -> Html:
    """Parts one after the other; None is left out, lists are joined."""
    found = []
    for part in parts:
        if part is None:
            continue
        found.append(joined(*part) if isinstance(part, (list, tuple)) else escaped(part))
    return Html("".join(found))


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """An element; class_ is class, aria_label is aria-label; None and False are left out.

    >>> print(tag("p", "a < b", class_="x"))
    <p class="x">a &lt; b</p>
    """
    said = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        spelt = key.rstrip("_").replace("_", "-")
        said += f" {spelt}" if value is True else f' {spelt}="{escaped(value)}"'
    if name in _VOID:
        return Html(f"<{name}{said}>")
    return Html(f"<{name}{said}>{joined(*children)}</{name}>")


def embedded(values: Any) -> Html:
    r"""JSON for a script element: no text in it can end the element, or begin another.

    >>> print(embedded({"a": "</script>&"}))
    {"a":"\u003c/script\u003e\u0026"}
    """
    plain = json.dumps(values, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        plain = plain.replace(sign, f"\\u{ord(sign):04x}")
    return Html(plain)


def plus_minus(number: Number, beside: Number | None = None) -> str:
    """A number as it is read and copied; beside: a difference that its digits must show."""
    if math.isnan(number.value):
        return "unknown"
    if math.isnan(number.low) or number.low == number.high:
        return f"{number.value:.4g}"
    places = _digits(number)
    if beside is not None and not math.isnan(beside.low):
        places = max(places, min(_digits(beside), 4))
    return f"{number.value:.{places}f} ± {number.reach:.{places}f}"


def ranged(number: Number, unit: str = "", most: float = math.inf) -> str:
    """A size with the ends of its interval, which are not alike: no size is below 0.

    >>> ranged(Number(1.34, 0.8, -0.2, 4.51)), ranged(Number(96.4, 16.0, 65.0, 128.0), "%", most=100.0)
    ('1.34 (0 to 4.5)', '96.4% (65 to 100)')
    """
    if math.isnan(number.value):
        return "unknown"
    value = f"{number.value:.3g}{unit}"
    if math.isnan(number.low) or number.low == number.high:
        return value
    return f"{value} ({max(number.low, 0.0):.2g} to {_short(min(number.high, most))})"


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


def worded(text: str) -> Html:
    """A text whose `commands` are marked as such.

    >>> print(worded("see `trueup <x>` for it"))
    see <code>trueup &lt;x&gt;</code> for it
    """
    return joined([tag("code", part) if i % 2 else part for i, part in enumerate(text.split("`"))])


def interval(number: Number) -> str:
    """A value with the ends of its interval, signed: for differences."""
    if math.isnan(number.value):
        return "unknown"
    if math.isnan(number.low):
        return f"{number.value:+.3g}"
    places = _digits(number)
    return f"{number.value:+.{places}f} ({number.low:+.{places}f} to {number.high:+.{places}f})"


def _digits(number: Number) -> int:
    """Decimals that show two figures of the uncertainty, but no more than eight."""
    reach = abs(number.reach)
    if not reach > 0 or math.isinf(reach):
        return 4
    return max(0, min(8, 1 - math.floor(math.log10(reach))))


def table(heads: list[Any], rows: list[list[Any]], caption: str | None = None) -> Html:
    """A table whose first column names the row; on a phone, wide ones stand in blocks."""
    columns = tag("tr", [tag("th", one, scope="col") for one in heads])
    body = [
        tag(
            "tr",
            tag("th", first, scope="row"),
            [
                tag("td", cell, class_=_kind(cell), data_head=head)
                for cell, head in zip(rest, heads[1:], strict=True)
            ],
        )
        for first, *rest in rows
    ]
    said = None if caption is None else tag("caption", caption)
    made = tag(
        "table", said, tag("thead", columns), tag("tbody", body), class_="stacked" if len(heads) > 3 else None
    )
    return tag("div", made, class_="wide", tabindex="0", role="region", aria_label=caption or "a table")


def _kind(cell: Any) -> str | None:
    """Numbers stay on their line."""
    return "number" if len(str(cell)) < 20 and re.match(r"[+-]?\d", str(cell)) else None


def details(summary: str, *children: Any) -> Html:
    """What is there for those who want it."""
    return tag("details", tag("summary", summary), *children)


def command(*lines: str) -> Html:
    """Commands to copy."""
    return tag("pre", tag("code", Html("\n".join(map(escaped, lines)))))


def section(name: str, title: str, lead: str | None, *children: Any) -> Html:
    """A part of the page."""
    about = None if lead is None else tag("p", lead, class_="lead")
    return tag("section", tag("h2", title), about, *children, id=name)


def missing(what: str, *lines: str, more: bool = False) -> Html:
    """What is not there, and what makes it; more: that is said at the end, for all that is missing."""
    said = joined(what, " ", tag("a", "How to add it", href="#more"), ".") if more else what
    return tag("div", tag("p", said), command(*lines) if lines else None, class_="missing")
