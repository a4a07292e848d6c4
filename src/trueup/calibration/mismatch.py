"""Why a calibration is not a network's: adapters that came or went, quantised weights, or simply others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from trueup.calibration.calibration import Calibration
from trueup.denoiser.adapters import fused
from trueup.denoiser.weights import ADAPTER, BASE, PRECISIONS, QUANTISED, VECTORS, same_weights
from trueup.errors import Argument, MismatchError

FORCE, ADVICE = Argument("force", True), "recalibrate, or pass {} if you know they agree"
GUIDE = "docs/guide.md#quantised-and-fine-tuned-models"


def of_other_weights(calibration: Calibration, weights: dict[str, str], network: Any) -> MismatchError:
    """What to tell whoever attaches a calibration to a network with other weights (its fingerprint)."""
    made = calibration.provenance.get("weights") or {}
    problem, advice = _adapted(made, weights) or _changed(made, weights, network) or ("", "")
    if not problem:
        problem = f"this calibration was made for other weights{_apart(made, weights)}"
    return MismatchError(problem, f"{advice}, or pass {{}} ({GUIDE})" if advice else ADVICE, FORCE)


def _adapted(made: dict[str, str], now: dict[str, str]) -> tuple[str, str] | None:
    """Where the weights below are the same, and the adapters are not."""
    then, on = ({k: v for k, v in found.items() if k.startswith(ADAPTER)} for found in (made, now))
    below = same_weights(made, now, part=BASE if then else "", of=BASE if on else "")
    if not below or not (then or on):
        return None
    if not then:
        problem = f"this network has LoRA adapters ({listed(on)}) on top of the weights that were calibrated"
        return problem, "calibrate it with them on, turn them off"
    problem = f"this calibration was made with LoRA adapters on ({listed(then)})"
    if not on:
        return f"{problem}, and they are off now", "turn them on, calibrate without them"
    if then.keys() == on.keys() and then != on:
        return f"{problem}, and their scales are others now", "set them as they were, calibrate it as it is"
    if then == on:
        return f"{problem}, and others of that name are on now", "load those, calibrate it as it is"
    return f"{problem}, not with those that are on now ({listed(on)})", "set those, calibrate it as it is"


def _changed(made: dict[str, str], now: dict[str, str], network: Any) -> tuple[str, str] | None:
    """Where something has been done to the weights themselves."""
    if QUANTISED in now and QUANTISED not in made:
        problem = "this calibration was made in full precision, and the network is quantised"
        return problem, "its errors are its own now: calibrate it quantised"
    if QUANTISED in made and QUANTISED not in now:
        problem = "this calibration was made for a quantised network, and this one is in full precision"
        return problem, "calibrate it in full precision, quantise it as it was"
    if any(getattr(layer, "fused_projections", False) for layer in _layers(network)):
        problem = (
            "this calibration was made for other weights, or before projections of this network were fused "
            "(fuse_qkv_projections)"
        )
        return problem, "calibrate it as it is, attach before they are fused"
    merged = fused(network)
    if merged:
        problem = f"LoRA adapters ({listed(merged)}) are fused into the weights of this network"
        return problem, "calibrate it as it is, load it without them"
    if same_weights(made, now, part=VECTORS, of=VECTORS):
        problem = "this network has the biases and norms of the one that was calibrated, and other matrices"
        return f"{problem}, as after fusing a LoRA or rounding weights", "calibrate it as it is"
    return None


def _apart(made: dict[str, str], now: dict[str, str]) -> str:
    """The two fingerprints, at the finest dtype that both have; else their dtypes, which do not compare."""
    ours, theirs = ([name for name in PRECISIONS if name in found] for found in (made, now))
    both = next((name for name in ours if name in theirs), None)
    if both is not None:
        return f" (fingerprint {made[both][:8]}, model {now[both][:8]})"
    return f", or the same in {ours[0]}, while these are in {theirs[0]}" if ours and theirs else ""


def _layers(network: Any) -> Iterable[Any]:
    return network.modules() if isinstance(network, nn.Module) else ()


def listed(names: Iterable[str]) -> str:
    """Names of adapters, for a line of text: they may come from a file."""
    found = [name.removeprefix(ADAPTER)[:40] for name in sorted(names)]
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
