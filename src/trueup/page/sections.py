"""What a report says, section by section; where something is missing, which command makes it."""

from __future__ import annotations

import math
import re
from typing import Any

from trueup.calibration import Calibration, Drawn
from trueup.page import levels
from trueup.page.chart import Axis, Line, chart
from trueup.page.markup import Html, command, details, interval, joined, plus_minus, table, tag
from trueup.page.measured import Comparison, Likelihood, Measured, Samplers
from trueup.page.origin import FILE, IMAGES, commands, model_name, provenance
from trueup.page.pictures import picture
from trueup.statistics import Number, told

_TABLE = "All numbers of this section"


def section(name: str, title: str, lead: str | None, *children: Any) -> Html:
    """A part of the page."""
    about = None if lead is None else tag("p", lead, class_="lead")
    return tag("section", tag("h2", title), about, *children, id=name)


def missing(what: str, *lines: str) -> Html:
    """What is not there, and what makes it."""
    return tag("div", tag("p", what), command(*lines) if lines else None, class_="missing")


def verdict(calibration: Calibration) -> Html:
    """The verdict in a sentence, what else was said, and the numbers behind it."""
    said = calibration.verdict().replace(" -> ", " → ")
    first, *rest = re.split(r"(?<=\.)\s+(?=[A-Z])", f"{said[:1].upper()}{said[1:]}")
    tiles = [tag("div", tag("dt", name), tag("dd", value)) for name, value in _headline(calibration)]
    return tag(
        "header",
        tag("p", "trueup report", class_="kicker"),
        tag("p", model_name(calibration), class_="model"),
        tag("h1", first),
        tag("p", " ".join(rest), class_="more") if rest else None,
        tag("dl", tiles, class_="tiles") if tiles else None,
        id="verdict",
    )


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
    chosen = len(sets) - 1 if not any(one.fitted for one in sets) else max(i for i, one in enumerate(sets) if not one.fitted)
    controls, grids = [], []
    for i, (one, name) in enumerate(zip(sets, names, strict=True)):
        radio = tag("input", type="radio", name="set", id=f"set-{i}", value=i, checked=i == chosen)
        controls += [radio, tag("label", name[:1].upper() + name[1:], for_=f"set-{i}")]
        grids.append(_grid(one, name, i))
    legend = tag("legend", "Which samples to show")
    lead = (
        f"The same {_count(sets[0])} seeds each time: image by image, only the correction differs."
    )
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
        return missing(f"{said}without an autoencoder. Name it with --vae.", *commands(calibration)[:1])
    said = "This file holds no samples: none were drawn, or there was nothing to judge them by."
    return missing(f"{said} Calibrated with data and without --no-samples, it will.", *commands(calibration)[:1])


def quality(calibration: Calibration, measured: Measured) -> Html:
    """Quality against evaluations, of what was measured."""
    parts: list[Any] = [_of_samplers(one) for one in measured.samplers]
    parts += [part for one in measured.comparisons if (part := _of_comparison(one)) is not None]
    if calibration.solvers:
        parts.append(_of_solvers(calibration))
    if not measured.samplers:
        how = f"trueup samplers {model_name(calibration, 'MODEL')} --calibration {FILE} --nfe 5,8,10,20 --json > samplers.json"
        parts.append(
            missing(
                "Other samplers were not compared. To have them here:",
                how,
                f"trueup report {FILE} --with samplers.json -o report.html",
            )
        )
    lead = "How near few evaluations of the network come, sampler by sampler."
    return section("quality", "Quality against evaluations", lead, *parts)


def _of_samplers(found: Samplers) -> Html:
    """Error to the limit, each sampler on the grid that suits it best."""
    numbers = sorted({row.nfe for row in found.rows})
    best: dict[str, dict[int, Number]] = {}
    for row in found.rows:
        line = best.setdefault(row.sampler, {})
        if row.nfe not in line or row.error.value < line[row.nfe].value:
            line[row.nfe] = row.error
    others = {name: line for name, line in best.items() if name != "fitted"}
    # The usual sampler that is nearest at most numbers of evaluations stands out beside the fitted one.
    nearest = [min((n for n in others if k in others[n]), key=lambda n: others[n][k].value) for k in numbers]
    usual = max(others, key=nearest.count) if others else None
    lines = []
    for name, line in best.items():
        kind = "accent" if name == "fitted" else "plain" if name == usual else "faint"
        ordered = sorted(line.items())
        values = [number for _, number in ordered]
        bands = ([v.low for v in values], [v.high for v in values]) if kind != "faint" else ([], [])
        lines.append(Line(name, [k for k, _ in ordered], [v.value for v in values], kind, *bands))
    network = "the calibrated network" if found.calibrated else "the network as it is"
    drawn = chart(
        f"Distance to the limit against evaluations, samplers of {network}",
        lines,
        Axis("evaluations of the network", log=True, ticks=numbers),
        Axis("distance to the model's own limit", log=True),
    )
    rows = [
        [row.sampler, row.grid, row.nfe, plus_minus(row.error)]
        for row in sorted(found.rows, key=lambda row: (row.nfe, row.error.value))
    ]
    words = f"Samplers of {network}, each on its best grid; {found.trajectories} trajectories. Squared error to "
    words += "the many-step limit from the same noise, over the limit's variance, every band in its own units."
    heads = ["sampler", "grid", "evaluations", "distance, ± 95%"]
    return joined(tag("div", drawn, class_="charts one"), tag("p", words), details(_TABLE, table(heads, rows, "Samplers")))


def _of_comparison(found: Comparison) -> Html | None:
    """Fréchet distance against evaluations, where there are several."""
    sides: dict[str, list[tuple[int, Number]]] = {}
    for row in found.rows:
        change = row.changes.get("frechet")
        if change is None or row.nfe is None:
            continue
        if row.uncalibrated is None:
            sides.setdefault(f"{row.solver}, before", []).append((row.nfe, change.before))
        sides.setdefault(f"{row.solver}, after", []).append((row.nfe, change.after))
    if not sides:
        return None
    lines = []
    for name, points in sides.items():
        points.sort(key=lambda point: point[0])
        kind = "plain" if name.endswith("before") else "accent"
        values = [number for _, number in points]
        ends = ([v.low for v in values], [v.high for v in values])
        lines.append(Line(name, [k for k, _ in points], [v.value for v in values], kind, *ends, name.startswith("fitted")))
    numbers = sorted({k for points in sides.values() for k, _ in points})
    drawn = chart(
        "Fréchet distance against evaluations, before and after",
        lines,
        Axis("evaluations of the network", log=len(numbers) > 1, ticks=numbers),
        Axis(f"Fréchet distance ({found.features})", least=0.0),
    )
    words = f"{found.samples:,} samples against {found.images:,} images; features: {found.features}."
    return joined(tag("div", drawn, class_="charts one"), tag("p", words))


def _of_solvers(calibration: Calibration) -> Html:
    """What fitting did, from the file itself."""

    def pair(solver: Any, name: str) -> str:
        before, after = (solver.evidence.get(key, math.nan) for key in (f"{name}_base", name))
        if math.isnan(after):
            return "–"
        first = "" if math.isnan(before) or before == after else f"{max(0.0, before):.3g} → "
        return f"{first}{max(0.0, after):.3g}"

    rows = [
        [
            solver.purpose,
            solver.provenance.get("base", "a rule"),
            pair(solver, "error"),
            pair(solver, "miss"),
        ]
        for solver in calibration.solvers
    ]
    heads = ["fitted for", "starting from", "distance to the limit", "miss of the data's bands"]
    return table(heads, rows, "Solvers in this file: the rule as it was → fitted")


def moments(calibration: Calibration) -> Html:
    """The samples' bands beside the data's."""
    title, lead = "Samples' bands against the data's", "A ratio of 1 and a mean off by 0 is the data itself."
    if not calibration.drawn:
        return section("bands", title, None, _no_samples(calibration))
    count = f"{calibration.drawn[0].samples} samples each, {calibration.data_images:,} images of the data."
    seen = calibration.samples
    rows = [] if seen is None else [[form, plus_minus(number)] for form, number in seen.misses.items()]
    shown = table(["form of the correction", "miss, nats a coefficient"], rows, "Miss of every form") if rows else None
    return section("bands", title, f"{lead} {count}", levels.band_moments(calibration), shown)


def measures(calibration: Calibration, measured: Measured) -> Html:
    """Everything that has a value and an interval."""
    parts: list[Any] = []
    for one in measured.comparisons:
        parts += [_changes(one)]
    for bits in measured.likelihoods:
        parts.append(_likelihood(bits))
    e, model = calibration.evidence, model_name(calibration, "MODEL")
    if not measured.comparisons:
        how = f"trueup evaluate {model} --calibration {FILE} --data {IMAGES} --json > evaluate.json"
        parts.append(missing("Samples were not compared with the data by a measure. To have that here:", how))
    if not measured.likelihoods:
        how = f"trueup likelihood {model} --calibration {FILE} --data {IMAGES} --json > likelihood.json"
        parts.append(missing("Likelihoods were not measured. To have them here:", how))
    if calibration.measured:
        heads = ["t", "λ", "loss", "‖E[ε̂]‖²", "taken off the loss"]
        rows = [
            [
                f"{float(t):.4g}",
                f"{float(lam):+.2f}",
                plus_minus(e.loss[row]),
                plus_minus(e.eta2[row]),
                interval(e.gain[row]),
            ]
            for row, (t, lam) in enumerate(zip(calibration.t, calibration.correction.lam, strict=True))
        ]
        words = "By noise level, on images that nothing was fitted to; ± and intervals are 95%"
        parts.append(details(f"{len(rows)} noise levels", table(heads, rows, words)))
    return section("measures", "Measures", "Before and after from the same seeds; intervals are 95%.", *parts)


def _changes(found: Comparison) -> Html:
    made = []
    for row in found.rows:
        by = "" if row.uncalibrated is None else f"; before by {row.uncalibrated}"
        spent = "its own number of" if row.nfe is None else row.nfe
        rows = [
            [each.name, plus_minus(each.before), plus_minus(each.after), told(each.difference, each.more_is_better)]
            for each in row.changes.values()
        ]
        caption = f"{row.solver}, {spent} evaluations{by}"
        made.append(table(["", "before", "after", "difference"], rows, caption))
    words = f"{found.samples:,} samples, seed {found.seed}, against {found.images:,} images; features: {found.features}."
    return joined(*made, tag("p", words), [tag("p", note, class_="note") for note in found.notes])


def _likelihood(found: Likelihood) -> Html:
    rows = []
    for name, sides in found.terms.items():
        change = told(sides["difference"]) if "difference" in sides else "–"
        after = plus_minus(sides["after"]) if "after" in sides else "–"
        rows.append([name, plus_minus(sides["before"]), after, change])
    kind = "by the probability flow" if found.method == "ode" else "bound"
    caption = f"Negative log-likelihood ({kind}), bits/dim of a {found.of}, {found.images:,} images"
    notes = [tag("p", note, class_="note") for note in (found.description, *found.notes)]
    return joined(table(["", "before", "after", "difference"], rows, caption), notes)


def origin(calibration: Calibration, measured: Measured) -> Html:
    """Data, provenance, and the commands that make this again."""
    rows = [tag("div", tag("dt", name), tag("dd", value)) for name, value in provenance(calibration)]
    again = [
        tag("h3", "Commands"),
        tag("p", "What makes this file again, with the names of your model and images in their places:"),
        command(*commands(calibration)),
    ]
    inner = tag("pre", id="json-text", tabindex="0")
    numbers = tag("div", details("All numbers as JSON", inner), class_="only-live", id="json")
    return section("origin", "Data and provenance", None, tag("dl", rows, class_="facts"), again, numbers)


def figures(calibration: Calibration) -> Html:
    """Figure 1 and figure 2 of the paper."""
    one, two = "The network's mean error over time", "One noise level at a time"
    if not calibration.measured:
        said = missing("Nothing was measured: this file has solvers alone.", *commands(calibration)[:1])
        return joined(section("curves", one, None, said), section("levels-of", two, None, said))
    lead = "An ideal network's expected prediction is 0 at every noise level. Bands are 95%."
    about = "Where it is not 0, what is kept of it as a correction, and the gains that go with it."
    return joined(
        section("curves", one, lead, levels.figure_one(calibration)),
        section("levels-of", two, about, levels.figure_two(calibration)),
    )


def _count(one: Drawn) -> int:
    return 0 if one.pictures is None else len(one.pictures)
