"""Log-likelihood by the probability flow: the path of an image to the prior, and how it spreads (46 to 49).

In y = x/sqrt(alpha^2 + sigma^2) and lam, with s = sigma/sqrt(alpha^2 + sigma^2), every process and every
parametrization have the same flow, dy/dlam = s (s y - eps_hat), of unit size from data to noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.denoiser import Denoiser
from trueup.denoiser.memory import out_of_memory
from trueup.density.ode import solve
from trueup.errors import ModelError, TrueupError
from trueup.noise import normals
from trueup.process import NoiseProcess

TRACES = ("rademacher", "gaussian", "exact")
_PROBE_KEY = 0x70726F6265
_BASIS = 64  # rows of a Jacobian at once


@dataclass(frozen=True)
class Divergence:
    """How the divergence is found: Hutchinson's estimator with `probes` probes of a kind, or exactly."""

    kind: str = "rademacher"
    probes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in TRACES:
            raise TrueupError(f"trace is one of {', '.join(TRACES)}, not {self.kind!r}")
        if self.probes < 1:
            raise TrueupError(f"the trace needs at least one probe, not {self.probes}")
        if self.kind == "exact" and self.probes > 1:
            raise TrueupError("an exact trace has no probes")

    def vectors(self, index: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
        """Each sample's probes, (probes, B, *shape); they stay the same along its path."""
        if self.kind == "exact":
            return None
        z = normals(self.seed, index, torch.arange(self.probes) + _PROBE_KEY, shape, device)
        return z.sign() + (z == 0) if self.kind == "rademacher" else z


def with_divergence(
    function: Callable[[Tensor], Tensor], x: Tensor, probes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """function(x) (B, ...) and the trace of its Jacobian in each row, (B,), by probes or exactly (48)."""
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        output = function(x)
        if not output.requires_grad:
            raise ModelError("this network cannot be differentiated in its input: use the bound")
        if probes is None:
            return output.detach(), _trace(output, x)
        total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        for left, probe in zip(reversed(range(len(probes))), probes, strict=True):
            (product,) = torch.autograd.grad(output, x, probe.to(output), retain_graph=left > 0)
            total += (product.double() * probe.double()).flatten(1).sum(1)
        return output.detach(), total / len(probes)


def _trace(output: Tensor, x: Tensor) -> Tensor:
    """Trace of d output / d x in each row, one backward pass per entry: at once where the operations can."""
    size = x[0].numel()
    trace = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    try:
        for start in range(0, size, _BASIS):
            which = torch.arange(start, min(start + _BASIS, size), device=x.device)
            basis = torch.nn.functional.one_hot(which, size).to(output).reshape(-1, 1, *x.shape[1:])
            wide = basis.expand(-1, *x.shape)
            (rows,) = torch.autograd.grad(output, x, wide, retain_graph=True, is_grads_batched=True)
            trace += (rows * basis).flatten(2).sum(2).double().sum(0)
    except RuntimeError as error:  # group norm in channels-last order, for one
        if out_of_memory(error):
            raise
        trace.zero_()
        for entry, column in enumerate(output.flatten(1).unbind(1)):
            (row,) = torch.autograd.grad(column.sum(), x, retain_graph=True)
            trace += row.flatten(1)[:, entry].double()
    return trace


def follow(
    denoiser: Denoiser,
    y: Tensor,
    labels: Tensor | None,
    probes: Tensor | None,
    tolerance: float,
    advance: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """log p of y (B, *shape) at the process's least noise in nats, (B,), by its path to the prior.

    With it the bias of starting there (first order: -log p of clean data less that at t_min), and the
    evaluations it took.
    """
    process, shape, size = denoiser.process, denoiser.shape, math.prod(denoiser.shape)
    ends = process.lam(torch.tensor([process.t_min, process.t_max], dtype=torch.float64))
    seen: list[Tensor] = []

    def field(flat: Tensor, lam: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        t, scale, share = coordinates(process, lam)
        label = None if labels is None else labels[rows]

        def eps_of(x_t: Tensor) -> Tensor:
            output = denoiser.predict(x_t, t, label)
            if not output.requires_grad:  # what follows would hide it
                return output
            return denoiser.parametrization.to_eps(output, x_t.to(output), *process.scales(t, output))

        x_t = as_fed(denoiser, (flat * scale[:, None]).reshape(-1, *shape))
        eps, spread = with_divergence(eps_of, x_t, None if probes is None else probes[:, rows])
        eps, spread = eps.flatten(1).double(), spread * scale  # of eps in y
        if not seen:
            # log p_tmin - log p_0, to first order in the noise's variance: the heat equation (49).
            seen.append(0.5 * (eps.square().sum(1) - share * spread))
        return share[:, None] * (share[:, None] * flat - eps), share * (share * size - spread) / size

    top, bottom = ends.tolist()
    x, extra, evaluations = solve(field, y.flatten(1).double(), top, bottom, tolerance, advance)
    std = process.prior_std / float(coordinates(process, ends)[1][1])
    at_prior = -0.5 * ((x / std).square().sum(1) + size * math.log(2 * math.pi * std**2))
    return at_prior + size * extra, seen[0], evaluations


def as_fed(denoiser: Denoiser, x_t: Tensor) -> Tensor:
    """In single precision, or double where the network has that."""
    return x_t.to(torch.float64 if denoiser.dtype == torch.float64 else torch.float32)


def coordinates(process: NoiseProcess, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(t, sqrt(alpha^2 + sigma^2), sigma over that) of levels."""
    t = process.t_of_lam(lam).clamp(process.t_min, process.t_max)
    alpha, sigma = process.alpha(t), process.sigma(t)
    scale = (alpha.square() + sigma.square()).sqrt()
    return t, scale.to(lam), (sigma / scale).to(lam)
