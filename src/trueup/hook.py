"""The correction as a forward hook: finds x_t and t in a network's call and corrects what it returned."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from trueup.bands import along_last_axes, dct_matrix
from trueup.calibration import Calibration
from trueup.correction import interpolation_weights
from trueup.denoiser import prediction
from trueup.errors import AttachError, MismatchError

_INPUT_NAMES = ("sample", "hidden_states", "x_t", "x")
_TIME_NAMES = ("timestep", "timesteps", "t", "sigma", "noise_labels", "time")
_FLAT = 2**24  # entries of the largest DCT matrix over all axes at once
_NODES = 8192  # times at which the interpolation is tabulated; a row uses the nearest


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
        correction = calibration.correction
        bands = correction.bands
        nodes = _nodes(calibration)
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
        self._ready: dict[tuple[torch.device, torch.dtype], tuple[Any, ...]] = {}

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
        with torch.autocast(output.device.type, enabled=False):
            return self._correct(output, x_t, t)

    def _correct(self, output: Tensor, x_t: Tensor, t: Any) -> Tensor:
        dtype = output.dtype if output.dtype == torch.float64 else torch.float32
        rows = self._rows(t, output, dtype)
        wide = output.to(dtype)
        if self.constant:
            return (wide - rows.reshape(-1, *self.shape)).to(output.dtype)
        forward, backward = self._tables(output.device, dtype)[3:]
        flat = len(forward) < len(self.spatial)
        both = torch.stack([wide, x_t.to(wide)], 2)  # (B, C, 2, *spatial)
        z = along_last_axes(both.flatten(3) if flat else both, forward)
        constant, gains = rows.reshape(-1, self.shape[0], 2, 2, *z.shape[3:]).unbind(2)
        delta = torch.addcmul(constant, gains, z)  # (B, C, 2, *box), to be summed over the 2
        if flat:  # one product transforms back, sums and subtracts
            pixels = wide.reshape(-1, math.prod(self.spatial))
            corrected = torch.addmm(pixels, delta.reshape(len(pixels), -1), backward[0].T, alpha=-1)
            return corrected.reshape(output.shape).to(output.dtype)
        return (wide - along_last_axes(delta.sum(2), backward)).to(output.dtype)

    def _rows(self, t: Any, output: Tensor, dtype: torch.dtype) -> Tensor:
        """The table at each row's time, (B or 1, ...). Never waits for the device."""
        boundaries, weights, table = self._tables(output.device, dtype)[:3]
        if torch.compiler.is_compiling():  # which cannot follow a bisection
            t = torch.as_tensor(t)
        elif not isinstance(t, Tensor) or (t.numel() == 1 and t.device.type == "cpu"):
            node = bisect_left(self.boundary_list, float(t))
            return weights[node : node + 1] @ table
        times = t.to(output.device, dtype, non_blocking=True).reshape(-1)
        if times.numel() not in (1, output.shape[0]):
            raise AttachError(f"got {times.numel()} times for a batch of {output.shape[0]}")
        return weights[torch.bucketize(times, boundaries)] @ table

    def _tables(self, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        """Boundaries, weights, table and the DCT's matrices, copied to a device once.

        On an accelerator a small network's time is launches, not arithmetic, so there the DCT over all axes
        is one matrix as long as that stays small.
        """
        key = (device, dtype)
        ready = self._ready.get(key)
        if ready is None:
            with torch.inference_mode(False):  # they may be part of a backward pass later
                forward = [] if self.constant else self.matrices
                backward = [m.T for m in forward]
                small = math.prod(m.numel() for m in forward) <= _FLAT
                if len(forward) > 1 and small and _wants_one_matrix(device):
                    forward = [reduce(torch.kron, forward)]
                    backward = [torch.cat([forward[0].T, forward[0].T], 1)]  # undoes both halves, and adds
                parts = (self.boundaries, self.weights, self.table)
                ready = (
                    *(part.to(device, dtype) for part in parts),
                    [m.to(device, dtype) for m in forward],
                    [m.to(device, dtype).contiguous() for m in backward],
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
    if is_dataclass(raw) and not isinstance(raw, type) and "sample" in {f.name for f in fields(raw)}:
        return replace(raw, sample=corrected)
    raw.sample = corrected
    return raw


def _nodes(calibration: Calibration) -> Tensor:
    """Times to tabulate: dense in lam over the calibrated range, with every whole timestep exact.

    Outside that range the correction stays what it is at the end, in the network's own output space.
    """
    process, lam = calibration.process, calibration.correction.lam
    nodes = process.t_of_lam(torch.linspace(float(lam[0]), float(lam[-1]), _NODES, dtype=torch.float64))
    exact = calibration.t
    if process.integer_times:
        whole = torch.arange(math.ceil(process.t_min), math.floor(process.t_max) + 1, dtype=torch.float64)
        exact = torch.cat([exact, whole[(whole >= exact[0]) & (whole <= exact[-1])]])
    nodes = nodes.clamp(float(calibration.t[0]), float(calibration.t[-1]))
    return torch.unique(torch.cat([nodes, exact]))


def _wants_one_matrix(device: torch.device) -> bool:
    return device.type != "cpu"


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
