"""A small batch of trajectories through a sampler's states, looked at or changed on the way."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from trueup.denoiser import Denoiser
from trueup.errors import ModelError, TrueupError
from trueup.noise import normal
from trueup.sampling.draw import STARTING_NOISE, Solver, count_evaluations, draw, network_for
from trueup.sampling.network import Network
from trueup.trajectory.fitting import Miss, StateMoments, Target, measure
from trueup.trajectory.maps import Trajectory
from trueup.trajectory.marginals import Marginals
from trueup.trajectory.states import Adjust, States

TRAJECTORIES = 128
FEWEST = 16


class Walk:
    """A batch of trajectories, all at the same state."""

    def __init__(
        self,
        solver: Solver,
        nfe: int,
        network: Network,
        states: States,
        marginals: Marginals,
        count: int,
        progress: bool | None,
    ):
        self.solver, self.nfe, self.network = solver, nfe, network
        self.states, self.marginals = states, marginals
        denoiser = network.denoiser
        self.index = torch.arange(count)
        self.evaluations = count_evaluations(solver, nfe, denoiser, network.y) or 0
        self.show = sys.stderr.isatty() if progress is None else progress

    def target(self, i: int) -> Target:
        """The moments state i should have."""
        alpha, sigma = float(self.states.alpha[i]), float(self.states.sigma[i])
        mean, variance = self.marginals.at(alpha, sigma)
        return Target(
            mean, variance, *self.marginals.errors_at(alpha), sigma**2 / variance, i == len(self.states) - 1
        )

    def misses(self, seed: int, description: str, adjust: Trajectory | None = None) -> list[Miss]:
        """The miss of every state, of trajectories with the noise of a seed, as they are or adjusted."""
        found: list[Miss] = []

        def look(i: int, x: Tensor) -> Tensor:
            x = x if adjust is None else adjust(i, x)
            fitted = None if adjust is None else adjust.fitted(i)
            found.append(measure(self.moments(i, x), self.target(i), fitted))
            return x

        self.go(seed, description, look)
        return found

    def moments(self, i: int, x: Tensor) -> StateMoments:
        """The moments state i has."""
        if not torch.isfinite(x).all():
            raise ModelError(f"state {i + 1} has values that are not finite: use more evaluations")
        return StateMoments.of(self.marginals.bands, x.to(self.noise.device), self.noise, self.target(i).mean)

    def go(self, seed: int, description: str, adjust: Adjust) -> None:
        """Take all trajectories from noise to samples."""
        denoiser = self.network.denoiser
        start = normal(seed, self.index, STARTING_NOISE, denoiser.shape, denoiser.device)
        if denoiser.device.type == "mps":  # which has no float64
            start = start.cpu()
        self.noise = self.marginals.bands.dct(start.double()).flatten(2)  # (n, C, K)
        total = self.evaluations * len(self.index)
        with (
            denoiser.evaluating(),
            tqdm(total=total, desc=description, unit="eval", disable=not self.show, file=sys.stderr) as bar,
        ):

            def advance(evaluations: int) -> None:
                bar.update(evaluations * len(self.index))

            draw(self.solver, self.network, self.index, seed, self.nfe, advance, adjust)


def network_and_states(
    denoiser: Denoiser,
    solver: Solver,
    nfe: int,
    *,
    trajectories: int = TRAJECTORIES,
    labels: Any = None,
    guidance: float = 1.0,
    null_label: Any = None,
    batch_size: int | None = None,
) -> tuple[Network, States]:
    """A network ready to sample so many trajectories, and the states it will go through; or what is wrong."""
    if not isinstance(trajectories, int) or isinstance(trajectories, bool) or trajectories < FEWEST:
        raise TrueupError(f"moments need {FEWEST} trajectories or more, not {trajectories!r}")
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise TrueupError(f"batch_size is a whole number of at least 1, not {batch_size!r}")
    if solver.adaptive:
        raise TrueupError(
            f"{solver.name} chooses its own steps: trajectories are of a fixed number of evaluations"
        )
    network = network_for(denoiser, solver, nfe, labels, guidance, null_label, batch_size)
    if network.y is not None:
        count = len(network.y)
        turn = torch.arange(trajectories)  # every label as often, or labels from everywhere
        network.y = network.y[turn % count if count <= trajectories else turn * count // trajectories]
    return network, solver.states(denoiser, nfe, network.whole_times)
