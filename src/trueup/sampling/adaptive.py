"""DPM-Solver with steps as long as a tolerance allows, for every image on its own.

As published (Lu et al. 2022, appendix C), but for two things. That takes one step for the whole batch, as
short as its worst image needs; here each image has its own, and what it becomes does not depend on its
neighbours. And a step is at most twice the one before: two orders can agree by chance, upon which the
published rule leaps to the end (Gaussian data then came out with 1.6 times its standard deviation).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.errors import ModelError
from trueup.process import NoiseProcess
from trueup.sampling.network import Network
from trueup.sampling.steps import Levels, Weights, eps_weights, first_order, midpoint, network_times, taylor

_FIRST_STEP = 0.05  # in lam
_SAFETY = 0.9
_GROWTH = 2.0  # of a step, at most
_CLOSE = 1e-5  # in lam: the end is reached
_MOST = 10_000  # steps; a network that needs more is not a denoiser


def solve(network: Network, x: Tensor, order: int, end: Tensor, atol: float, rtol: float) -> Tensor:
    """From x at the process's last time to lam = end."""
    process, axes = network.process, [1] * (x.ndim - 1)
    x = x.clone()
    before = x.clone()  # the lower order's result of the step before: errors are relative to it
    rows = torch.arange(len(x))  # images not yet done
    lam = process.lam(torch.full((len(x),), process.t_max, dtype=torch.float64))
    h = torch.full_like(lam, _FIRST_STEP)
    labels = network.y
    for _ in range(_MOST):
        shares = torch.linspace(0, 1, order + 1, dtype=torch.float64)
        points = [_levels(process, lam + share * h, axes) for share in shares]
        on = rows.to(x.device)
        network.y = None if labels is None else labels[on]
        lower, higher = _both(network, x[on], points)
        scale = torch.maximum(lower.abs(), before[on].abs()).mul_(rtol).clamp_min_(atol)
        error = ((higher - lower) / scale).flatten(1).square().mean(1).sqrt().double().cpu()
        if not torch.isfinite(error).all():
            raise ModelError("the network returned values that are not finite along the path")
        kept = error <= 1
        accepted = kept.to(x.device)
        x[on[accepted]], before[on[accepted]] = higher[accepted], lower[accepted]
        lam = torch.where(kept, lam + h, lam)
        growth = (_SAFETY * error.clamp_min(1e-12) ** (-1 / order)).clamp_max(_GROWTH)
        h = torch.minimum(h * growth, end - lam)
        going = end - lam > _CLOSE
        rows, lam, h = rows[going], lam[going], h[going]
        if not len(rows):
            network.y = labels
            return x
    raise ModelError(f"the adaptive solver did not end in {_MOST} steps: raise atol and rtol")


def _both(network: Network, x: Tensor, points: list[Levels]) -> tuple[Tensor, Tensor]:
    """A step with one order less and with the full order, from the same evaluations."""
    eps = [_eps(network, x, points[0])]

    def value(w: Weights) -> Tensor:
        on_x, on_first, on_latest = (part.to(x) for part in w)
        return x * on_x + eps[0] * on_first + eps[-1] * on_latest

    eps.append(_eps(network, value(first_order(points[0], points[1])), points[1]))
    if len(points) == 3:
        s, m, t = points
        return value(first_order(s, t)), value(midpoint(s, m, t))
    s, m1, m2, t = points
    lower = value(midpoint(s, m1, t))
    eps.append(_eps(network, value(taylor(s, m1, m2)), m2))
    return lower, value(taylor(s, m2, t))


def _eps(network: Network, x: Tensor, level: Levels) -> Tensor:
    output = network(x, network_times(network.process, level.t).flatten().to(x))
    on_output, on_x = eps_weights(network.parametrization, level)
    return output * on_output.to(x) + x * on_x.to(x)


def _levels(process: NoiseProcess, lam: Tensor, axes: list[int]) -> Levels:
    t = process.t_of_lam(lam)
    return Levels(*(v.reshape(-1, *axes) for v in (t, process.log_alpha(t), lam)))
