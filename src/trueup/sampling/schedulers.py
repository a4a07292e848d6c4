"""Any diffusers scheduler as a solver: its steps, our loop, our noise."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trueup.denoiser import Denoiser
from trueup.errors import MismatchError, ModelError, TrueupError
from trueup.noise import normal
from trueup.process import EDM, DiscreteVP, Flow
from trueup.sampling.network import Network
from trueup.schedules import schedule
from trueup.trajectory.states import Adjust, States

# What people call them: the class, and what it is set to.
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
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
# These draw noise of their own making, in which an image would depend on the others of its batch.
_OWN_NOISE = ("DPMSolverSDEScheduler", "CosineDPMSolverMultistepScheduler")
_PREDICTION_TYPES = {
    "noise": "epsilon",
    "data": "sample",
    "velocity": "v_prediction",
    "flow": "flow_prediction",
    "edm": "epsilon",
    "edm_velocity": "v_prediction",
}
_LEARNED_VARIANCE = ("DDPMScheduler", "DDPMParallelScheduler")  # those that use a learned variance
# Several evaluations per step, each its own "step": what lies between is no state.
_STAGED = (
    "HeunDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "DPMSolverSinglestepScheduler",
)
_CHANGE = 0.01  # of the noise in a state, to see where it goes
_FIRST_DRAW = -2  # noise key of a scheduler's first draw; -1 is the starting noise


class SchedulerSolver:
    """A diffusers scheduler, by instance. The one given is never changed."""

    adaptive = False

    def __init__(self, scheduler: Any, name: str | None = None):
        for needed in ("set_timesteps", "step", "config"):
            if not hasattr(scheduler, needed):
                raise TrueupError(
                    f"cannot sample with {type(scheduler).__name__}: it is no diffusers scheduler"
                )
        kind = type(scheduler).__name__
        if kind in _OWN_NOISE:
            raise TrueupError(
                f"{kind} draws its own noise, so an image would depend on its batch: use another"
            )
        if "Inverse" in kind:
            raise TrueupError(f"{kind} turns images into noise: use the scheduler it is the inverse of")
        self.scheduler = copy.deepcopy(scheduler)
        self.name = name or kind

    def __repr__(self) -> str:
        config = {k: v for k, v in self.scheduler.config.items() if not k.startswith("_")}
        return f"{type(self.scheduler).__name__}({', '.join(f'{k}={config[k]!r}' for k in sorted(config))})"

    @classmethod
    def named(cls, name: str, denoiser: Denoiser) -> SchedulerSolver:
        """A scheduler by one of `NAMES` or by its class, set up for a denoiser.

        It takes over the config of the scheduler the model came with, clipping and spacing included.
        """
        kind, settings = NAMES.get(name, (name, {}))
        try:
            import diffusers
        except ImportError:
            raise ModelError(f"{name} is a scheduler of diffusers: pip install 'trueup[diffusers]'") from None
        made: Any = getattr(diffusers, kind, None) if kind.endswith("Scheduler") else None
        if not hasattr(made, "from_config"):
            raise TrueupError(unknown(name))
        config = _config(denoiser)
        changes = {**settings, "prediction_type": _PREDICTION_TYPES.get(denoiser.parametrization.name)}
        if kind not in _LEARNED_VARIANCE:
            config.pop("variance_type", None)  # they are handed the mean alone
        if isinstance(denoiser.process, Flow):
            changes["use_dynamic_shifting"] = False  # needs to be told the size of the image
            if not kind.startswith("FlowMatch") and "use_flow_sigmas" in inspect.signature(made).parameters:
                changes |= {"use_flow_sigmas": True, "flow_shift": config.get("shift") or 1.0}
        config |= {k: v for k, v in changes.items() if v is not None}
        config.pop("_use_default_values", None)  # or from_config drops what was a default of the model's own
        try:
            with _Quiet():
                return cls(made.from_config(config), name)
        except (ImportError, TypeError, ValueError, NotImplementedError) as error:
            raise TrueupError(f"{name} cannot be set up for this model: {_line(error)}") from None

    def check(self, denoiser: Denoiser) -> None:
        """Raise unless the scheduler steps through the noise this network was trained on."""
        kind = type(self.scheduler)
        known = inspect.signature(kind).parameters  # from_config keeps what a class does not know, too
        config = {name: value for name, value in dict(self.scheduler.config).items() if name in known}
        process, parametrization = schedule({"_class_name": kind.__name__, **config})
        if parametrization != denoiser.parametrization:
            raise MismatchError(
                f"{self.name} is set up for networks that predict {parametrization.name}, this one predicts "
                f"{denoiser.parametrization.name}"
            )
        if not denoiser.process.agrees_with(process):
            raise MismatchError(
                f"{self.name} steps through {process.kind} noise, or a schedule of it, that is not what the "
                f"network was trained on ({denoiser.process.kind})"
            )

    def evaluations(self, nfe: int) -> int:
        """How many evaluations it makes of the `nfe` it may."""
        return len(self._set(nfe).timesteps)

    def _set(self, nfe: int) -> Any:
        """A scheduler with as many steps as take no more than `nfe` evaluations."""
        reason = ""
        for steps in range(nfe, 0, -1):
            scheduler = copy.deepcopy(self.scheduler)
            try:
                with _Quiet():
                    scheduler.set_timesteps(steps)
            except (ValueError, IndexError, RuntimeError, AssertionError) as error:
                reason = f": {_line(error)}"
                continue
            if len(scheduler.timesteps) <= nfe:
                return scheduler
        raise TrueupError(f"{self.name} cannot sample in {nfe} evaluations{reason}")

    def solve(
        self,
        network: Network,
        x: Tensor,
        nfe: int | None,
        advance: Callable[[int], None],
        *,
        seed: int,
        index: Tensor,
        adjust: Adjust | None = None,
    ) -> Tensor:
        """From standard normal x to samples; image i's noise depends on the seed and on i alone.

        adjust(i, state) may change state i, of those that `states` lists.
        """
        assert nfe is not None
        scheduler = self._set(nfe)
        times = scheduler.timesteps  # kept on the CPU: a scheduler that looks one up must not wait for a GPU
        variance = _uses_learned_variance(scheduler)
        x = x * float(getattr(scheduler, "init_noise_sigma", 1.0))
        noise = _Noise(partial(_noise_of_images, seed, index), len(index))
        for i, (t, at) in enumerate(zip(times, _for_network(times, x), strict=True)):
            output = network(_scaled(scheduler, x, t), at, variance=variance)
            x = self._step(scheduler, noise, output, t, x)
            if adjust is not None:
                x = adjust(i, x)
            advance(1)
        return x

    def _step(self, scheduler: Any, noise: _Noise, output: Tensor, t: Tensor, x: Tensor) -> Tensor:
        try:
            with noise:  # and not around the network, every operation of which it would look at
                stepped: Tensor = scheduler.step(output, t, x, return_dict=False)[0]
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise TrueupError(f"{self.name} cannot be stepped through: {_line(error)}") from None
        return stepped

    def settings(self) -> dict[str, Any]:
        """What tells it apart from other solvers: its class, and of its config what the class knows."""
        kind = type(self.scheduler)
        known = inspect.signature(kind).parameters
        config = {name: value for name, value in self.scheduler.config.items() if name in known}
        return {"kind": kind.__name__, **config}

    def budget(self, nfe: int) -> int:
        """The number of evaluations its steps depend on."""
        return self.evaluations(nfe)

    def states(self, denoiser: Denoiser, nfe: int, whole_times: bool = False) -> States:
        """Where its states lie, found by stepping through it with data that are a single point.

        All that a network can know of such data it knows, and every solver is exact: the states are
        alpha x0 + sigma eps, in whatever scale the scheduler keeps them.
        """
        alpha, stepped, drew = self._probe(denoiser, nfe)
        sigma = stepped.clone()
        times = self._set(nfe).timesteps.double()
        if drew:  # a solver that adds noise: how much there is, the times say
            sigma[:-1] = alpha[:-1] * (-denoiser.process.lam(times[1:])).exp()
        inner = torch.zeros(len(times), dtype=torch.bool)
        if type(self.scheduler).__name__ in _STAGED:
            for i in range(len(times) - 1):  # does a change of state i arrive at the next one, as it should?
                expected = (1 + _CHANGE) * stepped[i + 1]
                found = self._probe(denoiser, nfe, change=i)[1][i + 1]
                inner[i] = bool((found - expected).abs() > 0.1 * _CHANGE * expected.clamp_min(1e-3))
        return States(times, alpha, sigma, inner)

    def _probe(self, denoiser: Denoiser, nfe: int, change: int | None = None) -> tuple[Tensor, Tensor, bool]:
        """alpha and sigma of every state, and whether noise was drawn (here all zero).

        change: the noise in this state is made larger by _CHANGE.
        """
        scheduler, process = self._set(nfe), denoiser.process
        times = scheduler.timesteps
        axes = [1] * len(denoiser.shape)
        alpha, sigma = (f(times.double()).float() for f in (process.alpha, process.sigma))
        x0, eps = torch.tensor([0.5, 0.0]).reshape(-1, *axes), torch.tensor([0.0, 0.5]).reshape(-1, *axes)
        noise = _Noise(lambda draw, shape, device: torch.zeros(2, *shape, device=device), 2)
        x = alpha[0] * x0 + sigma[0] * eps
        levels = []
        for i, t in enumerate(times):
            scale = float(_scaled(scheduler, torch.ones_like(x), t).flatten()[0])
            if i == 0:
                x = x / scale
            elif not torch.allclose(x[0] * scale, alpha[i] * x0[0], rtol=0.02, atol=1e-3):
                raise TrueupError(
                    f"the states of {self.name} are not where its timesteps say: nothing is known of them"
                )
            known = (x * scale - alpha[i] * x0) / sigma[i]
            output = denoiser.parametrization.target(x0, known, alpha[i], sigma[i])
            if _uses_learned_variance(scheduler):
                output = torch.cat([output, torch.zeros_like(output)], 1)
            x = self._step(scheduler, noise, output, t, x)
            if i == change:
                x = torch.cat([x[:1], (1 + _CHANGE) * x[1:]])
            levels.append(x.flatten().double().abs() / 0.5)
        made = torch.stack(levels)
        return made[:, 0], made[:, 1], noise.draws > 0


def _for_network(times: Tensor, x: Tensor) -> Tensor:
    return times.to(x) if times.is_floating_point() else times.to(x.device)


class _Noise(TorchFunctionMode):
    """Inside, `torch.randn` of a whole batch is `noise(draw, shape, device)`, draw by draw."""

    def __init__(self, noise: Callable[[int, tuple[int, ...], torch.device], Tensor], images: int):
        super().__init__()
        self.noise, self.images, self.draws = noise, images, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is not torch.randn:
            return func(*args, **options)
        shape = options.get("size", args[0] if args and not isinstance(args[0], int) else args)
        if not shape or shape[0] != self.images:
            return func(*args, **options)
        device = torch.device(options.get("device") or "cpu")
        noise = self.noise(self.draws, tuple(shape[1:]), device)
        self.draws += 1
        return noise.to(options.get("dtype") or torch.get_default_dtype())


def _noise_of_images(seed: int, index: Tensor, draw: int, shape: tuple[int, ...], device: Any) -> Tensor:
    """Noise that belongs to the images, whatever else is in the batch."""
    return normal(seed, index, _FIRST_DRAW - draw, shape, device)


def _scaled(scheduler: Any, x: Tensor, t: Tensor) -> Tensor:
    """A state as the network is shown it."""
    if not hasattr(scheduler, "scale_model_input"):
        return x
    scaled: Tensor = scheduler.scale_model_input(x, t)
    return scaled


def _uses_learned_variance(scheduler: Any) -> bool:
    kind = str(scheduler.config.get("variance_type"))
    return type(scheduler).__name__ in _LEARNED_VARIANCE and kind.startswith("learned")


class _Quiet:
    """diffusers logs every config key a scheduler does not know; here that is expected."""

    def __enter__(self) -> None:
        import logging

        self.logger = logging.getLogger("diffusers")
        self.level = self.logger.level
        self.logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self.logger.setLevel(self.level)


def unknown(name: str) -> str:
    """What to say of a solver nobody knows."""
    return (
        f"unknown solver {name!r}: use dpm-solver-1, -2 or -3 (with -fixed or -adaptive), the class of a "
        f"diffusers scheduler, or {', '.join(NAMES)}"
    )


def _config(denoiser: Denoiser) -> dict[str, Any]:
    """The scheduler config a network came with, or one that says the same of it."""
    if denoiser.scheduler_config is not None:
        return dict(denoiser.scheduler_config)
    process, kind = denoiser.process, denoiser.parametrization.name
    if isinstance(process, DiscreteVP) and kind in _PREDICTION_TYPES:
        before = torch.cat([torch.ones(1, dtype=torch.float64), process.alphas_cumprod[:-1]])
        betas = (1 - process.alphas_cumprod / before).tolist()
        return {"num_train_timesteps": len(betas), "trained_betas": betas, "clip_sample": False}
    if isinstance(process, Flow) and kind == "flow":
        return {"num_train_timesteps": round(process.time_scale)}
    if isinstance(process, EDM) and kind in ("edm", "edm_velocity"):
        return {
            "sigma_data": process.sigma_data,
            "sigma_min": process.sigma_min,
            "sigma_max": process.sigma_max,
        }
    raise ModelError(
        f"diffusers has no scheduler for a {kind} prediction under {process.kind} noise: use dpm-solver-3"
    )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
