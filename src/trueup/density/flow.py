"""Log-likelihood by the probability flow: the path of an image to the prior, and how it spreads (46 to 49).

In y = x/sqrt(alpha^2 + sigma^2) and lam, with s = sigma/sqrt(alpha^2 + sigma^2), every process and every
parametrization have the same flow, dy/dlam = s (s y - eps_hat), of unit size from data to noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from trueup.denoiser import Denoiser
from trueup.denoiser.memory import out_of_memory
from trueup.density.ode import solve
from trueup.errors import ModelError, TrueupError
from trueup.noise import mix, normals
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
        keys = torch.arange(self.probes) + _PROBE_KEY
        z = normals(self.seed, index, keys, shape, device)
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
        if probes is not None:
            total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
            for i, probe in enumerate(probes):
                (product,) = torch.autograd.grad(
                    output, x, probe.to(output), retain_graph=i + 1 < len(probes)
                )
                total += (product.double() * probe.double()).flatten(1).sum(1)
            return output.detach(), total / len(probes)
        return output.detach(), _trace(output, x)


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


@dataclass
class Traced:
    """What following the flow of a batch gave, (B,) each, in nats."""

    log_density: Tensor  # of y at the least noise
    start_bias: Tensor  # first order: -log p of clean data less that at t_min
    evaluations: Tensor


def follow(
    denoiser: Denoiser,
    y: Tensor,
    labels: Tensor | None,
    probes: Tensor | None,
    tolerance: float,
    advance: Callable[[Tensor], None] | None = None,
) -> Traced:
    """log p of y (B, *shape) at the process's least noise, by its path to the prior."""
    process, shape = denoiser.process, denoiser.shape
    size = math.prod(shape)
    top, bottom = (float(process.lam(t)) for t in (process.t_min, process.t_max))
    seen: dict[str, Tensor] = {}

    def field(flat: Tensor, lam: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        t, scale, share = coordinates(process, lam)
        label = None if labels is None else labels[rows]

        def eps_of(x_t: Tensor) -> Tensor:
            output = denoiser.predict(x_t, t, label)
            if not output.requires_grad:  # what follows would hide it
                return output
            alpha, sigma = process.scales(t, output)
            return denoiser.parametrization.to_eps(output, x_t.to(output), alpha, sigma)

        x_t = as_fed(denoiser, (flat * scale[:, None]).reshape(-1, *shape))
        eps, spread = with_divergence(eps_of, x_t, None if probes is None else probes[:, rows])
        spread = spread.double() * scale  # of eps in y
        slope = share[:, None] * (share[:, None] * flat - eps.flatten(1).double())
        growth = share * (share * size - spread)
        if "eps" not in seen:
            seen["eps"], seen["spread"] = eps.flatten(1).double(), spread
        return slope, growth / size

    solution = solve(field, y.flatten(1).double(), top, bottom, tolerance, advance)
    last = process.t_max
    rho = math.sqrt(float(process.alpha(last)) ** 2 + float(process.sigma(last)) ** 2)
    std = process.prior_std / rho
    at_prior = -0.5 * (solution.x / std).square().sum(1) - size * (
        math.log(std) + 0.5 * math.log(2 * math.pi)
    )
    _, _, share = coordinates(process, torch.tensor([top], dtype=torch.float64))
    # log p_tmin - log p_0, to first order in the noise's variance: the heat equation (49).
    bias = 0.5 * (seen["eps"].square().sum(1) - share.to(seen["spread"]) * seen["spread"])
    return Traced(at_prior + size * solution.extra, bias, solution.evaluations)


def as_fed(denoiser: Denoiser, x_t: Tensor) -> Tensor:
    """In single precision, or double where the network has that."""
    return x_t.to(torch.float64 if denoiser.dtype == torch.float64 else torch.float32)


def coordinates(process: NoiseProcess, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(t, sqrt(alpha^2 + sigma^2), sigma over that) of levels."""
    t = process.t_of_lam(lam).clamp(process.t_min, process.t_max)
    alpha, sigma = process.alpha(t), process.sigma(t)
    scale = (alpha.square() + sigma.square()).sqrt()
    return t, scale.to(lam), (sigma / scale).to(lam)


@contextmanager
def full_precision() -> Any:
    """Without the coarse products that GPUs use by default: an error estimate would be all rounding."""
    backends: Any = torch.backends
    places, name, off = [backends.cuda.matmul, backends.cudnn], "allow_tf32", cast(Any, False)
    if hasattr(backends.cuda.matmul, "fp32_precision"):  # torch 2.9 and later
        places, name, off = [backends.cuda.matmul, backends.cudnn.conv], "fp32_precision", "ieee"
    before = [getattr(place, name) for place in places]
    try:
        for place in places:
            setattr(place, name, off)
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            setattr(place, name, value)


def dequantization_noise(seed: int, index: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Uniform noise in (-1/2, 1/2) that belongs to the sample, (B, *shape)."""
    z = normals(seed, index, torch.tensor([mix(seed) >> 2 | 1]), shape, device)[0]
    return torch.special.ndtr(z.double()) - 0.5
