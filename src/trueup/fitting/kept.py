"""What an interrupted fit keeps in its run directory: the fine trajectories, and the solvers made so far."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueup.calibration import Calibration, load
from trueup.errors import ArtifactError
from trueup.files import Folder, load_as, save_tensors
from trueup.fitted import FittedSolver
from trueup.fitting.teacher import MOST, Teacher
from trueup.stored import Bounds, check_tensors, part

KIND = "fine trajectories"
SOLVERS = "solvers.trueup.safetensors"
_TEACHER = "trajectories.safetensors"
_LARGEST = 2**30  # bytes of trajectories worth keeping


def clear(run: str | PathLike[str]) -> None:
    """Remove what a fit has kept, its result being somewhere else."""
    if Path(run).is_dir():
        Kept(run, {}).clear()


class Kept:
    """Where a fit goes on; without a directory nothing is kept."""

    def __init__(self, run: str | PathLike[str] | None, settings: dict[str, Any]):
        self.folder = None if run is None else Folder(run)
        text = json.dumps(settings, sort_keys=True, default=str)
        self.key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        if self.folder is not None:
            self.folder.release()

    def teacher(self, noise: Tensor) -> Teacher | None:
        """The trajectories from this noise, if they are those of the same settings."""
        path = self._path(_TEACHER)
        if path is None or not path.exists():
            return None
        try:
            return load_as(path, KIND, partial(self._unpack, noise.cpu()))
        except ArtifactError:  # of other settings, or damaged: they are made again
            return None

    def _unpack(self, noise: Tensor, meta: dict[str, Any], tensors: dict[str, Tensor]) -> Teacher:
        count, shape = len(part(tensors, "lam", Tensor)), tuple(noise.shape)
        same: dict[str, Any] = {"low": -MOST, "high": MOST, "dtype": torch.float32}
        bounds = {name: Bounds(shape, **same) for name in ("noise", "samples")}
        check_tensors(
            tensors,
            {**bounds, "states": Bounds((count, *shape), **same), "lam": Bounds((count,), -100.0, 100.0)},
        )
        if meta.get("key") != self.key or not torch.allclose(tensors["noise"], noise, atol=1e-5):
            raise ArtifactError("these are trajectories of something else")
        if count < 4 or not (tensors["lam"].diff() > 1e-9).all():
            raise ArtifactError("these are no trajectories")
        return Teacher(tensors["noise"], tensors["lam"], [*tensors["states"].unbind(0)], tensors["samples"])

    def keep_teacher(self, teacher: Teacher) -> None:
        """Keep the trajectories, unless they are too large."""
        path, size = self._path(_TEACHER), teacher.noise.numel() * 4 * len(teacher.states)
        if path is None or size > _LARGEST:
            return
        parts = {"noise": teacher.noise, "samples": teacher.samples, "states": torch.stack(teacher.states)}
        tensors = {name: value.float().cpu().contiguous() for name, value in parts.items()}
        save_tensors(path, KIND, {"key": self.key}, {**tensors, "lam": teacher.lam.cpu()})

    def solvers(self) -> list[FittedSolver]:
        """The solvers made so far with the same settings."""
        path = self._path(SOLVERS)
        if path is None or not path.exists():
            return []
        try:
            before = load(path)
        except ArtifactError:
            return []
        return [solver for solver in before.solvers if solver.provenance.get("run") == self.key]

    def keep_solvers(self, calibration: Calibration, made: list[FittedSolver]) -> None:
        """Keep the solvers made so far."""
        path = self._path(SOLVERS)
        if path is not None:
            marked = [replace(one, provenance={**one.provenance, "run": self.key}) for one in made]
            replace(calibration, solvers=tuple(marked)).save(path)

    def clear(self) -> None:
        """All is done and elsewhere: nothing needs to be kept."""
        for name in (SOLVERS, _TEACHER):
            path = self._path(name)
            if path is not None:
                path.unlink(missing_ok=True)
        if self.folder is not None:
            self.folder.release()
            if not any(self.folder.path.iterdir()):
                self.folder.path.rmdir()

    def _path(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder.path / name
