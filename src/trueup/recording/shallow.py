"""The paper's way of recording: a small network that learns the mean output (section 3.5, figure 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trueup.errors import TrueupError
from trueup.parametrization import Parametrization
from trueup.recording.rows import Reader, described, home

_EMBEDDING = 128


class ShallowNetwork:
    """h_phi(t, y): a 3-layer MLP of width 512, trained by Adam towards E[eps_hat] beside the model.

    The baseline that `Recorder` is compared with. As published it regresses the network's output, read as
    noise; `paired`: its residual eps_hat - eps, which has the same mean and far less noise. beta: the weight
    of a time, a function of t (B,); by default all weigh the same.

    >>> from trueup.process import DiscreteVP
    >>> shallow = ShallowNetwork(DiscreteVP.linear(), "noise", shape=(1, 8, 8), width=32)
    >>> eps, t = torch.randn(4, 1, 8, 8), torch.tensor([3, 50, 400, 900])
    >>> shallow.update(eps, t, eps + 0.1, eps)
    >>> shallow.eta(t).shape
    torch.Size([4, 1, 8, 8])
    """

    def __init__(
        self,
        process: Any,
        prediction: Parametrization | str | None = None,
        shape: Sequence[int] = (3, 32, 32),
        *,
        classes: Sequence[int] = (),
        paired: bool = False,
        width: int = 512,
        learning_rate: float = 1e-3,
        beta: Callable[[Tensor], Tensor] | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ):
        self._described = described(process, prediction, shape)
        self._reader = Reader(self._described, classes)
        self.paired, self.beta = paired, beta or torch.ones_like
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = _Network(self._described.shape, len(classes), width)
        self.network.to(home(torch.device(device)))
        self._optimizer = torch.optim.Adam(self.network.parameters(), lr=learning_rate)

    def update(
        self,
        x_t: Tensor,
        t: Tensor | float,
        output: Tensor,
        target: Tensor,
        y: Tensor | None = None,
        index: Tensor | None = None,
    ) -> None:
        """One step of Adam on beta_t |h(t, y) - eps_hat|^2 of a batch; no gradient reaches the model."""
        rows = self._reader.read(x_t, t, output, target, y)
        wanted = rows.eps_hat - rows.eps if self.paired else rows.eps_hat
        weight = (self.beta(rows.t) * rows.used).float()
        with torch.enable_grad(), torch.autocast(x_t.device.type, enabled=False):
            miss = self.network(self._unit(rows.t), rows.position) - wanted.float()
            loss = (weight * miss.flatten(1).square().mean(1)).mean()
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
        self._optimizer.step()

    @torch.no_grad()
    def eta(self, t: Tensor | float, y: Tensor | None = None) -> Tensor:
        """The mean of eps_hat at times t (B,), as it was learned, (B, *shape)."""
        device = next(self.network.parameters()).device
        times = torch.as_tensor(t, dtype=torch.float64).reshape(-1).to(device)
        if (y is None) == bool(self._reader.classes):
            raise TrueupError("labels y go with named classes")
        position = None if y is None else self._reader.position(y, len(times), device)
        return self.network(self._unit(times), position)

    def _unit(self, t: Tensor) -> Tensor:
        """Times from 0 to 1,000, as embeddings have them."""
        process = self._described.process
        return (1000 * (t - process.t_min) / (process.t_max - process.t_min)).float()


class _Network(nn.Module):
    def __init__(self, shape: Sequence[int], classes: int, width: int):
        super().__init__()
        self.shape = tuple(shape)
        self.labels = nn.Embedding(classes, _EMBEDDING) if classes else None
        layers = (nn.Linear(_EMBEDDING, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.layers = nn.Sequential(*layers, nn.Linear(width, math.prod(self.shape)))

    def forward(self, t: Tensor, position: Tensor | None) -> Tensor:
        """t (B,) from 0 to 1,000 and places among the classes (B,) -> (B, *shape)."""
        half = _EMBEDDING // 2
        rates = torch.exp(-math.log(10_000) * torch.arange(half, device=t.device) / half)
        angles = t[:, None] * rates
        embedded = torch.cat([angles.sin(), angles.cos()], 1)  # (B, 128)
        if self.labels is not None:
            embedded = embedded + self.labels(position)
        return self.layers(embedded).unflatten(1, self.shape)
