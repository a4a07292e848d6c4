"""What the network predicts. Nothing else in the library knows.

Every parametrization in use is linear in data and noise, target = p x0 + q eps (equation 5 of
docs/math.md), so two coefficients say everything: how to build the target, how to read eps and x0
out of an output, what the best constant shift is and what it gains.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from trueup.errors import ModelError

NAMES = ("noise", "data", "velocity", "score", "flow", "reversed_flow", "edm", "edm_velocity")


@dataclass(frozen=True)
class Parametrization:
    """One of `NAMES`; `edm` is the raw network inside EDM's preconditioner, `edm_velocity` its negative.

    `flow` is eps - x0, `reversed_flow` is x0 - eps, as in code whose time runs from noise to data.

    >>> alpha, sigma = torch.tensor(0.8), torch.tensor(0.6)
    >>> x0, eps = torch.tensor(1.0), torch.tensor(-0.5)
    >>> velocity = Parametrization("velocity")
    >>> output = velocity.target(x0, eps, alpha, sigma)
    >>> x_t = alpha * x0 + sigma * eps
    >>> [round(float(v), 6) for v in (velocity.to_x0(output, x_t, alpha, sigma),
    ...                               velocity.to_eps(output, x_t, alpha, sigma))]
    [1.0, -0.5]
    """

    name: str
    sigma_data: float | None = None

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ModelError(f"unknown prediction {self.name!r}; choose from {', '.join(NAMES)}")
        if self.name.startswith("edm") != (self.sigma_data is not None):
            raise ModelError(
                "sigma_data belongs to the edm parametrizations, and they need it: "
                'Parametrization("edm", sigma_data=0.5), say'
            )
        if self.sigma_data is not None and not 0 < self.sigma_data < math.inf:
            raise ModelError(f"sigma_data must be positive, got {self.sigma_data}")

    def coefficients(self, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """(p, q) of target = p x0 + q eps, equation 5."""
        one, zero = torch.ones_like(alpha), torch.zeros_like(alpha)
        if self.name == "noise":
            return zero, one
        if self.name == "data":
            return one, zero
        if self.name == "velocity":
            return -sigma, alpha
        if self.name == "score":
            return zero, -1.0 / sigma
        sign = -1.0 if self.name in ("reversed_flow", "edm_velocity") else 1.0
        if self.sigma_data is None:  # a flow
            return -sign * one, sign * one
        return sign * sigma / self.sigma_data, -sign * self.sigma_data * alpha  # equation 11

    def target(self, x0: Tensor, eps: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """What an ideal network is trained towards, equation 5."""
        p, q = self.coefficients(alpha, sigma)
        return p * x0 + q * eps

    def to_eps(self, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """The noise an output claims, equation 6."""
        p, q = self.coefficients(alpha, sigma)
        return (alpha * output - p * x_t) / (alpha * q - sigma * p)

    def to_x0(self, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """The data an output claims, equation 7."""
        p, q = self.coefficients(alpha, sigma)
        return (q * x_t - sigma * output) / (alpha * q - sigma * p)

    def from_eps(self, eps: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """The output that claims this noise."""
        return self.target((x_t - sigma * eps) / alpha, eps, alpha, sigma)

    def from_x0(self, x0: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """The output that claims this data."""
        return self.target(x0, (x_t - alpha * x0) / sigma, alpha, sigma)

    def deps_doutput(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """How far eps moves per unit of output, equation 8."""
        p, q = self.coefficients(alpha, sigma)
        return alpha / (alpha * q - sigma * p)

    def dsm_weight(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """w of the denoising score matching loss, w/2 E|output - target|^2 (paper, appendix B)."""
        return (self.deps_doutput(alpha, sigma) / sigma) ** 2

    def optimal_shift(self, mean_output: Tensor, mean_x0: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """The constant to subtract from the output, E[output] - p E[x0], equation 9."""
        return mean_output - self.coefficients(alpha, sigma)[0] * mean_x0

    def dsm_gap(self, shift: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """What subtracting the optimal shift takes off the DSM loss, w/2 |shift|^2, equation 10."""
        return 0.5 * self.dsm_weight(alpha, sigma) * shift.square().sum()

    def turned(self) -> Parametrization:
        """That of a flow with its sign turned, as some pipelines do before their scheduler is told."""
        if self.name not in ("flow", "reversed_flow"):
            problem = f"its pipeline turns the sign of a {self.name} prediction"
            raise ModelError(f"{problem}, which has no name here")
        return Parametrization("reversed_flow" if self.name == "flow" else "flow")

    def settings(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: value for name, value in asdict(self).items() if value is not None}
