"""Reading a diffusers scheduler's config: the noise a network was trained on, and what it predicts.

Works on plain dictionaries; diffusers itself is not needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from trueup import process as processes
from trueup.errors import ModelError
from trueup.parametrization import Parametrization

PREDICTIONS = {"epsilon": "noise", "sample": "data", "v_prediction": "velocity", "flow_prediction": "flow"}
# What diffusers calls a prediction; EDM's are said to be other ones.
PREDICTION_TYPES = {name: kind for kind, name in PREDICTIONS.items()}
PREDICTION_TYPES |= {"edm": "epsilon", "edm_velocity": "v_prediction"}
_DISTILLED = {
    "CMStochasticIterativeScheduler": "a consistency model",
    "ConsistencyDecoderScheduler": "a consistency model",
    "FlowMapEulerDiscreteScheduler": "a distilled flow map",
    "FlowMatchLCMScheduler": "a latent consistency model",
    "HeliosDMDScheduler": "a model distilled by distribution matching",
    "LCMScheduler": "a latent consistency model",
    "PiflowScheduler": "a distilled policy",
    "SCMScheduler": "a consistency model",
    "TCDScheduler": "a trajectory consistency model",
}


def schedule(config: Mapping[str, Any]) -> tuple[processes.NoiseProcess, Parametrization]:
    """Read a scheduler's config: the noise the network was trained on, and what it predicts."""
    name = str(config.get("_class_name", ""))
    if name in _DISTILLED:
        outputs = "its outputs are not conditional expectations, so their average error need not be zero"
        raise ModelError(f"{name} belongs to {_DISTILLED[name]}: {outputs} and there is nothing to calibrate")
    try:
        return _schedule(name, config)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"the config of {name or 'the scheduler'} cannot be read: {error}") from None


def scheduler_settings(scheduler: Any) -> dict[str, Any]:
    """What tells a scheduler apart from others: its class, and of its config what the class knows."""
    kind = type(scheduler)
    known = inspect.signature(kind).parameters  # from_config keeps what a class does not know, too
    config = dict(scheduler.config).items()
    return {"kind": kind.__name__, **{n: v for n, v in config if n.removeprefix("_") in known}}


def _schedule(name: str, config: Mapping[str, Any]) -> tuple[processes.NoiseProcess, Parametrization]:
    kind = str(config.get("prediction_type", "epsilon"))
    steps = int(config.get("num_train_timesteps", 1000))
    if name == "FittedScheduler":  # ours, see `trueup.hf.fitted`
        settings, ours = config.get("_process"), Parametrization(**config["_parametrization"])
        return (processes.from_settings(settings) if settings else _discrete(config, steps)), ours
    if name.startswith("FlowMatch"):
        if config.get("invert_sigmas"):
            by_hand = 'process.Flow(1000.0, reversed=True), "reversed_flow", shape'
            backwards = "with invert_sigmas counts time backwards"
            raise ModelError(f"{name} {backwards}: describe it with Denoiser(net, {by_hand})")
        return processes.Flow(time_scale=float(steps)), Parametrization("flow")
    if name == "ScoreSdeVeScheduler":
        return processes.VE(float(config["sigma_min"]), float(config["sigma_max"])), Parametrization("score")
    if name.startswith("EDM"):
        sigma_data = float(config.get("sigma_data", 0.5))
        ends = float(config.get("sigma_min", 0.002)), float(config.get("sigma_max", 80))
        names = {"epsilon": "edm", "v_prediction": "edm_velocity"}
        if kind not in names:
            raise ModelError(f"{name} knows no prediction type {kind!r}; expected epsilon or v_prediction")
        return processes.EDM(sigma_data, *ends), Parametrization(names[kind], sigma_data)
    if kind not in PREDICTIONS:
        known = ", ".join(PREDICTIONS)
        raise ModelError(f"unknown prediction type {kind!r} in the scheduler; known: {known}")
    if config.get("use_flow_sigmas") or kind == "flow_prediction":
        if kind == "v_prediction":
            raise ModelError(f"{name} with use_flow_sigmas has no meaning for a {kind!r} prediction")
        return processes.Flow(time_scale=float(steps)), Parametrization(PREDICTIONS[kind])
    if config.get("beta_schedule") is None and config.get("trained_betas") is None:
        unknown = "so what noise it puts at which time is not known: pass process= and prediction="
        raise ModelError(f"the config of {name or 'the scheduler'} names no beta_schedule, {unknown}")
    process = _discrete(config, steps)
    if config.get("timestep_type") == "continuous" and kind == "v_prediction":
        # Euler's: the network receives ln(sigma)/4, and sigma has a range of its own.
        low = config.get("sigma_min") or (-process.lam(process.t_min)).exp()
        high = config.get("sigma_max") or (-process.lam(process.t_max)).exp()
        return processes.EDM(1.0, float(low), float(high)), Parametrization("velocity")
    return process, Parametrization(PREDICTIONS[kind])


def _discrete(config: Mapping[str, Any], steps: int) -> processes.DiscreteVP:
    return processes.DiscreteVP(_alphas_cumprod(config, steps))


def _alphas_cumprod(config: Mapping[str, Any], steps: int) -> torch.Tensor:
    name = str(config.get("beta_schedule"))
    if config.get("trained_betas") is not None:
        process = processes.DiscreteVP.from_betas(config["trained_betas"])
    elif name == "squaredcos_cap_v2":
        process = processes.DiscreteVP.cosine(steps)
    elif name in ("linear", "scaled_linear", "sigmoid"):
        if config.get("beta_start") is None or config.get("beta_end") is None:
            raise ModelError(f"a {name} beta schedule needs beta_start and beta_end; the config has not both")
        start, end = float(config["beta_start"]), float(config["beta_end"])
        if name == "sigmoid":
            ramp = torch.sigmoid(torch.linspace(-6, 6, steps, dtype=torch.float64))
            process = processes.DiscreteVP.from_betas(ramp * (end - start) + start)
        else:
            process = getattr(processes.DiscreteVP, name)(start, end, steps)
    else:
        advice = "pass process=trueup.process.DiscreteVP(alphas_cumprod)"
        raise ModelError(f"unknown beta schedule {name!r}; {advice}")
    shift = float(config.get("snr_shift_scale") or 1.0)  # CogVideoX
    alphas_cumprod = process.alphas_cumprod / (shift + (1.0 - shift) * process.alphas_cumprod)
    if not config.get("rescale_betas_zero_snr"):
        return alphas_cumprod
    root = alphas_cumprod.sqrt()  # shifted to end at zero, scaled to keep its start
    return ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
