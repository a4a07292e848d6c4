"""The solvers that come with trueup, by name: a table that takes nothing to read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from trueup.errors import TrueupError

DPM_SOLVERS = tuple(
    f"dpm-solver-{order}{how}"
    for order in (1, 2, 3)
    for how in ("", "-fixed", "-adaptive")
    if (order, how) != (1, "-adaptive")  # it compares two orders
)
# diffusers' schedulers as people call them: the class, and what it is set to.
SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddpm": ("DDPMScheduler", {}),
    "ddim": ("DDIMScheduler", {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "dpm++2m": ("DPMSolverMultistepScheduler", {"solver_order": 2}),
    "dpm++3m": ("DPMSolverMultistepScheduler", {"solver_order": 3}),
    "dpm++2m-sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "dpm++2s": ("DPMSolverSinglestepScheduler", {"solver_order": 2, "lower_order_final": True}),
    "dpm++3s": ("DPMSolverSinglestepScheduler", {"solver_order": 3, "lower_order_final": True}),
    "unipc": ("UniPCMultistepScheduler", {}),
    "deis": ("DEISMultistepScheduler", {}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler-a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "kdpm2": ("KDPM2DiscreteScheduler", {}),
    "kdpm2-a": ("KDPM2AncestralDiscreteScheduler", {}),
    "edm-euler": ("EDMEulerScheduler", {}),
    "edm-dpm++2m": ("EDMDPMSolverMultistepScheduler", {}),
    "flow-euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "flow-heun": ("FlowMatchHeunDiscreteScheduler", {}),
}
NAMES = (*DPM_SOLVERS, *SCHEDULERS)
FITTED = "fitted"  # the one that a calibration has for a model
OR_A_CLASS = "or the class of a diffusers scheduler"


# What others call it.
_ALSO = {"epsilon": "noise", "eps": "noise", "sample": "data", "x0": "data", "v_prediction": "velocity"}
_ALSO |= {"--sampler": "--solver"}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the nearest name there is, or nothing.

    >>> did_you_mean("calibrat", ["calibrate", "check"]), did_you_mean("epsilon", ["noise", "data"])
    (', did you mean calibrate?', ', did you mean noise?')
    """
    known = list(known)
    if _ALSO.get(name) in known:
        return f", did you mean {_ALSO[name]}?"
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {near[0]}?" if near else ""


def check_name(name: str, known: Iterable[str] = NAMES) -> None:
    """Raise for a solver nobody knows; the class of a diffusers scheduler may be one.

    >>> check_name("dpm-solver3")
    Traceback (most recent call last):
    trueup.errors.TrueupError: unknown solver 'dpm-solver3', did you mean dpm-solver-3? There are ...
    """
    known = list(known)
    if name in known or name.endswith("Scheduler"):
        return
    meant = did_you_mean(name, known)
    there = f"{meant} There are" if meant else ": use"
    raise TrueupError(f"unknown solver {name!r}{there} {', '.join(known)}, {OR_A_CLASS}")


def check_evaluations(name: str, nfe: int) -> None:
    """Raise for fewer evaluations than a step of DPM-Solver takes; other solvers say so themselves."""
    if name in DPM_SOLVERS and not name.endswith("adaptive") and nfe < (order := int(name.split("-")[2])):
        raise TrueupError(f"{name} needs at least {order} evaluations, not {nfe}")
