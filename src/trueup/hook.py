"""The correction as a forward hook: finds x_t and t in a network's call and corrects what it returned."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trueup.bands import along_last_axes, dct_matrix
from trueup.calibration import Calibration
from trueup.correction import interpolation_weights
from trueup.denoiser import prediction
from trueup.errors import AttachError, MismatchError

_INPUT_NAMES = ("sample", "hidden_states", "x_t", "x")
_TIME_NAMES = ("timestep", "timesteps", "t", "sigma", "noise_labels", "time")
_NODES = 8192  # times at which the interpolation is tabulated; a row uses the nearest


class _Tables(NamedTuple):
    boundaries: Tensor  # between neighbouring times of the table
    whole_boundaries: Tensor  # the same for whole times
    weights: Tensor
    table: Tensor
    forward: list[Tensor]  # the DCT's matrices
    backward: list[Tensor]
    fused: ModuleType | None  # trueup.fused, where it works


class CorrectOutput:
    """The forward hook: finds x_t and t among the arguments and corrects the mean channels of the output.

    Everything that depends on the time is tabulated once: a row's correction is a weighted sum of table
    rows, one small matrix product, and the conversion between eps and the network's own output is folded
    into the weights (equation 28).
    """

    corrects_output = True

    def __init__(self, calibration: Calibration):
        self.shape = calibration.shape
        self.spatial = calibration.shape[1:]
        self.empty = calibration.empty
        if self.empty:
            return
        correction = calibration.correction.refined()
        bands = correction.bands
        nodes = _nodes(calibration, correction.lam)
        self.boundaries = 0.5 * (nodes[1:] + nodes[:-1])
        self.boundary_list: list[float] = self.boundaries.tolist()
        process, parametrization = calibration.process, calibration.parametrization
        alpha, sigma = process.alpha(nodes), process.sigma(nodes)
        weights = interpolation_weights(correction.lam, process.lam(nodes))  # (N, L)
        k_output = parametrization.deps_doutput(alpha, sigma)  # eps_hat = k_output output + k_input x_t
        p, q = parametrization.coefficients(alpha, sigma)
        k_input = -p / (alpha * q - sigma * p)
        self.constant = not (correction.a.any() or correction.d.any())
        per_output = weights / k_output[:, None]
        if self.constant:
            maps = correction.shift_map()  # (L, C, *spatial)
            self.weights, self.table = per_output, maps.flatten(1)
        else:
            b = correction.b
            a, d = bands.spread(correction.a), bands.spread(correction.d)
            box = _box((b != 0) | (a != 0) | (d != 0), self.spatial)
            b, a, d = (_crop(part, self.spatial, box) for part in (b, a, d))  # (L, C * box)
            zero = torch.zeros_like(b)
            blocks = [  # weights, and what they multiply in (constant, -, gain on the output, on the input)
                (per_output, (b, zero, zero, zero)),
                (weights, (zero, zero, a, zero)),
                (weights * (k_input / k_output)[:, None], (zero, zero, zero, a)),
                (per_output / sigma[:, None], (zero, zero, zero, d)),
            ]
            blocks = [(w, rows) for w, rows in blocks if w.any()]
            self.weights = torch.cat([w for w, _ in blocks], 1)
            self.table = torch.cat([_by_channel(rows, self.shape[0]) for _, rows in blocks])
            self.box = box
            self.matrices = [dct_matrix(n)[:k] for n, k in zip(self.spatial, box, strict=True)]
        self._ready: dict[tuple[torch.device, torch.dtype], _Tables] = {}

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], raw: Any) -> Any:
        """Correct what a forward call returned."""
        output = prediction(raw)
        x_t = _argument(args, kwargs, 0, _INPUT_NAMES)
        t = _argument(args, kwargs, 1, _TIME_NAMES)
        channels = self.shape[0]
        if tuple(output.shape[2:]) != self.spatial or output.shape[1] not in (channels, 2 * channels):
            raise MismatchError(
                f"the calibration was made for samples of shape {self.shape}; the network returned "
                f"{tuple(output.shape[1:])}"
            )
        if self.empty:
            return raw
        if output.shape[1] == channels:
            return _like(raw, self.correct(output, x_t, t))
        mean, rest = output[:, :channels], output[:, channels:]  # a learned variance is left alone
        return _like(raw, torch.cat([self.correct(mean, x_t, t), rest], 1))

    def correct(self, output: Tensor, x_t: Tensor, t: Any) -> Tensor:
        """The corrected output, in its own dtype; in single precision even under autocast."""
        kind = output.device.type
        if not torch.compiler.is_compiling() and not torch.is_autocast_enabled(kind):  # entering is not free
            return self._correct(output, x_t, t)
        with torch.autocast(kind, enabled=False):
            return self._correct(output, x_t, t)

    def _correct(self, output: Tensor, x_t: Tensor, t: Any) -> Tensor:
        dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
        tables = self._tables(output.device, dtype)
        rows = self._rows(t, len(output), tables)
        if tables.fused and not torch.compiler.is_compiling() and tables.fused.fits(output, x_t):
            corrected: Tensor | None = tables.fused.correct(output, x_t, rows, tables.forward)
            if corrected is not None:
                return corrected
        wide = output.to(dtype)
        if self.constant:
            return (wide - rows.view(-1, *self.shape)).to(output.dtype)
        both = torch.stack([wide, x_t.to(wide)], 2)  # (B, C, 2, *spatial)
        z = along_last_axes(both, tables.forward)
        constant, gains = rows.view(-1, self.shape[0], 2, 2, *z.shape[3:]).unbind(2)
        delta = torch.addcmul(constant, gains, z).sum(2)
        return (wide - along_last_axes(delta, tables.backward)).to(output.dtype)

    def _rows(self, t: Any, batch: int, tables: _Tables) -> Tensor:
        """The table at each row's time, (B or 1, ...). Never waits for the device."""
        if torch.compiler.is_compiling():  # which cannot follow a bisection
            t = torch.as_tensor(t)
        elif not isinstance(t, Tensor) or (t.numel() == 1 and t.device.type == "cpu"):
            node = bisect_left(self.boundary_list, float(t))
            return tables.weights[node : node + 1] @ tables.table
        boundaries = tables.whole_boundaries if t.dtype == torch.int64 else tables.boundaries
        times = t.to(boundaries, non_blocking=True).reshape(-1).contiguous()
        if times.numel() not in (1, batch):
            raise AttachError(f"got {times.numel()} times for a batch of {batch}")
        return tables.weights.index_select(0, torch.bucketize(times, boundaries)) @ tables.table

    def _tables(self, device: torch.device, dtype: torch.dtype) -> _Tables:
        """Everything the correction needs, copied to a device once."""
        key = (device, dtype)
        ready = self._ready.get(key)
        if ready is None:
            with torch.inference_mode(False):  # they may be part of a backward pass later
                matrices = [] if self.constant else [m.to(device, dtype) for m in self.matrices]
                ready = _Tables(
                    self.boundaries.to(device, dtype),
                    self.boundaries.floor().to(device, torch.int64),  # for whole t the same comparison
                    self.weights.to(device, dtype),
                    self.table.to(device, dtype),
                    [m.contiguous() for m in matrices],
                    [m.T.contiguous() for m in matrices],
                    _fused_kernel(device) if len(matrices) == 2 else None,
                )
            self._ready[key] = ready
        return ready

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": {}}  # device copies are made again where they are needed


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, names: tuple[str, ...]) -> Any:
    if len(args) > position:
        return args[position]
    for name in names:
        if name in kwargs:
            return kwargs[name]
    raise AttachError(f"the network was called without an argument named {' or '.join(names)}")


def _like(raw: Any, corrected: Tensor) -> Any:
    """`raw` with its prediction replaced."""
    if isinstance(raw, Tensor):
        return corrected
    if isinstance(raw, tuple) and hasattr(raw, "_fields") and hasattr(raw, "_replace"):  # a namedtuple
        return raw._replace(**{raw._fields[0]: corrected})
    if isinstance(raw, (tuple, list)):
        return type(raw)((corrected, *raw[1:]))
    if "sample" in getattr(raw, "__dataclass_fields__", ()):
        return replace(raw, sample=corrected)
    raw.sample = corrected
    return raw


def _nodes(calibration: Calibration, lam: Tensor) -> Tensor:
    """Times to tabulate: dense over the lam where something is corrected, with every whole timestep exact.

    Outside the process's own times the correction stays what it is at the end, in the network's output space.
    """
    process = calibration.process
    times = torch.tensor([process.t_min, process.t_max], dtype=torch.float64)
    top, bottom = process.lam(times).tolist()
    high, low = min(float(lam[0]), top), max(float(lam[-1]), bottom)
    nodes = process.t_of_lam(torch.linspace(high, low, _NODES, dtype=torch.float64))
    exact = calibration.t
    if process.integer_times:
        whole = torch.arange(math.ceil(process.t_min), math.floor(process.t_max) + 1, dtype=torch.float64)
        exact = torch.cat([exact, whole])
    return torch.unique(torch.cat([nodes, exact]).clamp(process.t_min, process.t_max))


@lru_cache
def _fused_kernel(device: torch.device) -> ModuleType | None:
    """`trueup.fused` if this device can run it."""
    if device.type != "cuda":
        return None
    try:
        fused = import_module("trueup.fused")
    except ImportError:  # no Triton
        return None
    return fused if fused.works(device) else None


def _by_channel(parts: tuple[Tensor, ...], channels: int) -> Tensor:
    """Tables (L, C * box) each, side by side within every channel, flat."""
    return torch.stack([part.reshape(len(part), channels, -1) for part in parts], 2).flatten(1)


def _box(used: Tensor, spatial: tuple[int, ...]) -> tuple[int, ...]:
    """The smallest corner of the DCT that holds every coefficient in use."""
    grid = used.flatten(0, -2).any(0).reshape(spatial)
    box = []
    for axis in range(len(spatial)):
        others = [i for i in range(len(spatial)) if i != axis]
        line = grid.any(dim=others) if others else grid
        box.append(int(line.nonzero().max()) + 1)
    return tuple(box)


def _crop(part: Tensor, spatial: tuple[int, ...], box: tuple[int, ...]) -> Tensor:
    grid = part.reshape(*part.shape[:-1], *spatial)
    for axis, size in enumerate(box):
        grid = grid.narrow(axis - len(box), 0, size)
    return grid.flatten(1)
