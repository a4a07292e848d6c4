"""Fitted schedulers in directories: beside a calibration, one for each solver, or in a pipeline."""

from __future__ import annotations

import math
from os import PathLike
from pathlib import Path
from typing import Any

from trueup.errors import Argument, MismatchError, ModelError
from trueup.files import is_hub_name
from trueup.fitted import FittedSolver, purpose
from trueup.hf.hub import from_hub
from trueup.hf.loading import read_json

CONFIG = "scheduler_config.json"
OURS = f"scheduler-*/{CONFIG}"  # what a calibration's directory has them in


def folder_of(solver: FittedSolver) -> str:
    """Where in a calibration's directory the scheduler of a solver is."""
    guided = f"-guidance-{solver.guidance:.9g}" if solver.guidance != 1.0 else ""
    return f"scheduler-{solver.nfe}{guided}"


def find_scheduler(
    where: str | PathLike[str],
    subfolder: str | None = None,
    nfe: int | None = None,
    guidance: float | None = None,
    **how: Any,
) -> Path:
    """The directory of the fitted scheduler that is meant, or an error that says which there are.

    where: a scheduler's own directory, a calibration's or a pipeline's, or the name of one on the Hub.
    """
    root = Path(where)
    if not root.exists() and is_hub_name(where):
        root = from_hub(str(where), [f"*{CONFIG}"], error=ModelError, **how)
    if not root.is_dir():
        raise ModelError(f"{where} is not a directory that holds a scheduler, nor a name on the Hub")
    root = root / (subfolder or "")
    paths = [root / CONFIG, root / "scheduler" / CONFIG, *sorted(root.glob(OURS))]
    found = {path.parent: of for path in paths if path.exists() and (of := made_for(path)) is not None}
    if not found:
        fit = "solvers are fitted by trueup.fit_solver, and kept by Calibration.save_pretrained"
        raise ModelError(f"{where} holds no scheduler fitted to a model: {fit}")
    meant = [
        path
        for path, (steps, guided) in found.items()
        if nfe in (None, steps) and (guidance is None or math.isclose(guided, guidance, rel_tol=1e-6))
    ]
    if len(meant) == 1:
        return meant[0]
    there = f"{where} has schedulers for {', '.join(purpose(*of) for of in sorted(found.values()))}"
    if not meant:
        asked = [] if nfe is None else [f"nfe {nfe}"]
        asked += [] if guidance is None else [f"guidance {guidance:g}"]
        raise MismatchError(f"{there}, not for {' and '.join(asked)}")
    raise MismatchError(there, "say which with {} and {}", Argument("nfe"), Argument("guidance"))


def made_for(path: Path) -> tuple[int, float] | None:
    """Evaluations and guidance of a fitted scheduler's config; None if it is another's."""
    config = read_json(path)
    solver = config.get("_solver")
    if config.get("_class_name") != "FittedScheduler" or not isinstance(solver, dict):
        return None
    nfe, guidance = solver.get("nfe"), solver.get("guidance")
    if type(nfe) is not int or not isinstance(guidance, (int, float)):
        raise ModelError(f"{path} does not say what its solver is for")
    return nfe, float(guidance)
