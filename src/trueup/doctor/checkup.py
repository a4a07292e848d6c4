"""From what was measured to what is wrong: the probable cause first, and no symptom of it after that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from trueup.denoiser import Denoiser
from trueup.doctor.finding import CAUSES, Checkup, Finding, percent
from trueup.doctor.maps import drift, grid, leak
from trueup.doctor.parts import Part, Parts
from trueup.doctor.probes import Modes, modes, signs
from trueup.errors import Argument, ModelError, TrueupError
from trueup.estimate import Moments, measure
from trueup.estimate.diagnose import IMAGES as FIRST
from trueup.estimate.diagnose import Diagnosis, look
from trueup.hf import as_denoiser
from trueup.images import Batch, open_images
from trueup.statistics import Number, enough_folds

IMAGES = 100
FEWEST = 8  # images of which residuals are looked at one by one
WORTH = 1e-3  # of the loss where there is more data than noise: less is no reason to average weights anew
LEAK = 0.01  # nats a coefficient: brightness off by a tenth in contrast
_LOSS = "of the loss"
_COLOURS = ("red ", "green ", "blue ")


def check(
    model: Any,
    data: Any,
    *,
    moments: Moments | None = None,
    use: Diagnosis | None = None,
    seed: int = 0,
    trust: bool = False,
    phrase: Callable[[Argument], str] = str,
    progress: bool | None = None,
) -> Checkup:
    """Say what kind of miss a network has, its likely cause and what to do: see docs/doctor.md.

    model, data: as in `trueup.calibrate`, of which 100 images are measured if nothing is said. moments: what
    was measured before, by `trueup.estimate.measure`, and need not be again. use: what
    `trueup.estimate.diagnose.look` found, likewise. phrase: how advice calls arguments. Of a network that
    seems to be used otherwise than it was trained nothing is measured; trust: not looked for.
    """
    denoiser = as_denoiser(model)
    denoiser.check_bare()
    samples = open_images(data, denoiser, count=IMAGES)
    if use is None:
        use = Diagnosis(math.nan) if trust else look(denoiser, samples)
    if moments is None and use.problem is None:
        moments = measure(denoiser, samples.images, seed=seed, trust=True, progress=progress)
    if moments is not None and tuple(moments.shape) != denoiser.shape:
        raise TrueupError(
            f"these moments are of samples of {tuple(moments.shape)}, the network's are {denoiser.shape}"
        )
    findings: list[Finding] = []
    notes: list[str] = []
    batch = samples.first(FIRST)
    if use.problem is not None:
        findings.append(_misuse(use.problem, use.score, phrase))
    measured_so = True  # whether what was measured is the network's own
    few = None
    if batch is None:
        notes.append("the network was not called again: images can be read only once")
    else:
        seen = modes(denoiser, batch)
        few = seen.few
        findings += _of_modes(seen)
        measured_so = not (seen.evaluated.random or seen.evaluated.mixes)
    limits: dict[str, float] = {}
    if use.problem is None and measured_so and moments is not None:
        parts = Parts(moments)
        if not enough_folds(parts.rows).all():
            notes.append("too few images to say what is off in the mean or in the bands")
        else:
            own, limits = _of_parts(parts, few)
            if own and few is None and batch is not None and len(batch) >= FEWEST:
                own = _median(denoiser, batch, own)
            findings += own
        findings += _terminal(parts, denoiser)
    findings.sort(key=_order)
    looked_at = 0 if batch is None else len(batch)
    images = looked_at if moments is None else moments.images
    return Checkup(findings, images, limits, notes, {"weights": denoiser.fingerprint()})


def _order(finding: Finding) -> tuple[int, float]:
    place = CAUSES.index(finding.kind) if finding.kind in CAUSES else len(CAUSES)
    return place, -(0.0 if math.isnan(finding.share.value) else float(finding.share.value))


def _misuse(problem: ModelError, score: float, phrase: Callable[[Argument], str]) -> Finding:
    advice = problem.advice.format(*map(phrase, problem.arguments))
    return Finding("misuse", problem.problem, advice, Number(score), "of a linear filter's loss")


def _of_modes(seen: Modes) -> Iterator[Finding]:
    """Dropout and batch statistics that are on: while measuring, or only as the network was handed over."""

    def finding(kind: str, said: str, why: str, still: bool, found: Number, always: str) -> Finding:
        mode = "" if still else ", in the mode it is in (it was measured in evaluation mode)"
        advice = always if still else "call network.eval() before you sample"
        return Finding(kind, f"{said}{mode}: {why}", advice, found, "of the output")

    if seen.evaluated.mixes or seen.given.mixes:
        still = seen.evaluated.mixes
        found = (seen.evaluated if still else seen.given).neighbours
        said = f"what it says of an image changes by {percent(found)} with the others in the batch"
        why = f"BatchNorm layers that look at the batch: {seen.batch_norms or 'none, look for F.batch_norm'}"
        always = "let them use running statistics, or put what is inside into evaluation mode"
        yield finding("batch-norm", said, why, still, found, always)
    if seen.evaluated.random or seen.given.random:
        still = seen.evaluated.random
        found = (seen.evaluated if still else seen.given).again
        said = f"the same input twice gives outputs {percent(found)} apart"
        why = f"dropout layers that are on: {seen.dropouts or 'none, look for F.dropout in its code'}"
        always = "turn them off, or put what is inside into evaluation mode"
        yield finding("dropout", said, why, still, found, always)


def _of_parts(parts: Parts, few: str | None) -> tuple[list[Finding], dict[str, float]]:
    """What the moments show; and the smallest share of the loss that would have been found, by kind."""
    lowest, beyond = parts.lowest, 1 - parts.lowest
    of = {
        "constant-map": parts.part({"mean": beyond}),
        "drift": parts.part({"mean": lowest, "response": lowest}),
        "excess-noise": parts.part({"innovation": parts.noise}),
        "contrast": parts.part({"response": beyond, "innovation": 1 - parts.noise}),
    }
    means = parts.moments.bands.kept.expand_as(lowest[0])  # (C, bands)
    unknowns = {
        "constant-map": beyond[0] * means,
        "drift": 2 * lowest[0],
        "excess-noise": parts.every[0],
        "contrast": parts.every[0] + beyond[0],
    }
    limits = {kind: max(parts.limit(entries), of[kind].least) for kind, entries in unknowns.items()}
    findings = [_symptom(kind, part, parts) for kind, part in of.items() if part.found]
    comb = grid(parts)
    if comb is not None:
        limits["patch-grid"] = comb.least
    if comb is not None and comb.found:
        said = f"{percent(comb.share)} of the loss is a constant grid that repeats every {comb.period} pixels"
        advice = "calibrating subtracts it; patches, or layers that enlarge, of that size make it"
        findings.append(Finding("patch-grid", said, advice, comb.share, _LOSS, comb.share))
        if comb.share.value > 0.5 * of["constant-map"].share.value:
            findings = [finding for finding in findings if finding.kind != "constant-map"]
    if not findings:
        return [], limits
    whole = parts.whole().share
    if few is not None:
        said = f"{few}, and {percent(whole)} of the loss is a constant or linear miss"
        advice = "likely the rounding: calibrate it as it is, or keep the first and last layers finer"
        return [Finding("quantised", said, advice, whole, _LOSS, whole)], limits
    if _everywhere(parts):
        symptom = next((f" ({f.sentence})" for f in findings if f.kind == "drift"), "")
        said = f"misses at all noise levels are {percent(whole)} of the loss{symptom}"
        advice = "average weights over more steps (EMA), or train longer: these are not at a minimum"
        return [Finding("unconverged", said, advice, whole, _LOSS, whole)], limits
    return findings, limits


def _everywhere(parts: Parts) -> bool:
    """Whether weights are not at a minimum, at any noise level.

    There the gradients of biases and scales vanish, which are the mean residual and the response; noise of
    its own where there is more data than noise is another sign.
    """
    high = parts.moments.lam < 0
    halves = []
    for half in (high, ~high):
        mask = half.double()[:, None, None] * parts.every
        beyond = mask * (1 - parts.lowest)
        kinds = {"mean": mask}, {"response": beyond, "innovation": beyond}, {"innovation": mask * parts.noise}
        mean, slopes, noise = (parts.part(where, half).found for where in kinds)
        halves.append((mean and slopes, noise))
    everywhere = any(all(signs) for signs in zip(*halves, strict=True))
    return everywhere and bool(parts.whole(~high).share.value > WORTH)


def _symptom(kind: str, part: Part, parts: Parts) -> Finding:
    said, where = percent(part.share), _where(part, parts)
    if kind == "constant-map":
        text, advice = f"{said} of the loss is a constant map, {where}", "calibrating subtracts it"
        return Finding(kind, text, advice, part.share, _LOSS, part.share)
    if kind == "excess-noise":
        text = f"{said} of the loss is noise that the network adds, {where}"
        advice = "average weights over more steps (a longer EMA), or train longer; calibrating removes it"
        return Finding(kind, text, advice, part.share, _LOSS, part.share)
    if kind == "contrast":
        text = f"{said} of the loss is contrast that is off in some frequencies, {where}"
        return Finding(kind, text, "calibrating corrects it", part.share, _LOSS, part.share)
    ends = drift(parts)
    mean, spread = ends.widest()
    colours = _COLOURS if len(ends.mean) == 3 and parts.moments.provenance.get("data_range") else None
    names = ("",) * len(ends.mean) if colours is None else colours
    by = [f"{name}{n.value:+.2g} ± {n.reach:.1g}" for name, n in zip(names, ends.mean, strict=True)]
    what = "brightness" if colours is None else "colour"
    wider = f"and its spread is multiplied by {spread.value:.2g} ± {spread.reach:.1g}"
    if all(abs(n.value) < n.reach for n in ends.mean):  # within noise
        text = f"the spread of samples' {what} is multiplied by {spread.value:.2g} ± {spread.reach:.1g}"
    else:
        whole = parts.moments.provenance.get("data_range")
        units = f", of a range of {whole[1] - whole[0]:g}" if whole else ""
        text = f"{what} of samples drifts by {', '.join(by)}{units}"
        text += f", {wider}" if abs(spread.value - 1) > spread.reach else ""
    surer = abs(mean.value) / max(mean.error, 1e-300) >= abs(math.log(spread.value)) / max(
        spread.error, 1e-300
    )
    number, unit = (mean, "units of the data") if surer else (spread, "times the data's")
    return Finding(kind, text, "calibrating corrects it", number, unit, part.share)


def _where(part: Part, parts: Parts) -> str:
    """The levels that have most of it."""
    most = part.by_level >= 0.5 * part.by_level.max()
    t = parts.moments.t[most]
    return f"most at t = {float(t[0]):.4g}" + (f" to {float(t[-1]):.4g}" if len(t) > 1 else "")


def _median(denoiser: Denoiser, batch: Batch, own: list[Finding]) -> list[Finding]:
    """The findings, or that the network predicts medians, which explains them; a grid it does not."""
    found = signs(denoiser, batch)
    if not found.median:
        return own
    most = max(own, key=lambda finding: finding.share.value).share
    text = (
        f"it predicts medians, not means: {percent(found.balance)} more errors above zero than below, and "
        f"{percent(found.righted)} were their mean zero"
    )
    advice = "it was trained with an L1 loss: train with squares; calibrating corrects what is linear of it"
    finding = Finding("l1", text, advice, found.righted, "more above than below", most)
    return [finding, *(f for f in own if f.kind == "patch-grid")]


def _terminal(parts: Parts, denoiser: Denoiser) -> Iterator[Finding]:
    """A last state that still shows the data, which samplers start without."""
    found = leak(parts, denoiser.process)
    if found.nats.low > LEAK:
        text = (
            f"samples start from noise alone, where {found.alpha:.2g} of the data is left "
            f"(SNR {found.snr:.2g}): "
            f"brightness is off by {found.mean:+.2g}, its spread by x{found.spread:.2g} ({found.nats} nats)"
        )
        advice = (
            "train with betas of zero terminal SNR, or add that much of the data's mean to the first noise"
        )
        yield Finding("terminal-snr", text, advice, found.nats, "nats a coefficient")
