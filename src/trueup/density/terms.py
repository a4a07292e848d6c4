"""The terms of a likelihood bound, each a closed form: prior, steps, decoder (equations 40 to 45).

Everything is in nats, one number per sample, float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def prior(x0: Tensor, alpha: float, sigma: float, prior_std: float) -> Tensor:
    """KL(q(x_T | x0) || N(0, prior_std^2)), equation 41.

    >>> prior(torch.zeros(1, 1, 2, 2), alpha=0.0, sigma=1.0, prior_std=1.0).tolist()
    [0.0]
    """
    ratio = (sigma / prior_std) ** 2
    mean2 = x0.double().square().flatten(1).sum(1) * (alpha / prior_std) ** 2
    return 0.5 * (mean2 + x0[0].numel() * (ratio - 1 - math.log(ratio)))


def step_weight(lam_s: Tensor, lam_t: Tensor) -> Tensor:
    """What E|eps_hat - eps|^2 at t counts in the KL of the step to s, with the posterior's variance (42)."""
    return 0.5 * torch.expm1(2 * (lam_s - lam_t))


def step(squared: Tensor, lam_s: Tensor, lam_t: Tensor, log_ratio: Tensor) -> Tensor:
    """KL(q(x_s | x_t, x0) || p(x_s | x_t)), equation 43, of |eps_hat - eps|^2 and log(variance/posterior's).

    Both (B, dimensions), summed over the latter; a posterior variance (log_ratio = 0) is equation 42.
    """
    weight = step_weight(lam_s, lam_t)
    terms = 0.5 * (log_ratio + torch.expm1(-log_ratio)) + weight[:, None] * squared * (-log_ratio).exp()
    return terms.sum(1)


def flat_decoder(dimensions: int, alpha: float, sigma: float) -> float:
    """-E log N(x0; x_t/alpha, (sigma/alpha)^2): data with a density, read off the least noisy x_t (44)."""
    return 0.5 * dimensions * (math.log(2 * math.pi) + 1 + 2 * math.log(sigma / alpha))


def discrete_decoder(
    x0: Tensor, mean: Tensor, std: Tensor | float, data_range: tuple[float, float]
) -> Tensor:
    """-log of the mass that N(mean, std^2) puts on each value's bin, as in DDPM (equation 45), (B,).

    x0 is 8-bit data in `data_range`; the outer bins reach to infinity.

    >>> x0 = torch.full((1, 1, 1, 1), 1 / 255, dtype=torch.float64)
    >>> all_values = torch.linspace(-1, 1, 256, dtype=torch.float64).reshape(-1, 1, 1, 1)
    >>> nats = discrete_decoder(all_values, x0.expand(256, 1, 1, 1), 0.3, (-1.0, 1.0))
    >>> round(float((-nats).exp().sum()), 12)
    1.0
    """
    low, high = data_range
    half = 0.5 * (high - low) / 255
    x0, mean = x0.double(), mean.double()
    upper = ((x0 + half - mean) / std).masked_fill(x0 > high - half, math.inf)
    lower = ((x0 - half - mean) / std).masked_fill(x0 < low + half, -math.inf)
    # Mirrored to the side where both tails are small numbers rather than near one: nothing cancels.
    right = lower + upper > 0
    a, b = torch.where(right, -upper, lower), torch.where(right, -lower, upper)  # a < b
    larger, smaller = torch.special.log_ndtr(b), torch.special.log_ndtr(a)
    mass = larger + torch.log1p(-(smaller - larger).exp().clamp_max(1 - 2.0**-53))
    return -mass.flatten(1).sum(1)
