"""What an attached correction looks up: made once for a device, a dtype and a size of samples."""

from __future__ import annotations

import math
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trueup.bands import Bands, dct_matrix
from trueup.calibration.calibration import Calibration
from trueup.calibration.conditions import OfConditions, Projection
from trueup.calibration.correction import interpolation_weights, level_position, refinement
from trueup.calibration.pictures import OfPictures, fine

_NODES = 8192  # times at which the interpolation is tabulated; a row uses the nearest


class Tables(NamedTuple):
    """What a correction needs, on one device."""

    boundaries: Tensor  # between neighbouring nodes
    whole_boundaries: Tensor  # the same for whole times
    knots: Tensor  # (N, 6): the level before, shares of it and the next, three factors; or (N, R) all weights
    labels: (
        Tensor  # (G,) rising: classes with a correction of their own, which follow that of all, R rows each
    )
    constant: Tensor  # (R, C * box) in the DCT, or (R, C * pixels) where nothing else is corrected
    slopes: Tensor  # (R, C * 2 * bands), a and d
    bands: Tensor  # (box,) each coefficient's band
    forward: list[Tensor]  # the DCT's matrices
    backward: list[Tensor]
    fused: ModuleType | None  # trueup.calibration.fused, where it works
    places: Tensor | None = None  # (K,) of large samples, where in the box the constant's coefficients are
    pictured: list[Tensor] | None = None  # or, where nothing else is corrected, their matrices back
    seen: Projection | None = None  # of an embedding
    maps: Tensor | None = None  # (R, Q, C * low box), what depends on it
    low: list[Tensor] | None = None  # their matrices back
    by_told: Tensor | None = None  # (R, C * M * bands), gains on a condition's picture
    beside: Tensor | None = None  # (R, C * box), the map that goes with them
    beside_slopes: Tensor | None = None  # (R, C * 2 * bands), and the gains on output and u
    usual: Tensor | None = None  # (R,), mean square of all that

    def between(self, times: Tensor | float) -> Tensor:
        """The boundaries to compare times with."""
        whole = isinstance(times, Tensor) and times.dtype == torch.int64
        return self.whole_boundaries if whole else self.boundaries


def nodes_of(calibration: Calibration) -> Tensor:
    """Times to tabulate: dense where something is corrected, every whole timestep and level exact.

    Outside the process's own times the correction stays what it is at the end, in the network's own space.
    """
    process, lam = calibration.process, refinement(calibration.correction.lam)[0]
    top, bottom = (float(process.lam(t)) for t in (process.t_min, process.t_max))
    high, low = min(float(lam[0]), top), max(float(lam[-1]), bottom)
    nodes = process.t_of_lam(torch.linspace(high, low, _NODES, dtype=torch.float64))
    exact = calibration.t
    if process.integer_times:
        whole = torch.arange(math.ceil(process.t_min), math.floor(process.t_max) + 1, dtype=torch.float64)
        exact = torch.cat([exact, whole])
    return torch.unique(torch.cat([nodes, exact]).clamp(process.t_min, process.t_max))


def make_tables(
    calibration: Calibration,
    nodes: Tensor,
    *,
    form: str,
    labels: list[int],
    by_level: bool,
    constant_only: bool,
    device: torch.device,
    dtype: torch.dtype,
    spatial: tuple[int, ...],
) -> Tables:
    """Everything for samples of one size. form: of the gains; labels: classes with a correction of their own.

    by_level: whether a level has a correction at all, and not conditions alone; constant_only: and no gains.
    """
    boundaries = between_nodes(nodes)

    def put(part: Tensor, kind: torch.dtype = dtype) -> Tensor:
        # Not waited for: a size may be new in the middle of a pipeline's loop.
        return part.to(device, kind, non_blocking=device.type == "cuda")

    process, parametrization = calibration.process, calibration.parametrization
    sized = calibration.resized(spatial)
    every = (sized.correction, *(sized.for_class(y) for y in labels))
    of_pictures = sized.conditions if isinstance(sized.conditions, OfPictures) and form != "none" else None
    if of_pictures is None:
        correction, *own = (one.with_gains(form).refined() for one in every)
    else:
        own, lam = [], fine(of_pictures.lam)
        correction = sized.correction.with_gains(form).at(lam)
        told_gains, rest, usual = of_pictures.at(lam)
    alpha, sigma = process.alpha(nodes), process.sigma(nodes)
    k_output = parametrization.deps_doutput(alpha, sigma)  # eps_hat = k_output output + k_input x_t
    p, q = parametrization.coefficients(alpha, sigma)
    k_input = -p / (alpha * q - sigma * p)
    position = level_position(correction.lam, process.lam(nodes))
    left = position.floor().clamp_max(len(correction.lam) - 2)
    far = position - left
    # On the constant; on x_t through the output's conversion; on x_t itself.
    factors = (1 / k_output, k_input / k_output, 1 / (k_output * sigma))
    knots = torch.stack([left, 1 - far, far, *factors], 1)
    none, matrices = torch.zeros(0), []
    slopes, band_of = none, none
    constant, kept = none, correction.bands
    places, pictured = None, None
    if constant_only:
        knots = interpolation_weights(correction.lam, process.lam(nodes)) / k_output[:, None]
        if kept.whole:
            constant = correction.shift_map().flatten(1)  # (R, C * pixels)
        else:
            constant = correction.b.flatten(1)  # (R, C * K): pixels would be many
            pictured = [put(matrix.T.contiguous()) for matrix in _rows(kept, kept.box)]
    elif by_level:
        bands = correction.bands
        b, a, d = (torch.cat([getattr(made, n) for made in (correction, *own)]) for n in ("b", "a", "d"))
        gains = ((a != 0) | (d != 0)).any(0).any(0)
        if of_pictures is not None:
            gains = gains | (told_gains != 0).flatten(0, 2).any(0)
        gained = bands.spread_all(gains)
        box = _box(bands.fill((b != 0).any(0).any(0)) | gained, spatial)
        if bands.whole:
            constant = _crop(b, spatial, box).flatten(1)
        else:
            inside = torch.full(spatial, -1)
            inside[tuple(map(slice, box))] = torch.arange(math.prod(box)).reshape(box)
            inside = bands.keep(inside)  # (K,) where in the box
            constant = b[..., inside >= 0].flatten(1)
            places = put(inside[inside >= 0], torch.int64)
        slopes, band_of = (
            torch.stack([a, d], 2).flatten(1),
            _crop(bands.index.flatten(), spatial, box),
        )
        matrices = [put(dct_matrix(n)[:k]) for n, k in zip(spatial, box, strict=True)]
    by_condition: dict[str, Any] = {}
    if of_pictures is not None:
        every_beside = bands.fill(rest.b).flatten(-len(spatial))
        by_condition = {
            "by_told": put(told_gains.flatten(1)),
            "beside": put(_crop(every_beside, spatial, box).flatten(1)),
            "beside_slopes": put(torch.stack([rest.a, rest.d], 2).flatten(1)),
            "usual": put(usual),
        }
    elif isinstance(sized.conditions, OfConditions) and form != "none":
        maps = sized.conditions.refined(sized.correction.lam, kept)
        low_box = _box((maps != 0).flatten(0, -2).any(0).reshape(kept.box), kept.box)
        back = [matrix.T.contiguous() for matrix in _rows(kept, low_box)]
        seen = Projection(*map(put, vars(sized.conditions.projection).values()))
        cropped = put(_crop(maps, kept.box, low_box).flatten(2))
        by_condition = {"seen": seen, "maps": cropped, "low": [put(matrix) for matrix in back]}
    return Tables(
        put(boundaries),
        put(boundaries.floor(), torch.int64),  # for whole t the same comparison
        put(knots),
        put(torch.tensor(labels, dtype=torch.int64), torch.int64),
        put(constant),
        put(slopes),
        put(band_of, torch.int32),
        [m.contiguous() for m in matrices],
        [m.T.contiguous() for m in matrices],
        _fused_kernel(device, spatial) if len(matrices) == 2 and kept.whole else None,
        places,
        pictured,
        **by_condition,
    )


def between_nodes(nodes: Tensor) -> Tensor:
    """Boundaries: a time belongs to the nearest node."""
    return 0.5 * (nodes[1:] + nodes[:-1])


@lru_cache(maxsize=256)
def _fused_kernel(device: torch.device, spatial: tuple[int, ...]) -> ModuleType | None:
    """The Triton kernel if this device can run it on images of this size."""
    if device.type != "cuda":
        return None
    try:
        fused = import_module("trueup.calibration.fused")
    except ImportError:  # no Triton
        return None
    return fused if fused.works(device, *spatial) else None


def _rows(bands: Bands, box: tuple[int, ...]) -> list[Tensor]:
    """The DCT's matrices at the first so many of the frequencies that are kept."""
    axes = zip(bands.spatial, bands.frequencies, box, strict=True)
    return [dct_matrix(size)[axis[:count]] for size, axis, count in axes]


def _box(grid: Tensor, spatial: tuple[int, ...]) -> tuple[int, ...]:
    """The smallest corner of the DCT that holds every coefficient in use, (*spatial)."""
    box = []
    for axis in range(len(spatial)):
        others = [i for i in range(len(spatial)) if i != axis]
        line = grid.any(dim=others) if others else grid
        box.append(int(line.nonzero().max()) + 1 if line.any() else 1)  # a small grid may have room for none
    return tuple(box)


def _crop(part: Tensor, spatial: tuple[int, ...], box: tuple[int, ...]) -> Tensor:
    grid = part.reshape(*part.shape[:-1], *spatial)
    for axis, size in enumerate(box):
        grid = grid.narrow(axis - len(box), 0, size)
    return grid.flatten(-len(box))
