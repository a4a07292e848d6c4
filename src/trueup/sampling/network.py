"""A denoiser as a sampler calls it: with labels, and guided."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trueup.denoiser import Denoiser, in_parts
from trueup.errors import TrueupError


class Network:
    """`network(x_t, t)` for one batch, guided where asked: null + guidance (conditional - null), row by row.

    y: the labels of the batch at hand. `evaluations` counts calls, one per x_t whatever the guidance.
    """

    def __init__(self, denoiser: Denoiser, *, guidance: float = 1.0, y: Tensor | None = None):
        self.denoiser, self.guidance, self.y = denoiser, guidance, y
        self.process, self.parametrization = denoiser.process, denoiser.parametrization
        self.evaluations = 0

    @classmethod
    def of(cls, denoiser: Denoiser, labels: Any = None, guidance: float = 1.0) -> Network:
        """With everything checked; its `y` are the labels to go round in."""
        classes = check_labels(denoiser, labels, guidance)
        if not isinstance(guidance, (int, float)) or not math.isfinite(guidance):
            raise TrueupError(f"guidance is a number, not {guidance!r}")
        if guidance != 1.0 and denoiser.null_label is None:
            raise TrueupError(
                "guidance needs the label that stands for none: give the Denoiser its null_label"
            )
        return cls(denoiser, guidance=guidance, y=None if classes is None else classes.to(denoiser.device))

    def __call__(self, x_t: Tensor, t: Tensor | float, *, variance: bool = False) -> Tensor:
        """The prediction (B, C, ...) in float32 or finer, with the learned variance's channels if asked for.

        x_t (B, *shape), t (B,) or one for all; no more rows at once than the denoiser's batch size.
        """
        self.evaluations += 1
        times = torch.as_tensor(t)

        def work(part: slice) -> Tensor:
            own = times if times.ndim == 0 else times[part]
            return self._guided(x_t[part], own, None if self.y is None else self.y[part], variance)

        parts, _ = in_parts(work, len(x_t), self.denoiser.batch_size)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _guided(self, x_t: Tensor, t: Tensor, y: Tensor | None, variance: bool) -> Tensor:
        predict = self.denoiser.predict
        if self.guidance == 1.0 or y is None:
            return predict(x_t, t, y, variance=variance)
        null = torch.as_tensor(self.denoiser.null_label).to(y).expand_as(y)
        both = predict(
            torch.cat([x_t, x_t]),
            t if t.ndim == 0 else torch.cat([t, t]),
            torch.cat([null, y]),
            variance=variance,
        )
        unconditional, conditional = both.chunk(2)
        guided = unconditional + self.guidance * (conditional - unconditional)
        channels = self.denoiser.shape[0]
        if guided.shape[1] == channels:
            return guided
        return torch.cat([guided[:, :channels], conditional[:, channels:]], 1)  # variances are not guided


def check_labels(denoiser: Denoiser, labels: Any, guidance: float = 1.0) -> Tensor | None:
    """Labels to go round in, or None for a network without."""
    if not denoiser.conditional:
        if labels is not None or guidance != 1.0:
            raise TrueupError(
                "this network takes no labels and cannot be guided; a Denoiser of one that does needs "
                "conditional=True"
            )
        return None
    if labels is None:
        raise TrueupError("this network is conditional: say which labels to sample")
    try:
        values = torch.as_tensor(labels)
    except (TypeError, ValueError):
        raise TrueupError(f"labels are numbers, or a tensor with a row each, not {labels!r}") from None
    values = values.reshape(1) if values.ndim == 0 else values
    if not len(values):
        raise TrueupError("there is no label among the labels")
    return values
