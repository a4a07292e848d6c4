"""The many-step limit of a network from given noise: what few steps should arrive at, and pass through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.errors import ModelError
from trueup.noise import normal
from trueup.sampling.draw import STARTING_NOISE
from trueup.sampling.fitted import at_times, follow
from trueup.sampling.network import Network
from trueup.sampling.rules import Grid, Rule

INTERVALS = 32
FINE = Rule("fine", "eps", 3)
_ENOUGH = 96  # intervals that resolve whatever few steps do not
_FEWEST = 5  # evaluations of a fine solver
_ON_DEVICE = 2**30  # bytes of states that stay where the network is
MOST = 1e6  # beyond all data: what is fitted to it could not be kept


def intervals_for(most: int) -> int:
    """Of a fine solver that so many steps are compared with: it must not be what is far from the limit."""
    return max(INTERVALS, 2 * most, min(4 * most, _ENOUGH))


def deal(network: Network, count: int, seed: int) -> None:
    """Make it the network of trajectories 0 to count, labels from all over the list however it is sorted.

    Ranks that work together all follow them, and share the evaluations.
    """
    network.seed, network.index, network.shared = seed, torch.arange(count), True
    if network.y is not None:
        order = torch.randperm(len(network.y), generator=torch.Generator().manual_seed(seed))
        network.y = network.y[order[network.index % len(order)]]


class NoLimit(ModelError):
    """There is no fine trajectory to learn from."""


@dataclass(eq=False, repr=False)
class Teacher:
    """Fine trajectories from the noise of a seed."""

    noise: Tensor  # (n, *shape)
    lam: Tensor  # (M,) rising
    states: list[Tensor]  # (n, *shape) each, at lam, in the process's own scale; many are kept on the CPU
    samples: Tensor  # (n, *shape)

    @classmethod
    def of(
        cls,
        network: Network,
        seed: int,
        *,
        intervals: int = INTERVALS,
        keep: bool = True,
        finer_than: int = 0,
    ) -> Teacher:
        """The limits of the network's batch; keep: with the states on the way; finer_than: so many levels."""
        denoiser, index = network.denoiser, network.index
        assert index is not None
        noise = normal(seed, index, STARTING_NOISE, denoiser.shape, denoiser.device)
        t = Grid().times(denoiser.process, intervals + 1)
        if denoiser.takes_whole_times_only(network.y):  # where they lie far apart, several levels are one
            t = denoiser.process.snap(t).unique().flip(0)
        if len(t) < _FEWEST:
            raise NoLimit("the network knows too few timesteps for a fine solver")
        solver = at_times(denoiser, FINE, t, FINE.name)
        if solver.nfe <= finer_than:
            known = f"the network knows whole timesteps alone, and its fine solver has {solver.nfe} of them"
            raise NoLimit(f"{known}: choose fewer evaluations, not {finer_than}")
        states = [noise * network.process.prior_std]
        keeping: Callable[[int, Tensor], Tensor] | None = None
        if keep:
            home = _home(noise, solver.nfe)
            states[0] = states[0].to(home)

            def keeping(i: int, x: Tensor) -> Tensor:
                states.append(x.to(home))
                return x

        samples = follow(solver, network, noise, keeping)
        if not samples.abs().max() <= MOST:  # nan is not
            problem = "the network diverges even in small steps, so there is no limit to fit a solver to"
            raise NoLimit(problem, "check its range, prediction and schedule with `trueup check`")
        return cls(noise, network.process.lam(solver.t), states[:-1] if keep else [], samples)

    def check_varied(self, shown: Tensor) -> None:
        """Raise if samples, as they are shown, are all alike: no error can be told from another."""
        if not shown.std() > 0:
            problem = "all samples of this network look the same, so that nothing can be fitted to them"
            raise ModelError(problem, "check its range, prediction and schedule with `trueup check`")

    def to(self, device: torch.device) -> Teacher:
        """On another device."""
        noise = self.noise.to(device)
        states = [x.to(_home(noise, len(self.states))) for x in self.states]
        return Teacher(noise, self.lam, states, self.samples.to(device))

    def rows(self, part: slice) -> Teacher:
        """Some of the trajectories."""
        return Teacher(self.noise[part], self.lam, [x[part] for x in self.states], self.samples[part])

    def at(self, lam: float, channels: slice = slice(None)) -> Tensor:
        """The states at a level, by a cubic in lam through the four next to it; of some channels."""
        first = int(torch.searchsorted(self.lam, lam)) - 2
        first = max(0, min(first, len(self.lam) - 4))
        nodes = self.lam[first : first + 4].tolist()
        made = torch.zeros_like(self.noise[:, channels])
        for j, node in enumerate(nodes):
            weight = 1.0
            for other in nodes[:j] + nodes[j + 1 :]:
                weight *= (lam - other) / (node - other)
            made.add_(self.states[first + j][:, channels].to(made.device), alpha=weight)
        return made


def _home(noise: Tensor, count: int) -> torch.device:
    """Where so many states are kept."""
    return noise.device if count * noise.nbytes <= _ON_DEVICE else torch.device("cpu")
