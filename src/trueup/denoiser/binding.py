"""Where a network's own call holds x_t, t and the condition, found by calling it.

A correction is put on the network itself, so that samplers, pipelines and training loops all see it. There it
must read x_t and the time out of arguments that whoever wrote the model arranged: in another order, under
other names, the time divided by 1000 or counted backwards. Two calls at known times tell.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trueup.denoiser.network import eagerly, prediction, unwrapped
from trueup.errors import AttachError

_CLOSE = 1e-5  # relative: times may have been through float32
_TIME_NAMES = ("timestep", "timesteps", "t", "sigma", "noise_labels", "time")


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
    """The places of x_t, t and the condition, and the network's time as scale * t + offset."""

    x: Place
    t: Place
    y: Place | None = None
    scale: float = 1.0
    offset: float = 0.0

    def settings(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Binding:
        """From plain values."""
        places = {n: None if settings[n] is None else Place(**settings[n]) for n in ("x", "t", "y")}
        scale, offset = float(settings["scale"]), float(settings["offset"])
        return cls(places["x"], places["t"], places["y"], scale, offset)  # type: ignore[arg-type]


def default_binding(network: nn.Module) -> Binding:
    """x_t first; the time by its usual names, else second."""
    names = _parameters(network)
    time = next((i for i, name in enumerate(names) if i and name in _TIME_NAMES), 1)
    return Binding(_place(network, 0), _place(network, time))


def find_binding(network: nn.Module, call: Any, x_t: Tensor, times: Tensor, y: Any) -> Binding | None:
    """The binding of `call(x_t, t[, y])`, or None where it does more than pass arguments on.

    x_t (2, ...) and times (2, 2), two calls with two rows each; rows must not be equal.
    """
    inner = unwrapped(network)
    seen: list[tuple[dict[Any, Any], Tensor]] = []

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], raw: Any) -> None:
        seen.append(({**dict(enumerate(args)), **kwargs}, prediction(raw)))

    handle = inner.register_forward_hook(look, with_kwargs=True)
    try:
        with eagerly(), torch.inference_mode():
            outputs = [prediction(call(x_t, t, *(() if y is None else (y,)))) for t in times]
    finally:
        handle.remove()
    if len(seen) != len(times):  # called more than once, or not at all
        return None
    channels = x_t.shape[1]
    if not all(
        torch.equal(raw[:, :channels], out[:, :channels]) for (_, raw), out in zip(seen, outputs, strict=True)
    ):
        return None
    arguments = [found for found, _ in seen]
    x = next((k for k, v in arguments[0].items() if _same(v, x_t)), None)
    label = next((k for k, v in arguments[0].items() if y is not None and _same(v, y)), None)
    if x is None:
        return None
    for key in arguments[0]:
        if key in (x, label):
            continue
        line = _line([found.get(key) for found in arguments], times)
        if line is not None:
            return Binding(
                _place(inner, x), _place(inner, key), None if label is None else _place(inner, label), *line
            )
    return None


def _parameters(network: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(network.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in kinds]


def _place(network: nn.Module, key: int | str) -> Place:
    names = _parameters(unwrapped(network))
    if isinstance(key, int):
        return Place(key, names[key] if key < len(names) else None)
    return Place(names.index(key) if key in names else None, key)


def _same(value: Any, tensor: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and isinstance(tensor, Tensor)
        and value.shape == tensor.shape
        and torch.equal(value.to(tensor), tensor)
    )


def _line(values: list[Any], times: Tensor) -> tuple[float, float] | None:
    """(scale, offset) if an argument is scale * t + offset, row by row, in both calls."""
    rows = []
    for value in values:
        if not isinstance(value, Tensor) or value.numel() != times.shape[1] or value.is_complex():
            return None
        rows.append(value.detach().double().flatten().cpu())
    told, t = torch.cat(rows), times.double().flatten().cpu()
    scale = float((told[0] - told[-1]) / (t[0] - t[-1]))
    offset = float(told[0] - scale * t[0])
    if scale == 0 or not torch.isfinite(told).all():
        return None
    size = told.abs().max()
    if not ((scale * t + offset - told).abs() <= _CLOSE * size).all():
        return None
    for exact in (round(scale), 1 / round(1 / scale) if abs(scale) < 1 else scale):  # what was meant
        if exact and abs(scale - exact) <= 4 * _CLOSE * abs(exact):
            scale = float(exact)
    offset = float((told - scale * t).mean())
    if abs(offset - round(offset)) <= 4 * _CLOSE * float(size):
        offset = float(round(offset))
    return scale, offset
