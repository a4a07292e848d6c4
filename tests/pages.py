"""Calibrations with everything that a page shows, of random numbers, and measurements that go with them."""

from __future__ import annotations

import math

import torch

from trueup.calibration import Drawn
from trueup.statistics import Number

from calibrations import fitted_solver, make

SHAPE = (1, 6, 8)
HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "]]><script>alert(1)</script>",
    "\"'><svg onload=alert(1)>",
    "`${alert(1)}` {{7*7}} &lt;b&gt; <!--",
    "a\x00\x07\x1b[2J\r\nb",
    "\u202eevil\u202c \u200f\u2066x\u2069 \ud800",
    "</style></title></textarea></pre></svg><base href=//x>",
)


class Plain:
    """A measurement as the library returns it."""

    def __init__(self, values):
        self.values = values

    def as_json(self):
        return self.values


def number(value=1.0, reach=0.1):
    return {"value": value, "low": value - reach, "high": value + reach}


def drawn(shape, bands, *, gains="none", fitted=False, nfe=25, seed=0, pictures=16):
    """A set of samples; the pictures of a form are like no other's."""
    generator = torch.Generator().manual_seed(nfe + 100 * (gains == "none"))
    variance = torch.rand(shape[0], bands, generator=generator, dtype=torch.float64) + 0.5
    size = (pictures, *shape)
    pixels = torch.randint(0, 256, size, generator=generator).to(torch.uint8) if pictures else None
    how = {"samples": 64, "seed": seed, "variance": variance, "variance_se": 0.1 * variance}
    return Drawn(gains, fitted, nfe, **how, off=0.1 * variance - 0.06, pictures=pixels)


def whole(shape=SHAPE, levels=5, model="a model", **changes):
    """A calibration that surely gains, with samples, a solver and what its network expects."""
    cal = make(shape, levels=levels, **changes)
    loss = torch.full_like(cal.t, 10.0)
    cal.evidence.loss = Number.of(loss, 0.1 * loss, 16)
    cal.evidence.gain = Number.of(0.3 * loss, 0.01 * loss, 16)
    cal.evidence.bound_gain = Number.of(0.5, 0.1, 16)
    cal.evidence.shift_bound_gain = Number.of(0.2, 0.05, 16)
    generator = torch.Generator().manual_seed(5)
    if len(shape) == 3:
        cal.evidence.expected = torch.randn(levels, *shape, generator=generator)
    miss = {"none": [0.2, 0.1, 0.3], "sqrt": [0.05, 0.0, 0.1], "change": [-0.15, -0.2, -0.1]}
    cal.provenance |= {"model": model, "samples": {"miss": miss, "trajectories": 64, "evaluations": 25}}
    kept = torch.ones(cal.correction.bands.count, dtype=torch.float64)
    solver = fitted_solver(shape, cal.process, kept, generator, nfe=8, guidance=1.0)
    cal.solvers = (solver,)
    count = cal.correction.bands.count
    if shape[0] in (1, 3) and len(shape) == 3:
        sets = [{}, {"gains": "sqrt"}, {"gains": "sqrt", "fitted": True, "nfe": 8}]
        cal.drawn = tuple(drawn(shape, count, **each) for each in sets)
    return cal


def comparison(cal, **changes):
    """As `trueup evaluate` writes it."""
    change = {"before": number(9.0), "after": number(4.0), "difference": number(-5.0, 1.0), "better": True}
    row = {"solver": "dpm-solver-3", "settings": "", "nfe": 8, "evaluations": 8, "mean_colour": {}}
    rows = [{**row, "evaluations": n, "changes": {"frechet": change, "recall": change}} for n in (5, 8)]
    return {
        "rows": [*rows, {**rows[1], "solver": "fitted", "uncalibrated": "dpm-solver-3"}],
        "samples": 64,
        "seed": 0,
        "features": {"name": "pixels"},
        "reference": {"images": 200},
        "calibration": {"identity": cal.identity},
        "settings": {"weights": cal.provenance["weights"]},
        "notes": ["a note on what was compared"],
        **changes,
    }


def samplers(cal, **changes):
    """As `trueup samplers` writes it."""
    names = ("DDIM", "UniPC", "heun", "fitted")
    rows = [
        {
            "sampler": name,
            "grid": "Karras",
            "nfe": n,
            "error": 2.0 / n + k / 9,
            "low": math.nan,
            "high": math.nan,
        }
        for k, name in enumerate(names)
        for n in (5, 8, 20)
    ]
    settings = {"weights": cal.provenance["weights"], "calibration": cal.identity}
    return {"samplers": rows, "trajectories": 32, "calibrated": True, "settings": settings, **changes}


def checkup(cal, **changes):
    """As `trueup check` writes it, or the part of it that is the diagnosis."""
    drift = {"kind": "drift", "sentence": "brightness of samples drifts by +0.5 ± 0.02"}
    drift |= {"advice": "calibrating corrects it", "measurement": number(0.5), "unit": "units of the data"}
    found = {
        "healthy": False,
        "findings": [{**drift, "share_of_loss": number(0.1)}],
        "images": 100,
        "would_have_been_seen": {"drift": 0.001, "contrast": None},
        "notes": ["a note on what was looked at"],
        "settings": {"weights": cal.provenance["weights"]},
        **changes,
    }
    return {"verdict": "miscalibrated", "diagnosis": found}


def likelihood(cal, **changes):
    """As `trueup likelihood` writes it."""
    sides = {"before": number(3.8), "after": number(3.7), "difference": number(-0.1, 0.01)}
    return {
        "method": "bound",
        "description": "continuous time",
        "dimensions": 48,
        "images": 30,
        "of": "probability of 8-bit values",
        "terms": {"diffusion": sides},
        "total": sides,
        "notes": [],
        "settings": {"weights": cal.provenance["weights"], "calibration": cal.identity},
        "per_image": [{"index": 0, "before": 1.0}],
        **changes,
    }
