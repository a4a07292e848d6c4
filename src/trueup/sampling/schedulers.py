"""Any diffusers scheduler as a solver: its steps, our loop, our noise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trueup.calibration.trajectory import Adjust, States
from trueup.denoiser import Denoiser
from trueup.errors import MismatchError, TrueupError
from trueup.files import line
from trueup.hf import schedulers as hf
from trueup.hf.schedules import scheduler_settings
from trueup.noise import normal
from trueup.sampling.network import Network
from trueup.sampling.solver import Solver, register
from trueup.solvers import SCHEDULERS

# Several evaluations per step, each its own "step": what lies between is no state.
_STAGED = ("Heun", "KDPM2", "DPMSolverSinglestep")  # in the name of the class
_CHANGE = 0.01  # of the noise in a state, to see where it goes
_FIRST_DRAW = -2  # noise key of a scheduler's first draw; -1 is the starting noise


class SchedulerSolver(Solver):
    """A diffusers scheduler, by instance. The one given is never changed.

    exact: the network is told the very times the scheduler has, as in diffusers' own loops; else times within
    the range it was trained on.
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
        return cls(scheduler, name, exact=own)

    def __repr__(self) -> str:
        config = {k: v for k, v in self.scheduler.config.items() if not k.startswith("_")}
        return f"{type(self.scheduler).__name__}({', '.join(f'{k}={config[k]!r}' for k in sorted(config))})"

    def check(self, denoiser: Denoiser) -> None:
        """Raise unless the scheduler was made for a network like this."""
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

    def solve(self, network: Network, noise: Tensor, nfe: int | None, adjust: Adjust | None = None) -> Tensor:
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
        for i, (t, view) in enumerate(zip(scheduler.timesteps, views, strict=True)):
            output = view.seen(network, _scaled(scheduler, x, t), variance)
            x = self._step(scheduler, drawn, output, t, x)
            x = x if adjust is None else adjust(i, x)
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

    def budget(self, nfe: int) -> int:
        """The evaluations it makes: diffusers counts in steps."""
        return self.evaluations(nfe)

    def states(self, denoiser: Denoiser, nfe: int, y: Any = None) -> States:
        """Where its states lie, found by stepping through it with data that are a single point.

        All that a network can know of such data it knows, and every solver is exact: the states are
        alpha x0 + sigma eps, in whatever scale the scheduler keeps them.
        """
        alpha, stepped, drew = self._probe(denoiser, nfe)
        sigma = stepped.clone()
        times = self._set(nfe).timesteps.double()
        if drew:  # a solver that adds noise: how much there is, the times say
            sigma[:-1] = alpha[:-1] * (-self.process.lam(times[1:])).exp()
        inner = torch.zeros(len(times), dtype=torch.bool)
        if any(kind in type(self.scheduler).__name__ for kind in _STAGED):
            for i in range(len(times) - 1):  # does a change of state i arrive at the next one, as it should?
                expected = (1 + _CHANGE) * stepped[i + 1]
                found = self._probe(denoiser, nfe, change=i)[1][i + 1]
                inner[i] = bool((found - expected).abs() > 0.1 * _CHANGE * expected.clamp_min(1e-3))
        return States(times, alpha, sigma, inner)

    def _probe(self, denoiser: Denoiser, nfe: int, change: int | None = None) -> tuple[Tensor, Tensor, bool]:
        """alpha and sigma of all states, noise in one larger by _CHANGE; and if any was drawn (all zero)."""
        scheduler = self._set(nfe)
        times = scheduler.timesteps
        alpha, sigma = (f(times.double()).float() for f in (self.process.alpha, self.process.sigma))
        x0, eps = 0.5 * torch.eye(2).reshape(2, 2, *[1] * len(denoiser.shape))
        noise = _Noise(lambda draw, shape, device: torch.zeros(2, *shape, device=device), 2)
        x = alpha[0] * x0 + sigma[0] * eps
        levels = []
        for i, t in enumerate(times):
            scale = float(_scaled(scheduler, torch.ones_like(x), t).flatten()[0])
            if i == 0:
                x = x / scale
            elif not torch.allclose(x[0] * scale, alpha[i] * x0[0], rtol=0.02, atol=1e-3):
                where = "not where its timesteps say: nothing is known of them"
                raise TrueupError(f"the states of {self.name} are {where}")
            known = (x * scale - alpha[i] * x0) / sigma[i]
            output = self.parametrization.target(x0, known, alpha[i], sigma[i])
            if _uses_learned_variance(scheduler):
                output = torch.cat([output, torch.zeros_like(output)], 1)
            x = self._step(scheduler, noise, output, t, x)
            if i == change:
                x = torch.cat([x[:1], (1 + _CHANGE) * x[1:]])
            levels.append(x.flatten().double().abs() / 0.5)
        made = torch.stack(levels)
        return made[:, 0], made[:, 1], noise.draws > 0


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
