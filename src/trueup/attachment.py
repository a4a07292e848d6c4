"""Putting a calibration on a model and taking it off.

The correction runs as a forward hook on the network itself, so every sampler, scheduler and pipeline
around it sees a calibrated network. Each row is corrected at its own time.
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trueup.artifact import load
from trueup.calibration import Calibration
from trueup.denoiser import Denoiser, carries_correction, fingerprint
from trueup.errors import AttachError, MismatchError
from trueup.hf import is_pipeline, network_of
from trueup.hook import CorrectOutput
from trueup.schedules import schedule

if TYPE_CHECKING:
    from trueup.trajectory import Trajectory


def attach(model: Any, calibration: Calibration | str | PathLike[str], *, force: bool = False) -> Attachment:
    """Correct a model's outputs until `.remove()`, or for the length of a `with` block.

    model: a diffusers pipeline or model, a `Denoiser`, or the `nn.Module` that was calibrated. force skips
    the checks that the calibration was made for this model.

        with trueup.attach(pipe, cal):
            pipe(num_inference_steps=20)
    """
    if not isinstance(calibration, (Calibration, str, PathLike)):
        raise AttachError(f"attach takes a Calibration or its file, not {type(calibration).__name__}")
    if not isinstance(calibration, Calibration):
        calibration = load(calibration)
    target, denoiser = _target(model)
    if carries_correction(target) or (denoiser is not None and carries_correction(denoiser._call)):
        raise AttachError("a calibration is already attached to this model: remove it first (trueup.detach)")
    if not force:
        _check_model(model, target, denoiser, calibration)
    with torch.inference_mode(False):
        hook = CorrectOutput(calibration)
    own_call = bool(calibration.provenance.get("own_call"))
    if isinstance(target, nn.Module) and not (own_call and denoiser is not None):
        weight = next(target.parameters(), None)
        if weight is not None and not hook.empty:
            hook._tables(weight.device, torch.float32)  # before anyone compiles the network
        target.register_forward_hook(hook, with_kwargs=True)
        return Attachment(target, hook, calibration)
    assert denoiser is not None
    denoiser._call = _Wrapped(denoiser._call, hook)
    return Attachment(denoiser, hook, calibration)


def detach(model: Any) -> bool:
    """Take off whatever calibration a model carries, a deep copy's too; True if there was one."""
    target, denoiser = _target(model)
    return _take_off(target, None) | (denoiser is not None and _take_off(denoiser, None))


def _take_off(model: Any, only: CorrectOutput | None) -> bool:
    """Remove one correction, or any, from a module or a denoiser; True if it was there."""
    if isinstance(model, Denoiser):
        call = model._call
        if not isinstance(call, _Wrapped) or only not in (None, call.hook):
            return False
        model._call = call.inner
        return True
    hooks = getattr(model, "_forward_hooks", {})
    found = [k for k, hook in hooks.items() if isinstance(hook, CorrectOutput) and only in (None, hook)]
    for key in found:
        del hooks[key]
        model._forward_hooks_with_kwargs.pop(key, None)
    return bool(found)


class Attachment:
    """A calibration on a model. `remove()` it, or use it as a context manager."""

    def __init__(self, model: nn.Module | Denoiser, hook: CorrectOutput, calibration: Calibration):
        self._model, self._hook, self._calibration = model, hook, calibration
        self._trajectory: Trajectory | None = None  # of the call in progress

    @property
    def active(self) -> bool:
        """Whether it is still on."""
        if isinstance(self._model, Denoiser):
            return getattr(self._model._call, "hook", None) is self._hook
        return any(hook is self._hook for hook in self._model._forward_hooks.values())

    def on_step_end(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """Keeps a diffusers pipeline's latents on the marginals, with the trajectory for its scheduler.

        with trueup.attach(pipe, cal) as calibrated:
            pipe(prompt, num_inference_steps=10, callback_on_step_end=calibrated.on_step_end)

        What a pipeline does not show its callback, such as DDIM's eta, is not checked: leave it as it is.
        """
        if step == 0 or self._trajectory is None:
            self._trajectory = self._for_pipeline(pipe)
        if "latents" not in tensors:
            raise AttachError(
                "on_step_end needs the latents: leave callback_on_step_end_tensor_inputs as it is"
            )
        tensors["latents"] = self._trajectory.at_step(step, float(timestep), tensors["latents"])
        return tensors

    def _for_pipeline(self, pipe: Any) -> Trajectory:
        from trueup.sampling.schedulers import SchedulerSolver
        from trueup.trajectory.maps import Sampler, choose

        if not self.active or not is_pipeline(pipe) or _unwrapped(network_of(pipe)) is not self._model:
            raise AttachError("this calibration is not attached to the network of this pipeline")
        steps = len(pipe.scheduler.timesteps)
        if getattr(pipe, "_num_timesteps", steps) != steps:
            raise MismatchError(
                f"the pipeline takes {pipe._num_timesteps} of {steps} steps, as from an image it was given: "
                "trajectories start from noise. Leave out on_step_end, or use strength=1."
            )
        if getattr(pipe, "guidance_rescale", 0.0):
            raise MismatchError(
                "trajectories are made without guidance_rescale: leave it, or on_step_end, out"
            )
        guided = getattr(pipe, "do_classifier_free_guidance", False)
        guidance = float(getattr(pipe, "guidance_scale", 1.0)) if guided else 1.0
        sampler = Sampler.of(SchedulerSolver(pipe.scheduler), steps, guidance)
        return choose(self._calibration.trajectories, sampler)

    def remove(self) -> None:
        """Take it off; the model's outputs are again exactly what they were. Doing it twice is harmless."""
        _take_off(self._model, self._hook)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Wrapped:
    """A callable network with its correction, for denoisers that are not modules."""

    corrects_output = True

    def __init__(self, inner: Callable[..., Any], hook: CorrectOutput):
        self.inner, self.hook = inner, hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook(None, args, kwargs, self.inner(*args, **kwargs))


def _target(model: Any) -> tuple[Any, Denoiser | None]:
    if isinstance(model, Denoiser):
        return _unwrapped(model.network), model
    if is_pipeline(model):
        return _unwrapped(network_of(model)), None
    if isinstance(model, nn.Module):
        return _unwrapped(model), None
    if isinstance(model, (str, Path)):
        raise AttachError("attach takes a loaded model or pipeline, not a path")
    raise AttachError(
        f"cannot attach to {type(model).__name__}: pass the pipeline, the nn.Module, or a trueup.Denoiser"
    )


def _unwrapped(network: Any) -> Any:
    """The network inside torch.compile's, DataParallel's and DistributedDataParallel's wrappers."""
    while True:
        inner = getattr(network, "_orig_mod", None)
        if inner is None and isinstance(network, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = network.module
        if inner is None:
            return network
        network = inner


def _check_model(model: Any, target: Any, denoiser: Denoiser | None, calibration: Calibration) -> None:
    if calibration.provenance.get("own_call") and denoiser is None:
        raise MismatchError(
            "this network was calibrated through a Denoiser whose `call` changes what goes in or comes out: "
            "attach to that Denoiser"
        )
    weights = fingerprint(target)
    if not calibration.fits(weights):
        made_for = next(iter((calibration.provenance.get("weights") or {}).values()), "none")
        this = next(iter(weights.values()), "none")
        raise MismatchError(
            f"this calibration was made for other weights (fingerprint {made_for[:8]}, model {this[:8]}). "
            "Recalibrate, or pass force=True if you know they agree."
        )
    if denoiser is not None:
        process, parametrization = denoiser.process, denoiser.parametrization
    elif is_pipeline(model) and model.scheduler is not None:
        config = dict(model.scheduler.config)
        process, parametrization = schedule({"_class_name": type(model.scheduler).__name__, **config})
    else:
        return
    if not calibration.process.agrees_with(process):
        raise MismatchError(
            "this calibration was made for another noise process than the model's scheduler describes. "
            "Recalibrate with this scheduler, or pass force=True if you know they agree."
        )
    if calibration.parametrization != parametrization:
        raise MismatchError(
            f"this calibration is of a {calibration.parametrization.name} prediction, the scheduler says "
            f"{parametrization.name}"
        )
