"""Files that somebody changed and signed again, and what reading them says."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

import trueup
from trueup import files
from trueup.errors import ArtifactError


def refused(path: Path, reason: str) -> str:
    """Loading raises ArtifactError: one line that names the file and holds the reason."""
    with pytest.raises(ArtifactError) as caught:
        trueup.load(path)
    message = str(caught.value)
    assert reason in message
    assert path.name in message
    assert message.isprintable()
    assert len(message) < 400 + len(str(path))
    return message


def resign(path: Path, change) -> Path:
    """Edit a file's metadata and tensors and sign it again, as a careful forger would."""
    meta, tensors = content(path)
    change(meta, tensors)
    forged = path.with_name("forged.trueup.safetensors")
    sign(forged, meta, tensors)
    return forged


def content(path: Path):
    """The metadata and tensors of a file, whatever they are."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return json.loads(file.metadata()["trueup"]), tensors


def sign(path: Path, meta, tensors) -> None:
    """Write a file with the right checksum, whatever is in it."""
    meta = {name: value for name, value in meta.items() if name != "checksum"}
    meta["checksum"] = files._checksum(tensors, meta)
    save_file({name: v.contiguous() for name, v in tensors.items()}, path, {"trueup": json.dumps(meta)})
