"""Any diffusers scheduler as a solver: its steps, our loop, our noise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trueup.denoiser import Denoiser
from trueup.errors import MismatchError, TrueupError
from trueup.files import line
from trueup.hf import schedulers as hf
from trueup.hf.schedules import scheduler_settings
from trueup.noise import normal
from trueup.sampling.network import Network
from trueup.sampling.solver import Solver, register
from trueup.solvers import SCHEDULERS

_FIRST_DRAW = -2  # noise key of a scheduler's first draw; -1 is the starting noise


class SchedulerSolver(Solver):
    """A diffusers scheduler, by instance. The one given is never changed.

    exact: the network is told the very times the scheduler has, as in diffusers' own loops; else times within
    the range it was trained on, of the same noise, and its answers are translated for the scheduler.
    """

    name = ""  # what it was asked for by, or its class
    adaptive = False

    def __init__(self, scheduler: Any, name: str | None = None, *, exact: bool = True):
        hf.check_scheduler(scheduler)
        self.scheduler, self.exact = copy.deepcopy(scheduler), exact
        self.name = name or type(scheduler).__name__
        self.process, self.parametrization = hf.scheduler_process(scheduler)

    @classmethod
    def named(cls, name: str, denoiser: Denoiser) -> SchedulerSolver:
        """A scheduler by its name or its class, set up for a denoiser."""
        scheduler, own = hf.make_scheduler(name, denoiser)
        made = cls(scheduler, name, exact=own)
        made.exact = own and made.parametrization == denoiser.parametrization  # not all take every prediction
        return made

    def __repr__(self) -> str:
        config = {k: v for k, v in self.scheduler.config.items() if not k.startswith("_")}
        if (fitted := getattr(self.scheduler, "identity", None)) is not None:  # a scheduler of ours
            config["fitted"] = fitted
        return f"{type(self.scheduler).__name__}({', '.join(f'{k}={config[k]!r}' for k in sorted(config))})"

    def check(self, denoiser: Denoiser) -> None:
        """Raise unless the scheduler was made for a network like this, or is translated for it."""
        if not self.exact:
            return
        ours, theirs = self.parametrization, denoiser.parametrization
        if ours != theirs:
            made_for = f"networks that predict {ours.name}, this one predicts {theirs.name}"
            raise MismatchError(f"{self.name} is set up for {made_for}")
        if not denoiser.process.agrees_with(self.process):
            trained_on = f"not what the network was trained on ({denoiser.process.kind})"
            steps = f"steps through {self.process.kind} noise, or a schedule of it"
            raise MismatchError(f"{self.name} {steps}, that is {trained_on}")

    def evaluations(self, nfe: int | None, denoiser: Denoiser | None = None, y: Any = None) -> int:
        """How many evaluations it makes of the `nfe` it may."""
        assert nfe is not None
        return len(self._set(nfe).timesteps)

    def _set(self, nfe: int) -> Any:
        """A scheduler with as many steps as take no more than `nfe` evaluations."""
        reason, steps = "", nfe
        while steps > 0:
            scheduler = copy.deepcopy(self.scheduler)
            try:
                with hf.quiet():
                    scheduler.set_timesteps(steps)
            except (ValueError, IndexError, RuntimeError, AssertionError) as error:
                reason, made = f": {line(error)}", 0
            else:
                made = len(scheduler.timesteps)
                if made <= nfe and torch.isfinite(torch.as_tensor(scheduler.timesteps)).all():
                    return scheduler
                if made <= nfe:
                    reason = ": its times are not finite"
                    break
            steps = min(steps - 1, steps * nfe // made + 1 if made else steps)  # as evaluations go with steps
        raise TrueupError(f"{self.name} cannot sample in {nfe} evaluations{reason}")

    def solve(self, network: Network, noise: Tensor, nfe: int | None) -> Tensor:
        """From standard normal noise to samples; image i's noise depends on the seed and on i alone."""
        assert nfe is not None
        scheduler = self._set(nfe)
        # Times are kept on the CPU: a scheduler that looks one up must not wait for a GPU.
        views = self._views(network.denoiser, scheduler.timesteps, noise)
        variance = _uses_learned_variance(scheduler)
        x = noise * float(getattr(scheduler, "init_noise_sigma", 1.0))
        index = torch.arange(len(x)) if network.index is None else network.index

        def noise_of_images(draw: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
            return normal(network.seed, index, _FIRST_DRAW - draw, shape, device)

        drawn = _Noise(noise_of_images, len(index))
        for t, view in zip(scheduler.timesteps, views, strict=True):
            output = view.seen(network, _scaled(scheduler, x, t), variance)
            x = self._step(scheduler, drawn, output, t, x)
        return x

    def _views(self, denoiser: Denoiser, times: Tensor, like: Tensor) -> Iterator[_View]:
        """How the network sees the state at each of the scheduler's times.

        At the same lam another process shows the same state in another scale, and has another time for it.
        """
        own, scheduled = denoiser.process, self.process
        agree, same = own.agrees_with(scheduled), denoiser.parametrization == self.parametrization
        told = times if agree else own.t_of_lam(scheduled.lam(times))
        if told.is_floating_point() and not (self.exact and same):
            told = told.clamp(own.t_min, own.t_max)
        at = told.to(like) if told.is_floating_point() else told.to(like.device)
        if agree and same:
            yield from (_View(t) for t in at)
            return
        alpha, sigma = own.alpha(told), own.sigma(told)
        wanted = scheduled.alpha(times), scheduled.sigma(times)
        scale = torch.where(alpha > sigma, alpha / wanted[0], sigma / wanted[1])  # one of them may be zero
        p, q = denoiser.parametrization.coefficients(alpha, sigma)
        p_wanted, q_wanted = self.parametrization.coefficients(*wanted)
        # From output = p x0 + q eps and x_t = alpha x0 + sigma eps to p' x0 + q' eps.
        determinant = alpha * q - sigma * p
        on_output = (q_wanted * alpha - p_wanted * sigma) / determinant
        on_x = (p_wanted * q - q_wanted * p) / determinant
        for t, *weights in zip(at, scale.tolist(), on_output.tolist(), on_x.tolist(), strict=True):
            yield _View(t, *weights)

    def _step(self, scheduler: Any, noise: _Noise, output: Tensor, t: Tensor, x: Tensor) -> Tensor:
        try:
            with noise:  # and not around the network, every operation of which it would look at
                return scheduler.step(output, t, x, return_dict=False)[0]
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise TrueupError(f"{self.name} cannot be stepped through: {line(error)}") from None

    def settings(self) -> dict[str, Any]:
        """What tells it apart from other solvers: its class, and of its config what the class knows."""
        return scheduler_settings(self.scheduler)


class _View(NamedTuple):
    """What a network is told, and how its answer becomes what a scheduler wants, as weights."""

    t: Tensor
    scale: float = 1.0
    on_output: float = 1.0
    on_x: float = 0.0

    def seen(self, network: Network, x: Tensor, variance: bool) -> Tensor:
        """What the scheduler is handed."""
        if self[1:] == (1.0, 1.0, 0.0):
            return network(x, self.t, variance=variance)
        x_t, channels = x * self.scale, x.shape[1]
        output = network(x_t, self.t, variance=variance)
        mean = self.on_output * output[:, :channels] + self.on_x * x_t
        return torch.cat([mean, output[:, channels:]], 1)  # which may be none


class _Noise(TorchFunctionMode):
    """Inside, `torch.randn` of a whole batch is `noise(draw, shape, device)`, draw by draw."""

    def __init__(self, noise: Callable[[int, tuple[int, ...], torch.device], Tensor], images: int):
        super().__init__()
        self.noise, self.images, self.draws = noise, images, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        shape = options.get("size", args[0] if args and not isinstance(args[0], int) else args)
        if func is not torch.randn or not shape or shape[0] != self.images:
            return func(*args, **options)
        device = torch.device(options.get("device") or "cpu")
        noise = self.noise(self.draws, tuple(shape[1:]), device)
        self.draws += 1
        return noise.to(options.get("dtype") or torch.get_default_dtype())


def _scaled(scheduler: Any, x: Tensor, t: Tensor) -> Tensor:
    """A state as the network is shown it."""
    return scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x


def _uses_learned_variance(scheduler: Any) -> bool:
    kind = str(scheduler.config.get("variance_type"))
    return type(scheduler).__name__ in hf.LEARNED_VARIANCE and kind.startswith("learned")


for _name in SCHEDULERS:
    register(_name, partial(SchedulerSolver.named, _name), offered=partial(hf.offered, _name))
