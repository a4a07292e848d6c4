"""The paper's figure 1 for any model: the size of the mean residual over time, and what it costs the bound.

A third row shows the same area over lam, where it can be seen: over t it lies at the first steps.
Networks that predict data, velocity, a score or a flow are read as noise first, so that their curves compare.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueup.calibration import Calibration
from trueup.errors import TrueupError
from trueup.files import write
from trueup.fitting import Samplers
from trueup.statistics import Number

_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass
class Curves:
    """Both rows of the figure at times t (L,): value, and the ends of a 95% band, (3, L) each."""

    t: Tensor
    size: Tensor  # |E[eps_hat] - E[eps]|^2 / 2
    rate: Tensor  # g^2/(2 sigma^2) times the square: nats per unit of t
    area: Number  # under `rate`: nats by which a shift raises the bound


def curves(calibration: Calibration) -> Curves:
    """The curves of the network a calibration was measured on; unbiased, so they may dip below zero."""
    if not calibration.measured:
        raise TrueupError("this calibration was made without data: there is nothing to draw")
    e, process = calibration.evidence, calibration.process
    squares = torch.stack([e.eta2.value, e.eta2.low, e.eta2.high])
    return Curves(calibration.t, 0.5 * squares, -process.dlam(calibration.t) * squares, e.shift_bound_gain)


def check_figure(path: Path) -> Any:
    """Matplotlib's figure, or what stands in the way of drawing one."""
    if path.suffix.lower() not in _SUFFIXES:
        raise TrueupError(f"{path}: a figure ends in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}")
    if not path.absolute().parent.is_dir():
        raise TrueupError(f"{path.parent} is not a directory: make it first")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise TrueupError("drawing a figure needs matplotlib: pip install 'trueup[figures]'") from None
    return Figure


def draw(calibrations: Mapping[str, Calibration] | Calibration, path: str | PathLike[str]) -> None:
    """Draw the figure to a .png, .svg or .pdf file, one column per calibration."""
    path = Path(path)
    Figure = check_figure(path)
    if isinstance(calibrations, Calibration):
        calibrations = {str(calibrations.provenance.get("model", "")): calibrations}
    figure = Figure(figsize=(4.2 * len(calibrations), 7.2), layout="constrained")
    axes = figure.subplots(3, len(calibrations), squeeze=False)
    for column, (name, calibration) in enumerate(calibrations.items()):
        found = curves(calibration)
        process, bits = calibration.process, calibration.evidence.bits_per_dim(1.0)
        value, low, high = found.area.value, found.area.low, found.area.high
        gain = f"area {value:.3g} nats ({low:.3g} to {high:.3g}), {value * bits:.2g} bits/dim"
        shift = "the same area: what a shift gains"
        rows = (
            (found.t, found.size, "t", r"$\frac{1}{2}\|E[\epsilon_\theta]\|^2$", name),
            (found.t, found.rate, "t", r"$\frac{g^2}{2\sigma^2}\|E[\epsilon_\theta]\|^2$", gain),
            (process.lam(found.t), 2 * found.size, r"$\lambda$", r"$\|E[\epsilon_\theta]\|^2$", shift),
        )
        for axis, (x, values, below, beside, title) in zip(axes[:, column], rows, strict=True):
            value, low, high = values.clamp_min(0.0).numpy()
            axis.fill_between(x.numpy(), low, high, color="C0", alpha=0.25, linewidth=0)
            axis.plot(x.numpy(), value, color="C0", marker=".", linewidth=1)
            axis.set(xlabel=below, ylabel=beside)
            axis.set_title(title, fontsize="small")
            axis.set_ylim(bottom=0)
            if below == "t" and process.t_min > 0 and process.prior_std > 2:  # t is a sigma of many decades
                axis.set_xscale("log")
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.lower()[1:], dpi=120)
    write(path, content.getvalue())


def draw_samplers(found: Samplers, path: str | PathLike[str]) -> None:
    """Error against evaluations, a line per sampler on the grid that suits it best."""
    path = Path(path)
    figure = check_figure(path)(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.subplots()
    best: dict[str, dict[int, float]] = {}
    for row in found.rows:
        line = best.setdefault(row.sampler, {})
        line[row.nfe] = min(line.get(row.nfe, math.inf), row.error.value)
    for name, line in best.items():
        wide = {"linewidth": 2.5, "color": "black"} if name == "fitted" else {"linewidth": 1.2}
        axes.plot(list(line), list(line.values()), "o-", markersize=4, label=name, **wide)
    axes.set(xscale="log", yscale="log", xlabel="evaluations of the network", ylabel="distance to the limit")
    axes.set_xticks(found.numbers, [str(number) for number in found.numbers])
    axes.minorticks_off()
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(f"{found.model}: samplers, each on its best grid", fontsize=10)
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:].lower(), dpi=150)
    write(path, content.getvalue())
