"""A run directory: what has been measured so far, so that nothing is measured twice.

One file, `checkpoint.safetensors`, holds the moments, the settings they were measured with and digests of
every image and label behind them. It is replaced atomically after each batch, less often where that would
take more than a tenth of the time; whatever happens, what came after it is all that is lost.
"""

from __future__ import annotations

import hashlib
import json
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup.errors import ArtifactError, DataError, TrueupError
from trueup.estimate.moments import Moments
from trueup.estimate.stored import pack, unpack
from trueup.files import Folder, line, load_as, save_tensors, unpacked
from trueup.images import Batch, Samples
from trueup.stored import Bounds, check_tensors, part

KIND = "a run"
CHECKPOINT = "checkpoint.safetensors"
SHARDS = "shards.safetensors"  # where everything is in the tar shards that are measured
_LOOKED_AT = 16  # images read again on resuming, to see that the data is still the same


class Run(Folder):
    """A run directory in use by this process alone. `with Run(folder) as run: ...`"""

    def __init__(self, path: str | PathLike[str]):
        super().__init__(path)
        self.file = self.path / CHECKPOINT
        self.labels: list[int] = []  # digests of the samples' labels
        self.groups: list[int] = []  # and of the groups they were put in

    def __enter__(self) -> Run:
        return self

    def resume(self, fresh: Moments, samples: Samples) -> Moments:
        """The moments measured so far, or `fresh` in a new run; other settings or images are refused."""
        if not self.file.exists():
            return fresh
        try:
            moments, self.labels, self.groups, signed, settings = load_as(self.file, KIND, _unpack)
        except ArtifactError as error:
            why = f"{self.file} cannot be trusted ({line(error, 300)})"
            raise TrueupError(f"{why}: delete {self.path} to start over") from None
        now = settings_of(fresh)
        other = [name for name in {**settings, **now} if settings.get(name) != now.get(name)]
        if other:
            raise TrueupError(
                f"{self.path} was begun with another {' and another '.join(other)}: "
                "repeat those settings, or use a new run directory"
            )
        if settings_of(moments) != settings:
            raise TrueupError(f"{self.file} contradicts itself: delete {self.path} to start over")
        samples.signed, samples.skipped = signed, list(moments.skipped)
        self._check_data(moments, samples)
        return moments

    def note(self, batch: Batch, samples: Samples) -> None:
        """Note the labels and groups of a batch."""
        self.labels += _digests(batch.y, len(batch))
        self.groups += _groups(batch, samples)

    def save(self, moments: Moments, samples: Samples) -> None:
        """Replace the checkpoint."""
        moments.skipped = samples.skipped
        meta, tensors = pack(moments)
        unpacked(unpack, meta, tensors, f"cannot write {self.file}")  # or nobody could go on from it
        for name in ("labels", "groups"):
            tensors[name] = torch.tensor(getattr(self, name), dtype=torch.int64)
        values = {"settings": settings_of(moments), "signed": samples.signed, "moments": meta}
        save_tensors(self.file, KIND, values, tensors)

    def _check_data(self, moments: Moments, samples: Samples) -> None:
        """Look at some samples again; a stream, which is read up to here anyway, is looked at in passing."""
        if not samples.indexed:
            return
        last = len(moments.indices) - 1
        for row in sorted({round(i * last / (_LOOKED_AT - 1)) for i in range(_LOOKED_AT)}):
            index = int(moments.indices[row])
            try:
                found = samples.at(index)
                seen = (int(found.digests[0]), *_digests(found.y, 1), *_groups(found, samples))
            except (DataError, IndexError):
                seen = None
            if seen != (int(moments.digests[row]), self.labels[row], self.groups[row]):
                raise DataError(
                    f"sample {index} of {samples.name} is not what it was when {self.path} was begun: "
                    "put the images, labels and groups back, or use a new run directory"
                )
        own = moments.indices - samples.images.offset
        try:  # all of them, since they cost nothing
            if samples.vocabulary is not None and samples.labels is not None:
                y = samples.vocabulary.numbers([samples.labels[k] for k in own.tolist()])
            else:
                y = torch.as_tensor(np.asarray(samples.labels))[own]
        except (TypeError, ValueError, RuntimeError):  # none, or not numbers
            return
        if _digests(y, len(own)) != self.labels:
            raise DataError(f"the labels are not what they were when {self.path} was begun")


def _unpack(
    meta: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[Moments, list[int], list[int], bool, dict[str, Any]]:
    """What a checkpoint holds: the moments, digests of labels and groups, and what was said of the data."""
    noted = {name: tensors.pop(name) for name in ("labels", "groups")}
    moments = Moments(**unpack(meta["moments"], tensors))
    check_tensors(noted, dict.fromkeys(noted, Bounds(tuple(moments.indices.shape), dtype=torch.int64)))
    labels, groups = (tensor.tolist() for tensor in noted.values())
    return moments, labels, groups, part(meta, "signed", bool), part(meta, "settings", dict)


def _digests(y: Tensor | None, count: int) -> list[int]:
    """A digest of every label; 0 where there are none."""
    if y is None:
        return [0] * count
    rows = (row.contiguous().numpy().tobytes() for row in y.cpu().double())  # however few are whole
    return [int.from_bytes(hashlib.blake2b(r, digest_size=8).digest(), "little", signed=True) for r in rows]


def _groups(batch: Batch, samples: Samples) -> list[int]:
    """The groups that samples were put in on purpose; 0 where they were not."""
    if batch.group is None or samples.images.groups is None:
        return [0] * len(batch)
    return batch.group.tolist()


def settings_of(moments: Moments) -> dict[str, Any]:
    """Everything that must not change within a run, as JSON has it."""
    own = ("binding", "generated", "process", "base_model", "chosen")
    process = json.dumps(moments.provenance["process"], sort_keys=True).encode()
    settings = {
        **{name: value for name, value in moments.provenance.items() if name not in own},
        "noise process": hashlib.blake2b(process, digest_size=8).hexdigest(),
        "way of generating images": moments.provenance.get("generated"),
        "sample shape": moments.shape,
        "set of levels": moments.t.tolist(),
        "set of bands": moments.bands.edges,
        "set of classes": moments.classes,
    }
    return dict(json.loads(json.dumps(settings)))
