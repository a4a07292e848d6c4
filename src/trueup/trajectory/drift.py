"""How a sampler's states drift from the marginals: which bands, which steps, how much."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.calibration import Sampler, States
from trueup.trajectory.fitting import Miss


@dataclass(eq=False, repr=False)
class Drift:
    """The miss of every state of a sampler, with its uncertainty."""

    sampler: Sampler
    states: States
    bands: Bands
    misses: list[Miss]
    trajectories: int
    data_images: int
    generated: bool = False

    @property
    def nats(self) -> Tensor:
        """The miss, (S, bands): how far the Gaussian of the states is from that of the data."""
        return torch.stack([miss.nats for miss in self.misses])

    def total(self, i: int) -> tuple[float, float]:
        """The miss of state i over all bands, and its standard error."""
        return float(self.misses[i].nats.sum()), float(self.misses[i].total_se)

    def __repr__(self) -> str:
        return f"<drift of {self.sampler}: {self.verdict()}>"

    def verdict(self) -> str:
        """What to make of it, in a sentence."""
        last, error = self.total(len(self.misses) - 1)
        sure = [i + 1 for i in range(len(self.misses)) if self.total(i)[0] > 3 * self.total(i)[1]]
        if not sure:
            return "its states have the data's moments, within noise"
        if len(self.misses) not in sure:
            worst = max(sure, key=lambda i: self.total(i - 1)[0])
            return f"its samples have the data's moments, within noise; on the way state {worst} is off most"
        miss, band = self.misses[-1], int(self.nats[-1].argmax())
        spread = float(miss.ratio[:, band].log().mean().exp())
        off = float(miss.mean[:, band].square().mean().sqrt())
        what = f"the standard deviation is {spread:.2g} of the data's"
        if 0.5 * off**2 > spread - 1 - math.log(spread):  # which of the two makes more of equation 36
            what = f"the mean is off by {off:.2g} standard deviations"
        per_dim = last / float(self.bands.sizes.sum() * len(miss.ratio))
        by = f"{last:.3g} ± {2 * error:.2g} nats ({per_dim:.2g} per dimension)"
        return f"its samples miss the data's moments by {by}, most at {self._frequency(band)}, where {what}"

    def _frequency(self, band: int) -> str:
        """A band in words: its wavelength in pixels."""
        if band == 0:
            return "the mean of an image"
        longest = max(self.bands.spatial)
        edges = [0.0, *self.bands.edges, math.inf]
        low, high = edges[band], min(edges[band + 1], math.sqrt(len(self.bands.spatial)) * (longest - 1))
        long, short = f"{2 * longest / max(low, 1.0):.3g}", f"{2 * longest / high:.3g}"
        waves = f"a wavelength of {long}" if long == short else f"wavelengths of {long} to {short}"
        return f"{waves} pixels"

    def summary(self, *, plain: bool = False) -> str:
        """A row per state: the miss, the spread in low, middle and high bands, and where it lies."""
        shades, rule = (" .:+*#", "|") if plain else (" ·░▒▓█", "│")
        per = self.nats / (self.bands.sizes * len(self.misses[0].ratio))  # per coefficient
        top = float(per.max())
        heads = ("state", "from t", "miss (nats)", "mean", "std, low", "middle", "high")
        widths = (5, 8, 19, 6, 8, 6, 6)
        wide = max(2 * self.bands.count, 18)
        title = " ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
        images = f"{self.data_images:,} {'generated ' if self.generated else ''}images"
        lines = [f"drift of {self.sampler}, {self.trajectories:,} trajectories, moments of {images}", ""]
        lines.append(f"{title}  {rule}{'where, low to high':<{wide}}{rule}")
        thirds = torch.tensor_split(torch.arange(self.bands.count), 3)
        for i, miss in enumerate(self.misses):
            value, error = self.total(i)
            weights = self.bands.sizes.double()
            mean = float((miss.mean.square() @ weights / weights.sum()).mean().sqrt())
            parts = [float(miss.ratio[:, part].log().mean().exp()) for part in thirds]
            cells = "".join(_shade(float(p), top, shades) * 2 for p in per[i])
            lines.append(
                f"{i + 1:5d} {float(self.states.t[i]):8.4g} {f'{value:.3g} ± {2 * error:.2g}':>19} "
                f"{mean:6.2f} {parts[0]:8.2f} {parts[1]:6.2f} {parts[2]:6.2f}  {rule}{cells:<{wide}}{rule}"
            )
        lines += [
            "",
            "miss: how far means and variances of the states are from those of noised data, ± 95%;",
            "mean: that of the mean in standard deviations; std: standard deviation over what it should be",
        ]
        if self.generated:
            own = "the moments are those of the model's own samples"
            lines.append(f"{own}: what these have wrong counts as right")
        text = "\n".join([*lines, f"verdict: {self.verdict()}"])
        return text.replace("±", "+-") if plain else text

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        states = []
        for i, miss in enumerate(self.misses):
            state = {name: float(getattr(self.states, name)[i]) for name in ("t", "alpha", "sigma")}
            bands = {"miss_by_band": miss.nats, "miss_by_band_se": miss.nats_se, "mean_miss": miss.mean}
            bands |= {"std_ratio": miss.ratio, "std_ratio_se": miss.ratio_se}
            total = dict(zip(("miss", "miss_se"), self.total(i), strict=True))
            states.append({**state, **total, **{name: value.tolist() for name, value in bands.items()}})
        found = {"verdict": self.verdict(), "sampler": self.sampler.as_json()}
        found |= {name: getattr(self, name) for name in ("trajectories", "data_images", "generated")}
        return {**found, "band_edges": list(self.bands.edges), "states": states}


def _shade(value: float, top: float, shades: str) -> str:
    """A character for a miss; every step down is a factor of ten or so below the largest."""
    if value <= 0 or top <= 0:
        return shades[0]
    step = len(shades) - 1 + math.floor(math.log10(value / top) + 0.5)
    return shades[max(0, min(len(shades) - 1, step))]
