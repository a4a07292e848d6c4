"""A calibration for people and for machines: a small chart, and plain JSON values."""

from __future__ import annotations

import sys
from typing import Any

import torch

from trueup.calibration import Calibration
from trueup.calibration.words import percent
from trueup.statistics import Number

_BLOCKS = " ▁▂▃▄▅▆▇█"
_HEIGHT = 5
_COLUMN = 2


def as_text(calibration: Calibration, *, plain: bool = False) -> str:
    """Table, chart and verdict."""
    table, verdict = calibration.summary().rsplit("\nverdict:", 1)
    drawn = f"{chart(calibration, plain=plain)}\n\n" if calibration.measured else ""
    text = f"{table}\n\n{drawn}verdict:{verdict}"
    return text.replace("±", "+-") if plain else text


def plain_output() -> bool:
    """Whether standard output takes no more than ASCII."""
    return not (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")


def chart(calibration: Calibration, *, plain: bool = False) -> str:
    """The share of the loss that the correction removes, least noise at the left; plain: only ASCII."""
    gain, loss = calibration.evidence.gain.value, calibration.evidence.loss.value
    shares = torch.where(loss > 0, gain / loss, 0.0).nan_to_num(0.0).clamp_min(0.0).tolist()
    top = max(shares)
    if top <= 0:
        return "no noise level has a part of its loss that a correction surely removes"
    blocks = " ......##" if plain else _BLOCKS
    side, corner, floor = "|+-" if plain else "│└─"
    lines = ["share of the loss that calibration removes, by noise level"]
    for row in reversed(range(_HEIGHT)):
        steps = [min(8, max(0, round(8 * (share / top * _HEIGHT - row)))) for share in shares]
        if row == 0:
            steps = [max(step, share > 0) for step, share in zip(steps, shares, strict=True)]  # something
        label = percent(top) if row == _HEIGHT - 1 else "0%" if row == 0 else ""
        lines.append(f"{label:>6} {side}{''.join(blocks[step] * _COLUMN for step in steps)}")
    width = _COLUMN * len(shares)
    first, last = (f"t={float(t):.4g}" for t in calibration.t[[0, -1]])
    lines.append(f"{'':>6} {corner}{floor * width}")
    lines.append(f"{'':>8}{first}{last:>{max(len(last) + 2, width - len(first))}}")
    return "\n".join(lines)


def as_json(calibration: Calibration) -> dict[str, Any]:
    """Everything `summary` says, as plain values; what is unknown is null."""
    e = calibration.evidence
    times, lams = calibration.t.tolist(), calibration.correction.lam.tolist()
    levels = [
        {"t": t, "lam": lam, **{name: getattr(e, name)[row].as_json() for name in ("loss", "eta2", "gain")}}
        for row, (t, lam) in enumerate(zip(times, lams, strict=True))
        if calibration.measured
    ]
    own = ("empty", "family", "estimator", "gains", "data_images", "generated")
    made = ("name", "model", "parametrization", "weights", "seed")
    bits = e.bound_gain.scaled(e.bits_per_dim(1.0))
    return {
        "verdict": calibration.verdict(),
        **{name: getattr(calibration, name) for name in own},
        **{name: calibration.provenance.get(name) for name in made},
        "images": e.images,
        "shape": list(calibration.shape),
        "bound_gain": {"nats": e.bound_gain.as_json(), "bits_per_dim": bits.as_json()},
        "share_of_loss_removed": Number(calibration.explained()).as_json()["value"],
        "uncalibration": {
            "bits_per_dim": calibration.uncalibration.as_json(),
            "share_of_loss": calibration.uncalibration_share.as_json(),
        },
        "levels": levels,
        "process": calibration.process.kind,
        "shares": None if calibration.shares is None else calibration.shares.settings(),
        "samples": None if calibration.samples is None else calibration.samples.as_json(),
        "classes": [
            {
                "label": of.label,
                "null": of.label == calibration.provenance.get("null_label"),
                "images": of.images,
                "own": of.correction is not None,
                "bound_gain": {"nats": of.gain.as_json()},
            }
            for of in calibration.classes
        ],
        "solvers": [
            {
                **{
                    name: getattr(solver, name)
                    for name in ("nfe", "guidance", "gains", "empty", "provenance")
                },
                "base": solver.provenance.get("base"),
                "t": solver.t.tolist(),
                "evidence": {key: Number(value).as_json()["value"] for key, value in solver.evidence.items()},
            }
            for solver in calibration.solvers
        ],
    }
