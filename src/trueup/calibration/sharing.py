"""A calibration as a directory for others: here, or on the Hugging Face Hub. See docs/format.md."""

from __future__ import annotations

import warnings
from contextlib import suppress
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trueup.calibration.card import MARK, card
from trueup.errors import ArtifactError, ModelError, TrueupError
from trueup.files import is_hub_name, write
from trueup.hf.hub import from_hub, push
from trueup.hf.shared import CONFIG, OURS, folder_of, made_for

NAME = "calibration.trueup.safetensors"
_ANY = "*.trueup.safetensors"


def save_folder(
    calibration: Any,
    folder: str | PathLike[str],
    base_model: str | None = None,
    where: str | None = None,
) -> None:
    """Write a calibration, its card and its schedulers; of what else is in the folder, nothing is touched."""
    if base_model is not None and not is_hub_name(base_model):
        raise TrueupError(f"base_model is the model's name on the Hub, owner/name, not {base_model!r}")
    folder = Path(folder)
    readme = folder / "README.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        calibration.save(folder / NAME)  # first: what cannot be saved leaves nothing behind
        foreign = readme.exists() and MARK not in readme.read_text(encoding="utf-8", errors="replace")
        try:
            _write_schedulers(folder, calibration)
        except ModelError as missing:
            warnings.warn(f"the calibration is written without its schedulers: {missing}", stacklevel=3)
    except OSError as error:
        raise ArtifactError(f"cannot write {folder}: {error.strerror or error}") from None
    if foreign:
        warnings.warn(f"{readme} is not one of trueup's, and is left as it is", stacklevel=3)
    else:
        write(readme, card(calibration, where, base_model).encode(), ArtifactError)


def push_folder(
    calibration: Any, name: str, *, private: bool | None, token: str | None, base_model: str | None
) -> str:
    """Put it on the Hub; returns its address there."""
    with TemporaryDirectory() as folder:
        save_folder(calibration, folder, base_model, where=name)
        return push(Path(folder), name, private=private, token=token, ours=MARK, stale=[OURS])


def find_calibration(where: str | PathLike[str], revision: str | None = None) -> Path:
    """The file of a calibration: itself, in a directory, or from the Hub."""
    path = Path(where)
    on_hub = not path.exists() and is_hub_name(where)
    if not on_hub and revision is not None:
        raise ArtifactError(f"{where} is no name on the Hub, and has no revision {revision}")
    if on_hub:
        path = from_hub(str(where), [_ANY], revision, ArtifactError)
    elif not path.is_dir():
        return path
    there = [path / NAME] if (path / NAME).exists() else sorted(path.glob(_ANY))
    if not there:
        raise ArtifactError(f"{where} holds no calibration ({_ANY})")
    if len(there) > 1:
        names = ", ".join(found.name for found in there[:5])
        raise ArtifactError(f"{where} holds {len(there)} calibrations ({names}): name one of the files")
    return there[0]


def _write_schedulers(folder: Path, calibration: Any) -> None:
    """A config for each solver, and none for others: what an earlier calibration had is removed."""
    texts = {}
    for solver in calibration.solvers:
        made = calibration.scheduler(solver.nfe, solver.guidance)
        texts[folder / folder_of(solver) / CONFIG] = made.to_json_string()
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        write(path, text.encode(), ArtifactError)
    for path in set(folder.glob(OURS)) - set(texts):
        linked = path.is_symlink() or path.parent.is_symlink()
        if linked or not _is_fitted(path):
            continue
        path.unlink()
        with suppress(OSError):  # somebody keeps other things there
            path.parent.rmdir()


def _is_fitted(path: Path) -> bool:
    try:
        return made_for(path) is not None
    except ModelError:  # whatever it is, it was not written here
        return False
