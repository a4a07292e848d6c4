"""Which gains make better samples: a few are drawn near the limit with each, and compared with the data.

Least squares has the lowest loss, but shrinks the network's own opinion below what an ideal network's varies
by, and samples then vary too little. Loss cannot tell how much of it to keep; the samples' bands can.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trueup import distributed
from trueup.calibration import Attachment, Calibration, Drawn
from trueup.denoiser import Denoiser
from trueup.fitting.look import OWN_STREAM, look_at
from trueup.fitting.moments import Miss, Moments, seen
from trueup.fitting.teacher import NoLimit, Teacher, deal
from trueup.noise import mix
from trueup.progress import Progress
from trueup.sampling.draw import network_for
from trueup.statistics import Number

TRAJECTORIES = 64
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
    the gains are "none".
    Where the network as it is has no many-step limit, samples say nothing and nothing changes. labels: as
    in the data (`labels_of`); samples of others are not to be compared with it, and nothing changes.
    """
    data = Moments.of(calibration, labels)
    if data is None or calibration.empty:
        return calibration
    made = [calibration.correction, *(of.correction for of in calibration.classes)]
    forms = ["none", "sqrt", *(["response"] if any(one is not None and one.a.any() for one in made) else [])]
    network = network_for(denoiser, labels)
    deal(network, trajectories, mix(seed ^ OWN_STREAM))
    misses: dict[str, Miss] = {}
    drawn: dict[str, Drawn] = {}
    evaluations = (INTERVALS + 1) * trajectories * len(forms)
    with Progress(evaluations, "drawing samples to judge by", show=progress) as bar:
        network.advance = bar.update
        for form in forms:
            with Attachment(denoiser, calibration, gains=form):
                try:
                    limit = Teacher.of(network, network.seed, intervals=INTERVALS, keep=False)
                except NoLimit:
                    continue
            misses[form] = data.miss(seen(limit.samples, denoiser))
            how = {"gains": form, "fitted": False, "nfe": len(limit.lam), "seed": seed}
            drawn[form] = look_at(limit.samples, denoiser, data, **how)
    if "none" not in misses:
        return calibration
    found: dict[str, Any] = {form: _plain(miss.number) for form, miss in misses.items()}
    chosen = choose(misses)
    if chosen != "none":
        found["change"] = _plain(misses[chosen].less(misses["none"]))
    told = {"miss": found, "trajectories": trajectories, "evaluations": INTERVALS + 1}
    kept = tuple(drawn[form] for form in dict.fromkeys(("none", chosen)))
    provenance = {**calibration.provenance, "samples": told}
    judged = replace(calibration, gains=chosen, provenance=provenance, drawn=kept)
    return distributed.by_first(lambda: judged)


def choose(misses: dict[str, Miss]) -> str:
    """What is derived or is surely and materially closer; "none" unless that is closer than nothing is."""
    if set(misses) == {"none"}:
        return "none"
    chosen = "sqrt" if "sqrt" in misses else "response"
    if chosen == "sqrt" and "response" in misses:
        change = misses["response"].less(misses["sqrt"])
        if change.high < 0 and change.value < -MATERIAL:
            chosen = "response"
    return chosen if misses[chosen].number.value < misses["none"].number.value else "none"


def _plain(number: Number) -> list[float]:
    return [max(-_LARGEST, min(v, _LARGEST)) for v in (number.value, number.low, number.high)]
