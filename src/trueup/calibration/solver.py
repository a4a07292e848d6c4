"""A solver fitted to a model: where it asks the network, and what it makes of the answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.parametrization import Parametrization


@dataclass(eq=False, repr=False)
class FittedSolver:
    """x_(i+1) = w_x x_i + w_0 h_i + w_1 h_(i-1) + w_2 h_(i-2), weights by channel and band, and a map."""

    nfe: int
    t: Tensor  # (N,) what the network is told
    alpha: Tensor  # (N + 1,) of the states; the last is the sample, 1
    sigma: Tensor  # (N + 1,)
    history: str  # what is remembered, "eps" or "x0"
    weights: Tensor  # (N, 4) of the rule it started from
    bands: Bands
    tables: Tensor  # (N, 4, C, bands) what is added to them
    offset: Tensor  # (N, C, K) in the DCT
    guidance: float = 1.0
    gains: str = "none"
    evidence: dict[str, float] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ready: dict[Any, Any] = {}

    def remembered(self, i: int, output: Tensor, x: Tensor, parametrization: Parametrization) -> Tensor:
        """What the network said at level i, as eps or x0."""
        alpha, sigma = self.alpha[i], self.sigma[i]
        p, q = parametrization.coefficients(alpha, sigma)
        bottom = alpha * q - sigma * p
        if self.history == "eps":
            on_output, on_x = alpha / bottom, -p / bottom
        else:
            on_output, on_x = -sigma / bottom, q / bottom
        if float(on_x) == 0.0:
            return output * float(on_output)
        return torch.add(output * float(on_output), x, alpha=float(on_x))

    def step(self, i: int, x: Tensor, history: list[Tensor]) -> Tensor:
        """State i + 1 from state i and what was remembered, the latest first."""
        w = self.weights[i].tolist()
        made = x * w[0]
        for weight, h in zip(w[1:], history, strict=False):
            if weight:
                made = made.add_(h, alpha=weight)
        tables, offset = self._on(i, x)
        if tables is None:
            return made
        parts = torch.stack([x, *history])  # (J, B, C, *spatial)
        z = (self.bands.dct(parts) * tables[: len(parts), None]).sum(0)
        return made + self.bands.idct(z + offset)

    def _on(self, i: int, x: Tensor) -> tuple[Tensor | None, Tensor]:
        key = (i, x.device, x.dtype)
        if key not in self._ready:
            with torch.inference_mode(False):
                spatial = self.bands.spatial
                offset = self.offset[i].to(x).reshape(-1, *spatial)
                tables = None
                if self.tables[i].any() or self.offset[i].any():
                    tables = self.bands.spread(self.tables[i]).to(x).reshape(4, -1, *spatial)
                self._ready[key] = tables, offset
        return self._ready[key]
