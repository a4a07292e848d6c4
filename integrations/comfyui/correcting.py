"""The correction as ComfyUI runs it: a model function wrapper."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from trueup.calibration import Calibration, FittedSolver
from trueup.calibration.hook import CorrectOutput
from trueup.errors import AttachError, MismatchError

from .levels import Level, Levels, levels_of

log = logging.getLogger("trueup")
WRAPPER = "model_function_wrapper"  # ComfyUI's name for it in a MODEL's options
Wrapper = Callable[[Callable[..., Tensor], Mapping[str, Any]], Tensor]
Sized = TypeVar("Sized", Calibration, FittedSolver)


class Corrected:
    """Corrects every row of the network's answers at its own noise level, conditional or not.

    before: a wrapper that was there, which goes on to do what it does, with a corrected network.
    """

    def __init__(
        self, calibration: Calibration, levels: Levels, gains: str | None, before: Wrapper | None = None
    ):
        self.calibration, self.levels, self.before = calibration, levels, before
        form = calibration.gains if gains is None else gains
        self.gains = "none" if calibration.empty else form  # as solvers are fitted to it
        self._kind = calibration.parametrization
        self._hooks: dict[tuple[int, ...], CorrectOutput] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Corrected:
        return self  # ComfyUI copies the options of a MODEL with every node; nothing here ever changes

    def __call__(self, apply_model: Callable[..., Tensor], call: Mapping[str, Any]) -> Tensor:
        """As ComfyUI calls it, in the network's place."""

        def network(x: Tensor, t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            level = self.levels.at(t, self._kind)  # before the network is called, which is not waited for
            return self._correct(apply_model(x, t, *args, **kwargs), x, level)

        if self.before is not None:
            return self.before(network, call)
        return network(call["input"], call["timestep"], **call["c"])

    def _correct(self, denoised: Tensor, x: Tensor, level: Level) -> Tensor:
        hook = self._hook(tuple(denoised.shape[1:]))
        if hook.empty:
            return denoised
        wide = denoised.float()
        scale, on_state, on_output = (_by_row(part, wide) for part in level[1:])
        state = x.to(wide)
        output = (wide + on_state * state) / on_output
        change = hook.correct(output, scale * state, level.t) - output
        return (wide + on_output * change).to(denoised.dtype)

    def _hook(self, shape: tuple[int, ...]) -> CorrectOutput:
        if shape not in self._hooks:
            with torch.inference_mode(False):
                self._hooks[shape] = CorrectOutput(sized(self.calibration, shape), gains=self.gains)
        return self._hooks[shape]


def _by_row(part: Tensor, like: Tensor) -> Tensor | float:
    """(B,) or one number for all, ready to multiply rows with."""
    return float(part) if part.numel() == 1 else part.to(like).reshape(-1, *[1] * (like.ndim - 1))


def corrected(model: Any, calibration: Calibration, gains: str | None = None) -> Any:
    """A MODEL like another, with a calibration on it; the other one is left as it is."""
    before = model.model_options.get(WRAPPER)
    if isinstance(before, Corrected):
        raise AttachError("a calibration is already on this MODEL: connect the one from before that")
    channels = getattr(model.get_model_object("latent_format"), "latent_channels", calibration.shape[0])
    _check_channels(calibration.shape, channels)
    levels = levels_of(model.get_model_object("model_sampling"), calibration)
    _vouch(model, calibration)
    if calibration.classes or calibration.conditions is not None:
        log.warning(
            "trueup: ComfyUI does not say which class or prompt a row is of: using the correction of all"
        )
        calibration = replace(calibration, classes=(), conditions=None)
    made = model.clone()
    made.set_model_unet_function_wrapper(Corrected(calibration, levels, gains, before))
    return made


def sized(made: Sized, shape: tuple[int, ...]) -> Sized:
    """A calibration or a solver for latents of a shape."""
    _check_channels(made.shape, shape[0])
    return made if made.shape == shape else made.resized(shape[1:])


def _check_channels(shape: tuple[int, ...], channels: int) -> None:
    if shape[0] != channels:
        problem = (
            f"this calibration was made for latents of {shape[0]} channels, and this MODEL has {channels}"
        )
        raise MismatchError(problem, "use it with the model it was made for")


def _vouch(model: Any, calibration: Calibration) -> None:
    """Say what nobody here can check: ComfyUI keeps weights under other names, so fingerprints differ."""
    name = calibration.provenance.get("model", "a network")
    loras = (
        " and without the weight patches (LoRA, say) that it has" if getattr(model, "patches", None) else ""
    )
    log.warning(
        "trueup: this calibration is of %s; that the MODEL has its weights%s is yours to know", name, loras
    )
