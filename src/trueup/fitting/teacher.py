"""The many-step limit of a network from given noise: what few steps should arrive at, and pass through."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.calibration.solver import FittedSolver
from trueup.denoiser import Denoiser
from trueup.errors import ModelError
from trueup.noise import normal
from trueup.sampling.draw import STARTING_NOISE
from trueup.sampling.network import Network
from trueup.sampling.rules import MEMORY, Grid, Rule
from trueup.sampling.steps import Levels

INTERVALS = 64
FINE = Rule("fine", "eps", 3)


def plan(denoiser: Denoiser, rule: Rule, grid: Grid, nfe: int, whole: bool = False) -> FittedSolver | None:
    """A rule on a grid, nothing fitted yet; None where whole timesteps coincide."""
    process = denoiser.process
    t = grid.times(process, nfe)
    if whole:
        t = process.snap(t)
    if not (t.diff() < 0).all():
        return None
    return on_times(denoiser, rule, t, f"{rule.name}, {grid.name}")


def on_times(denoiser: Denoiser, rule: Rule, t: Tensor, name: str) -> FittedSolver:
    levels, nfe = Levels.at(denoiser.process, t), len(t)
    alpha = torch.cat([levels.log_alpha.exp(), torch.ones(1, dtype=torch.float64)])
    sigma = torch.cat([levels.sigma, torch.zeros(1, dtype=torch.float64)])
    bands, channels = Bands(denoiser.shape[1:]), denoiser.shape[0]
    tables = torch.zeros(nfe, 1 + MEMORY, channels, bands.count, dtype=torch.float64)
    offset = torch.zeros(nfe, channels, bands.index.numel(), dtype=torch.float64)
    how = {"base": name}
    told = t.clamp(denoiser.process.t_min, denoiser.process.t_max)
    return FittedSolver(nfe, told, alpha, sigma, rule.history, rule.weights(levels), bands, tables, offset, 1.0, how)


@torch.inference_mode()
def follow(solver: FittedSolver, network: Network, noise: Tensor, look=None) -> Tensor:
    """From standard normal noise to samples; look(i, state i) may change states 1 .. N."""
    x = noise * network.process.prior_std
    history: list[Tensor] = []
    with network.denoiser.evaluating():
        for i, t in enumerate(solver.t.tolist()):
            output = network(x, t)
            history.insert(0, solver.remembered(i, output, x, network.parametrization))
            del history[MEMORY:]
            x = solver.step(i, x, history)
            if look is not None:
                x = look(i + 1, x)
    return x


@dataclass(eq=False)
class Teacher:
    """Fine trajectories from the noise of a seed."""

    noise: Tensor  # (n, *shape)
    lam: Tensor  # (M,) rising
    states: list[Tensor]  # (n, *shape) each, at lam, in the process's own scale
    samples: Tensor

    @classmethod
    def of(cls, network: Network, index: Tensor, seed: int, intervals: int = INTERVALS, keep: bool = True) -> Teacher:
        denoiser = network.denoiser
        noise = normal(seed, index, STARTING_NOISE, denoiser.shape, denoiser.device)
        whole = denoiser.takes_whole_times_only(network.y)
        solver = None
        while solver is None:
            solver = plan(denoiser, FINE, Grid(), intervals + 1, whole)
            intervals -= 1 if solver is None else 0
        states = [noise * network.process.prior_std]

        def look(i: int, x: Tensor) -> Tensor:
            if keep:
                states.append(x.clone())
            return x

        samples = follow(solver, network, noise, look)
        if not torch.isfinite(samples).all():
            raise ModelError("the network diverges in a fine solver: nothing can be fitted to it")
        return cls(noise, network.process.lam(solver.t), states[:-1] if keep else [], samples)

    def at(self, lam: float) -> Tensor:
        """The states at a level, by a cubic through the four next to it."""
        first = int(torch.searchsorted(self.lam, lam)) - 2
        first = max(0, min(first, len(self.lam) - 4))
        nodes = self.lam[first : first + 4].tolist()
        made = torch.zeros_like(self.noise)
        for j, node in enumerate(nodes):
            w = 1.0
            for other in nodes[:j] + nodes[j + 1 :]:
                w *= (lam - other) / (node - other)
            made.add_(self.states[first + j], alpha=w)
        return made
