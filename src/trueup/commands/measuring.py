"""`trueup likelihood`."""

from __future__ import annotations

import argparse
from typing import Any

from trueup.checks import BELONGS
from trueup.commands import shared
from trueup.density import likelihood as measure_likelihood
from trueup.density import objectives as measure_objectives
from trueup.density.run import IMAGES


def likelihood(options: argparse.Namespace) -> int:
    """`trueup likelihood`."""
    method = options.method
    options.run = None if method == "dsm" else shared.run_directory(options)
    denoiser = shared.open_model(options)
    calibration = shared.open_calibration(options, denoiser)
    data = shared.images_of(options, denoiser, options.images or IMAGES.get(method, 200))
    found: Any
    common = shared.given(options, "seed", "trust", "progress")
    if method == "dsm":
        found = measure_objectives(denoiser, data, calibration, **common)
    else:
        own = {name: value for name in BELONGS if (value := getattr(options, name)) not in (None, False)}
        if own.pop("uniform", False):
            own["importance"] = False
        common |= shared.given(options, "method", "run", "force")
        found = measure_likelihood(denoiser, data, calibration, **own, **common)
    return shared.conclude(options, found, "every image's")
