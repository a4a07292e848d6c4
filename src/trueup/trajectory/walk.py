"""A small batch of trajectories through a sampler's states, looked at or changed on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trueup.calibration import States, Trajectory
from trueup.calibration.trajectory import Adjust
from trueup.denoiser import Denoiser
from trueup.errors import ModelError, TrueupError
from trueup.noise import normal
from trueup.progress import Progress
from trueup.sampling.draw import STARTING_NOISE, count_evaluations, draw, network_for
from trueup.sampling.solver import Solver
from trueup.trajectory.fitting import Miss, StateMoments, Target, measure
from trueup.trajectory.marginals import Marginals

TRAJECTORIES = 128
FEWEST = 16


class Walk:
    """A batch of trajectories, all at the same state."""

    def __init__(
        self,
        denoiser: Denoiser,
        solver: Solver,
        nfe: int,
        marginals: Marginals,
        *,
        trajectories: int = TRAJECTORIES,
        labels: Any = None,
        guidance: float = 1.0,
        progress: bool | None = None,
    ):
        if not isinstance(trajectories, int) or isinstance(trajectories, bool) or trajectories < FEWEST:
            raise TrueupError(f"moments need {FEWEST} trajectories or more, not {trajectories!r}")
        if solver.adaptive:
            fixed = "trajectories are of a fixed number of evaluations"
            raise TrueupError(f"{solver.name} chooses its own steps: {fixed}")
        self.denoiser, self.solver, self.nfe = denoiser, solver, nfe
        self.marginals, self.progress = marginals, progress
        self.network = network_for(denoiser, labels, guidance)
        self.index = torch.arange(trajectories)
        y = self.network.y
        if y is not None:  # every label as often, or labels from everywhere
            count = len(y)
            y = y[self.index % count if count <= trajectories else self.index * count // trajectories]
            self.network.y = y
        self.evaluations = count_evaluations(solver, nfe, denoiser, y) or 0
        self.states: States = solver.states(denoiser, nfe, y)

    def target(self, i: int) -> Target:
        """The moments state i should have."""
        alpha, sigma = float(self.states.alpha[i]), float(self.states.sigma[i])
        mean, variance = self.marginals.at(alpha, sigma)
        errors, last = self.marginals.errors_at(alpha), i == len(self.states) - 1
        return Target(mean, variance, *errors, sigma**2 / variance, last)

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
        denoiser = self.denoiser
        start = normal(seed, self.index, STARTING_NOISE, denoiser.shape, denoiser.device)
        if denoiser.device.type == "mps":  # which has no float64
            start = start.cpu()
        self.noise = self.marginals.bands.dct(start.double()).flatten(2)  # (n, C, K)
        with Progress(self.evaluations * len(self.index), description, show=self.progress) as bar:
            self.network.seed, self.network.index, self.network.advance = seed, self.index, bar.update
            draw(self.solver, self.network, self.nfe, adjust)
