"""`trueup likelihood`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from trueup.calibration import Attachment, load
from trueup.checks import BELONGS
from trueup.commands.shared import images_of, open_model, progress, say, show
from trueup.density import Likelihood, Objectives
from trueup.density import likelihood as measure_likelihood
from trueup.density import objectives as measure_objectives
from trueup.density.run import IMAGES
from trueup.estimate.diagnose import check_use
from trueup.files import write
from trueup.images import open_images


def likelihood(options: argparse.Namespace) -> int:
    """`trueup likelihood`."""
    output, method = options.output, options.method
    options.run = run = options.run or (
        Path(f"{output}.run") if output is not None and method != "dsm" else None
    )
    denoiser = open_model(options)
    calibration = None if options.calibration is None else load(options.calibration)
    if calibration is not None:
        Attachment(denoiser, calibration)  # or say now that it does not fit
    data = images_of(options, options.images or IMAGES.get(method, 200))
    if not options.trust and not (run is not None and (run / "samples.json").exists()):
        say(options, "looking for the usual mistakes")
        for hint in check_use(denoiser, open_images(data, denoiser, exact=True)).hints:
            say(options, f"note: {hint}")
    found: Likelihood | Objectives
    common: dict[str, Any] = {"seed": options.seed, "progress": progress(options)}
    if method == "dsm":
        found = measure_objectives(denoiser, data, calibration, **common)
    else:
        given = {name: value for name in BELONGS if (value := getattr(options, name)) not in (None, False)}
        if given.pop("uniform", False):
            given["importance"] = False
        found = measure_likelihood(
            denoiser, data, calibration, method=method, run=run, force=options.force, **given, **common
        )
    values = found.as_json()
    if output is not None:
        write(output, f"{json.dumps(values, indent=2)}\n".encode())
    show(options, values, found.table())
    if output is not None:
        kept = f"; {run} keeps every image's (delete it when you are done)" if run is not None else ""
        say(options, f"wrote {output}{kept}")
    return 0
