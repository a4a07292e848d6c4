"""What a pipeline's network is told, by number: prompts encoded once, and kept."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from trueup.denoiser import fingerprint, prediction, unwrapped
from trueup.denoiser.denoiser import evaluating
from trueup.denoiser.layout import arranged, restored
from trueup.errors import Argument, DataError, ModelError
from trueup.hf.listening import (
    PICTURES,
    TEXT,
    Heard,
    Interface,
    Pipeline,
    more_channels,
    same_in_some_order,
)

_AT_ONCE = 16  # conditions that a text encoder is handed together
_GUIDANCE = 2.0  # with which guidance is listened to
# What guides otherwise than by a line, and when it does not.
_OTHERWISE = {"guidance_rescale": 0.0, "cfg_normalization": False, "use_dynamic_cfg": False, "pag_scale": 0.0}


class _Row(NamedTuple):
    """What one row's network, and its helper, are told."""

    network: list[Tensor]
    helper: list[Tensor]
    channels: Tensor | None  # that come with x_t

    @property
    def sizes(self) -> tuple[Any, ...]:
        return tuple(leaf.shape for leaf in (*self.network, *self.helper))


class Vocabulary:
    """Conditions of a pipeline: what a person says in text, as whole numbers that networks are called with.

    A condition is a prompt, or the arguments of the pipeline as a mapping: {"prompt": .., "image": ..}. Its
    number is a hash of it, the same in every process. The empty prompt is none at all, as in guidance.
    """

    def __init__(self, pipeline: Pipeline, interface: Interface):
        self.pipeline, self.interface = pipeline, interface
        self._said: dict[int, Mapping[str, Any]] = {}
        self._rows: dict[int, _Row] = {}
        negative = pipeline.arguments.get("negative_prompt") or ""
        self.null = _number({"negative_prompt": negative} if negative else {"prompt": ""})
        self._blank = {"prompt": "a"} if "prompt" in pipeline.known else {}
        self._rows[self.null] = self._null(self._blank)
        self.pictures = self._needed(self._blank)
        self._guides: bool | None = None  # whether by a line; None until somebody asked

    def numbers(self, conditions: Sequence[Any]) -> Tensor:
        """The numbers of conditions, (n,) int64."""
        said = [_arguments(condition) for condition in conditions]
        for name, one in ((name, one) for one in said for name in self.pictures):
            if one.get(name) is None:
                pipe, names = type(self.pipeline.pipe).__name__, ", ".join(("prompt", *self.pictures))
                raise DataError(
                    f"{pipe} is told of a picture: conditions are mappings with {names}, not {one!r:.60}"
                )
        found = [_number(one) for one in said]
        self._said.update(zip(found, said, strict=True))
        return torch.tensor(found, dtype=torch.int64)

    def settings(self) -> dict[str, Any]:
        """What its answers depend on, as plain values."""
        return {"told": self.identity, "size": list(self.pipeline.picture_size())}

    @property
    def identity(self) -> str:
        """A hash of how conditions are told: of the pipeline's arguments, its encoders and its helper."""
        pipeline, digest = self.pipeline, hashlib.blake2b(digest_size=8)
        parts = {name: part for name, part in pipeline.pipe.components.items() if isinstance(part, nn.Module)}
        others = {name: part for name, part in parts.items() if unwrapped(part) is not pipeline.network}
        _add(digest, [pipeline.arguments, {name: fingerprint(part) for name, part in others.items()}])
        return digest.hexdigest()

    def embedding(self, y: Tensor) -> Tensor:
        """Embeddings of prompts, (B, tokens, width)."""
        k = self.interface.network.own(TEXT)
        if k is None:
            raise DataError("this pipeline's network is told no embedding of its prompts that could be read")
        rows = [row.network[k] for row in self.rows(y.reshape(-1).tolist())]
        if len({row.shape for row in rows}) > 1:
            raise DataError("this pipeline's prompts have embeddings of different lengths")
        return torch.cat(rows).float().to(y.device)

    def nulls(self, y: Tensor) -> Tensor:
        """What stands for no prompt beside each: the same for all that say neither it nor pictures."""
        return torch.tensor([self._null_of(number) for number in y.reshape(-1).tolist()]).to(y)

    def _null_of(self, number: int) -> int:
        said = self._said.get(number, {})
        negative = any(name.startswith("negative_") for name, value in said.items() if value is not None)
        if not (negative or self.pictures):
            return self.null
        null = _number({**said, "null": True})  # with its prompt, of which a helper may be told
        if null not in self._rows:
            self._rows[null] = self._null(said)
        return null

    def _null(self, said: Mapping[str, Any]) -> _Row:
        """What is told in place of a condition: heard beside it, in guidance; or the empty prompt."""
        positive = self._heard(*self.pipeline.listen([said])[:2])[0]
        calls, helped, _ = self.pipeline.listen([said], guidance=_GUIDANCE, until="step")
        first, beside = ([call for call in heard if call.step == 0] for heard in (calls, helped))
        # A helper may be told the prompt alone, and what it makes of that is for both halves.
        rows = [row for k, call in enumerate(first) for row in self._heard([call], beside[k:] or beside)]
        if len(rows) < 2:
            empty = {**said, "prompt": ""} if "prompt" in said else said
            return self._heard(*self.pipeline.listen([empty])[:2])[0]
        return max(rows, key=lambda row: _distance(row, positive))

    def check_guidance(self) -> None:
        """Raise if what the pipeline makes of guidance is not null + guidance (conditional - null)."""
        if self._guides is None:
            self._guides = self._guides_by_a_line()
        if self._guides:
            return
        pipe, parameters = self.pipeline.pipe, inspect.signature(self.pipeline.pipe.__call__).parameters
        said = {name: self.pipeline.arguments.get(name, p.default) for name, p in parameters.items()}
        off = {name: value for name, value in _OTHERWISE.items() if said.get(name, value) != value}
        problem = f"{type(pipe).__name__} does not guide by null + guidance (prompt - null)"
        so = f"pass as_denoiser(pipe, arguments={off}), and the same to the pipeline" if off else "do without"
        raise ModelError(f"{problem}: {so}")

    def _guides_by_a_line(self) -> bool:
        calls, _, stepped = self.pipeline.listen([self._blank], guidance=_GUIDANCE, until="end")
        sign = -1 if self.interface.binding.turned else 1
        for k, step in enumerate(stepped):
            outputs = [prediction(call.output) for call in calls if call.step == k]
            halves = torch.cat([self.interface.mean(output) for output in outputs])
            if len(halves) != 2:
                return False
            eps = max(torch.finfo(output.dtype).eps for output in (*outputs, step.output))
            close = 4 * eps * _GUIDANCE * float(halves.abs().max())
            handed, (one, other) = sign * self.interface.mean(step.output), halves.double().split(1)
            lines = (null + _GUIDANCE * (told - null) for null, told in ((one, other), (other, one)))
            if not any(same_in_some_order(line, handed, close) for line in lines):
                return False
        return True

    def _needed(self, said: Mapping[str, Any]) -> tuple[str, ...]:
        """Pictures that the network is told of: those with which it is told otherwise."""
        found = []
        before = self._heard(*self.pipeline.listen([said])[:2])[0]
        for name in (name for name in PICTURES if name in self.pipeline.known):
            white = self.pipeline.picture(name, 255)
            after = self._heard(*self.pipeline.listen([{**said, name: white}])[:2])[0]
            found += [name] if _distance(before, after) > 0 else []
        return tuple(found)

    def _heard(self, calls: list[Heard], helped: list[Heard]) -> list[_Row]:
        network = self.interface.network.rows(calls[0])
        helper = self.interface.helper
        beside = [[]] * len(network) if helper is None else helper.rows(helped[0])
        return [
            _Row(*row) for row in zip(network, beside, more_channels(self.interface, calls[0]), strict=True)
        ]

    def rows(self, numbers: Sequence[int]) -> list[_Row]:
        """What rows are told, encoded now where it was not before."""
        new = [number for number in dict.fromkeys(numbers) if number not in self._rows]
        unknown = next((number for number in new if number not in self._said), None)
        if unknown is not None:
            raise DataError(
                f"{unknown} is the number of no condition: pass prompts, or what `numbers` made of them"
            )
        for first in range(0, len(new), _AT_ONCE):
            part = new[first : first + _AT_ONCE]
            calls, helped, _ = self.pipeline.listen([self._said[number] for number in part])
            self._rows.update(zip(part, self._heard(calls, helped), strict=True))
        return [self._rows[number] for number in numbers]

    def __call__(self, x_t: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """The network's output (B, C, *spatial) for rows told what their numbers stand for."""
        numbers = y.reshape(-1).tolist()
        rows = self.rows(numbers)
        groups: dict[Any, list[int]] = {}
        for k, row in enumerate(rows):  # prompts of different lengths make tensors of different sizes
            groups.setdefault(row.sizes, []).append(k)
        if len(groups) == 1:
            return self._run(x_t, t, rows)
        parts = [self._run(x_t[own], t[own], [rows[k] for k in own]) for own in groups.values()]
        order = torch.tensor([k for own in groups.values() for k in own], device=x_t.device)
        return torch.cat(parts)[order.argsort()]

    def _run(self, x_t: Tensor, t: Tensor, rows: Sequence[_Row]) -> Tensor:
        interface, helper, pipe = self.interface, self.pipeline.helper, self.pipeline
        layout = interface.binding.layout
        channels = [row.channels for row in rows if row.channels is not None]
        x = x_t if not channels else torch.cat([x_t, torch.cat(channels).to(x_t)], 1)
        x = arranged(x, layout)
        made: dict[str, Any] = {}
        if interface.helper is not None and helper is not None:
            arguments = interface.helper.arguments(arranged(x_t, layout), t, [row.helper for row in rows])
            with evaluating(helper):
                found = helper(**arguments)
            made = {name: found[k] for name, k in interface.made.items()}
        arguments = interface.network.arguments(x, t, [row.network for row in rows])
        output = prediction(pipe.called(**arguments, **made))
        return restored(output, layout, tuple(x_t.shape[2:]))


def _arguments(condition: Any) -> dict[str, Any]:
    if condition is None or isinstance(condition, str):
        return {"prompt": condition or ""}
    if isinstance(condition, Mapping) and condition and all(isinstance(name, str) for name in condition):
        return dict(condition)
    if isinstance(condition, (int, np.integer)):
        raise DataError(
            "this model is told prompts, not numbers", "pass {}", Argument("prompts", said="texts")
        )
    problem = "a condition is a prompt, or a mapping of the pipeline's arguments"
    raise DataError(f"{problem}, not {condition!r:.60}")


def _number(said: Mapping[str, Any]) -> int:
    """A hash of a condition that fits a label."""
    digest = hashlib.blake2b(digest_size=8)
    _add(digest, said)
    return int.from_bytes(digest.digest(), "little") >> 2  # labels of files are below 2^62


def _add(digest: Any, value: Any) -> None:
    """A value's content: of pictures what is seen, whatever palette they have."""
    if isinstance(value, Image.Image):
        value = np.asarray(value if value.mode in ("L", "RGB", "RGBA") else value.convert("RGB"))
    if isinstance(value, Tensor):
        value = value.detach().cpu().double().numpy()
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for name, part in sorted(value.items()):
            digest.update(f"{name}=".encode())
            _add(digest, part)
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}]".encode())
        for part in value:
            _add(digest, part)
    elif value is None or isinstance(value, (str, bool, int, float)):
        digest.update(f"{type(value).__name__}{value!r};".encode())
    else:
        raise DataError(f"a condition holds text, numbers, pictures and tensors, not {type(value).__name__}")


def _distance(row: _Row, other: _Row) -> float:
    """How far apart two conditions are."""
    ours, theirs = (
        [*one.network, *one.helper, *([] if one.channels is None else [one.channels])] for one in (row, other)
    )
    pairs = zip(ours, theirs, strict=True)
    return sum(float((a.double() - b.double()).abs().sum()) if a.shape == b.shape else 1e9 for a, b in pairs)
