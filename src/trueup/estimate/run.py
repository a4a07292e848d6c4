"""A run directory: what has been measured so far, so that nothing is measured twice.

One file, `checkpoint.safetensors`, holds the moments, the settings they were measured with and a digest of
every image behind them. It is replaced atomically after each batch, less often where that would take more
than a tenth of the time; whatever happens, what came after it is all that is lost.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from trueup.data import Batch, Samples, digests
from trueup.errors import DataError, TrueupError
from trueup.estimate.moments import LEVELS, SUMS, Moments
from trueup.files import write

FORMAT = 1
_COUNTS = ("mean_only", "data_digest")
_LOOKED_AT = 16  # images read again on resuming, to see that the data is still the same


@dataclass
class Run:
    """A run directory in use by this process alone. `with Run(folder) as run: ...`"""

    folder: str | PathLike[str]
    indices: array[int] = field(default_factory=lambda: array("q"))  # the samples measured so far
    digests: array[int] = field(default_factory=lambda: array("q"))  # and what was in them
    skipped: list[str] = field(default_factory=list)
    batch_size: int | None = None
    position: int = 0  # where in the data to go on

    @property
    def file(self) -> Path:
        """The checkpoint."""
        return Path(self.folder) / "checkpoint.safetensors"

    def __enter__(self) -> Run:
        folder = Path(self.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("w")
        except OSError as error:
            raise TrueupError(f"cannot use {folder} as a run directory: {error.strerror or error}") from None
        try:
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process, however it ends
        except ImportError:  # not on Windows
            pass
        except BlockingIOError:
            self._lock.close()
            raise TrueupError(f"another process is working in {folder}: wait for it, or stop it") from None
        except OSError:  # a file system that cannot lock
            pass
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def resume(self, fresh: Moments, samples: Samples) -> Moments:
        """The moments measured so far, or `fresh` in a new run; other settings or images are refused."""
        if not self.file.exists():
            return fresh
        try:
            with safe_open(self.file, framework="pt") as file:
                meta = json.loads((file.metadata() or {})["trueup_run"])
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            if meta["format"] != FORMAT:
                raise TrueupError(f"{self.folder} was made by another version of trueup: use a new directory")
            other = _differences(meta["settings"], _settings(fresh))
            shapes = {name: getattr(fresh, name).shape for name in (*SUMS, *LEVELS)}
            if not other and {n: v.shape for n, v in tensors.items() if n in shapes} != shapes:
                raise ValueError("its sums have the wrong shape")
            self.indices, self.digests = (array("q", tensors[n].tolist()) for n in ("indices", "digests"))
            self.skipped, self.batch_size = list(meta["skipped"]), meta["batch_size"]
            self.position, signed = meta["position"], meta["signed"]
        except (SafetensorError, OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TrueupError(
                f"{self.file} cannot be read ({' '.join(str(error).split())[:100]}): "
                "delete the run directory to start over"
            ) from None
        if other:
            raise TrueupError(
                f"{self.folder} was begun with another {' and another '.join(other)}: "
                "repeat those settings, or use a new run directory"
            )
        samples.signed = signed
        self._check_data(samples)
        samples.skipped, samples.position = list(self.skipped), self.position
        for name in (*SUMS, "indices", "digests"):
            setattr(fresh, name, tensors[name])
        for name in _COUNTS:
            setattr(fresh, name, meta["counts"][name])
        fresh.provenance = meta["provenance"]
        return fresh

    def add(self, batch: Batch) -> None:
        """Note which samples a batch held."""
        self.indices.extend(batch.index.tolist())
        self.digests.extend(map(_signed, batch.digests))

    def save(self, moments: Moments, batch_size: int, samples: Samples) -> None:
        """Replace the checkpoint."""
        names = (*SUMS, *LEVELS)
        tensors = {name: getattr(moments, name).to("cpu", copy=True).contiguous() for name in names}
        tensors["indices"] = torch.tensor(self.indices, dtype=torch.int64)
        tensors["digests"] = torch.tensor(self.digests, dtype=torch.int64)
        meta = {
            "format": FORMAT,
            "settings": _settings(moments),
            "provenance": moments.provenance,
            "counts": {name: getattr(moments, name) for name in _COUNTS},
            "batch_size": batch_size,
            "position": samples.position,
            "skipped": samples.skipped,
            "signed": samples.signed,
        }
        write(self.file, to_bytes(tensors, {"trueup_run": json.dumps(meta)}))
        self.position = samples.position

    def _check_data(self, samples: Samples) -> None:
        """Look at some samples again, or, of a stream, which is read up to here anyway, at all."""
        known = dict(zip(self.indices, self.digests, strict=True))
        if samples.indexed:
            last = len(self.indices) - 1
            some = {self.indices[round(i * last / (_LOOKED_AT - 1))] for i in range(_LOOKED_AT)}
            found = {index: self._digest(samples, index) for index in sorted(some)}
        else:
            found = {}
            for batch in samples.batches(64, 0, self.position):
                values = map(_signed, batch.digests)
                found.update(zip(batch.index.tolist(), values, strict=True))
            found.update({index: None for index in known if index not in found})
        for index, value in found.items():
            if value is None or value != known.get(index):
                raise DataError(
                    f"sample {index} of {samples.name} is not what it was when {self.folder} was begun: "
                    "put the images back, or use a new run directory"
                )

    @staticmethod
    def _digest(samples: Samples, index: int) -> int | None:
        try:
            return _signed(digests(samples.at(index)[None])[0])
        except (DataError, IndexError):
            return None


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 == 1 else value


def _settings(moments: Moments) -> dict[str, Any]:
    """Everything that must not change within a run, as JSON has it."""
    provenance = {k: v for k, v in moments.provenance.items() if k not in ("own_call", "generated")}
    settings = {
        **provenance,
        "way of generating images": moments.provenance.get("generated"),
        "sample shape": moments.shape,
        "set of levels": moments.t.tolist(),
        "set of bands": moments.bands.edges,
    }
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]
