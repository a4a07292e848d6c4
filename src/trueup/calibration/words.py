"""A `Calibration` in words: a headline, a table of its levels, a verdict."""

from __future__ import annotations

import math
from typing import Any

from trueup.calibration.evidence import of_samples
from trueup.calibration.pictures import OfPictures
from trueup.statistics import Number

FEWEST_IMAGES = 20  # fewer cannot say that there is nothing to correct


def headline(calibration: Any) -> str:
    """What it is, of what, from what."""
    model = calibration.provenance.get("model", "a network")
    if not calibration.measured:
        return f"calibration of {model} without data"
    noun = "generated image" if calibration.generated else "image"
    seen, levels = _count(calibration.evidence.images, noun), _count(len(calibration.t), "noise level")
    seen = _recorded(calibration) or seen
    return f"{calibration.family} calibration ({calibration.estimator}) of {model}, {seen}, {levels}"


def made_from(calibration: Any) -> str:
    """Which data it was measured on."""
    if not calibration.measured:
        return "none: solvers alone"
    if recorded := _recorded(calibration):
        return recorded
    seen = f"{calibration.evidence.images:,}"
    if isinstance(calibration.provenance.get("chosen"), str):
        seen += f", {calibration.provenance['chosen']}"
    if calibration.data_images > calibration.evidence.images:
        seen += f"; {calibration.data_images:,} were read for the data's own mean and spread"
    if calibration.shares is not None:
        seen += f"; {calibration.shares} alone"
    if calibration.generated:
        seen += ", the model's own samples: errors that these share with it do not show"
    return seen


def _recorded(calibration: Any) -> str:
    """What a recorder saw: rows, that count by how recent they are, and of which many may be of one image."""
    recorded = calibration.provenance.get("recorded")
    if not recorded:
        return ""
    return f"{_count(recorded['rows'], 'row')} of {_count(recorded['steps'], 'training step')}"


def verdict(calibration: Any) -> str:
    """What to make of it, in a few sentences: of the network, and of its samples."""
    e, bits = calibration.evidence, calibration.uncalibration
    if not calibration.measured:
        count = _count(len(calibration.solvers), "solver")
        return f"nothing was measured: the network is left as it is, with {count} for it."
    if calibration.family == "none":
        return "the network is left as it is."
    if not calibration.confirmable:
        more = "are in too few groups, or most of them in one: use 20 groups"
        if e.images < FEWEST_IMAGES:
            more = f"cannot confirm a correction: use {FEWEST_IMAGES}"
        return f"{_count(e.images, 'image')} {more} or more."
    if calibration.empty:
        return "calibrated within noise: nothing to do."
    seen = calibration.samples
    on_samples = "" if seen is None else f" {seen.verdict(calibration.gains)}"
    if calibration.correction.empty:
        if isinstance(calibration.conditions, OfPictures):
            return f"calibrated within noise, but it could make more of its condition.{on_samples}"
        if calibration.conditions is not None:
            return f"calibrated within noise over all conditions, but not in each of them.{on_samples}"
        own = [of for of in calibration.classes if of.correction is not None]
        which = f"label {own[0].label} has" if len(own) == 1 else f"{len(own)} labels have"
        return f"calibrated within noise over all classes; {which} a correction apart.{on_samples}"
    removed = 100 * calibration.explained()
    if math.isnan(bits.value):
        at_level = e.gain[0]
        if at_level.sign < 0:
            return f"WORSE: this correction adds {-removed:.2g}% to the loss measured; do not attach it."
        if not at_level.sign:
            return f"no sure gain: the loss measured falls by {removed:.2g}%, within noise."
        return f"miscalibrated: correcting it removes {removed:.2g}% of the loss at the level measured."
    gain = f"{bits.value:.2g} ± {bits.reach:.1g} bits/dim"
    if bits.sign < 0:
        return f"WORSE: this correction changes the likelihood bound by {gain}; do not attach it."
    if not bits.sign:
        return f"no sure gain: the likelihood bound moves by {gain}, within noise.{on_samples}"
    if removed < 1e-6:
        return "off by rounding alone: nothing to do."
    if removed < 0.01:
        return f"off by a measurable but negligible amount: correcting it gains {gain}.{on_samples}"
    said = of_samples(seen, calibration.gains)
    return (
        f"miscalibrated: correcting it lowers the denoising loss, by at least {removed:.2g}% of the "
        f"score matching loss, and raises the likelihood bound by {gain}. {said}"
    )


def summary(calibration: Any) -> str:
    """A table of what was measured at every level, the totals, and the verdict."""
    e, last = calibration.evidence, f"verdict: {verdict(calibration)}"
    solvers = [solver.summary() for solver in calibration.solvers]
    if not calibration.measured:
        return "\n".join([headline(calibration), "", *solvers, last])
    heads = ("t", "lam", "loss", "|mean residual|^2", "held-out gain", "of loss")
    widths = (9, 7, 10, 24, 18, 8)
    header = " ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
    lines = [headline(calibration), "", header]
    for row in range(len(calibration.t)):
        loss, gain = float(e.loss.value[row]), e.gain[row]
        share = gain.value / loss if loss else math.nan
        lines.append(
            f"{float(calibration.t[row]):9.4g} {float(calibration.correction.lam[row]):7.2f} {loss:10.4g} "
            f"{_range(e.eta2[row]):>24} {_pm(gain):>18} {percent(share):>8}"
        )
    sure = int(((e.eta2.low > 0) & (e.gain.value == 0)).sum())
    if sure and calibration.family != "none":
        what = "miss something for sure, of which held-out images confirm no correction: more images may"
        lines += ["", f"{_count(sure, 'level')} {what}"]
    bits, share = calibration.uncalibration, calibration.uncalibration_share.scaled(100)
    score = f"{_pm(bits)} bits/dim of the bound, at least {_pm(share)}% of the score matching loss"
    lines += [
        "",
        "loss: E|eps_hat - eps|^2 summed over a sample; intervals and ± are 95%",
        f"gain of the likelihood bound: {_pm(e.bound_gain)} nats",
        f"uncalibration score: {'unknown' if math.isnan(bits.value) else score}",
    ]
    lines += _of_classes(calibration)
    if isinstance(calibration.provenance.get("chosen"), str):
        part = "" if calibration.shares is None else f"; {calibration.shares} alone"
        lines.append(f"images: {e.images:,}, {calibration.provenance['chosen']}{part}")
    if calibration.generated:
        lines.append("measured on the model's own samples: errors that these share with it do not show")
    if calibration.samples is not None:
        lines += calibration.samples.lines(calibration.gains)
    return "\n".join([*lines, *solvers, last])


def _of_classes(calibration: Any) -> list[str]:
    """Which classes differ, by how much; and what embeddings or pictures do."""
    if calibration.conditions is not None:
        gain = f"{_pm(calibration.conditions.gain)} nats of the likelihood bound"
        if isinstance(calibration.conditions, OfPictures):
            channels = _count(calibration.conditions.channels, "channel")
            told = f"in the bands of the condition's picture ({channels})"
            return [f"beyond it, a correction {told}: {gain}, held out"]
        seen, count = calibration.conditions.projection, calibration.conditions.conditions
        kind = "linear in" if seen.linear == seen.count else "a small network of"
        told = f"{kind} {seen.linear} components of {count:,} embeddings"
        return [f"beyond it, a correction {told}: {gain}, at conditions that were held out"]
    if not calibration.classes:
        return []
    null = calibration.provenance.get("null_label")
    lines = ["gain of a class's own correction over that of all classes, nats of the likelihood bound:"]
    for of in sorted(calibration.classes, key=lambda of: -of.gain.value if of.correction else math.inf):
        name = f"label {of.label}" + (" (null)" if of.label == null else "")
        told = _pm(of.gain) if of.correction is not None else "none of its own"
        lines.append(f"  {name}, {_count(of.images, 'image')}: {told}")
    shown = 12
    left = f"  and {len(lines) - 1 - shown} more (--json has all)"
    return lines if len(lines) <= shown + 2 else [*lines[: shown + 1], left]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def _pm(number: Number) -> str:
    if math.isnan(number.value):
        return "unknown"
    if math.isnan(number.low):
        return f"{number.value:.3g} ± unknown"
    return f"{number.value:.3g} ± {number.reach:.2g}"


def _range(number: Number) -> str:
    if math.isnan(number.value):
        return "unknown"
    return f"{number.value:.3g} ({max(number.low, 0.0):.2g} to {max(number.high, 0.0):.2g})"


def percent(share: float) -> str:
    """A share in print."""
    if math.isnan(share):
        return "-"
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.2g}%"
