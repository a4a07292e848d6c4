"""How a pipeline calls its network, found by listening to it.

A text-to-image pipeline knows what its network has to be told: embeddings, sizes, positions, the features of
a control image; under which names, at which scale of time. Nobody else has to: it is run for a few steps, and
what reaches the network and the scheduler is noted. What changes from step to step is x_t and t; the rest is
the condition.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trueup.denoiser import Binding, prediction, signature, unwrapped
from trueup.denoiser.binding import place, time_line
from trueup.denoiser.layout import arranged, restored
from trueup.denoiser.network import eagerly
from trueup.errors import ModelError
from trueup.files import line

_STEPS = 3  # enough to see a line in time
_SCALES = ("guidance_scale", "true_cfg_scale", "min_guidance_scale", "max_guidance_scale")  # per frame, too
_OURS = ("num_images_per_prompt", "num_inference_steps", *_SCALES, "prompt")
_TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
TEXT = "encoder_hidden_states"  # embeddings of a prompt, as networks call them
_FRAMES = ("num_frames", "video_length")  # what pipelines call how many there are
PICTURES = ("image", "mask_image", "control_image")  # arguments of pipelines


class _HeardEnoughError(Exception):
    """Stops a pipeline in the middle."""


@dataclass
class Heard:
    """One call of a module."""

    arguments: dict[str, Any]  # by the names of its forward
    step: int  # of the scheduler, before which it was made
    output: Any = None


class Stepped(NamedTuple):
    """One step of the scheduler."""

    output: Tensor  # that it was handed
    t: Any
    sample: Tensor  # x_t


@dataclass
class Told:
    """What a module is called with: x_t, t, and leaves of its other arguments, some of which each row has."""

    x: str
    t: str
    names: list[str]  # of the other arguments
    spec: Any  # how leaves make them
    shared: list[Any]  # leaves; those that each row has are None
    times: list[int]  # of each leaf: how many rows of the tensor belong to one of the batch; 0: it is shared
    scale: float  # its time is scale * t + offset
    offset: float

    def rows(self, heard: Heard) -> list[list[Tensor]]:
        """What each row of a call was told."""
        leaves = pytree.tree_leaves([heard.arguments.get(name) for name in self.names])
        own = [(leaf, each) for leaf, each in zip(leaves, self.times, strict=True) if each]
        count = len(heard.arguments[self.x])
        return [[leaf[k * each : (k + 1) * each].cpu() for leaf, each in own] for k in range(count)]

    def own(self, name: str) -> int | None:
        """Where an argument, if it is one tensor that each row has, is among those of `rows`."""
        if name not in self.names:
            return None
        parts = pytree.tree_unflatten(list(range(len(self.times))), self.spec)
        leaf = parts[self.names.index(name)]
        return sum(map(bool, self.times[:leaf])) if isinstance(leaf, int) and self.times[leaf] == 1 else None

    def arguments(self, x_t: Tensor, t: Tensor, rows: Sequence[Sequence[Tensor]]) -> dict[str, Any]:
        """Arguments that tell every row its own."""
        own, leaves = iter(zip(*rows, strict=True)), []
        for leaf, each in zip(self.shared, self.times, strict=True):
            found = torch.cat(next(own)) if each else leaf
            leaves.append(found.to(x_t.device) if isinstance(found, Tensor) else found)
        others = dict(zip(self.names, pytree.tree_unflatten(leaves, self.spec), strict=True))
        time = t if (self.scale, self.offset) == (1.0, 0.0) else self.scale * t + self.offset
        return {self.x: x_t, self.t: time, **others}


@dataclass
class Interface:
    """How a pipeline uses its network."""

    binding: Binding
    shape: tuple[int, ...]  # of a sample
    network: Told
    helper: Told | None  # of what runs before it, a ControlNet
    made: dict[str, int]  # the network's arguments that come out of that, and where

    def mean(self, output: Tensor) -> Tensor:
        """Of what the network returned, or the scheduler was handed: (B, C, *spatial), without a variance."""
        return restored(output, self.binding.layout, self.shape[1:])[:, : self.shape[0]]


class Pipeline:
    """A pipeline to listen to; arguments: more that its own call is given, height and width say."""

    def __init__(self, pipe: Any, network: nn.Module, arguments: Mapping[str, Any] | None = None):
        self.pipe, self.network, self.called = pipe, unwrapped(network), network  # which may be compiled
        helper = getattr(pipe, "controlnet", None)
        self.helper = helper if isinstance(helper, nn.Module) else None
        self.known = list(inspect.signature(pipe.__call__).parameters)
        self.arguments = dict(arguments or {})
        self.enlarges = 1  # pictures that it makes are so many times as high as those that it is given
        self._check(self.arguments)
        ours = next((name for name in _OURS if name in self.arguments), None)
        if ours is not None:
            raise ModelError(f"{ours} is no argument to fix: trueup says it itself, or takes it elsewhere")
        if "prompt" in self.known and all(getattr(pipe, n, None) is None for n in _TEXT_ENCODERS):
            name = type(pipe).__name__
            raise ModelError(f"this {name} has no text encoder for prompts: load it with one")

    def _check(self, arguments: Mapping[str, Any]) -> None:
        unknown = next((name for name in arguments if name not in self.known), None)
        if unknown is not None:
            raise ModelError(f"{type(self.pipe).__name__} takes no argument {unknown}")

    def listen(
        self, conditions: Sequence[Mapping[str, Any]], *, guidance: float = 1.0, until: str = "call"
    ) -> tuple[list[Heard], list[Heard], list[Stepped]]:
        """Calls of the network, of its helper, and the scheduler's steps.

        conditions: arguments of the pipeline, a set for each row. until: the network's first "call", which
        then is not made, the first "step" of the scheduler, or the "end".
        """
        calls: list[Heard] = []
        helped: list[Heard] = []
        stepped: list[Stepped] = []
        handles = _listened(self.network, calls, stepped, until == "call")
        handles += [] if self.helper is None else _listened(self.helper, helped, stepped, False)
        try:
            # Not in inference mode: weights that are moved meanwhile, by hooks, could not be trained after.
            with _quiet(self.pipe, stepped, until == "step"), eagerly(), torch.no_grad():
                self.pipe(**self._call(conditions, guidance))
        except _HeardEnoughError:
            pass
        except ModelError:
            raise
        except Exception as error:  # whatever a pipeline makes of its arguments
            problem = f"{type(self.pipe).__name__} does not run on these conditions"
            raise ModelError(f"{problem}: {line(error, 300)}") from error
        finally:
            for handle in handles:
                handle.remove()
        if not calls:
            raise self._odd("did not call its network")
        return calls, helped, stepped

    def _call(self, conditions: Sequence[Mapping[str, Any]], guidance: float) -> dict[str, Any]:
        own = getattr(self.pipe.scheduler, "solver", None)  # a fitted one has its own number of steps
        given: dict[str, Any] = {
            "num_inference_steps": _STEPS if own is None else own.nfe,
            "output_type": "latent",
            # One a row, or what is drawn for it would depend on its place in a batch.
            "generator": [torch.Generator().manual_seed(0) for _ in conditions],
            **dict.fromkeys(_SCALES, guidance),
            "strength": 1.0,
            "clean_caption": False,  # or texts are changed by packages that may not be there
            "use_resolution_binning": False,
        }
        if guidance != 1.0 and "true_cfg_scale" in self.known:
            given["negative_prompt"] = ""  # without one there is no guidance
        given = {name: value for name, value in given.items() if name in self.known} | self.arguments
        for name in dict.fromkeys(name for one in conditions for name in one):
            self._check({name: None})
            values: list[Any] = [one.get(name) for one in conditions]
            given[name] = torch.stack(values) if all(isinstance(v, Tensor) for v in values) else values
        if isinstance(given.get("negative_prompt"), str) and "prompt" in given:
            given["negative_prompt"] = [given["negative_prompt"]] * len(conditions)
        # Blank pictures where there are none: to hear how the network is told of them.
        for name in (name for name in PICTURES if name in self.known and name not in given):
            given[name] = [self.picture(name, 0)] * len(conditions)
        return given

    def picture(self, name: str, value: int) -> Image.Image:
        """A picture of one gray value that the pipeline may be given under a name."""
        height, width = (side // self.enlarges for side in self.picture_size())
        picture = Image.new("L", (width, height), value)
        return picture if "mask" in name else picture.convert("RGB")

    @property
    def _factor(self) -> int:
        return getattr(self.pipe, "vae_scale_factor", 8)

    def picture_size(self) -> tuple[int, int]:
        """Height and width of the pictures it makes."""
        config, factor = self.network.config, self._factor
        side = config.get("sample_size") or getattr(self.pipe, "default_sample_size", 64)
        sides = (side, side) if isinstance(side, int) else tuple(side)[-2:]
        named = (self.arguments.get(name) for name in ("height", "width"))
        height, width = (own or factor * default for own, default in zip(named, sides, strict=True))
        return int(height), int(width)

    def interface(self) -> Interface:
        """How the network is called, heard in a few steps of two rows, and in one of three."""
        texts = [{"prompt": text} if "prompt" in self.known else {} for text in ("", "a", "the")]
        if "height" not in self.known and "image" in self.known:  # which says how large the latents are
            told = self.listen(texts[:2])[0][0].arguments.values()
            rows = next((v.shape[-2] for v in told if isinstance(v, Tensor) and v.ndim == 4), 0)
            self.enlarges = max(1, rows * self._factor // self.picture_size()[0])
        calls, helped, stepped = self.listen(texts[:2], until="end")
        more, more_helped, _ = self.listen(texts)
        if len(calls) != len(stepped) or len(helped) not in (0, len(calls)):
            raise self._odd(f"calls its network {len(calls)} times in {len(stepped)} steps")
        times = [float(step.t) for step in stepped]
        made = _made(calls, helped)
        network = self._told(calls, more[0], times, made)
        helper = self._told(helped, more_helped[0], times, ()) if helped else None
        x, raw = calls[0].arguments[network.x], prediction(calls[0].output)
        layout = self._layout(x, network.x, texts[:2])
        spatial = self._spatial(x, layout)
        x, raw, sample, handed = (
            restored(v, layout, spatial) for v in (x, raw, stepped[0].sample, stepped[0].output)
        )
        channels = sample.shape[1]  # x_t may come with a condition's, outputs with a variance's
        turned = self._turned(raw[:, :channels], handed[:, :channels])
        at_x, at_t = (place(self.network, name) for name in (network.x, network.t))
        at_y = None if network.own(TEXT) is None else place(self.network, TEXT)
        binding = Binding(at_x, at_t, at_y, network.scale, network.offset, layout, turned)
        return Interface(binding, (channels, *x.shape[2:]), network, helper, made)

    def _odd(self, what: str) -> ModelError:
        name = type(self.pipe).__name__
        return ModelError(f"{name} {what}: wrap its network in a trueup.Denoiser whose `call` knows how")

    def _told(
        self, calls: list[Heard], other: Heard, times: list[float], made: Mapping[str, int] | tuple[()]
    ) -> Told:
        """What a module is told, of calls with two rows and one with three."""
        heard = calls[0].arguments
        rows = torch.tensor(times, dtype=torch.float64)[:, None].expand(-1, 2)
        lines = {name: time_line([_twice(call.arguments[name]) for call in calls], rows) for name in heard}
        t = next((name for name, found in lines.items() if found is not None), None)
        x = next(
            (name for name, value in heard.items() if isinstance(value, Tensor) and value.ndim >= 3), None
        )
        if t is None or x is None:
            raise self._odd(f"tells its network {', '.join(heard)}: where the time is cannot be seen")
        names = [name for name in heard if name not in (x, t, *made)]
        leaves, spec = pytree.tree_flatten([heard[name] for name in names])
        others, *later = (
            pytree.tree_leaves([call.arguments.get(name) for name in names]) for call in (other, *calls[1:])
        )
        if not all(len(found) == len(leaves) and all(map(_equal, found, leaves)) for found in later):
            raise self._odd("tells its network more than x_t and t that changes from step to step")
        if len(others) != len(leaves):
            raise self._odd("tells its network things that depend on how many rows there are")
        each = [_rows_each(two, three) for two, three in zip(leaves, others, strict=True)]
        shared = [None if own else leaf for leaf, own in zip(leaves, each, strict=True)]
        return Told(x, t, names, spec, shared, each, *(lines[t] or ()))

    def _layout(self, x: Tensor, name: str, texts: Sequence[Mapping[str, Any]]) -> str | None:
        if x.ndim == 3 and hasattr(self.pipe, "_pack_latents"):
            return "packed"
        if x.ndim != 5 or self.network.config.get("in_channels") != x.shape[2]:
            return None
        if x.shape[1] != x.shape[2]:
            return "frames_first"
        # As many frames as channels: of a single picture there are fewer.
        frames = next((name for name in _FRAMES if name in self.known), None)
        if frames is not None:
            calls = Pipeline(self.pipe, self.called, {**self.arguments, frames: 1}).listen(texts)[0]
            one = calls[0].arguments[name]
            fewer = [one.shape[axis] < x.shape[axis] for axis in (1, 2)]
            if any(fewer) and not all(fewer):
                return "frames_first" if fewer[0] else None
        raise self._odd(f"has as many frames as channels ({x.shape[1]}), and which are which cannot be seen")

    def _spatial(self, x: Tensor, layout: str | None) -> tuple[int, ...]:
        """Height and width of latents that are packed: tokens do not say, so that pictures do."""
        if layout != "packed":
            return ()
        tokens, (height, width) = x.shape[1], self.picture_size()
        rows = max(1, round(math.sqrt(tokens * height / width)))
        spatial = (2 * rows, 2 * (tokens // rows))
        latents = torch.randn(2, x.shape[2] // 4, *spatial, generator=torch.Generator().manual_seed(0))
        try:
            packed = self.pipe._pack_latents(latents, *latents.shape)
        except (TypeError, RuntimeError):
            packed = None
        if packed is None or packed.shape[1] != tokens or not torch.equal(packed, arranged(latents, layout)):
            raise self._odd("packs latents in a way of its own")
        return spatial

    def _turned(self, mean: Tensor, output: Tensor) -> bool:
        """Whether the scheduler is handed the output with its sign turned, its values in whatever order."""
        close = 2e-2 * float(mean.abs().max())  # of half precision
        for turned in (False, True):
            if same_in_some_order(mean, -output if turned else output, close):
                return turned
        raise self._odd("does more with its network's output than to hand it to the scheduler")


def _listened(module: nn.Module, calls: list[Heard], stepped: list[Any], stop: bool) -> list[Any]:
    """Note the calls of a module, from now on."""
    takes = signature(module)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = dict(takes.bind(*args, **kwargs).arguments)
        for parameter in takes.parameters.values():  # **kwargs, by their own names
            found.update(found.pop(parameter.name, {}) if parameter.kind is parameter.VAR_KEYWORD else {})
        calls.append(Heard(pytree.tree_map(_copied, found), len(stepped)))
        if stop:
            raise _HeardEnoughError

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls[-1].output = output if isinstance(output, Tensor) else pytree.tree_map(_copied, output)

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


@contextmanager
def _quiet(pipe: Any, stepped: list[Stepped], stop: bool) -> Iterator[None]:
    """Without a bar, dropout or draws from anybody's generator, and with a copy of its scheduler.

    Its steps are noted; running it changes it.
    """
    own, bar = pipe.scheduler, getattr(pipe, "_progress_bar_config", None)
    pipe.scheduler = copied = copy.deepcopy(own)
    step = copied.step

    @functools.wraps(step)  # pipelines look at its arguments
    def noted(*args: Any, **kwargs: Any) -> Any:
        told = inspect.signature(step).bind(*args, **kwargs).arguments
        stepped.append(Stepped(told["model_output"].clone(), told["timestep"], told["sample"].clone()))
        if stop:
            raise _HeardEnoughError
        return step(*args, **kwargs)

    copied.step = noted
    pipe._progress_bar_config = {"disable": True}
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    training = [module for part in parts for module in part.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.random.fork_rng():
            yield
    finally:
        for module in training:
            module.training = True
        pipe.scheduler = own
        if bar is None:
            del pipe._progress_bar_config
        else:
            pipe._progress_bar_config = bar


def _made(calls: list[Heard], helped: list[Heard]) -> dict[str, int]:
    """Which of the network's arguments are parts of what its helper returned, and which parts."""
    if not helped:
        return {}
    output, arguments = helped[0].output, calls[0].arguments
    parts = [pytree.tree_leaves(part) for part in output]
    found: dict[str, int] = {}
    for name, value in arguments.items():
        leaves = pytree.tree_leaves(value)
        same = (
            k for k, part in enumerate(parts) if len(part) == len(leaves) and all(map(_equal, part, leaves))
        )
        if isinstance(leaves[0] if leaves else None, Tensor) and (k := next(same, None)) is not None:
            found[name] = k
    return found


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _twice(value: Any) -> Any:
    """One time as one for each of two rows."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = torch.tensor(float(value))
    return value.reshape(-1).expand(2) if isinstance(value, Tensor) and value.numel() == 1 else value


def _rows_each(two: Any, three: Any) -> int:
    """How many rows of a tensor belong to one of a call, of calls with two and three; 0: it is shared."""
    if not (isinstance(two, Tensor) and isinstance(three, Tensor) and two.ndim and three.ndim):
        return 0
    each = len(two) // 2
    return each if each and (len(two), len(three)) == (2 * each, 3 * each) else 0


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def same_in_some_order(one: Tensor, other: Tensor, close: float) -> bool:
    """Whether two tensors hold the same values but for `close`, however they are arranged."""
    ours, theirs = (values.flatten().double().sort().values for values in (one, other))
    return ours.shape == theirs.shape and bool(((ours - theirs).abs() <= close).all())


def more_channels(interface: Interface, heard: Heard) -> list[Tensor | None]:
    """Channels that came with x_t and are a condition, (1, c, *spatial) of each row; None: there are none."""
    x = heard.arguments[interface.network.x]
    if interface.binding.layout == "packed":
        return [None] * len(x)
    x = restored(x, interface.binding.layout, ())
    channels = interface.shape[0]
    return [x[k : k + 1, channels:].cpu() if x.shape[1] > channels else None for k in range(len(x))]
