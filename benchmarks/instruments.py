"""The paper's theory as instruments: the martingale of theorem 1, its concentration bounds, conservativeness.

With M_t = alpha_t · score_t(x_t), theorem 1 says E[M_s | x_t] = M_t for s < t along the reverse process of an
ideal network. In eps space M_t = -exp(lam_t) · E[eps | x_t]: no process or parametrization is special.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trueup.denoiser import Denoiser
from trueup.density.flow import as_fed, with_divergence
from trueup.errors import TrueupError
from trueup.hf import as_denoiser
from trueup.noise import normals
from trueup.statistics import Number

_REVERSE_KEY = 0x72657665727365
_PATH_KEY = 0x70617468


def martingale(denoiser: Denoiser, x_t: Tensor, t: Tensor | float, y: Tensor | None = None) -> Tensor:
    """M_t = alpha_t · score at x_t, (B, *shape), float64."""
    times = torch.as_tensor(t, dtype=torch.float64).expand(len(x_t))
    eps = _eps(denoiser, x_t, times, y).double()
    alpha, sigma = denoiser.process.scales(times, eps)
    return -alpha / sigma * eps


@dataclass
class MartingaleCheck:
    """|E[M_s | x_t] - M_t|^2 and what to compare it with, one of each per start, (B,).

    `gap` is unbiased (it may be below zero), `gap_error` its standard error; `size` is |M_t|^2. `share` is
    the total gap in units of the total size, with a 95% interval over starts.
    """

    gap: Tensor
    gap_error: Tensor
    size: Tensor

    @property
    def share(self) -> Number:
        """How far from a martingale: 0 is one, 1 is as far off as M itself."""
        return Number.mean(self.gap).scaled(1 / float(self.size.mean()))


@torch.no_grad()
def martingale_check(
    model: Any,
    x0: Tensor,
    s: float,
    t: float,
    *,
    draws: int = 64,
    steps: int = 50,
    y: Tensor | None = None,
    seed: int = 0,
) -> MartingaleCheck:
    """Theorem 1 by Monte Carlo: from each x_t of clean samples x0 (B, *shape), `draws` reverse paths to s.

    The reverse process is the network's own, in `steps` ancestral steps even in lam: for an exact denoiser
    the gap is zero up to the error of finite steps; a network's says how far its scores at t are from the
    mean of those it finds at s.
    """
    denoiser = as_denoiser(model)
    process = denoiser.process
    if not process.t_min <= s < t <= process.t_max:
        raise TrueupError(
            f"needs {process.t_min:g} <= s < t <= {process.t_max:g}, not s = {s:g} and t = {t:g}"
        )
    if draws < 4 or steps < 1:
        raise TrueupError("needs at least 4 draws and 1 step")
    if not isinstance(x0, Tensor) or tuple(x0.shape[1:]) != denoiser.shape:
        raise TrueupError(f"x0 is a tensor of clean samples, (count, {', '.join(map(str, denoiser.shape))})")
    index = torch.arange(len(x0))
    keys = torch.arange(draws * steps + 1) + _REVERSE_KEY
    noise = normals(seed, index, keys[:1], denoiser.shape, denoiser.device)[0]
    x_t = process.noised(x0.to(denoiser.device), noise.to(x0), t)
    with denoiser.evaluating():
        start = martingale(denoiser, x_t, t, y).flatten(1)  # (B, D)
        # |mean of draws - start|^2 without the noise of the mean: half against half of independent draws.
        ends = []
        for draw in range(draws):
            x_s = reverse(denoiser, x_t, s, t, steps, seed, index, keys[1 + draw * steps :], y)
            ends.append(martingale(denoiser, x_s, s, y).flatten(1) - start)
    gaps = torch.stack(ends, 1)  # (B, draws, D)
    gram = gaps @ gaps.transpose(1, 2)  # (B, draws, draws)
    off = gram * ~torch.eye(draws, dtype=torch.bool, device=gram.device)
    gap = off.sum((1, 2)) / (draws * (draws - 1))
    # Leaving out each draw in turn: the standard error of a mean of products.
    left_out = (off.sum((1, 2))[:, None] - 2 * off.sum(2)) / ((draws - 1) * (draws - 2))
    error = ((draws - 1) / draws * (left_out - left_out.mean(1, keepdim=True)).square().sum(1)).sqrt()
    return MartingaleCheck(gap.cpu(), error.cpu(), start.square().sum(1).cpu())


def reverse(
    denoiser: Denoiser,
    x_t: Tensor,
    s: float,
    t: float,
    steps: int,
    seed: int,
    index: Tensor,
    keys: Tensor,
    y: Tensor | None = None,
) -> Tensor:
    """One path of the network's reverse process from t to s: each step's posterior, given its own x0_hat."""
    process = denoiser.process
    lam = torch.linspace(float(process.lam(t)), float(process.lam(s)), steps + 1, dtype=torch.float64)
    times = process.t_of_lam(lam)
    times[0], times[-1] = t, s
    x = x_t.double()
    for i in range(steps):
        alpha_t, alpha_s = float(process.alpha(times[i])), float(process.alpha(times[i + 1]))
        sigma_t, sigma_s = float(process.sigma(times[i])), float(process.sigma(times[i + 1]))
        eps = _eps(denoiser, x, times[i], y).double()
        x0 = (x - sigma_t * eps) / alpha_t
        kept = (sigma_s * alpha_t / (alpha_s * sigma_t)) ** 2  # exp(-2 h) of the noise stays
        noise = normals(seed, index, keys[i : i + 1], denoiser.shape, denoiser.device)[0].double()
        x = alpha_s * x0 + sigma_s * (math.sqrt(kept) * eps + math.sqrt(1 - kept) * noise)
    return x


@dataclass
class Paths:
    """M along paths of noised data, read in reverse: values (L, N, D) at falling times t (L,)."""

    t: Tensor
    values: Tensor

    def azuma(self, distance: Tensor) -> tuple[Tensor, Tensor]:
        """(observed, bound) of P(|M_0 - M_T| >= distance) per entry (appendix A.3).

        The bound needs increments that never exceed a range. Gaussian noise has none, so the ranges are those
        observed: a figure to look at, and no guarantee.
        """
        ends = (self.values[-1] - self.values[0]).abs().flatten()
        increments = self.values.diff(dim=0)
        ranges = increments.amax(1) - increments.amin(1)  # (L - 1, D)
        total = ranges.square().sum(0).amax()
        observed = (ends[:, None] >= distance).double().mean(0)
        return observed, (2 * (-2 * distance.square() / total).exp()).clamp_max(1.0)

    def doob(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """(observed, bound) of P(sup_t M_t >= level) per entry (appendix A.3)."""
        highest = self.values.amax(0).flatten()
        observed = (highest[:, None] >= level).double().mean(0)
        positive = self.values[-1].clamp_min(0).mean()
        return observed, (positive / level).clamp_max(1.0)


@torch.no_grad()
def paths(model: Any, x0: Tensor, t: Tensor, *, y: Tensor | None = None, seed: int = 0) -> Paths:
    """M of a network along one noised path of every sample of x0 (N, *shape), at times t.

    Paths of noised data are those of the ideal reverse process, so this needs no sampler.
    """
    denoiser = as_denoiser(model)
    process = denoiser.process
    rising = torch.unique(torch.as_tensor(t, dtype=torch.float64))
    if len(rising) < 2 or rising[0] < process.t_min or rising[-1] > process.t_max:
        raise TrueupError(f"paths need at least two times between {process.t_min:g} and {process.t_max:g}")
    index, keys = torch.arange(len(x0)), torch.arange(len(rising)) + _PATH_KEY
    x = x0.to(denoiser.device).double()
    values = []
    alpha, sigma = 1.0, 0.0
    with denoiser.evaluating():
        for i, time in enumerate(rising):
            noise = normals(seed, index, keys[i : i + 1], denoiser.shape, denoiser.device)[0].double()
            next_alpha, next_sigma = float(process.alpha(time)), float(process.sigma(time))
            ratio = next_alpha / alpha
            x = ratio * x + math.sqrt(max(0.0, next_sigma**2 - ratio**2 * sigma**2)) * noise
            alpha, sigma = next_alpha, next_sigma
            values.append(martingale(denoiser, x, time, y).flatten(1).cpu())
    return Paths(rising.flip(0), torch.stack(values[::-1]))


def jacobian(model: Any, x_t: Tensor, t: float, y: Tensor | None = None) -> Tensor:
    """d eps_hat / d x_t of one sample x_t (*shape), (D, D)."""
    denoiser = as_denoiser(model)
    with denoiser.evaluating():
        rows: Tensor = torch.autograd.functional.jacobian(
            lambda x: _eps(denoiser, x[None], t, y)[0], x_t.to(denoiser.device)
        )
    size = x_t.numel()
    return rows.reshape(size, size).double()


def asymmetry(matrix: Tensor) -> float:
    """|J - J'| / |J|: zero for the Jacobian of a conservative field, a gradient.

    >>> asymmetry(torch.tensor([[1.0, 2.0], [2.0, 5.0]]))
    0.0
    """
    return float((matrix - matrix.T).norm() / matrix.norm())


def trace_gradient(model: Any, x_t: Tensor, t: float, y: Tensor | None = None) -> Tensor:
    """Gradient in x_t (*shape) of the trace of d eps_hat / d x_t: the third order term of appendix A.4."""
    denoiser = as_denoiser(model)
    # Attention's fast kernels have no second derivative.
    with denoiser.evaluating(), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        x = x_t.to(denoiser.device)[None].detach().requires_grad_(True)
        eps = _eps(denoiser, x, t, y)
        trace = torch.zeros((), dtype=eps.dtype, device=eps.device)
        for i in range(x_t.numel()):
            (row,) = torch.autograd.grad(eps.flatten()[i], x, create_graph=True)
            trace = trace + row.flatten()[i]
        (gradient,) = torch.autograd.grad(trace, x)
    return gradient[0].double()


def divergence(model: Any, x_t: Tensor, t: Tensor | float, y: Tensor | None = None) -> Tensor:
    """Trace of d eps_hat / d x_t of every row, exactly, (B,)."""
    denoiser = as_denoiser(model)
    with denoiser.evaluating():
        return with_divergence(lambda x: _eps(denoiser, x, t, y), x_t.to(denoiser.device), None)[1]


def _eps(denoiser: Denoiser, x_t: Tensor, t: Tensor | float, y: Tensor | None) -> Tensor:
    """The noise a network finds, in float32 or finer, on its device."""
    return denoiser.eps(as_fed(denoiser, x_t.to(denoiser.device)), t, y)
