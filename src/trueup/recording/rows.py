"""What a training loop has at hand, x_t, t, output and target, read as noise, and put to a noise level.

A row was drawn at a time of its own, and is counted at the level nearest in lam. Its residual, output and u =
x_t/sigma are those of its own time: what is uncorrelated at every time is so in their sum, and an ideal
network stays ideal (docs/math.md, recording).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trueup.denoiser import Denoiser, prediction
from trueup.errors import DataError, ModelError, TrueupError
from trueup.files import line
from trueup.hf.loading import config_of
from trueup.hf.schedules import PREDICTIONS, schedule
from trueup.parametrization import Parametrization
from trueup.process import NoiseProcess

_SLACK = 0.1  # of the range of times: who draws further out means another process
_COLUMNS = ("level", "share", "of_output", "of_input", "of_u", "to_x0")


def described(process: Any, prediction: Parametrization | str | None, shape: Sequence[int]) -> Denoiser:
    """What is known of a network that is still being trained; its own call is not among it.

    process: a `NoiseProcess` or a diffusers scheduler; prediction: by our name or by diffusers', and without
    one what the scheduler says.
    """
    if isinstance(process, type):
        raise ModelError(f"a process or a scheduler is expected, not its class: {process.__name__}(...)")
    read: Parametrization | None = None
    if not isinstance(process, NoiseProcess) and hasattr(process, "config"):
        process, read = schedule(config_of(process))
    if isinstance(prediction, str):
        prediction = PREDICTIONS.get(prediction, prediction)
    return Denoiser(_unknown, process, prediction or read or "noise", shape)


def _unknown(*_: Any) -> Tensor:
    raise TrueupError("a recorder has no network of its own")


@dataclass
class Rows:
    """A batch as it is counted; vectors are (B, C, *spatial) and float32, zero in rows that are left out."""

    t: Tensor  # (B,) float64
    level: Tensor  # (B,)
    position: Tensor | None  # (B,) of its class
    used: Tensor  # (B,) 1.0, or 0.0 if it is left out
    share: Tensor  # (B,) the same for the data's own sums: less, where x_t says little of x0
    eps_hat: Tensor
    eps: Tensor
    u: Tensor
    x0: Tensor
    strays: Tensor  # (3,) how many rows were at no time of the process, of no known class, not finite


class Reader:
    """Reads batches of a training loop, on their device and without waiting for it."""

    def __init__(self, model: Denoiser, classes: Sequence[int], lam: Tensor | None = None):
        """lam (L,) of the levels, falling; None: rows stay where they are."""
        self.model, self.classes, self.lam = model, tuple(classes), lam
        process = model.process
        slack = _SLACK * (process.t_max - process.t_min) * (not process.integer_times)
        self.ends = (process.t_min - slack, process.t_max + slack)
        self._ready: dict[torch.device, tuple[Tensor | None, Tensor | None, Tensor]] = {}

    def read(self, x_t: Tensor, t: Tensor | float, output: Any, target: Tensor, y: Tensor | None) -> Rows:
        """Rows of a batch; what is wrong in values that are on a device is counted, not looked at."""
        x_t, times, output, target, y = self.checked(x_t, t, output, target, y)
        count, device, times = len(x_t), home(x_t.device), self._of_process(times)
        table, lam, classes = self._on(device)
        times = times.to(device, torch.float64, non_blocking=True)
        process = self.model.process
        inside = self._inside(times)
        known = (times >= process.t_min) & (times <= process.t_max)
        if table is not None:
            columns = table[:, times.nan_to_num().clamp(process.t_min, process.t_max).round().long()]
        else:
            columns = self._columns(torch.where(known, times, process.t_max), lam)
        named = dict(zip(_COLUMNS, columns, strict=True))  # (B,) each
        position, labelled = self._position(y, count, classes)
        wide = (-1, *[1] * (x_t.ndim - 1))  # (B,) -> (B, 1, 1, 1)
        of_output, of_input, of_u, to_x0 = (named[name].reshape(wide) for name in _COLUMNS[2:])
        x_t, output, target = (v.to(device) for v in (x_t, output, target))
        at_input = of_input * x_t
        eps, u = of_output * target + at_input, of_u * x_t
        vectors = torch.stack([of_output * output + at_input, eps, u, to_x0 * (u - eps)])
        finite = vectors.sum((0, *range(2, vectors.ndim))).isfinite()  # (B,)
        used = finite & known & labelled
        eps_hat, eps, u, x0 = torch.where(used.reshape(wide), vectors, 0.0).float()
        strays = torch.stack([~inside, ~labelled, ~finite]).sum(1)
        level, share = named["level"].long(), named["share"] * used
        return Rows(times, level, position, used.to(share), share, eps_hat, eps, u, x0, strays)

    def checked(
        self, x_t: Tensor, t: Tensor | float, output: Any, target: Tensor, y: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """A batch without gradients, with a time and, by class, a label for each row; or why it is none."""
        for name, value in (("x_t", x_t), ("target", target)):
            if not isinstance(value, Tensor):
                raise DataError(f"{name} is a tensor, not {type(value).__name__}")
        x_t, output, target = (v.detach() for v in (x_t, prediction(output), target))
        shape, channels = self.model.shape, self.model.shape[0]
        if x_t.shape[1:] != shape:
            raise DataError(f"x_t is {tuple(x_t.shape)}, expected (batch, {', '.join(map(str, shape))})")
        if output.shape == (len(x_t), 2 * channels, *shape[1:]):
            output = output[:, :channels]  # the rest is a learned variance
        for name, value in (("output", output), ("target", target)):
            if value.shape != x_t.shape:
                raise DataError(f"{name} is {tuple(value.shape)} and x_t {tuple(x_t.shape)}: they must agree")
        return x_t, self._times(t, len(x_t)), output, target, self._labels(y, len(x_t))

    def _times(self, t: Tensor | float, count: int) -> Tensor:
        times = numbers("t", t)
        if times.numel() not in (1, count) or times.ndim > 1:
            raise DataError(f"t is {tuple(times.shape)}, expected a time for each of the {count} rows")
        if times.device.type == "cpu" and not self._inside(self._of_process(times)).all():
            self.refuse(torch.tensor([1, 0]))
        return times.expand(count)

    def _of_process(self, times: Tensor) -> Tensor:
        """Times that the network was told, as the process counts them."""
        scale, offset = self.model.process.told
        return times if scale == 1.0 and not offset else (times - offset) / scale

    def _inside(self, times: Tensor) -> Tensor:
        """Whether each is a time of the process."""
        inside = (times >= self.ends[0]) & (times <= self.ends[1])
        return inside & (times == times.round()) if self.model.process.integer_times else inside

    def _labels(self, y: Any, count: int) -> Tensor | None:
        """One of each row, where sums are kept by class."""
        if not self.classes:
            return None
        if y is None:
            raise DataError("these sums are kept by class: every row needs its label, y=")
        labels = numbers("y", y)
        if labels.shape != (count,):
            raise DataError(f"y is {tuple(labels.shape)}, expected a label for each of the {count} rows")
        if labels.device.type == "cpu" and not torch.isin(labels, torch.tensor(self.classes)).all():
            self.refuse(torch.tensor([0, 1]))
        return labels

    def _position(self, y: Tensor | None, count: int, classes: Tensor) -> tuple[Tensor | None, Tensor]:
        """The place of each label among the classes, and whether it has one."""
        labels = self._labels(y, count)
        if labels is None:
            return None, torch.ones(count, dtype=torch.bool, device=classes.device)
        same = labels.to(classes.device, non_blocking=True)[:, None] == classes  # (B, G)
        return same.int().argmax(1), same.any(1)

    def position(self, y: Tensor, count: int, device: torch.device) -> Tensor | None:
        """The place of each label among the classes."""
        return self._position(y, count, self._on(device)[2])[0]

    def refuse(self, strays: Tensor) -> None:
        """Raise for rows at no time of the process, or of no known class; looks at values, so it waits."""
        outside, unknown = strays[:2].tolist()
        if outside:
            process = self.model.process
            raise ModelError(
                f"t is not among {process.t_min:g} to {process.t_max:g}, the "
                f"{'whole timesteps' if process.integer_times else 'times'} of this process: is it the one "
                "that training draws from?"
            )
        if unknown:
            named = ", ".join(map(str, self.classes[:8])) + (", ..." if len(self.classes) > 8 else "")
            raise DataError(f"a label is not among the classes {named}: name it (the null label, too)")

    def _on(self, device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """What is looked up, where it is needed, copied there once: a table over whole times, lam,
        classes."""
        if device not in self._ready:
            process, table = self.model.process, None
            if process.integer_times:
                table = self._columns(torch.arange(process.t_max + 1, dtype=torch.float64), self.lam).to(
                    device
                )
            lam = None if self.lam is None else self.lam.to(device)
            self._ready[device] = (table, lam, torch.tensor(self.classes, dtype=torch.int64, device=device))
        return self._ready[device]

    def _columns(self, t: Tensor, levels: Tensor | None) -> Tensor:
        """_COLUMNS of rows at times t (B,), (6, B): the level, and how vectors follow from what is at
        hand."""
        process, parametrization = self.model.process, self.model.parametrization
        lam, alpha, sigma = process.lam(t), process.alpha(t), process.sigma(t)
        level = torch.zeros_like(lam)
        if levels is not None:
            between = -0.5 * (levels[1:] + levels[:-1])  # rising
            level = torch.searchsorted(between, -lam).to(lam)
        one, zero = torch.ones_like(lam), torch.zeros_like(lam)
        of_output, of_input = (parametrization.to_eps(*at, alpha, sigma) for at in ((one, zero), (zero, one)))
        return torch.stack([level, torch.sigmoid(2 * lam), of_output, of_input, 1 / sigma, (-lam).exp()])


def numbers(name: str, values: Any) -> Tensor:
    """What goes with the rows of a batch, as a tensor."""
    try:
        return torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"{name} is numbers, one for each row, not {line(repr(values), 80)}") from None


def home(device: torch.device) -> torch.device:
    """Where the sums of what is on a device are kept: there, but MPS has no float64."""
    return torch.device("cpu") if device.type == "mps" else device
