"""What a report says, section by section; where something is missing, which command makes it."""

from __future__ import annotations

import math
import re

from trueup.calibration import Calibration, Drawn
from trueup.page import levels
from trueup.page.markup import (
    Html,
    command,
    details,
    joined,
    missing,
    plus_minus,
    section,
    table,
    tag,
    worded,
)
from trueup.page.origin import commands, model_name, provenance
from trueup.page.pictures import picture


def verdict(calibration: Calibration) -> Html:
    """The verdict in a sentence, what else was said, and the numbers behind it."""
    said = calibration.verdict().replace(" -> ", " → ")
    first, *rest = re.split(r"(?<=\.)\s+(?=[A-Z])", f"{said[:1].upper()}{said[1:]}")
    if first.startswith("Miscalibrated") and _closer(calibration):
        told = first.partition(": ")[2]
        rest = [f"{told[:1].upper()}{told[1:]}", *rest]
        first = "Miscalibrated: correcting it brings samples closer to the data."
    tiles = [tag("div", tag("dt", name), tag("dd", value)) for name, value in _headline(calibration)]
    return tag(
        "header",
        tag("p", "trueup report", class_="kicker"),
        tag("p", model_name(calibration), class_="model"),
        tag("h1", first),
        tag("p", worded(" ".join(rest)), class_="more") if rest else None,
        tag("dl", tiles, class_="tiles") if tiles else None,
        id="verdict",
    )


def _closer(calibration: Calibration) -> bool:
    """Whether samples surely get closer to the data: what people see comes before what is measured."""
    seen = calibration.samples
    change = None if seen is None else seen.changed_by(calibration.gains)
    return calibration.gains != "none" and change is not None and change.sign < 0


def _headline(calibration: Calibration) -> list[tuple[str, str]]:
    found = []
    bits, share = calibration.uncalibration, calibration.uncalibration_share.scaled(100)
    if calibration.measured and not math.isnan(bits.value):
        found.append(("likelihood bound gains", f"{plus_minus(bits)} bits/dim"))
        found.append(("score matching loss falls by at least", f"{plus_minus(share)}%"))
    seen = calibration.samples
    if seen is not None and calibration.gains in seen.misses:
        values = [max(0.0, seen.misses[form].value) for form in ("none", calibration.gains)]
        text = f"{values[0]:.2g} → {values[1]:.2g}" if calibration.gains != "none" else f"{values[0]:.2g}"
        found.append(("samples miss the data's bands by", f"{text} nats a coefficient"))
    if calibration.solvers:
        numbers = ", ".join(str(solver.nfe) for solver in calibration.solvers)
        found.append(("solvers fitted for", f"{numbers} evaluations"))
    return found


def samples(calibration: Calibration) -> Html:
    """Before and after from the same noise, one at a time."""
    sets = [drawn for drawn in calibration.drawn if drawn.pictures is not None]
    if not sets:
        return section("samples", "Samples", None, _no_samples(calibration))
    names = [levels.drawn_name(one.before, one.fitted, one.nfe)[0] for one in sets]
    chosen = max(i for i, one in enumerate(sets) if not one.fitted or i == 0)
    controls, grids = [], []
    for i, (one, name) in enumerate(zip(sets, names, strict=True)):
        radio = tag("input", type="radio", name="set", id=f"set-{i}", value=i, checked=i == chosen)
        controls += [radio, tag("label", name[:1].upper() + name[1:], for_=f"set-{i}")]
        grids.append(_grid(one, name, i))
    legend = tag("legend", "Which samples to show")
    lead = f"The same {_count(sets[0])} seeds each time: only the correction differs, or the solver."
    if len(sets) == 1:
        lead = "Nothing is attached for sampling, so that samples stay as they are."
    switch = tag("fieldset", legend, controls, class_="switch") if len(sets) > 1 else None
    return section("samples", "Samples, before and after", lead, switch, tag("div", grids, class_="sets"))


def _grid(one: Drawn, name: str, i: int) -> Html:
    assert one.pictures is not None
    images = [picture(each, "") for each in one.pictures]
    by = "by the fitted solver" if one.fitted else "near the model's own limit"
    with_ = "as the network is" if one.gains == "none" else f"corrected ({one.gains})"
    words = f"{name[:1].upper()}{name[1:]}: {with_}, {by}, {one.nfe} evaluations each."
    grid = tag("div", images, class_="grid", role="img", aria_label=f"{len(images)} samples. {words}")
    return tag("figure", grid, tag("figcaption", words), class_="set", id=f"samples-{i}")


def _no_samples(calibration: Calibration) -> Html:
    if calibration.measured and calibration.empty:
        return missing("There is nothing to correct: samples with this file are those without it.")
    if calibration.drawn:
        said = "Samples were drawn to judge by, but are no pictures: they are latents, and the model came "
        return missing(f"{said}without an autoencoder. Name it with --vae.", _again(calibration))
    said = "This file holds no samples: none were drawn, or there was nothing to judge them by."
    return missing(f"{said} Calibrated with data and without --no-samples, it will.", _again(calibration))


def _again(calibration: Calibration) -> str:
    """What makes the file anew, over the one that is there."""
    first = commands(calibration)[0]
    return f"{first} --force" if first.startswith("trueup") else first


_FORMS = {
    "none": "none: the network as it is",
    "sqrt": "sqrt: the output's own part keeps its spread",
    "response": "response: the output's own part is left alone",
}


def moments(calibration: Calibration) -> Html:
    """The samples' bands beside the data's."""
    title, lead = "Samples' bands against the data's", "A ratio of 1 and a mean off by 0 is the data itself."
    unit = "A miss of 0.01 nats a coefficient is all bands off by 10% in contrast."
    if not calibration.drawn:
        return section("bands", title, None, _no_samples(calibration))
    count = f"{calibration.drawn[0].samples} samples each, {calibration.data_images:,} images of the data."
    seen = calibration.samples
    rows = [
        [f"{_FORMS.get(form, form)}{', used' * (form == calibration.gains)}", plus_minus(number)]
        for form, number in (seen.misses.items() if seen is not None else ())
    ]
    heads = ["form of the correction", "miss, nats a coefficient"]
    shown = table(heads, rows, f"Miss of every form that was tried. {unit}") if rows else None
    return section("bands", title, f"{lead} {count}", levels.band_moments(calibration), shown)


def origin(calibration: Calibration) -> Html:
    """Data, provenance, and the commands that make this again."""
    rows = [tag("div", tag("dt", name), tag("dd", value)) for name, value in provenance(calibration)]
    again = [
        tag("h3", "Commands"),
        tag("p", "What makes this file again, with the names of your model and images in their places:"),
        command(*commands(calibration)),
    ]
    inner = tag("pre", id="json-text", tabindex="0")
    numbers = tag("div", details("Numbers as JSON", inner), class_="only-live", id="json")
    return section("origin", "Data and provenance", None, tag("dl", rows, class_="facts"), again, numbers)


def figures(calibration: Calibration) -> Html:
    """Figure 1 and figure 2 of the paper."""
    one, two = "The network's mean error over time", "One noise level at a time"
    if not calibration.measured:
        said = missing("Nothing was measured: this file has solvers alone.", _again(calibration))
        return joined(section("curves", one, None, said), section("levels-of", two, None, said))
    lead = "An ideal network's expected prediction is 0 at every noise level. Bands are 95%."
    about = (
        "The network's expected prediction, which should be 0, and what the correction takes off it in the "
        "mean. What replaces an output is a factor of it, plus a factor of the input, less a constant."
    )
    return joined(
        section("curves", one, lead, levels.figure_one(calibration)),
        section("levels-of", two, about, levels.figure_two(calibration)),
    )


def _count(one: Drawn) -> int:
    return 0 if one.pictures is None else len(one.pictures)
