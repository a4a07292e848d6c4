"""What `trueup check` found to be wrong with the network: the likely cause first, and what to do."""

from __future__ import annotations

from trueup.doctor.finding import too_few
from trueup.page.markup import Html, joined, missing, section, tag
from trueup.page.measured import Diagnosis, Measured

# As docs/doctor.md explains them.
_TITLES = {
    "misuse": "It is used otherwise than it was trained",
    "batch-norm": "BatchNorm looks at the batch",
    "dropout": "Dropout is on",
    "quantised": "Its weights are rounded",
    "l1": "It was trained with an L1 loss",
    "unconverged": "Its weights are not at a minimum",
    "patch-grid": "A grid repeats in the picture",
    "constant-map": "A constant map is added",
    "drift": "Brightness or colour drifts",
    "excess-noise": "The network adds noise",
    "contrast": "Contrast is off in some frequencies",
    "terminal-snr": "The last state still shows the data",
}


def diagnosis(measured: Measured) -> Html:
    """The findings, or that there are none; or how to look for some."""
    if measured.diagnoses:
        return section("diagnosis", "Diagnosis", None, [_found(one) for one in measured.diagnoses])
    what = "What kind of miss this is, and its likely cause, was not looked for."
    return section("diagnosis", "Diagnosis", None, missing(what, more=True))


def _found(one: Diagnosis) -> Html:
    notes = [tag("p", note, class_="note") for note in one.notes]
    if not one.findings:
        words = f"Nothing above noise in {one.images:,} images."
        if not one.healthy:
            words = _sentence(too_few(one.images))
        seen = [f"{kind} of {100 * limit:.2g}%" for kind, limit in one.limits.items() if limit is not None]
        more = f"Would have been seen: {', '.join(seen)} of the loss." if seen else None
        title = "Healthy" if one.healthy else "Not known"
        return joined(
            tag("h3", title), tag("p", words), tag("p", more, class_="note") if more else None, notes
        )
    items = [
        tag(
            "li",
            tag("h3", _TITLES.get(each.kind, each.kind), " ", tag("code", each.kind)),
            tag("p", _sentence(each.sentence)),
            tag("p", _sentence(each.advice), class_="advice") if each.advice else None,
        )
        for each in one.findings
    ]
    lead = (
        f"In {one.images:,} images, the likely cause first; shares of the loss are means over noise levels."
    )
    return joined(tag("p", lead, class_="lead"), tag("ol", items, class_="findings"), notes)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
