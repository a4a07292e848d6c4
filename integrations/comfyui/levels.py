"""ComfyUI's noise levels and states, in the terms of a calibration's process.

ComfyUI names a level by its own sigma and keeps states as signal x0 + noise eps: (1, sigma) where noise
explodes, which is how it keeps variance preserving models too, and (1 - sigma, sigma) for flows. Whichever it
is, lam = log(signal/noise) is the same number as in the process, and a state is a multiple of x_t.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trueup.calibration import Calibration
from trueup.errors import MismatchError
from trueup.parametrization import Parametrization
from trueup.process import Flow, NoiseProcess

_LEAST = 1e-6  # noise of a level; a state without any has nothing to correct
_CLOSE = 1e-3  # relative: ComfyUI computes in float32


class Level(NamedTuple):
    """What turns ComfyUI's state and denoised image into x_t and the network's output, one per row."""

    t: Tensor  # what the network is told, in the process's time
    scale: Tensor  # x_t = scale state
    on_state: Tensor  # output = (denoised + on_state state) / on_output
    on_output: Tensor  # denoised = on_output output - on_state state


class Levels:
    """From ComfyUI's sigma to a process's levels; flow: whether it keeps states as flows are."""

    def __init__(self, process: NoiseProcess, flow: bool):
        self.process, self.flow = process, flow
        self._between: Tensor | None = None
        if process.integer_times:  # ComfyUI tells the network the whole timestep that is nearest in log sigma
            whole = torch.arange(round(process.t_max) + 1, dtype=torch.float64)
            rising = -process.lam(whole)
            self._between = 0.5 * (rising[1:] + rising[:-1])

    def sigma_of(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """ComfyUI's name for the level with these scales of data and noise."""
        return sigma / (alpha + sigma) if self.flow else sigma / alpha

    def lam(self, noise: Tensor) -> Tensor:
        """Half the log signal-to-noise ratio of states with so much noise."""
        return (torch.log1p(-noise) if self.flow else torch.zeros_like(noise)) - noise.log()

    def told(self, lam: Tensor) -> Tensor:
        """The time that the network is told, in the process's own."""
        if self._between is None:
            return self.process.t_of_lam(lam)
        return torch.bucketize(-lam, self._between).double()

    def at(self, sigma: Tensor, kind: Parametrization) -> Level:
        """The levels of rows, or the one of all, for a network that predicts `kind`; equation 7."""
        noise = sigma.detach().to("cpu", torch.float64).reshape(-1).clamp_min(_LEAST)
        noise = noise[:1] if bool((noise == noise[0]).all()) else noise
        lam = self.lam(noise)
        t = self.process.t_of_lam(lam)
        alpha_t, sigma_t = self.process.alpha(t), self.process.sigma(t)
        p, q = kind.coefficients(alpha_t, sigma_t)
        on_output = -sigma_t / (alpha_t * q - sigma_t * p)
        return Level(self.told(lam), sigma_t / noise, on_output * q / noise, on_output)


def levels_of(sampling: Any, calibration: Calibration) -> Levels:
    """The levels of a MODEL's `model_sampling`, which is asked what it does: an error if not the same."""
    process, kind = calibration.process, calibration.parametrization
    levels = Levels(process, _keeps_flow(sampling))
    t = torch.linspace(process.t_min, process.t_max, 9, dtype=torch.float64)[1:-1]
    t = process.snap(t)
    generator = torch.Generator().manual_seed(0)
    state, output = torch.randn(2, len(t), 1, 2, 2, generator=generator)
    sigma = levels.sigma_of(process.alpha(t), process.sigma(t)).float()
    level, wide = levels.at(sigma, kind), (-1, 1, 1, 1)
    told = sampling.timestep(sigma).double().cpu()
    if isinstance(process, Flow):  # whose networks are told s times anything
        told = told * (t.sum() / told.sum())
    x_t, seen = level.scale.reshape(wide) * state, sampling.calculate_input(sigma, state)
    if not (_close(told, t) and _close(seen, x_t)):
        problem = (
            f"this calibration was made for another noise process ({process.kind}) than that of this MODEL"
        )
        raise MismatchError(f"{problem} ({_named(sampling)})", _ADVICE)
    denoised = sampling.calculate_denoised(sigma, output, state).double()
    ours = level.on_output.reshape(wide) * output, level.on_state.reshape(wide) * state
    # ComfyUI turns the sign of some networks' outputs before it reads them: nothing here depends on that.
    if not any(_close(denoised, sign * ours[0] - ours[1]) for sign in (1, -1)):
        problem = f"this calibration is of a {kind.name} prediction, which is not that of this MODEL"
        raise MismatchError(f"{problem} ({_named(sampling)})", _ADVICE)
    return levels


_ADVICE = "use it with the model it was made for, without nodes that change how that is sampled"


def _keeps_flow(sampling: Any) -> bool:
    """Whether half a noise leaves half of the data, or all of it."""
    half, one, zero = torch.tensor([0.5]), torch.ones(1, 1), torch.zeros(1, 1)
    signal = float(sampling.noise_scaling(half, zero.clone(), one.clone()))
    noise = float(sampling.noise_scaling(half, one.clone(), zero.clone()))
    if noise != 0.5 or signal not in (0.5, 1.0):
        raise MismatchError(
            f"this MODEL ({_named(sampling)}) keeps its states in a way that is not known here"
        )
    return signal == 0.5


def _named(sampling: Any) -> str:
    return ", ".join(base.__name__ for base in type(sampling).__bases__)


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=_CLOSE, atol=_CLOSE)
