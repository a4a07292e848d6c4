"""A run directory: what has been measured so far, so that nothing is measured twice.

`checkpoint.safetensors` holds moments, the settings they were measured with and digests of every image and
label behind them. It is replaced atomically after each batch, less often where that would take more than a
hundredth of the time; whatever happens, what came after it is all that is lost. Of a job of many ranks each
has a file like it, `checkpoint-K.safetensors`. Whoever goes on, in however many processes, takes all files
there are, each rank some of them; one that is gone costs the work that it held.
"""

from __future__ import annotations

import hashlib
import json
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trueup import distributed
from trueup.errors import ArtifactError, DataError, TrueupError
from trueup.estimate.moments import Moments
from trueup.estimate.stored import pack, unpack
from trueup.files import Folder, line, load_as, save_tensors, unpacked
from trueup.images import Batch, Samples
from trueup.stored import Bounds, check_tensors, part

KIND = "a run"
CHECKPOINT = "checkpoint{}.safetensors"
SHARDS = "shards.safetensors"  # where everything is in the tar shards that are measured
_SAID = {"told": "set of text encoders or arguments", "size": "size of pictures"}
_LOOKED_AT = 16  # images of a file read again on resuming, to see that the data is still the same


class Resumed(NamedTuple):
    """What there is to go on from."""

    moments: Moments  # for this rank to add to
    known: dict[int, int]  # index and digest of every image that some rank has
    seen: Any = None  # what is looked at in embeddings


class Run(Folder):
    """A run directory in use by this process, or by this job, alone. `with Run(folder) as run: ...`"""

    def __init__(self, path: str | PathLike[str]):
        rank = distributed.rank()
        super().__init__(path, hold=rank == 0)
        self.file = self.path / CHECKPOINT.format(f"-{rank}" if rank else "")
        self.taken: list[Path] = []  # files whose moments will be in this one, when it is written
        self.replaced: list[Path] = []  # files whose moments are in one of those
        self.labels: list[int] = []  # digests of the samples' labels
        self.groups: list[int] = []  # and of the groups they were put in

    def __enter__(self) -> Run:
        return self

    def resume(self, fresh: Moments, samples: Samples) -> Resumed:
        """What was measured so far, `fresh` in a new run; other settings or images are refused."""
        found: Moments | None = None
        self.taken = self._current(self._share())
        for file in self.taken:
            moments = self._read(file, fresh, samples)
            found = moments if found is None else found + moments
        moments = fresh if found is None else found
        moments.skipped = list(dict.fromkeys(moments.skipped))
        seen = None if moments.conditions is None else moments.conditions.features
        said = distributed.gather((_known(moments), moments.skipped, samples.signed, seen))
        known: dict[int, int] = {}
        for theirs, skipped, signed, _ in said:
            if not known.keys().isdisjoint(theirs):
                raise TrueupError(f"two files in {self.path} hold the same image: delete it to start over")
            known |= theirs
            samples.skipped += [reason for reason in skipped if reason not in samples.skipped]
            samples.signed = samples.signed or signed
        return Resumed(moments, known, next((one[3] for one in said if one[3] is not None), None))

    def _share(self) -> list[Path]:
        """The files that this rank goes on from: its own, and of more than there are ranks every n-th.

        Ranks need not see the same files; each goes to one that sees it.
        """
        files = {path.name: path for path in self.path.glob(CHECKPOINT.format("*"))}
        there = [(name, files[name].stat().st_size, files[name].stat().st_mtime_ns) for name in sorted(files)]
        said, size = distributed.gather(there), distributed.size()

        def taker(file: Any) -> int:
            digits = "".join(filter(str.isdecimal, file[0]))
            whose = int(digits or 0) % size
            return (
                whose if file in said[whose] else next(k for k, theirs in enumerate(said) if file in theirs)
            )

        return [files[file[0]] for file in there if taker(file) == distributed.rank()]

    def _current(self, files: list[Path]) -> list[Path]:
        """Those files whose images are not all in another one, that was written to replace them."""
        held = [(distributed.rank(), file.name, _indices(file)) for file in files]
        everywhere = [file for theirs in distributed.gather(held) for file in theirs]
        kept = []
        for file, mine in zip(files, held, strict=True):
            larger = (o for o in everywhere if o[2] > mine[2] or (o[2] == mine[2] and o[:2] < mine[:2]))
            if next(larger, None) is None:
                kept.append(file)
            else:
                self.replaced.append(file)  # not deleted before the other has been read
        return kept

    def _read(self, file: Path, fresh: Moments, samples: Samples) -> Moments:
        """The moments in a file; labels and groups are noted."""
        try:
            moments, labels, groups, signed, settings = load_as(file, KIND, _unpack)
        except ArtifactError as error:
            raise _distrusted(file, error) from None
        now = settings_of(fresh)
        other = [name for name in {**settings, **now} if settings.get(name) != now.get(name)]
        if other:
            if "size" in other:  # which the rest follows from
                other = [name for name in other if name not in ("told", "sample shape", "set of bands")]
            names = [_SAID.get(name, name) for name in other]
            raise TrueupError(
                f"{self.path} was begun with another {' and another '.join(names)}: "
                "repeat those settings, or use a new run directory"
            )
        if settings_of(moments) != settings:
            raise _distrusted(file, "it contradicts itself")
        binding = {name: value for name, value in moments.provenance.items() if name == "binding"}
        moments.provenance = {**fresh.provenance, **binding}  # the same, and of this network for sure
        samples.signed = samples.signed or signed
        self._check_data(moments, labels, groups, samples)
        self.labels += labels
        self.groups += groups
        return moments

    def note(self, batch: Batch, samples: Samples) -> None:
        """Note the labels and groups of a batch."""
        self.labels += _digests(batch.y, len(batch))
        self.groups += _groups(batch, samples)

    def save(self, moments: Moments, samples: Samples) -> None:
        """Replace the checkpoint, and with it those that were taken over."""
        moments.skipped = samples.skipped
        meta, tensors = pack(moments)
        unpacked(unpack, meta, tensors, f"cannot write {self.file}")  # or nobody could go on from it
        for name in ("labels", "groups"):
            tensors[name] = torch.tensor(getattr(self, name), dtype=torch.int64)
        values = {"settings": settings_of(moments), "signed": samples.signed, "moments": meta}
        save_tensors(self.file, KIND, values, tensors)
        for file in (*self.taken, *self.replaced):
            if file != self.file:
                file.unlink(missing_ok=True)
        self.taken, self.replaced = [], []

    def _check_data(self, moments: Moments, labels: list[int], groups: list[int], samples: Samples) -> None:
        """Look at some samples again; a stream, which is read up to here anyway, is looked at in passing."""
        if not samples.indexed:
            return
        own = moments.indices - samples.images.offset
        gone = moments.indices[(own < 0) | (own >= len(samples.source))]
        if len(gone):
            problem = f"sample {int(gone[0])} of {self.path} is not in {samples.name}"
            raise DataError(f"{problem}: put the images back, or use a new run directory")
        last = len(moments.indices) - 1
        for row in sorted({round(i * last / (_LOOKED_AT - 1)) for i in range(_LOOKED_AT)}):
            index = int(moments.indices[row])
            try:
                found = samples.at(index)
                seen = (int(found.digests[0]), *_digests(found.y, 1), *_groups(found, samples))
            except (DataError, IndexError):
                seen = None
            if seen != (int(moments.digests[row]), labels[row], groups[row]):
                raise DataError(
                    f"sample {index} of {samples.name} is not what it was when {self.path} was begun: "
                    "put the images, labels and groups back, or use a new run directory"
                )
        # Of the rest what costs nothing.
        grouped = None if callable(samples.images.groups) else samples.grouped(own.tolist())
        if grouped is not None and grouped.tolist() != groups:
            changed = f"the groups are not what they were when {self.path} was begun"
            raise DataError(f"{changed}: put them back, or use a new run directory")
        try:
            if samples.vocabulary is not None and samples.labels is not None:
                y = samples.vocabulary.numbers([samples.labels[k] for k in own.tolist()])
            else:
                y = torch.as_tensor(np.asarray(samples.labels))[own]
        except (TypeError, ValueError, RuntimeError):  # none, or not numbers
            return
        if _digests(y, len(own)) != labels:
            changed = f"the labels are not what they were when {self.path} was begun"
            raise DataError(f"{changed}: put them back, or use a new run directory")


def _distrusted(file: Path, error: Exception | str) -> TrueupError:
    why = f"{file} cannot be trusted ({line(error, 300)})"
    return TrueupError(f"{why}: delete it, and what it holds is measured again")


def _known(moments: Moments) -> dict[int, int]:
    return dict(zip(moments.indices.tolist(), moments.digests.tolist(), strict=True))


def _indices(file: Path) -> frozenset[int]:
    """Which images a file holds, without the rest of it."""
    try:
        with safe_open(file, framework="pt") as content:
            return frozenset(content.get_tensor("indices").flatten().tolist())
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise _distrusted(file, error) from None


def _unpack(
    meta: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[Moments, list[int], list[int], bool, dict[str, Any]]:
    """What a checkpoint holds: the moments, digests of labels and groups, and what was said of the data."""
    noted = {name: tensors.pop(name) for name in ("labels", "groups")}
    moments = Moments(**unpack(meta["moments"], tensors))
    check_tensors(noted, dict.fromkeys(noted, Bounds(tuple(moments.indices.shape), dtype=torch.int64)))
    _check_counts(moments)
    labels, groups = (tensor.tolist() for tensor in noted.values())
    return moments, labels, groups, part(meta, "signed", bool), part(meta, "settings", dict)


def _check_counts(moments: Moments) -> None:
    """A run measures each of its samples once at every level, and reads none for its mean alone."""
    once, null = moments.data_rows.clone(), moments.provenance.get("null_label")  # (G, F)
    if null is not None:  # and those of other classes once more, as if they had none
        once[moments.classes.index(null)] = once.sum(0)
    counts = (moments.rows, moments.squares)  # (G, F, L)
    same = all(torch.equal(count, once[..., None].expand_as(count)) for count in counts)
    count = len(moments.indices)
    if not count or moments.mean_only or not same or float(moments.data_rows.sum()) != count:
        raise ArtifactError("its counts are not those of its samples")


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
    own = ("binding", "generated", "process", "base_model", "name", "chosen")
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
