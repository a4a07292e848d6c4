"""Where a network's own call holds x_t, t and the condition, found by calling it.

A correction is put on the network itself, so that samplers, pipelines and training loops all see it. There it
must read x_t and the time out of arguments that whoever wrote the model arranged: in another order, under
other names, the time divided by 1000 or counted backwards. A few calls at known times tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trueup.denoiser.network import eagerly, prediction, signature, unwrapped
from trueup.errors import AttachError, ModelError

_CLOSE = 1e-5  # relative to what was added up
_HALF = (torch.float16, torch.bfloat16)
_ROUNDING = 2.0**-22  # of the largest: times may have been through float32


@dataclass(frozen=True)
class Place:
    """One argument of a forward call."""

    position: int | None  # None: by name only
    name: str | None  # None: by position only

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The argument, however it was passed."""
        if self.name is not None and self.name in kwargs:
            return kwargs[self.name]
        if self.position is not None and self.position < len(args):
            return args[self.position]
        raise AttachError(f"the network was called without its argument {self.name or self.position}")


@dataclass(frozen=True)
class Binding:
    """The places of x_t, t and the condition, and the network's time as scale * t + offset.

    layout: how x_t and the output are arranged, see `trueup.denoiser.layout`. turned: whether a pipeline
    hands the output on with its sign turned, as those do whose networks count time from noise to data.
    """

    x: Place
    t: Place
    y: Place | None = None
    scale: float = 1.0
    offset: float = 0.0
    layout: str | None = None
    turned: bool = False

    def settings(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Binding:
        """From plain values."""
        x, t, y = (None if settings[n] is None else Place(**settings[n]) for n in ("x", "t", "y"))
        line = float(settings["scale"]), float(settings["offset"])
        how = settings.get("layout"), bool(settings.get("turned", False))
        return cls(x, t, y, *line, *how)  # type: ignore[arg-type]


def find_binding(network: nn.Module, call: Any, x_t: Tensor, times: Tensor, y: Any) -> Binding | None:
    """The binding of `call(x_t, t[, y])`, or None where it does more than pass arguments on.

    x_t (2, ...) and times (calls, 2), of two rows each; rows must not be equal.
    """
    inner = unwrapped(network)
    seen: list[tuple[dict[Any, Any], Any]] = []

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], raw: Any) -> None:
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        # Copies: whoever called may go on and change them.
        seen.append(({k: _copy(v) for k, v in arguments.items()}, _copy(_mean(raw, x_t.shape[1]))))

    handle = inner.register_forward_hook(look, with_kwargs=True)
    try:
        with eagerly(), torch.inference_mode():
            outputs = [call(x_t.clone(), t.clone(), *(() if y is None else (y,))) for t in times]
    finally:
        handle.remove()
    if len(seen) != len(times):  # called more than once, or not at all
        return None
    means = (_mean(output, x_t.shape[1]) for output in outputs)
    if not all(_same(raw, mean) for (_, raw), mean in zip(seen, means, strict=True)):
        return None
    arguments = [found for found, _ in seen]
    keys = list(arguments[0])
    x, label = (
        next((k for k in keys if all(_same(found.get(k), given) for found in arguments)), None)
        for given in (x_t, y)
    )
    lines = {k: time_line([found.get(k) for found in arguments], times) for k in keys if k not in (x, label)}
    time = next((k for k, line in lines.items() if line is not None), None)
    if x is None or time is None:
        return None
    y_place = None if label is None else place(inner, label)
    return Binding(place(inner, x), place(inner, time), y_place, *(lines[time] or ()))


def place(network: nn.Module, key: int | str) -> Place:
    """Where a network takes the argument that was passed at a position or by a name."""
    try:
        parameters = signature(network).parameters.values()
    except (TypeError, ValueError):
        parameters = {}.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if isinstance(key, int):
        return Place(key, names[key] if key < len(names) else None)
    return Place(names.index(key) if key in names else None, key)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _mean(raw: Any, channels: int) -> Tensor | None:
    """What is corrected of what a forward call returned, if it can be."""
    try:
        output = prediction(raw)
    except ModelError:
        return None
    return output[:, :channels] if output.ndim > 1 else None


def _same(value: Any, tensor: Any) -> bool:
    tensors = isinstance(value, Tensor) and isinstance(tensor, Tensor)
    return tensors and value.shape == tensor.shape and torch.equal(value.to(tensor), tensor)


def time_line(values: list[Any], times: Tensor) -> tuple[float, float] | None:
    """(scale, offset) if an argument is scale * t + offset, row by row, in every call."""
    rows = []
    for value in values:
        if not isinstance(value, Tensor) or value.numel() != times.shape[1] or value.is_complex():
            return None
        rows.append(value.detach().flatten().cpu().double())
    told, t = torch.cat(rows), times.flatten().cpu().double()
    # In half precision times are rounded, and once more when they are divided.
    eps = max(2 * torch.finfo(v.dtype).eps if v.dtype in _HALF else _ROUNDING for v in values)
    span, rounding = float(t[0] - t[-1]), eps * float(told.abs().max())
    scale = float(told[0] - told[-1]) / span if span else 0.0
    if scale == 0 or not math.isfinite(scale):
        return None
    whole = 1 / round(1 / scale) if abs(scale) < 1 else float(round(scale))
    for meant in (math.copysign(1.0, scale), math.copysign(1e-3, scale), whole):  # the likeliest first
        if abs(scale - meant) <= _CLOSE * abs(meant) + 2 * rounding / abs(span):
            scale = meant
            break
    offset = float((told - scale * t).mean())
    for meant in (0.0, float(round(offset))):
        if abs(offset - meant) <= 4 * rounding:
            offset = meant
            break
    close = _CLOSE * ((scale * t).abs() + abs(offset)) + rounding
    return (scale, offset) if ((scale * t + offset - told).abs() <= close).all() else None
