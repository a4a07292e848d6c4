"""What was measured of samples and likelihoods: quality against evaluations, and tables with intervals."""

from __future__ import annotations

import math
from typing import Any

from trueup.calibration import Calibration
from trueup.page.chart import Axis, Line, chart
from trueup.page.levels import level_rows
from trueup.page.markup import (
    Html,
    details,
    interval,
    joined,
    missing,
    plus_minus,
    ranged,
    section,
    table,
    tag,
)
from trueup.page.measured import Change, Compared, Comparison, Likelihood, Measured, Samplers
from trueup.statistics import Number, told

_TABLE = "All numbers of this chart"


def quality(calibration: Calibration, measured: Measured) -> Html:
    """Quality against evaluations, of what was measured."""
    parts: list[Any] = [_of_samplers(one) for one in measured.samplers]
    parts += [part for one in measured.comparisons if (part := _of_comparison(one)) is not None]
    if calibration.solvers:
        parts.append(_of_solvers(calibration))
    if not measured.samplers:
        parts.append(missing("How near other samplers come to the limit was not measured.", more=True))
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
    drawn = (
        None
        if len(numbers) < 2
        else chart(
            f"Distance to the limit against evaluations, samplers of {network}",
            lines,
            Axis("evaluations of the network", log=True, ticks=numbers),
            Axis("distance to the model's own limit", log=True),
        )
    )
    found_at = {(row.sampler, row.grid, row.nfe): plus_minus(row.error) for row in found.rows}
    nearest_first = sorted(found.rows, key=lambda row: (row.nfe, row.error.value))
    kinds = dict.fromkeys((row.sampler, row.grid) for row in nearest_first)
    rows = [
        [joined(name, ", ", grid), *(found_at.get((name, grid, number), "–") for number in numbers)]
        for name, grid in kinds
    ]
    which = "" if drawn is None else ", each on its best grid"
    words = (
        f"Samplers of {network}{which}; {found.trajectories} trajectories. Squared error to the many-step "
        "limit from the same noise, over the limit's variance, every band in its own units."
    )
    heads = ["sampler, grid", *(f"{number} evaluations" for number in numbers)]
    numbers_of = table(heads, rows, "Distance to the limit, ± 95%")
    if drawn is None:  # a table says it
        return joined(tag("p", words), numbers_of)
    return joined(tag("div", drawn, class_="charts one"), tag("p", words), details(_TABLE, numbers_of))


def _of_comparison(found: Comparison) -> Html | None:
    """Fréchet distance against evaluations, a chart for each solver that was measured at several."""
    solvers: dict[str, dict[int, tuple[Compared, Change]]] = {}
    for row in found.rows:
        if row.nfe is not None and "frechet" in row.changes:
            solvers.setdefault(row.solver, {})[row.nfe] = row, row.changes["frechet"]
    charts = []
    for solver, rows in sorted(solvers.items()):
        if len(rows) < 2:  # a table says it
            continue
        numbers, others = sorted(rows), {row.uncalibrated for row, _ in rows.values()} - {None}
        beside = f", by {' or '.join(sorted(map(str, others)))}" if others else ""
        lines = [
            _distances(f"before{beside}", "plain", {k: rows[k][1].before for k in numbers}),
            _distances("after", "accent", {k: rows[k][1].after for k in numbers}),
        ]
        drawn = chart(
            f"Fréchet distance against evaluations of {solver}, before and after",
            lines,
            Axis("evaluations of the network", log=True, ticks=numbers),
            Axis(f"{solver}: Fréchet distance ({found.features})", least=0.0),
        )
        charts.append(drawn)
    if not charts:
        return None
    words = f"{found.samples:,} samples against {found.images:,} images; features: {found.features}."
    return joined(tag("div", charts, class_="charts two"), tag("p", words))


def _distances(name: str, kind: str, found: dict[int, Number]) -> Line:
    """A curve with its band."""
    values = list(found.values())
    ends = [v.low for v in values], [v.high for v in values]
    return Line(name, list(found), [v.value for v in values], kind, *ends)


def _of_solvers(calibration: Calibration) -> Html:
    """What fitting did, from the file itself."""

    def pair(solver: Any, name: str) -> str:
        before, after = (solver.evidence.get(key, math.nan) for key in (f"{name}_base", name))
        if math.isnan(after):
            return "–"
        first = "" if math.isnan(before) or before == after else f"{max(0.0, before):.3g} → "
        reach = 1.96 * solver.evidence.get(f"{name}_se", math.nan)
        sure = "" if math.isnan(reach) else f" ± {reach:.1g}"
        limit = solver.evidence.get(f"limit_{name}", math.nan)
        last = "" if math.isnan(limit) else f" (the limit's: {max(0.0, limit):.3g})"
        return f"{first}{max(0.0, after):.3g}{sure}{last}"

    rows = [
        [
            solver.purpose,
            solver.provenance.get("base", "a rule"),
            solver.provenance.get("fitted", "–"),
            pair(solver, "error"),
            pair(solver, "miss"),
        ]
        for solver in calibration.solvers
    ]
    heads = [
        "fitted for",
        "starting from",
        "what was done",
        "distance to the limit",
        "miss of the data's bands",
    ]
    caption = "Solvers in this file: the rule as it was → fitted, ± 95%, on trajectories not fitted to"
    words = (
        "Steps are fitted to the model's own limit where that is near the data, and are then judged by their "
        "distance to it; elsewhere states are brought to the data's moments, and are judged by those."
    )
    return joined(table(heads, rows, caption), tag("p", words, class_="note"))


def measures(calibration: Calibration, measured: Measured) -> Html:
    """Everything that has a value and an interval."""
    parts: list[Any] = []
    for one in measured.comparisons:
        parts += [_changes(one)]
    for bits in measured.likelihoods:
        parts.append(_likelihood(bits))
    e = calibration.evidence
    if not measured.comparisons:
        parts.append(missing("Samples were not compared with the data by a measure.", more=True))
    if not measured.likelihoods:
        parts.append(missing("Likelihoods were not measured.", more=True))
    if calibration.measured:
        heads = ["t", "λ", "loss", "‖E[ε̂]‖²", "taken off the loss"]
        rows = [
            [
                f"{float(calibration.t[row]):.4g}",
                f"{float(calibration.correction.lam[row]):+.2f}",
                plus_minus(e.loss[row]),
                ranged(e.eta2[row]),
                interval(e.gain[row]),
            ]
            for row in level_rows(calibration)
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
            [
                each.name,
                plus_minus(each.before, each.difference),
                plus_minus(each.after, each.difference),
                told(each.difference, each.more_is_better),
            ]
            for each in row.changes.values()
        ]
        caption = f"{row.solver}, {spent} evaluations{by}"
        made.append(table(["", "before", "after", "difference"], rows, caption))
    words = f"{found.samples:,} samples, seed {found.seed}, against {found.images:,} images; "
    words += f"features: {found.features}."
    return joined(*made, tag("p", words), [tag("p", note, class_="note") for note in found.notes])


def _likelihood(found: Likelihood) -> Html:
    rows = []
    for name, sides in found.terms.items():
        difference = sides.get("difference")
        change = told(difference) if difference is not None else "–"
        after = plus_minus(sides["after"], difference) if "after" in sides else "–"
        rows.append([name, plus_minus(sides["before"], difference), after, change])
    kind = "by the probability flow" if found.method == "ode" else "bound"
    caption = f"Negative log-likelihood ({kind}), bits/dim of a {found.of}, {found.images:,} images"
    notes = [tag("p", note, class_="note") for note in (found.description, *found.notes)]
    return joined(table(["", "before", "after", "difference"], rows, caption), notes)
