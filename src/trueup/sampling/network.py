"""A denoiser as a sampler calls it: with labels, and guided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trueup import distributed
from trueup.denoiser import Denoiser, in_parts


class Network:
    """`network(x_t, t)` for one batch, guided where asked: null + guidance (conditional - null), row by row.

    y: the labels of the batch at hand. seed and index: whose images these are, for noise that a solver adds
    (see `trueup.noise.normal`). `evaluations` counts calls; `advance(rows)` is told of each. shared: ranks
    that work together all make the same calls, and each evaluates some of the batches.
    """

    def __init__(self, denoiser: Denoiser, *, guidance: float = 1.0, y: Tensor | None = None):
        self.denoiser, self.guidance, self.y = denoiser, guidance, y
        self.process, self.parametrization = denoiser.process, denoiser.parametrization
        self.evaluations, self.seed, self.shared = 0, 0, False
        self.index: Tensor | None = None  # by default images 0, 1, ..
        self.advance: Callable[[int], Any] = lambda rows: None
        if distributed.size() > 1:
            told = {"batch size": denoiser.batch_size, "guidance": guidance}
            distributed.agree({**denoiser.identity(), **told})

    def __call__(self, x_t: Tensor, t: Tensor | float, *, variance: bool = False) -> Tensor:
        """The prediction (B, C, ...) in float32 or finer, with the learned variance's channels if asked for.

        x_t (B, *shape), t (B,) or one for all; as many rows at once as the denoiser's batch size, each
        of them twice where guided.
        """
        self.evaluations += 1
        times = torch.as_tensor(t)

        def work(part: slice) -> Tensor:
            own = times if times.ndim == 0 else times[part]
            return self._guided(x_t[part], own, None if self.y is None else self.y[part], variance)

        size = self.denoiser.batch_size
        if self.shared and distributed.size() > 1 and len(x_t) > size:
            batches = [slice(first, first + size) for first in range(0, len(x_t), size)]
            dealt = distributed.dealt(batches, lambda part: work(part).cpu())
            parts = [made.to(x_t.device) for _, made in dealt]
        else:  # of one batch there is nothing to share: all ranks evaluate it
            parts, _ = in_parts(work, len(x_t), size)
        self.advance(len(x_t))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _guided(self, x_t: Tensor, t: Tensor, y: Tensor | None, variance: bool) -> Tensor:
        predict = self.denoiser.predict
        if self.guidance == 1.0 or y is None:
            return predict(x_t, t, y, variance=variance)
        said = self.denoiser.vocabulary
        null = torch.as_tensor(self.denoiser.null_label).expand_as(y) if said is None else said.nulls(y)
        null = null.to(y)
        times, labels = t if t.ndim == 0 else torch.cat([t, t]), torch.cat([null, y])
        both = predict(torch.cat([x_t, x_t]), times, labels, variance=variance)
        unconditional, conditional = both.chunk(2)
        guided = unconditional + self.guidance * (conditional - unconditional)
        channels = self.denoiser.shape[0]
        if guided.shape[1] > channels:
            guided[:, channels:] = conditional[:, channels:]  # variances are not guided
        return guided
