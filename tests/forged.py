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
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["trueup"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(meta, tensors)
    meta.pop("checksum", None)
    meta["checksum"] = files._checksum(tensors, meta)
    forged = path.with_name("forged.trueup.safetensors")
    save_file({name: v.contiguous() for name, v in tensors.items()}, forged, {"trueup": json.dumps(meta)})
    return forged
