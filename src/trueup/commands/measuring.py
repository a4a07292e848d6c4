"""`trueup likelihood`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from trueup.artifact import load
from trueup.attachment import attach
from trueup.commands.calibrating import look_for_mistakes
from trueup.commands.shared import check_output, open_model, progress, say
from trueup.denoiser import Denoiser
from trueup.density import Likelihood, Objectives
from trueup.density import likelihood as measure_likelihood
from trueup.density import objectives as measure_objectives
from trueup.density.bound import Bound
from trueup.density.flow import Divergence
from trueup.density.run import TOLERANCE, check_tolerance
from trueup.errors import DataError, TrueupError
from trueup.files import bundled, write
from trueup.report import plain_output

_BELONGS = {
    "steps": "bound",
    "variance": "bound",
    "draws": "bound",
    "tolerance": "ode",
    "trace": "ode",
    "probes": "ode",
    "start": "ode",
}


def _check_early(denoiser: Denoiser, options: argparse.Namespace, given: dict[str, Any]) -> None:
    """Say what cannot be before anything is measured."""
    if options.calibration is not None:
        attach(denoiser, load(options.calibration)).remove()
    if options.method == "bound":
        Bound(denoiser, None, given.get("steps"), given.get("variance") or "small")
    elif options.method == "ode":
        Divergence(given.get("trace", "rademacher"), given.get("probes", 1))
        check_tolerance(given.get("tolerance", TOLERANCE))


def likelihood(options: argparse.Namespace) -> int:
    """`trueup likelihood`."""
    output, method = options.output, options.method
    given = {name: value for name in _BELONGS if (value := getattr(options, name)) is not None}
    for name in given:
        if _BELONGS[name] != method:
            raise TrueupError(f"--{name} belongs to --{_BELONGS[name]}")
    if options.uniform and method != "bound":
        raise TrueupError("--uniform belongs to --bound")
    if options.run is not None and method == "dsm":
        raise TrueupError("--dsm keeps nothing: leave out --run")
    if options.guidance != 1.0:
        raise TrueupError(
            "guided outputs have no likelihood: leave out --guidance, and pass labels with the data"
        )
    if options.data is None:
        raise DataError("say whose likelihood to measure: --data")
    if output is not None:
        check_output(output, options.force)
    run = options.run or (Path(f"{output}.run") if output is not None and method != "dsm" else None)
    denoiser = open_model(options)
    _check_early(denoiser, options, given)
    if not options.trust and not (run is not None and (run / "samples.json").exists()):
        problem = look_for_mistakes(denoiser, options, exact=True)
        if problem:
            raise TrueupError(f"{problem} (or pass --trust to go on as it is)")
    names = ("seed", "batch_size", "resize", "crop", "flip", "data_range", "skip_bad")
    common: dict[str, Any] = {name: getattr(options, name) for name in names}
    common["progress"] = progress(options)
    data = bundled(options.data)
    found: Likelihood | Objectives
    if method == "dsm":
        found = measure_objectives(
            denoiser, data, options.calibration, images=options.images or 200, **common
        )
    else:
        options.run = run
        found = measure_likelihood(
            denoiser,
            data,
            options.calibration,
            method=method,
            images=options.images,
            importance=not options.uniform,
            run=run,
            force=options.force,
            **given,
            **common,
        )
    text = json.dumps(found.as_json(), indent=2)
    if output is not None:
        write(output, f"{text}\n".encode())
    if options.json:
        print(text)
    else:
        table = found.table()
        print(table.replace("±", "+-") if plain_output() else table)
    if output is not None:
        kept = f"; {run} keeps every image's (delete it when you are done)" if run is not None else ""
        say(options, f"wrote {output}{kept}")
    return 0
