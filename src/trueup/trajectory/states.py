"""The states of a sampler: what it holds after every step, the last being the sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Adjust = Callable[[int, Tensor], Tensor]  # (i, state i) -> what to go on with


@dataclass(frozen=True)
class States:
    """State i is alpha[i] x0 + sigma[i] eps, if nothing went wrong; t[i] is where the step to it began.

    A scheduler of several stages per step shows inner states, from which it does not go on: they are no
    samples of x_t, and are left alone.
    """

    t: Tensor  # (S,)
    alpha: Tensor  # (S,) in the sampler's own scale
    sigma: Tensor  # (S,)
    inner: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))  # (S,) within a step

    def __post_init__(self) -> None:
        if len(self.inner) != len(self.t):
            object.__setattr__(self, "inner", torch.zeros(len(self.t), dtype=torch.bool))

    def __len__(self) -> int:
        return len(self.t)
