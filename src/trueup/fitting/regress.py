"""The steps of a solver in closed form: fitted to the fine trajectories, or brought to the data's moments.

Both walk through the solver's own states, step after step, each after those before it were fitted. The last
step is never touched: what the network takes the data to be, at little noise, has no grain that a fit could
add or take away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.fitted import MEMORY, FittedSolver
from trueup.fitting.moments import Moments, channels_at_once, dct_of
from trueup.fitting.teacher import Teacher
from trueup.sampling.network import Network
from trueup.statistics import mean_and_error, threshold

FOLDS = 8
RIDGE = 1e-4  # of each regressor's power: they are nearly one another at small steps
SIGMAS = 1.5  # how sure held-out trajectories must be
_TINY = 1e-300

# All coefficients of parts, (J, n, C, ...), and of what the rule makes of them, (n, C, ...); step; which
# channels these are -> tables (J, C, bands) and offset (C, K)
Step = Callable[[Tensor, Tensor, int, slice], tuple[Tensor, Tensor]]


def fitted(solver: FittedSolver, network: Network, teacher: Teacher) -> FittedSolver:
    """Each step regressed on the fine trajectories, per channel and band (equation 37)."""
    lam = (solver.alpha[:-1] / solver.sigma[:-1]).log()

    def step(parts: Tensor, made: Tensor, i: int, channels: slice) -> tuple[Tensor, Tensor]:
        target = dct_of(solver.bands, teacher.at(float(lam[i + 1]), channels))
        return regression(solver.bands, parts, target - made)

    return _walk(solver, network, teacher.noise, step)


def restored(solver: FittedSolver, network: Network, noise: Tensor, data: Moments) -> FittedSolver:
    """Each state brought to the data's mean and variance at its level (equation 35)."""
    bands = solver.bands

    def step(parts: Tensor, made: Tensor, i: int, channels: slice) -> tuple[Tensor, Tensor]:
        variance = bands.sum_all(made.var(0)) / bands.sizes.to(made)
        alpha, sigma = float(solver.alpha[i + 1]), float(solver.sigma[i + 1])
        goal, wanted = (value[channels].to(made) for value in data.at(alpha, sigma))
        gain = (wanted / variance.clamp_min(1e-12)).sqrt()
        known = alpha**2 * data.variance[channels].to(made) / data.images  # the goal's own noise
        mean = goal + _vouched(bands, _kept(bands, made.mean(0)) - goal, variance / len(made) + known)
        rule = solver.weights[i, : len(parts)].to(made)[:, None, None]
        return (gain - 1) * rule, goal - bands.spread(gain) * mean

    return _walk(solver, network, noise, step)


def _walk(solver: FittedSolver, network: Network, noise: Tensor, step: Step) -> FittedSolver:
    """Through all states but the last, fitting each step before it is taken; as it was if one cannot be."""
    bare = solver
    bands, tables, offset = solver.bands, solver.tables.clone(), solver.offset.clone()
    x = noise * network.process.prior_std
    history: list[Tensor] = []
    with torch.inference_mode(), network.denoiser.evaluating():
        for i, t in enumerate(solver.t[:-1]):
            answer = solver.remembered(i, network(x, t), x, network.parametrization)
            history = [answer, *history][:MEMORY]
            count = channels_at_once(x)
            for start in range(0, x.shape[1], count):
                own = slice(start, start + count)
                parts = torch.stack([dct_of(bands, v[:, own]) for v in (x, *history)])
                made = torch.einsum("j,jnck->nck", solver.weights[i, : len(parts)].to(parts), parts)
                try:
                    table, shift = step(parts, made, i, own)
                except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                    return bare
                if not (torch.isfinite(table).all() and torch.isfinite(shift).all()):  # one ran away
                    return bare
                tables[i, : len(table), own], offset[i, own] = table.cpu(), shift.cpu()
            solver = replace(solver, tables=tables, offset=offset)
            x = solver.step(i, x, history)
    return solver


def regression(bands: Bands, parts: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """What parts explain of a residual, as far as held-out trajectories confirm it.

    Both are given by all their coefficients, (J, n, C, ...) and (n, C, ...).
    """
    n = parts.shape[1]
    fold = torch.randperm(n, generator=torch.Generator().manual_seed(n)) % FOLDS
    member = torch.nn.functional.one_hot(fold, FOLDS).to(parts)  # (n, F)
    r, e = parts - _centre(bands, parts.mean(1, keepdim=True)), residual - _centre(bands, residual.mean(0))

    def by_fold(value: Tensor) -> Tensor:
        return torch.einsum("nf,ncb->fcb", member, bands.sum_all(value))

    gram = torch.stack([torch.stack([by_fold(one * other) for other in r]) for one in r])  # (J, J, F, C, b)
    cross = torch.stack([by_fold(one * e) for one in r])  # (J, F, C, b)
    tables, gains = _solve(gram.sum(2), cross.sum(1)), []
    for f in range(FOLDS):  # fitted without it, scored on it
        w = _solve(gram.sum(2) - gram[:, :, f], cross.sum(1) - cross[:, f])
        gains.append(2 * (w * cross[:, f]).sum(0) - torch.einsum("icb,ijcb,jcb->cb", w, gram[:, :, f], w))
    tables = tables * _confirmed(torch.stack(gains).cpu(), member.sum(0).cpu()).to(tables)
    left = residual - (bands.spread_all(tables).flatten(2)[:, None] * parts).sum(0)
    noise = bands.sum_all(left.var(0)) / bands.sizes.to(left) / n
    return tables, _vouched(bands, _kept(bands, left.mean(0)), noise)


def _kept(bands: Bands, mean: Tensor) -> Tensor:
    return bands.keep(mean.unflatten(-1, bands.spatial))


def _centre(bands: Bands, mean: Tensor) -> Tensor:
    """Means as far as a constant can take them off; elsewhere 0."""
    return bands.fill(_kept(bands, mean)).flatten(-len(bands.spatial))


def _vouched(bands: Bands, mean: Tensor, noise: Tensor) -> Tensor:
    """Of a mean (C, K) as much as its size, in units of its noise (C, bands), vouches for; equation 38."""
    sizes = bands.kept.to(mean).clamp_min(1)
    surprise = bands.sum(mean.square()) / sizes / noise.clamp_min(_TINY)
    excess = (surprise - 1 - SIGMAS * (2 / sizes).sqrt()).clamp_min(0.0)
    return bands.spread(excess / (1 + excess)) * mean


def _solve(gram: Tensor, cross: Tensor) -> Tensor:
    """Ridge regression of every channel and band, (J, J, C, b) and (J, C, b) -> (J, C, b)."""
    scale = gram.diagonal(dim1=0, dim2=1).movedim(-1, 0).clamp_min(_TINY).sqrt()  # (J, C, b)
    matrix = (gram / (scale[:, None] * scale[None])).movedim((0, 1), (-2, -1))
    matrix = matrix + RIDGE * torch.eye(len(cross), dtype=gram.dtype, device=gram.device)
    return (
        torch.linalg.solve(matrix, (cross / scale).movedim(0, -1)[..., None])[..., 0].movedim(-1, 0) / scale
    )


def _confirmed(gains: Tensor, rows: Tensor) -> Tensor:
    """How much of a fit held-out trajectories confirm, (C, bands); equation 39."""
    mean, error = mean_and_error(gains, rows)
    # What fold f gains from g and g from f is partly one number seen twice: the 2.
    surprise = threshold(SIGMAS, FOLDS) * 2**0.5 * error / mean.clamp_min(_TINY)
    return torch.where(mean > 0, (1 - surprise.square()).clamp_min(0.0), torch.zeros_like(mean))
