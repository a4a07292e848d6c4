"""The steps of a solver fitted to a model, as ComfyUI's SIGMAS and SAMPLER."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trueup.calibration import Calibration, FittedSolver
from trueup.errors import MismatchError
from trueup.fitted import MEMORY
from trueup.parametrization import Parametrization

from .correcting import WRAPPER, Corrected, log, sized
from .levels import Levels, levels_of

_NEAR = 1e-4  # of a level, relative
_DATA = Parametrization("data")  # what ComfyUI's models hand on


def fitted(model: Any, calibration: Calibration, nfe: int, cfg: float) -> tuple[Tensor, FittedSolver, Levels]:
    """The levels of the solver for so many evaluations as ComfyUI names them, and what steps them."""
    solver = calibration.solver(nfe, cfg)
    levels = levels_of(model.get_model_object("model_sampling"), calibration)
    wrapper = model.model_options.get(WRAPPER)
    if wrapper is None and solver.gains != "none":
        problem = f"these steps were fitted to the network as it is corrected ({solver.gains} gains)"
        raise MismatchError(problem, "put the calibration on the MODEL first (trueup: calibrate)")
    if isinstance(wrapper, Corrected) and wrapper.gains != solver.gains:
        problem = f"these steps were fitted with {solver.gains} gains, and the MODEL is corrected with"
        raise MismatchError(f"{problem} {wrapper.gains}", "choose the same gains in trueup: calibrate")
    return levels.sigma_of(solver.alpha, solver.sigma).float(), solver, levels


def sampler_function(solver: FittedSolver, levels: Levels) -> Callable[..., Tensor]:
    """What a KSAMPLER of ComfyUI runs: the solver's steps over all its levels, or over some in a row."""

    def sample_trueup_fitted(
        model: Any,
        x: Tensor,
        sigmas: Tensor,
        extra_args: dict[str, Any] | None = None,
        callback: Callable[[dict[str, Any]], None] | None = None,
        disable: bool | None = None,
    ) -> Tensor:
        steps = sized(solver, tuple(x.shape[1:]))
        first = _first_step(steps, levels, sigmas)
        _compare_guidance(model, steps)
        # What a state is multiplied with to be x_t; the last one is the sample itself.
        scales = [*(steps.sigma[:-1] / levels.sigma_of(steps.alpha, steps.sigma)[:-1]).tolist(), 1.0]
        x_t = x * scales[first]
        history: list[Tensor] = []
        for i in range(len(sigmas) - 1):
            step = first + i
            state = x_t / scales[step]
            denoised = model(state, sigmas[i].expand(len(x)), **(extra_args or {}))
            if callback is not None:
                told = {"x": state, "i": i, "sigma": sigmas[i], "sigma_hat": sigmas[i], "denoised": denoised}
                callback(told)
            history.insert(0, steps.remembered(step, denoised, x_t, _DATA))
            del history[MEMORY:]
            x_t = steps.step(step, x_t, history)
        return x_t / scales[first + len(sigmas) - 1]

    return sample_trueup_fitted


def _first_step(solver: FittedSolver, levels: Levels, sigmas: Tensor) -> int:
    """With which of its steps these levels begin."""
    own = levels.sigma_of(solver.alpha, solver.sigma)
    given = sigmas.detach().to("cpu", torch.float64)
    gap, found = (given[:, None] - own).abs().min(1)
    if len(given) < 2 or not ((gap <= _NEAR * given).all() and (found.diff() == 1).all()):
        there = ", ".join(f"{float(sigma):.4g}" for sigma in own)
        problem = f"this sampler steps from one of its own levels to the next ({there})"
        raise MismatchError(problem, "connect the sigmas of the same node")
    return int(found[0])


def _compare_guidance(model: Any, solver: FittedSolver) -> None:
    cfg = getattr(getattr(model, "inner_model", None), "cfg", None)
    if isinstance(cfg, (int, float)) and not solver.is_for(solver.nfe, float(cfg)):
        log.warning("trueup: these steps were fitted for cfg %g, and run with %g", solver.guidance, cfg)
