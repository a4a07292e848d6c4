"""Which gains make better samples: a few are drawn near the limit with each, and compared with the data.

Least squares has the lowest loss, but shrinks the network's own opinion below what an ideal network's varies
by, and samples then vary too little. Loss cannot tell how much of it to keep; the samples' bands can.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trueup import distributed
from trueup.calibration import Attachment, Calibration
from trueup.denoiser import Denoiser
from trueup.fitting.look import OWN_STREAM, look_at
from trueup.fitting.moments import Miss, Moments, seen
from trueup.fitting.teacher import NoLimit, Teacher, deal
from trueup.noise import mix
from trueup.progress import Progress
from trueup.sampling.draw import network_for
from trueup.statistics import Number

TRAJECTORIES = 64
MOST = 4  # times as many, while these leave it open whether a form is closer than nothing
INTERVALS = 24
MATERIAL = 0.005  # nats a coefficient by which another form must be closer than the one derived
_LARGEST = 1e12  # that a file holds; samples this far off are nowhere


def judge(
    denoiser: Denoiser,
    calibration: Calibration,
    *,
    trajectories: int = TRAJECTORIES,
    labels: Any = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Calibration:
    """The calibration with the gains that samples favour, and what they say.

    "sqrt" is what theory says (equation 54); "response" takes its place if its samples' moments are surely
    and materially closer to the data's. Where that form's are no closer than those of the network as it is,
    the gains are "none"; while it is open which of the two are, by more than is immaterial, as many again are
    drawn of both, up to `MOST` times the trajectories.
    Where the network as it is has no many-step limit, samples say nothing and nothing changes. labels: as
    in the data (`labels_of`); samples of others are not to be compared with it, and nothing changes.
    """
    data = Moments.of(calibration, labels)
    if data is None or calibration.empty:
        return calibration
    made = [calibration.correction, *(of.correction for of in calibration.classes)]
    forms = ["none", "sqrt", *(["response"] if any(one is not None and one.a.any() for one in made) else [])]
    network = network_for(denoiser, labels)
    deal(network, MOST * trajectories, mix(seed ^ OWN_STREAM))
    every, told = network.index, network.y
    assert every is not None
    limits: dict[str, list[Tensor]] = {form: [] for form in forms}
    misses: dict[str, Miss] = {}
    count, wanted, evaluations = 0, trajectories, INTERVALS + 1
    with Progress(evaluations * wanted * len(forms), "drawing samples to judge by", show=progress) as bar:
        network.advance = bar.update
        while count < wanted:
            part = slice(count, count + trajectories)
            network.index, network.y = every[part], None if told is None else told[part]
            for form in list(limits):
                with Attachment(denoiser, calibration, gains=form):
                    try:
                        limit = Teacher.of(network, network.seed, intervals=INTERVALS, keep=False)
                    except NoLimit:
                        del limits[form]
                        continue
                limits[form].append(limit.samples)
                evaluations = len(limit.lam)
            if "none" not in limits:
                return calibration
            count += trajectories
            if count < wanted:
                continue
            samples = {form: torch.cat(parts) for form, parts in limits.items()}
            misses = {form: data.miss(seen(x, denoiser)) for form, x in samples.items()}
            still = distributed.by_first(lambda: _still_open(misses))  # noqa: B023
            if still is not None and wanted < MOST * trajectories:
                limits, wanted = {form: limits[form] for form in ("none", still)}, 2 * wanted
                bar.left(evaluations * (wanted - count) * len(limits))
    how = {"fitted": False, "nfe": evaluations, "seed": seed}
    found: dict[str, Any] = {form: _plain(miss.number) for form, miss in misses.items()}
    chosen = choose(misses)
    if chosen != "none":
        found["change"] = _plain(misses[chosen].less(misses["none"]))
    said = {"miss": found, "trajectories": count, "evaluations": INTERVALS + 1}
    forms = list(dict.fromkeys(("none", chosen)))
    kept = tuple(look_at(samples[form], denoiser, data, gains=form, **how) for form in forms)
    provenance = {**calibration.provenance, "samples": said}
    judged = replace(calibration, gains=chosen, provenance=provenance, drawn=kept)
    return distributed.by_first(lambda: judged)


def preferred(misses: dict[str, Miss]) -> str | None:
    """The form that is derived, or the one that is surely and materially closer; None if there is none."""
    if "sqrt" not in misses:
        return "response" if "response" in misses else None
    if "response" in misses:
        change = misses["response"].less(misses["sqrt"])
        if change.high < 0 and change.value < -MATERIAL:
            return "response"
    return "sqrt"


def choose(misses: dict[str, Miss]) -> str:
    """The preferred form; "none" unless that is closer than nothing is."""
    form = preferred(misses)
    closer = form is not None and misses[form].number.value < misses["none"].number.value
    return form if closer and form is not None else "none"


def _still_open(misses: dict[str, Miss]) -> str | None:
    """The preferred form, if samples may be either closer or further off with it, and it matters."""
    form = preferred(misses)
    if form is None:
        return None
    change = misses[form].less(misses["none"])
    reach = max(-change.low, change.high)
    return form if change.low < 0 < change.high and reach > MATERIAL else None


def _plain(number: Number) -> list[float]:
    return [max(-_LARGEST, min(v, _LARGEST)) for v in (number.value, number.low, number.high)]
