"""The page: its sections in order, its style and script by their hashes, and the numbers as JSON."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from trueup import __version__
from trueup.calibration import Calibration, as_calibration
from trueup.files import write as write_file
from trueup.page import measures, sections
from trueup.page.completing import completing
from trueup.page.diagnosis import diagnosis
from trueup.page.markup import Html, embedded, joined, tag
from trueup.page.measured import Measured
from trueup.page.origin import model_name
from trueup.report import as_json

_HERE = Path(__file__).parent


def write(
    calibration: Calibration | str | PathLike[str], path: str | PathLike[str], *, measured: Iterable[Any] = ()
) -> None:
    """Write the report of a calibration as one HTML file.

    measured: what `trueup.doctor.check`, `trueup.evaluate`, `trueup.fitting.samplers` and `trueup.likelihood`
    returned, or the files that the commands of those names wrote; of the same network and calibration.
    """
    write_file(Path(path), render(calibration, measured=measured).encode())


def render(calibration: Calibration | str | PathLike[str], *, measured: Iterable[Any] = ()) -> str:
    """The text of the page."""
    calibration = as_calibration(calibration)
    found = Measured.of(measured, calibration)
    style, script = (Html((_HERE / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    values = {"calibration": as_json(calibration), "measured": found.as_json(), "trueup": __version__}
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=Html(policy)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"trueup: {model_name(calibration)}"),
        tag("link", rel="icon", href="data:,"),
        tag("style", style),
    )
    main = tag(
        "main",
        sections.verdict(calibration),
        sections.samples(calibration),
        diagnosis(found),
        measures.quality(calibration, found),
        sections.figures(calibration),
        sections.moments(calibration),
        measures.measures(calibration, found),
        sections.origin(calibration),
        completing(calibration, found),
        tag("footer", tag("p", f"Written by trueup {__version__}. This page holds everything it shows.")),
    )
    data = tag("script", embedded(values), type="application/json", id="data")
    body = tag("body", main, data, tag("script", script))
    return str(joined(Html("<!doctype html>\n"), tag("html", head, body, lang="en"), Html("\n")))


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
