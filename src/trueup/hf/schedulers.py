"""diffusers' schedulers by name, set up for a network and its noise.

A network knows x_t at a noise level lam, whatever time and scale its process has there. A scheduler of
another process therefore serves as well, if its levels are the network's: `trueup.sampling.schedulers` tells
the network its own time and scale at the scheduler's lam.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trueup.denoiser import Denoiser
from trueup.errors import MismatchError, TrueupError
from trueup.files import line
from trueup.hf.loading import diffusers_module
from trueup.hf.schedules import schedule, scheduler_settings
from trueup.process import DiscreteVP, NoiseProcess
from trueup.solvers import SCHEDULERS, check_name

LEARNED_VARIANCE = ("DDPMScheduler", "DDPMParallelScheduler")  # those that use a learned variance
# What schedulers know of; other outputs are turned into noise predictions.
_PREDICTION_TYPES = {"data": "sample", "velocity": "v_prediction", "edm_velocity": "v_prediction"}
_WITHOUT_DATA = ("PNDM", "EulerAncestralDiscrete", "KDPM2Discrete", "KDPM2AncestralDiscrete", "EDM")
# Step through flows, if they are told to.
_FLOWS = ("FlowMatch", "DPMSolverMultistep", "DPMSolverSinglestep", "UniPCMultistep", "DEISMultistep")
_TIMESTEPS = 1000
_MOST_NOISE_FOR_HEUN = 1000.0  # its first step multiplies the slope at its end by this: few steps end far off


def offered(name: str, denoiser: Denoiser) -> bool:
    """Whether a scheduler can step through a network's noise; tests say that those which can give the data.

    Flows have their own, and the solvers that know them; noise that explodes those of EDM beside all others.
    """
    kind, process = SCHEDULERS.get(name, (name, {}))[0], denoiser.process
    noise = process.kind
    if kind.startswith("FlowMatch") or noise == "flow":
        return noise == "flow" and kind.startswith(_FLOWS)
    if kind.startswith("Heun") and float((-process.lam(process.t_max)).exp()) > _MOST_NOISE_FOR_HEUN:
        return False
    return noise in ("edm", "ve") if kind.startswith("EDM") else True


def make_scheduler(name: str, denoiser: Denoiser) -> tuple[Any, bool]:
    """A scheduler by its name or its class, set up for a denoiser; and whether it is the model's own.

    It takes over the config of the scheduler the model came with, clipping and spacing included, where it
    then steps through the model's noise; else it is made for that.
    """
    kind, settings = SCHEDULERS.get(name, (name, {}))
    made: Any = getattr(diffusers_module(f"the solver {name}"), kind, None)
    if not hasattr(made, "from_config"):
        check_name(name.removesuffix("Scheduler"))
        raise TrueupError(f"diffusers has no scheduler {kind}")
    fits = offered(name, denoiser)
    if denoiser.scheduler_config is not None and fits:
        scheduler = _set_up(name, made, {**denoiser.scheduler_config, **settings}, denoiser)
        if scheduler_process(scheduler)[0].agrees_with(denoiser.process):
            return scheduler, True
    scheduler = _set_up(name, made, _config(kind, denoiser) | settings, denoiser)
    if not fits or not _same_levels(scheduler_process(scheduler)[0], denoiser.process):
        noise = f"the noise of this network ({denoiser.process.kind})"
        raise MismatchError(f"{name} does not step through {noise}")
    return scheduler, False


def _same_levels(scheduled: NoiseProcess, process: NoiseProcess) -> bool:
    """Whether a scheduler begins and ends where a network was trained; some classes take any config."""
    if scheduled.kind == process.kind == "flow":
        return True
    ends = zip((scheduled.t_min, scheduled.t_max), (process.t_min, process.t_max), strict=True)
    return all(abs(float(scheduled.lam(s) - process.lam(t))) < 0.01 for s, t in ends)


def _set_up(name: str, made: Any, config: dict[str, Any], denoiser: Denoiser) -> Any:
    kind = made.__name__
    known = inspect.signature(made).parameters
    predicted = _PREDICTION_TYPES.get(denoiser.parametrization.name, "epsilon")
    changes: dict[str, Any] = {"prediction_type": predicted}
    if kind not in LEARNED_VARIANCE:
        config.pop("variance_type", None)  # they are handed the mean alone
    if denoiser.process.kind == "flow":
        changes["use_dynamic_shifting"] = False  # needs to be told the size of the image
        if "use_flow_sigmas" in known:
            changes |= {"use_flow_sigmas": True, "flow_shift": config.get("shift") or 1.0}
        changes["prediction_type"] = "flow_prediction"
    elif predicted == "sample" and kind.startswith(_WITHOUT_DATA):
        changes["prediction_type"] = "epsilon"
    config.pop("_use_default_values", None)  # or from_config drops what was a default of the model's own
    try:
        with quiet():
            return made.from_config(config | changes)
    except (ImportError, TypeError, ValueError, NotImplementedError) as error:
        raise TrueupError(f"{name} cannot be set up for this model: {line(error)}") from None


def _config(kind: str, denoiser: Denoiser) -> dict[str, Any]:
    """The config of a scheduler whose levels are those of a network's noise, nothing clipped."""
    process = denoiser.process
    if process.kind == "flow":
        return {"num_train_timesteps": _TIMESTEPS}
    if kind.startswith("EDM"):
        sigma_max, sigma_min = (float((-process.lam(t)).exp()) for t in (process.t_max, process.t_min))
        sigma_data = denoiser.parametrization.sigma_data or getattr(process, "sigma_data", 0.5)
        return {"sigma_min": sigma_min, "sigma_max": sigma_max, "sigma_data": sigma_data}
    if isinstance(process, DiscreteVP):
        betas, more = betas_of(process), {}
    else:  # timesteps that are even in lam, from the first level to the last
        first, last = float(process.lam(process.t_min)), float(process.lam(process.t_max))
        alphas_cumprod = torch.sigmoid(2 * torch.linspace(first, last, _TIMESTEPS, dtype=torch.float64))
        betas, more = betas_of(DiscreteVP(alphas_cumprod)), {"timestep_spacing": "trailing"}
    return {"num_train_timesteps": len(betas), "trained_betas": betas, "clip_sample": False, **more}


def betas_of(process: DiscreteVP) -> list[float]:
    """The variances of a chain's steps, as schedulers want them."""
    alphas_cumprod = process.alphas_cumprod
    before = torch.cat([torch.ones_like(alphas_cumprod[:1]), alphas_cumprod[:-1]])
    return (1 - alphas_cumprod / before).tolist()


def scheduler_process(scheduler: Any) -> tuple[NoiseProcess, Any]:
    """The noise a scheduler steps through, and what it takes a network to predict."""
    return schedule(scheduler_settings(scheduler) | {"_class_name": type(scheduler).__name__})


def check_scheduler(scheduler: Any) -> None:
    """Raise for what is no scheduler, or none that samples."""
    kind = type(scheduler).__name__
    if not all(hasattr(scheduler, needed) for needed in ("set_timesteps", "step", "config")):
        raise TrueupError(f"cannot sample with {kind}: it is no diffusers scheduler")
    if kind in ("DPMSolverSDEScheduler", "CosineDPMSolverMultistepScheduler"):
        raise TrueupError(f"{kind} draws its own noise, so an image would depend on its batch: use another")
    if "Inverse" in kind:
        raise TrueupError(f"{kind} turns images into noise: use the scheduler it is the inverse of")


@contextmanager
def quiet() -> Iterator[None]:
    """diffusers logs every config key a scheduler does not know; here that is expected."""
    logger = logging.getLogger("diffusers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
