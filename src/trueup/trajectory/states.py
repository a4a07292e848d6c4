"""The states of a sampler: what it holds after every step, the last being the sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Adjust = Callable[[int, Tensor], Tensor]  # (i, state i) -> what to go on with


@dataclass(frozen=True)
class States:
    """State i is alpha[i] x0 + sigma[i] eps, if nothing went wrong; t[i] is where the step to it began."""

    t: Tensor  # (S,)
    alpha: Tensor  # (S,) in the sampler's own scale
    sigma: Tensor  # (S,)

    def __len__(self) -> int:
        return len(self.t)
