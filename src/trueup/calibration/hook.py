"""The correction as it runs: finds x_t and t in a network's call and corrects what it returned."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trueup.bands import along_last_axes
from trueup.calibration.calibration import Calibration
from trueup.calibration.pictures import FAR, OfPictures, onto
from trueup.calibration.tables import Tables, between_nodes, make_tables, nodes_of
from trueup.denoiser import Binding, prediction
from trueup.denoiser.adapters import Watch
from trueup.denoiser.layout import SEEN, arranged, restored, spatial_of, spatial_of_ids
from trueup.errors import AttachError, MismatchError

_FORMS = 256  # of calls that the kernel is kept ready for


class _Fired(threading.local):
    count = 0


FIRED = _Fired()  # how often corrections were at work in this thread; those of compiled code are not counted


class CorrectOutput:
    """A forward hook, or what a `Denoiser` corrects its network's output with.

    What depends on the time is tabulated once: at a node, between which two levels it lies, and what the
    conversion between eps and the network's own output multiplies them with (equation 28). binding: where the
    network's call holds x_t and t. gains: the form of the correction, by default the calibration's. `watch`
    knows the adapters that the network had when this was attached, and warns once of others.
    """

    corrects_output = True

    def __init__(self, calibration: Calibration, binding: Binding | None = None, gains: str | None = None):
        self.binding, self.enabled = binding, True
        self.watch: Watch | None = None
        self._places: tuple[weakref.ref[Tensor] | None, tuple[int, ...]] = (None, ())
        self.shape = calibration.shape
        self.form = form = calibration.gains if gains is None else gains
        self.correction = calibration.correction.with_gains(form)
        own = {of.label: of.correction for of in calibration.classes if of.correction is not None}
        self.classes = {y: own[y].with_gains(form) for y in sorted(own)} if form != "none" else {}
        self.null_label = calibration.provenance.get("null_label")
        self.conditions = calibration.conditions if form != "none" else None
        self.by_level = not all(made.empty for made in (self.correction, *self.classes.values()))
        self.by_level = self.by_level or isinstance(self.conditions, OfPictures)
        self.empty = not self.by_level and self.conditions is None
        if self.empty:
            return
        self.calibration, self.nodes = calibration, nodes_of(calibration)
        self.boundaries: list[float] = between_nodes(self.nodes).tolist()
        process, correction = calibration.process, self.correction
        slack = 0.1 * (process.t_max - process.t_min)  # solvers end a little beyond
        self.span = (process.t_min - slack, process.t_max + slack)
        self.conditional = bool(self.classes) or self.conditions is not None
        self.constant_only = not (self.conditional or correction.a.any() or correction.d.any())
        self._ready: dict[tuple[torch.device, torch.dtype, tuple[int, ...]], Tables] = {}
        self._launches: dict[Any, Any] = {}  # of the kernel, by the form of a call; None: it has none

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], raw: Any) -> Any:
        """Correct what a forward call returned."""
        if not self.enabled:
            return raw
        if self.empty:
            self._told_size(kwargs)
            return raw
        if not torch.compiler.is_compiling():
            FIRED.count += 1
            if self.watch is not None:  # compiled, it would guard every layer
                self.watch.look(module)
        assert self.binding is not None
        output, x_t = self._samples(prediction(raw), args, kwargs)
        channels, layout = self.shape[0], self.binding.layout
        if output.ndim != 1 + len(self.shape) or output.shape[1] not in (channels, 2 * channels):
            raise MismatchError(
                f"the calibration was made for samples of shape {self.shape}, or with as many channels and "
                f"axes; the network returned {tuple(output.shape[1:])}"
            )
        t = self.binding.t.of(args, kwargs)
        if (self.binding.scale, self.binding.offset) != (1.0, 0.0):
            t = t.float() if isinstance(t, Tensor) and t.dtype in (torch.float16, torch.bfloat16) else t
            t = (t - self.binding.offset) / self.binding.scale
        y = self._label(args, kwargs) if self.conditional else None
        return _like(raw, arranged(self.correct(output, x_t, t, y), layout))

    def _samples(
        self, output: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """A call's output and x_t, channels first; x_t without the channels of a condition."""
        assert self.binding is not None
        layout, x_t = self.binding.layout, self.binding.x.of(args, kwargs)
        if layout is None:
            return output, x_t[:, : self.shape[0]]
        spatial = self._told_size(kwargs) or spatial_of(output, layout, self.shape[1:])
        if spatial is None:
            tokens = f"{output.shape[1]} tokens are no picture"
            raise MismatchError(f"{tokens} with the proportions of {self.shape[1:]}")
        return restored(output, layout, spatial), restored(x_t, layout, spatial)[:, : self.shape[0]]

    def _told_size(self, kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Of packed latents, where a call says it."""
        packed = self.binding is not None and self.binding.layout == "packed"
        ids = kwargs.get("img_ids") if packed else None
        return None if ids is None else self._size(ids)

    def _size(self, ids: Tensor) -> tuple[int, ...]:
        """The size of packed latents; a pipeline tells the same places at every step."""
        known, size = self._places
        if known is None or known() is not ids:
            size = spatial_of_ids(ids)
            self._places = (weakref.ref(ids), size)
        SEEN[ids.shape[-2]] = size  # for a scheduler, which is not told
        return size

    # As torch.compiler.disable does, which would load the compiler.
    _size._torchdynamo_disable = True  # type: ignore[attr-defined]
    _size._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "the size of packed latents is in the values of img_ids: compile without fullgraph=True"
    )

    def _label(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The labels of a call; a network that takes none for the null label may be called without."""
        assert self.binding is not None
        assert self.binding.y is not None  # or it is the Denoiser that corrects
        try:
            return self.binding.y.of(args, kwargs)
        except AttachError:
            return None

    def correct(self, output: Tensor, x_t: Tensor, t: Any, y: Any = None) -> Tensor:
        """The corrected output at times of the process, in its own dtype; not in autocast's.

        A learned variance, in channels after those of the sample, is left alone.
        """
        if self.empty:
            return output
        kind = output.device.type
        if not torch.compiler.is_compiling() and not torch.is_autocast_enabled(kind):  # entering is not free
            return self._correct(output, x_t, t, y)
        with torch.autocast(kind, enabled=False):
            return self._correct(output, x_t, t, y)

    def _correct(self, output: Tensor, x_t: Tensor, t: Any, y: Any) -> Tensor:
        dtype, channels = _wide(output.dtype), self.shape[0]
        tables = self._tables(output.device, dtype, tuple(output.shape[2:]))
        times = self._times(t, output)
        fused = tables.fused
        if fused and self.conditions is None:
            launched = self._launched(fused, output, x_t, times, tables)
            if launched is not None:
                return launched
        if fused and self.conditions is None and fused.fits(output, x_t):
            # The kernel finds the node itself, where nothing else depends on it.
            found = times if isinstance(times, Tensor) and not self.classes else None
            knots = tables.knots if found is not None else self._knots(times, y, output, tables)
            rest = (tables.constant, tables.slopes, tables.bands, tables.forward)
            corrected: Tensor = fused.correct(output, x_t, found, tables.between(times), knots, *rest)
            return corrected
        knots = self._knots(times, y, output, tables)
        mean, variance = output[:, :channels], output[:, channels:]
        seen = self._picture(y, output, tables) if tables.by_told is not None else None
        made = self._by_level(mean, x_t, knots, tables, seen) if self.by_level else mean
        if tables.seen is not None:
            made = (made.to(dtype) - self._of_embedding(knots, y, mean, tables)).to(mean.dtype)
        return torch.cat([made, variance], 1) if variance.shape[1] else made

    def _launched(
        self, fused: Any, output: Tensor, x_t: Tensor, times: Tensor | float, tables: Tables
    ) -> Tensor | None:
        """What the kernel makes of a call like others before, launched directly."""
        if self.classes or torch.compiler.is_compiling():
            return None
        form = fused.form_of(output, x_t, times)
        if form is None:
            return None
        found: int | Tensor = times if isinstance(times, Tensor) else bisect_left(self.boundaries, times)
        launch = self._launches.get(form, False)  # one look: another thread may forget them
        if launch is False:
            if not fused.can_be_readied(output, x_t):
                return None
            if len(self._launches) >= _FORMS:
                self._launches.clear()
            rest = (tables.between(times), tables.knots, tables.constant, tables.slopes, tables.bands)
            launch = self._launches[form] = fused.Ready.of(output, x_t, found, *rest, tables.forward)
        return None if launch is None else launch(output, x_t, found)

    def _knots(self, times: Tensor | float, y: Any, output: Tensor, tables: Tables) -> Tensor:
        """What each row's correction is made of, (B or 1, 6)."""
        if isinstance(times, Tensor):
            boundaries = tables.between(times)
            knots = tables.knots[torch.bucketize(times.to(boundaries).contiguous(), boundaries)]
        else:
            node = bisect_left(self.boundaries, times)
            knots = tables.knots[node : node + 1]
        if self.classes:
            first = self._class(y, output, tables) * (len(tables.constant) // (1 + len(self.classes)))
            knots = knots.expand(len(first), -1) + torch.nn.functional.pad(first[:, None].to(knots), (0, 5))
        return knots

    def _of_embedding(self, knots: Tensor, y: Any, output: Tensor, tables: Tables) -> Tensor:
        """What depends on an embedding, as images."""
        if not isinstance(y, Tensor) or len(y) not in (1, len(output)):
            got = "without one" if y is None else f"with {type(y).__name__} {tuple(getattr(y, 'shape', ()))}"
            raise AttachError(f"this calibration is by embedding, and the network was called {got}")
        seen, maps, back = tables.seen, tables.maps, tables.low
        assert seen is not None
        assert maps is not None
        assert back is not None
        features = seen(y.to(maps, non_blocking=True))  # (B or 1, Q)
        left, near, far, on_b, *_ = knots[..., None].unbind(1)  # (B or 1, 1) each
        row = left[:, 0].long()
        between = on_b[..., None] * (near[..., None] * maps[row] + far[..., None] * maps[row + 1])
        made = (features[..., None] * between).sum(1)  # (B, C * low box)
        box = [matrix.shape[1] for matrix in back]
        return along_last_axes(made.view(-1, self.shape[0], *box), back)

    def _picture(self, y: Any, output: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """The DCT of the pictures that a network was told, on the grid of its output, (B or 1, M, *box).

        And whether each is one, (B or 1,): guidance tells a blank where it tells nothing.
        """
        count = self.conditions.channels if isinstance(self.conditions, OfPictures) else 0
        fits = isinstance(y, Tensor) and y.ndim == 1 + len(self.shape) and y.shape[1] == count
        if not fits or len(y) not in (1, len(output)):
            got = "without one" if y is None else f"with {type(y).__name__} {tuple(getattr(y, 'shape', ()))}"
            problem = f"this calibration is by a condition's picture, {count} channels of one for each row"
            raise AttachError(f"{problem}, and the network was called {got}")
        like, box = tables.forward[0], [len(matrix) for matrix in tables.forward]
        matrices = onto(y.shape[2:], output.shape[2:], box)
        y = y.to(like, non_blocking=True)
        shown = (y.flatten(2) != y.flatten(2)[..., :1]).any(2).any(1)
        return along_last_axes(y, [matrix.to(like) for matrix in matrices]), shown

    def _by_level(
        self,
        output: Tensor,
        x_t: Tensor,
        knots: Tensor,
        tables: Tables,
        seen: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """What every row has at its level, or its class has; seen: of the pictures the network was told."""
        dtype = _wide(output.dtype)
        if self.constant_only:
            constant = knots @ tables.constant
            if tables.pictured is not None:
                box = [matrix.shape[1] for matrix in tables.pictured]
                constant = along_last_axes(constant.view(-1, self.shape[0], *box), tables.pictured)
            return (output.to(dtype) - constant.view(-1, *output.shape[1:])).to(output.dtype)
        wide, (left, near, far, on_b, on_x, on_u) = (
            output.to(dtype),
            knots[..., None].unbind(1),
        )  # (B, 1) each
        row = left[:, 0].long()
        constant = on_b * (near * tables.constant[row] + far * tables.constant[row + 1])  # (B, C * box)
        slopes = near * tables.slopes[row] + far * tables.slopes[row + 1]
        a, d = slopes.view(len(slopes), self.shape[0], 2, -1)[..., tables.bands].unbind(2)  # (B, C, box)
        z = along_last_axes(torch.stack([wide, x_t.to(wide)], 2), tables.forward)  # (B, C, 2, *box)
        output_z, input_z = z.flatten(3).unbind(2)
        delta = a * output_z
        if tables.places is None:
            delta = constant.view_as(a) + delta
        else:
            every = constant.view(*a.shape[:2], -1).expand(*delta.shape[:2], -1)
            delta = delta.index_add(2, tables.places, every)
        delta = delta + (on_x[..., None] * a + on_u[..., None] * d) * input_z
        if seen is not None:
            told = self._told(seen[0], output_z, input_z, knots, tables)
            delta = delta + seen[1][:, None, None] * told
        back = along_last_axes(delta.view(-1, *z.shape[1:2], *z.shape[3:]), tables.backward)
        return (wide - back).to(output.dtype)

    def _told(self, seen: Tensor, output_z: Tensor, input_z: Tensor, knots: Tensor, tables: Tables) -> Tensor:
        """What pictures say beyond output and input, (B, C, box); nothing of those that say too much."""
        left, near, far, on_b, on_x, on_u = knots[..., None].unbind(1)  # (B, 1) each
        row = left[:, 0].long()
        parts = (tables.by_told, tables.beside, tables.beside_slopes, tables.usual)
        gains, beside, slopes, usual = (
            near * part.reshape(len(part), -1)[row] + far * part.reshape(len(part), -1)[row + 1]
            for part in parts
            if part is not None
        )
        channels, count = self.shape[0], seen.shape[1]
        gains = gains.view(len(gains), channels, count, -1)[..., tables.bands]
        a, d = slopes.view(len(slopes), channels, 2, -1)[..., tables.bands].unbind(2)
        made = (gains * seen.flatten(2)[:, None]).sum(2) + beside.view_as(a)  # over (B, C, M, box)
        made = on_b[..., None] * made + a * output_z + (on_x[..., None] * a + on_u[..., None] * d) * input_z
        size = made.square().sum((1, 2)) / (on_b.square() * usual)[:, 0].clamp_min(1e-30)
        return (2 - size.sqrt() / FAR).clamp(0.0, 1.0)[:, None, None] * made

    def _class(self, y: Any, output: Tensor, tables: Tables) -> Tensor:
        """Which correction each row gets, (B,): 0 is that of all classes, for labels that have none."""
        y = self.null_label if y is None else y
        if y is None:
            raise AttachError("this calibration is by class, and the network was called without labels")
        labels = torch.as_tensor(y).to(output.device, non_blocking=True).reshape(-1)
        if labels.is_floating_point() or labels.is_complex() or len(labels) not in (1, len(output)):
            shape = tuple(torch.as_tensor(y).shape)
            raise AttachError(f"this calibration is by class, and the network got {shape} for its labels")
        place = torch.searchsorted(tables.labels, labels.long().contiguous()).clamp_max(
            len(tables.labels) - 1
        )
        return torch.where(tables.labels[place] == labels, place + 1, 0).expand(len(output))

    def _times(self, t: Any, output: Tensor) -> Tensor | float:
        """The rows' times on the output's device, (B or 1,), or one that the host knows. Never waits."""
        if torch.compiler.is_compiling():  # which cannot follow a bisection
            t = torch.as_tensor(t)
        elif not isinstance(t, Tensor) or (t.numel() == 1 and t.device.type == "cpu"):
            self._check(float(t))
            return float(t)
        elif t.device.type == "cpu" and t.numel():  # others are not waited for
            self._check(*map(float, t.aminmax()))
        times = t.to(output.device, non_blocking=True).reshape(-1)
        if times.numel() not in (1, len(output)):
            raise AttachError(f"got {times.numel()} times for a batch of {len(output)}")
        return times

    def _check(self, *times: float) -> None:
        for t in (t for t in times if not self.span[0] <= t <= self.span[1]):
            ends = f"from {self.calibration.process.t_min:g} to {self.calibration.process.t_max:g}"
            raise AttachError(f"the network was called at t = {t:g} of a process {ends}: is its time right?")

    def prepare(
        self, device: torch.device, dtype: torch.dtype, spatial: tuple[int, ...] | None = None
    ) -> None:
        """Make the tables for a network's outputs now, of the size that was measured if nothing is said."""
        if not self.empty:
            self._tables(device, _wide(dtype), self.shape[1:] if spatial is None else spatial)

    def _tables(self, device: torch.device, dtype: torch.dtype, spatial: tuple[int, ...]) -> Tables:
        """Everything the correction needs, made once for a device and a size."""
        if torch.compiler.is_compiling():
            spatial = tuple(len(range(n)) for n in spatial)  # whole numbers, where these are symbols
            self._make(device, dtype, *spatial)
        elif (device, dtype, spatial) not in self._ready:
            self._make(device, dtype, *spatial)
        return self._ready[device, dtype, spatial]

    def _make(self, device: torch.device, dtype: torch.dtype, *spatial: int) -> None:
        if (device, dtype, spatial) not in self._ready:
            how: dict[str, Any] = {"form": self.form, "labels": list(self.classes), "by_level": self.by_level}
            how |= {"constant_only": self.constant_only, "device": device, "dtype": dtype, "spatial": spatial}
            with torch.inference_mode(False):  # they may be part of a backward pass later
                self._ready[device, dtype, spatial] = make_tables(self.calibration, self.nodes, **how)

    # As torch.compiler.assume_constant_result does, which would load the compiler: what is compiled for a new
    # size makes its tables while it is being compiled, and not as part of it.
    _make._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_ready": {},
            "_launches": {},
            "_places": (None, ()),
        }  # device copies are made again where they are needed


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What an output is corrected in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _like(raw: Any, corrected: Tensor) -> Any:
    """`raw` with its prediction replaced."""
    if isinstance(raw, Tensor):
        return corrected
    if isinstance(raw, tuple) and hasattr(raw, "_fields") and hasattr(raw, "_replace"):  # a namedtuple
        return raw._replace(**{"sample" if "sample" in raw._fields else raw._fields[0]: corrected})
    if isinstance(raw, (tuple, list)):
        return type(raw)((corrected, *raw[1:]))
    if "sample" in getattr(raw, "__dataclass_fields__", ()):
        return replace(raw, sample=corrected)
    raw.sample = corrected
    return raw
