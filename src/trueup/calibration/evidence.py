"""What was measured about a correction, with its uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from trueup.statistics import Number


@dataclass(eq=False, repr=False)
class Evidence:
    """Losses and gains are in eps space, summed over a sample; a number for every noise level (L,).

    gain is what the correction takes off E|eps_hat - eps|^2 on images it was not fitted on. eta2 is the
    unbiased size of the mean residual, whether or not it is corrected. bound gains are in nats.
    """

    images: int
    folds: int
    dimensions: int
    loss: Number
    eta2: Number
    gain: Number
    shift_se: Tensor  # (L,) standard error of the unshrunk mean residual, as the norm of a map
    scale: Tensor  # (L, bands) share of what was held out that was confirmed and is in the final fit
    bound_gain: Number  # of this correction
    shift_bound_gain: Number  # of the ideal constant shift

    def bits_per_dim(self, nats: float) -> float:
        """Nats per sample as bits per dimension."""
        return nats / (self.dimensions * math.log(2))
