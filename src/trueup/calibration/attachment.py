"""Putting a calibration on a model and taking it off.

The correction runs as a forward hook on the network itself, so every sampler, scheduler and pipeline
around it sees a calibrated network. Each row is corrected at its own time. Where nobody can tell what the
network's own call holds (see `trueup.denoiser.binding`), the `Denoiser` corrects what it hands on instead.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trueup.calibration.calibration import Calibration, load
from trueup.calibration.hook import CorrectOutput
from trueup.calibration.mismatch import ADVICE, FORCE, of_other_weights
from trueup.denoiser import Binding, Denoiser, corrections, fingerprint, unwrapped
from trueup.denoiser.adapters import Watch
from trueup.denoiser.sharded import unseen
from trueup.errors import AttachError, MismatchError
from trueup.hf import is_pipeline, network_of, schedule
from trueup.hf.loading import config_of


def as_calibration(calibration: Calibration | str | PathLike[str]) -> Calibration:
    """A calibration, or what is in its file."""
    if isinstance(calibration, Calibration):
        return calibration
    if not isinstance(calibration, (str, PathLike)):
        raise AttachError(f"expected a Calibration or its file, not {type(calibration).__name__}")
    return load(calibration)


def attach(
    model: Any,
    calibration: Calibration | str | PathLike[str],
    *,
    gains: str | None = None,
    force: bool = False,
) -> Attachment:
    """Correct a model's outputs until `.remove()`, or for the length of a `with` block.

    model: a diffusers pipeline or model, a `Denoiser`, or the `nn.Module` that was calibrated. gains: the
    form of the correction (see `Correction.with_gains`), by default the calibration's for samples;
    "least-squares" has the lowest loss. force skips the checks that the calibration was made for this
    model. Code that was compiled around the model before is compiled again, since it would not see the
    correction.

        with trueup.attach(pipe, cal):
            pipe(num_inference_steps=20)
    """
    attachment = Attachment(model, as_calibration(calibration), gains=gains, force=force)
    attachment.put_on()
    return attachment


def detach(model: Any) -> bool:
    """Take off whatever calibration a model carries, a deep copy's too; True if there was one."""
    target, denoiser = _target(model)
    found = _take_off(target, None)
    if denoiser is not None and denoiser.correction is not None:
        denoiser.correction, found = None, True
    return found


class Attachment:
    """A calibration for a model, checked against it. `remove()` it, or use it as a context manager.

    Made by `attach`, it is on; made by itself, only within `with` blocks, of which there may be many.
    gains: as in `attach`.
    """

    def __init__(
        self, model: Any, calibration: Calibration, *, gains: str | None = None, force: bool = False
    ):
        self.calibration = calibration
        self._target, self._denoiser = _target(model)
        if not force:
            _check_model(model, self._target, self._denoiser, calibration)
        binding = _binding(calibration, self._target, self._denoiser, force)
        with torch.inference_mode(False):
            self._hook = CorrectOutput(calibration, binding, gains)
        if binding is not None:
            self._hook.watch = Watch(self._target)

    @property
    def active(self) -> bool:
        """Whether it is on."""
        in_denoiser = None if self._denoiser is None else self._denoiser.correction
        return any(hook is self._hook for hook in (*_hooks(self._target).values(), in_denoiser))

    def put_on(self) -> None:
        """Put it on; of the calibrations on a model one is at work at a time."""
        if corrections(self._target) or (self._denoiser is not None and self._denoiser.corrected):
            raise AttachError("a calibration is already attached to this model: remove it first")
        self._hook.enabled = True
        if self.active:
            return
        if self._hook.binding is None:
            assert self._denoiser is not None
            self._denoiser.correction = self._hook
            return
        weight = next(self._target.parameters(), None)
        if weight is not None and weight.device.type != "meta":
            spatial = None if self._denoiser is None else self._denoiser.shape[1:]
            self._hook.prepare(weight.device, weight.dtype, spatial)
        try:
            self._target.register_forward_hook(self._hook, with_kwargs=True)
        except RuntimeError:  # torch.jit.script's do not
            raise AttachError(
                "this network takes no forward hooks: attach to the module it was scripted from, or "
                "calibrate and attach to trueup.Denoiser(lambda x_t, t: network(x_t, t), ...)"
            ) from None
        _compile_again()

    def remove(self) -> None:
        """Take it off; the model's outputs are again exactly what they were. Doing it twice is harmless."""
        if self._denoiser is not None and self._denoiser.correction is self._hook:
            self._denoiser.correction = None
        _take_off(self._target, self._hook)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """On for a while; after that it rests until `remove`, or code would be compiled again every time."""
        self.put_on()
        try:
            yield
        finally:
            self._hook.enabled = False

    def __enter__(self) -> Attachment:
        if not self.active:
            self.put_on()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _take_off(network: Any, only: CorrectOutput | None) -> bool:
    """Remove one correction, or any, from a module; True if it was there."""
    hooks = _hooks(network)
    found = [k for k, hook in hooks.items() if isinstance(hook, CorrectOutput) and only in (None, hook)]
    for key in found:
        del hooks[key]
        network._forward_hooks_with_kwargs.pop(key, None)
    if found:
        _compile_again()
    return bool(found)


def _hooks(network: Any) -> dict[int, Any]:
    return getattr(network, "_forward_hooks", {})


def _compile_again() -> None:
    """Forget compiled code: it does not look whether hooks came or went, and would go on as before."""
    if "torch._dynamo" in sys.modules:  # else nothing was ever compiled
        torch.compiler.reset()


def _target(model: Any) -> tuple[Any, Denoiser | None]:
    return unwrapped(_network(model)), model if isinstance(model, Denoiser) else None


def _network(model: Any) -> Any:
    """The network of a model, in whatever it is wrapped in."""
    if isinstance(model, Denoiser):
        return model.network
    if is_pipeline(model) or isinstance(model, nn.Module):
        return network_of(model) if is_pipeline(model) else model
    if isinstance(model, (str, Path)):
        raise AttachError("attach takes a loaded model or pipeline, not a path")
    kind = type(model).__name__
    raise AttachError(f"cannot attach to {kind}: pass the pipeline, the nn.Module, or a trueup.Denoiser")


def _binding(calibration: Calibration, target: Any, denoiser: Denoiser | None, force: bool) -> Binding | None:
    """Where the network's call holds x_t and t, as was found when it was measured."""
    settings = calibration.provenance.get("binding")
    if settings is not None and isinstance(target, nn.Module):
        made = Binding.from_settings(settings)
        # Finding it takes labels that nobody has here, if the network is conditional.
        if denoiser is not None and not denoiser.conditional and not force:
            found = denoiser.binding()
            if found is None or replace(found, y=made.y) != made:
                problem = "this Denoiser calls its network otherwise than the one that was calibrated did"
                raise MismatchError(problem, f"give it the same `call`, {ADVICE}", FORCE)
        by_class = any(of.correction is not None for of in calibration.classes)
        if made.y is not None or not (by_class or calibration.conditions is not None):
            return made
    if denoiser is None:
        raise MismatchError(
            "this network was calibrated through a Denoiser whose `call` does more than pass its arguments "
            "on, or it writes into its arguments: its own call does not show them, attach to that Denoiser"
        )
    return None


def _check_model(model: Any, target: Any, denoiser: Denoiser | None, calibration: Calibration) -> None:
    network = _network(model)
    weights = fingerprint(network)
    if isinstance(network, nn.Module) and unseen(network):
        warnings.warn("the weights are elsewhere: nobody can tell if the calibration is theirs", stacklevel=4)
    elif not calibration.fits(weights):
        raise of_other_weights(calibration, weights, target)
    if denoiser is not None:
        made, this = calibration.shape, denoiser.shape
        if (made[0], len(made)) != (this[0], len(this)):  # heights and widths may be others
            made_for = f"samples of shape {made}, or with as many channels and axes"
            raise MismatchError(f"this calibration was made for {made_for}, not {this}")
        process, parametrization = denoiser.process, denoiser.parametrization
    elif is_pipeline(model) and model.scheduler is not None:
        process, parametrization = schedule(config_of(model.scheduler))
        binding = calibration.provenance.get("binding") or {}
        if binding.get("turned"):  # the pipeline turns the sign before its scheduler is told
            parametrization = parametrization.turned()
    else:
        return
    if not calibration.process.agrees_with(process):
        problem = "this calibration was made for another noise process than the model's scheduler describes"
        raise MismatchError(problem, ADVICE, FORCE)
    ours, theirs = calibration.parametrization, parametrization
    if ours != theirs:
        problem = f"this calibration is of a {ours.name} prediction"
        raise MismatchError(f"{problem}, the scheduler says {theirs.name}")
