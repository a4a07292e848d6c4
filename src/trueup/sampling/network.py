"""A denoiser as a sampler calls it: labels, guidance, and no more rows at once than memory holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trueup.denoiser import Denoiser
from trueup.errors import ModelError, TrueupError
from trueup.estimate.evaluate import out_of_memory
from trueup.process import DiscreteVP


class Network:
    """`network(x_t, t)` for one batch, guided where asked: null + guidance (conditional - null).

    `evaluations` counts calls, one per x_t whatever the guidance; `at_once` is how many rows fitted into
    memory. `whole_times` says that the network takes whole timesteps only.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        *,
        guidance: float = 1.0,
        null_label: Any = None,
        at_once: int | None = None,
        whole_times: bool = False,
    ):
        self.denoiser = denoiser
        self.process, self.parametrization = denoiser.process, denoiser.parametrization
        self.guidance, self.null_label = guidance, null_label
        self.at_once, self.whole_times = at_once, whole_times
        self.y: Tensor | None = None
        self.evaluations = 0

    def __call__(self, x_t: Tensor, t: Tensor, *, variance: bool = False) -> Tensor:
        """The prediction (B, C, ...) in float32 or finer, with the learned variance's channels if asked for.

        x_t (B, *shape), t (B,) or one for all.
        """
        self.evaluations += 1
        times = t.expand(len(x_t)) if t.ndim == 0 else t
        if self.whole_times:
            times = times.round().to(torch.int64)
        outputs: list[Tensor] = []
        done = 0
        while done < len(x_t):
            size = self.at_once or len(x_t)
            part = slice(done, done + size)
            try:
                outputs.append(self._guided(x_t[part], times[part], part, variance))
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if size == 1:
                    raise ModelError("not enough memory to evaluate the network on a single sample") from None
                self.at_once = (min(size, len(x_t)) + 1) // 2
                continue
            done = part.stop
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _guided(self, x_t: Tensor, t: Tensor, rows: slice, variance: bool) -> Tensor:
        y = None if self.y is None else self.y[rows]
        call = self.denoiser.with_variance if variance else self.denoiser
        try:
            if self.guidance == 1.0 or y is None:
                return _wide(call(x_t, t, y))
            null = torch.as_tensor(self.null_label).to(y).expand_as(y)
            both = _wide(call(torch.cat([x_t, x_t]), torch.cat([t, t]), torch.cat([null, y])))
        except IndexError:
            if y is None:
                raise
            raise TrueupError("the network does not know one of these labels: it has fewer classes") from None
        unconditional, conditional = both.chunk(2)
        guided = unconditional + self.guidance * (conditional - unconditional)
        channels = self.denoiser.shape[0]
        if guided.shape[1] == channels:
            return guided
        return torch.cat([guided[:, :channels], conditional[:, channels:]], 1)  # variances are not guided


def _wide(output: Tensor) -> Tensor:
    """Half precision is for networks; what solvers add up is float32, or float64 where the network is."""
    return output if output.dtype == torch.float64 else output.float()


def takes_whole_times_only(denoiser: Denoiser, y: Tensor | None = None) -> bool:
    """Whether a network tells only whole timesteps apart (an embedding table, a cast), found by trying once.

    >>> table = torch.nn.Embedding(1000, 1)
    >>> net = Denoiser(lambda x_t, t: x_t + table(t.long())[..., None, None], DiscreteVP.linear(), "noise",
    ...                shape=(1, 4, 4))
    >>> takes_whole_times_only(net)
    True
    """
    if denoiser.whole_times is None:
        with denoiser.evaluating(), torch.inference_mode():
            denoiser.whole_times = isinstance(denoiser.process, DiscreteVP) and _rounds(denoiser, y)
    return denoiser.whole_times


def _rounds(denoiser: Denoiser, y: Tensor | None) -> bool:
    middle = denoiser.process.t_max // 2
    x_t = torch.linspace(-1, 1, denoiser.shape[-1], device=denoiser.device).expand(1, *denoiser.shape)
    label = None if y is None else y[:1].to(denoiser.device)

    def at(t: float) -> Tensor:
        return denoiser(x_t, torch.tensor([t], device=denoiser.device), label)

    try:
        between = at(middle + 0.5)
    except (RuntimeError, TypeError, IndexError):  # an embedding table asked for row 499.5
        return True
    return torch.equal(between, at(middle)) or torch.equal(between, at(middle + 1))
