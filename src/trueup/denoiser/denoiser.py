"""What a network looks like to us: one call (x_t, t, y) -> eps, with its process and parametrization."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trueup.denoiser.binding import Binding, find_binding, place
from trueup.denoiser.memory import in_parts, out_of_memory
from trueup.denoiser.network import (
    corrections,
    eagerly,
    holds_network,
    prediction,
    same_values,
    unwrapped,
)
from trueup.denoiser.sharded import uninferred
from trueup.denoiser.weights import fingerprint
from trueup.errors import ModelError
from trueup.files import line
from trueup.parametrization import Parametrization
from trueup.process import NoiseProcess

CORRECTED = "a calibration is attached to this model: remove it first"
_FED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Denoiser:
    """Any network with the noise it was trained on and what it predicts.

    network: called as `network(x_t, t)`, or `network(x_t, t, y)` for a conditional one, with x_t (B, *shape)
    and t (B,). call: what to call in its place, where it wants its arguments otherwise:
    `call=lambda x_t, t: net(x_t, t / 1000)`. prediction: see `trueup.Parametrization`. shape: one sample's,
    channels first. data_range: what the network was trained on; None means that the data are not pictures
    (latents, say) and are not rescaled. conditional: whether it takes a label y per row; null_label is the
    one that stands for none. autoencoder: between latents and pictures, see `trueup.hf.Autoencoder`.
    batch_size: rows at once; found by itself, and halved when memory runs out. scheduler_config: that of the
    diffusers scheduler the network came with; samplers of that name are set up like it. binding: where the
    network's own call holds x_t and t, if that is known and need not be found. vocabulary: makes the numbers
    that `call` knows of conditions that are none (prompts): `vocabulary.numbers(conditions)`.

    >>> from trueup.process import ContinuousVP
    >>> net = Denoiser(lambda x_t, t: x_t, ContinuousVP(), "noise", shape=(1, 8, 8))
    >>> net.eps(torch.zeros(2, 1, 8, 8), torch.tensor([0.1, 0.5])).shape
    torch.Size([2, 1, 8, 8])
    """

    def __init__(
        self,
        network: Callable[..., Any],
        process: NoiseProcess,
        prediction: Parametrization | str,
        shape: Sequence[int],
        *,
        call: Callable[..., Any] | None = None,
        data_range: tuple[float, float] | None = (-1.0, 1.0),
        conditional: bool = False,
        null_label: Any = None,
        autoencoder: Any = None,
        batch_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scheduler_config: Mapping[str, Any] | None = None,
        binding: Binding | None = None,
        vocabulary: Any = None,
        description: str | None = None,
    ):
        if not callable(network):
            raise ModelError(f"a network must be callable, got {type(network).__name__}")
        if not isinstance(process, NoiseProcess):
            raise ModelError("process must be a NoiseProcess: see trueup.process, or pass a scheduler")
        if isinstance(prediction, str):
            edm = getattr(process, "sigma_data", None) if prediction.startswith("edm") else None
            prediction = Parametrization(prediction, edm)
        self.network, self.process, self.parametrization = network, process, prediction
        sizes = _numbers(shape)
        if len(sizes) < 2 or not all(n >= 1 and n == n // 1 for n in sizes):
            raise ModelError(f"shape is one sample's, (channels, *spatial), got {shape!r}")
        self.shape = tuple(int(n) for n in sizes)
        ends = None if data_range is None else _numbers(data_range)
        if ends is not None and (len(ends) != 2 or not -math.inf < ends[0] < ends[1] < math.inf):
            raise ModelError(f"data_range is (low, high) with low < high, or None, not {data_range!r}")
        self.data_range: tuple[float, float] | None = None if ends is None else (ends[0], ends[1])
        self.conditional, self.null_label = conditional, null_label
        if autoencoder is not None and not hasattr(autoencoder, "picture_shape"):
            raise ModelError("wrap the autoencoder, so that its scaling is known: trueup.hf.Autoencoder(vae)")
        self.autoencoder = autoencoder
        self.scheduler_config = None if scheduler_config is None else dict(scheduler_config)
        self._holder: list[Any] = [None]  # shared by copies with another batch size
        self.description = description or type(unwrapped(network)).__name__
        self._call = call or network
        self._device, self._dtype, self._batch_size = device, dtype, _checked(batch_size)
        if device is not None:
            self.to(device)
        self._at_once: int | None = None  # rows that fitted into memory
        self._whole_times: bool | None = None  # None until somebody has tried
        self._answered = False  # whether a call went through
        self._binding: Binding | types.EllipsisType | None = binding or ...  # not yet looked for
        self.vocabulary = vocabulary

    @property
    def device(self) -> torch.device:
        """Where the network is now, or will run."""
        weight = next(self.network.parameters(), None) if isinstance(self.network, nn.Module) else None
        if weight is not None and weight.device.type != "meta":
            hook = getattr(unwrapped(self.network), "_hf_hook", None)  # accelerate moves weights when called
            return torch.device(getattr(hook, "execution_device", None) or weight.device)
        return torch.device(self._device or "cpu")

    @property
    def dtype(self) -> torch.dtype:
        """What the network is fed: what was asked for, or whatever its weights are now."""
        if self._dtype is not None or not isinstance(self.network, nn.Module):
            return self._dtype or torch.float32
        dtypes = (p.dtype for p in self.network.parameters())  # those of packed weights say nothing
        return next((dtype for dtype in dtypes if dtype in _FED), torch.float32)

    @property
    def batch_size(self) -> int:
        """How many samples to evaluate at once.

        >>> from trueup.process import ContinuousVP
        >>> Denoiser(lambda x_t, t: x_t, ContinuousVP(), "noise", shape=(3, 32, 32)).batch_size
        8
        """
        if self._batch_size is not None:
            return self._batch_size
        values, most = (2**15, 8) if self.device.type == "cpu" else (2**21, 256)
        fits = max(1, values // math.prod(self.shape))
        return min(most, 2 ** int(math.log2(fits)))

    def with_batch_size(self, batch_size: int | None) -> Denoiser:
        """The same network, so many rows at once; None: as it is."""
        if batch_size is None:
            return self
        other = copy.copy(self)
        other._batch_size, other._at_once = _checked(batch_size), None
        return other

    def to(self, device: torch.device | str) -> Denoiser:
        """Move the network; returns self."""
        try:
            self._device = torch.device(device)
            if isinstance(self.network, nn.Module):
                self.network.to(self._device)
        except (RuntimeError, AssertionError) as error:
            raise ModelError(f"device {device!s} cannot be used: {' '.join(str(error).split())}") from None
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Denoiser:
        own_call = self._call is not self.network
        encloses = isinstance(self.network, types.FunctionType) and holds_network(self.network)
        if (own_call and isinstance(self._call, (types.FunctionType, partial))) or encloses:
            raise ModelError(
                "this Denoiser calls a function that holds on to its network, and so would a copy, which "
                "then runs the original: copy the network and make another Denoiser around it"
            )
        other = copy.copy(self)
        for name in ("network", "_call", "_holder", "vocabulary"):
            setattr(other, name, copy.deepcopy(getattr(self, name), memo))
        return other

    def fingerprint(self) -> dict[str, str]:
        """Hashes of the weights; empty for a network without any."""
        return fingerprint(self.network)

    def identity(self) -> dict[str, Any]:
        """What a network's samples depend on, as plain JSON values, to tell runs apart by."""
        process = json.dumps(self.process.settings(), sort_keys=True).encode()
        return {
            "network": self.description,
            "weights": self.fingerprint(),
            "noise process": hashlib.blake2b(process, digest_size=8).hexdigest(),
            "prediction": self.parametrization.settings(),
            "model range": list(self.data_range) if self.data_range is not None else None,
            **self.told(),
        }

    def told(self) -> dict[str, Any]:
        """How a pipeline's network is told of conditions, and the size of its pictures; else nothing."""
        return {} if self.vocabulary is None else self.vocabulary.settings()

    def eps(self, x_t: Tensor, t: Tensor | float, y: Any = None) -> Tensor:
        """The noise the network finds in x_t (B, *shape) at t, one time or one per row; float32 or finer."""
        output = self.predict(x_t, t, y)
        alpha, sigma = self.process.scales(t, output)
        return self.parametrization.to_eps(output, x_t.to(output), alpha, sigma)

    def predict(self, x_t: Tensor, t: Tensor | float, y: Any = None, *, variance: bool = False) -> Tensor:
        """The network's own output (B, C, *spatial), float32 or finer; variance: with those of a learned one.

        However many rows memory holds at once, they are evaluated; a correction that is attached is applied.
        """
        if not isinstance(t, Tensor):
            t = torch.tensor(t, dtype=torch.float64 if isinstance(t, float) else None)
        times = self._times(t, x_t, y)
        y = y.to(x_t.device) if isinstance(y, Tensor) else y

        def rows(part: slice) -> Tensor:
            return self._rows(x_t[part], times[part], None if y is None else y[part])

        if x_t.requires_grad:  # parts would share one backward pass, and its memory
            parts = [rows(slice(None))]
        else:
            parts, self._at_once = in_parts(rows, len(x_t), self._at_once)
        output = parts[0] if len(parts) == 1 else torch.cat(parts)
        return output if variance else output[:, : self.shape[0]]

    __call__ = predict

    def _times(self, t: Tensor, x_t: Tensor, y: Any) -> Tensor:
        """Times as the network takes them, (B,) beside x_t; whole ones as integers, if it was trained so."""
        whole = not t.is_floating_point()
        if self.process.integer_times and not whole:
            on_cpu = t.device.type == "cpu"  # elsewhere looking would wait for the device
            whole = (on_cpu and bool((t == t.round()).all())) or self.takes_whole_times_only(y)
        if self.process.integer_times and whole:
            t = t.round().to(torch.int64)
        else:
            t = t.to(torch.float64 if torch.float64 in (x_t.dtype, self.dtype) else torch.float32)
        # A copy, since a network may change what it is given.
        return t.to(x_t.device, non_blocking=x_t.is_cuda).reshape(-1).expand(len(x_t)).clone()

    def _rows(self, x_t: Tensor, times: Tensor, y: Any) -> Tensor:
        args = (y,) if self.conditional else ()
        try:
            output = prediction(self._tell(x_t.to(self.dtype), times, *args))
        except Exception as error:
            if isinstance(error, IndexError) and y is not None:
                raise ModelError(
                    "the network does not know one of these labels: it has fewer classes"
                ) from None
            unlike = not isinstance(error, (TypeError, RuntimeError)) or out_of_memory(error)
            if self._answered or unlike or (self.conditional and y is None):
                raise
            problem = f"cannot call the network as network(x_t, t{', y' * self.conditional}) ({line(error)})"
            raise ModelError(problem, "say how it takes its arguments: call=lambda x_t, t: ...") from error
        self._answered = True
        channels = self.shape[0]
        if output.shape not in [(len(x_t), c, *x_t.shape[2:]) for c in (channels, 2 * channels)]:
            shapes = f"{tuple(output.shape)} for an input of {tuple(x_t.shape)}"
            raise ModelError(
                f"the network returned {shapes}: batch and spatial sizes must agree, and channels be "
                f"{channels}, or {2 * channels} with a learned variance"
            )
        output = output if output.dtype == torch.float64 else output.float()
        if self.correction is not None and self.correction.enabled:
            mean = self.correction.correct(output[:, :channels], x_t, times, y)
            output = torch.cat([mean, output[:, channels:]], 1) if output.shape[1] > channels else mean
        return output

    def _tell(self, x_t: Tensor, times: Tensor, *y: Any) -> Any:
        """Call with times as the network counts them, and with copies, since it may write into them."""
        with uninferred(self.network):
            return self._call(*self._copies(x_t, times, *y))

    def _copies(self, x_t: Tensor, times: Tensor, *y: Any) -> list[Any]:
        scale, offset = self.process.told
        told = times if scale == 1.0 and not offset else scale * times + offset
        return [one.clone() if isinstance(one, Tensor) else one for one in (x_t, told, *y)]

    def embedding(self, y: Tensor) -> Tensor:
        """What conditions say, as the network is told it: of a vocabulary's numbers their embeddings."""
        return y if self.vocabulary is None else self.vocabulary.embedding(y)

    def takes_whole_times_only(self, y: Any = None) -> bool:
        """Whether the network tells only whole timesteps apart (an embedding table, a cast).

        >>> from trueup.process import DiscreteVP
        >>> table = torch.nn.Embedding(1000, 1)
        >>> net = Denoiser(lambda x_t, t: x_t + table(t.long())[..., None, None],
        ...                DiscreteVP.linear(), "noise", shape=(1, 4, 4))
        >>> net.takes_whole_times_only()
        True
        """
        if not self.process.integer_times:
            return False
        if self._whole_times is None:
            with self.evaluating(), self.bare(), torch.inference_mode():
                (self._whole_times,), _ = in_parts(lambda _: self._rounds(y), 1)
        return self._whole_times

    def _rounds(self, y: Any) -> bool:
        middle = int(self.process.t_max // 2)
        x_t = torch.linspace(-1, 1, self.shape[-1], device=self.device).expand(1, *self.shape)
        label = None if y is None else torch.as_tensor(y)[:1].to(self.device)

        def at(t: float) -> Tensor:
            return self._rows(x_t, torch.tensor([t], device=self.device), label)

        below, above = at(middle), at(middle + 1)  # first: what fails here has nothing to do with times
        if torch.equal(below, above):  # it does not look at the time
            return False
        try:
            between = at(middle + 0.5)
        except Exception as error:  # a table asked for row 499.5, an assertion
            if out_of_memory(error):
                raise
            return True
        return torch.equal(between, below) or torch.equal(between, above)

    def binding(self, y: Any = None) -> Binding | None:
        """Where the network's own call holds x_t and t; None if only this Denoiser can be corrected."""
        if isinstance(self._binding, types.EllipsisType):
            if not isinstance(self.network, nn.Module):
                self._binding = None
            elif self._call is self.network:
                x, t, label = (place(self.network, i) for i in range(3))
                plain = Binding(x, t, label if self.conditional else None, *self.process.told)
                if self.conditional and y is None:
                    return plain  # as far as anybody can tell without a label
                self._binding = None if self._overwrites(y) else plain
            elif self.conditional and y is None:
                return None  # for now: nobody can try without a label
            else:
                self._binding = self._find_binding(y)
        return self._binding

    def _find_binding(self, y: Any) -> Binding | None:
        x_t, told, labels = self._to_try(y)
        with self.evaluating(), self.bare():
            return find_binding(self.network, self._tell, x_t, told, labels)  # type: ignore[arg-type]

    def _overwrites(self, y: Any) -> bool:
        """Whether the network writes into its arguments, which then do not show what it was called with."""
        x_t, told, labels = self._to_try(y)
        ends = torch.stack([told[0, 0], told[-1, -1]])
        with self.evaluating(), self.bare(), torch.inference_mode(), uninferred(self.network):
            # Far out, where one that clips would.
            given = self._copies(4 * x_t, ends, *(() if labels is None else (labels,)))
            kept = [one.clone() for one in given]
            try:
                self._call(*given)
            except Exception:  # whoever measures will be told
                return False
        return not all(map(same_values, given, kept))

    def _to_try(self, y: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """What to call the network with to see what it does: x_t, times (3, 2), and labels."""
        process = self.process
        high, low = (float(process.lam(t)) for t in (process.t_min, process.t_max))
        times = process.snap(process.t_of_lam(torch.linspace(high, low, 6, dtype=torch.float64)))
        generator = torch.Generator().manual_seed(0)
        x_t = torch.randn(2, *self.shape, generator=generator).to(self.device, self.dtype)
        labels = torch.as_tensor(y)[[0, 0]].to(self.device) if self.conditional else None
        return x_t, torch.stack([self._times(t, x_t, labels) for t in times.reshape(3, 2)]), labels

    @property
    def correction(self) -> Any:
        """A correction that the network itself cannot carry."""
        return self._holder[0]

    @correction.setter
    def correction(self, hook: Any) -> None:
        self._holder[0] = hook

    @property
    def corrected(self) -> bool:
        """Whether a calibration is attached, and at work."""
        own = self.correction is not None and self.correction.enabled
        return own or bool(corrections(self.network))

    def check_bare(self) -> None:
        """Raise if a calibration is attached, where it would be taken for the network's own."""
        if self.corrected:
            raise ModelError(CORRECTED)

    @contextmanager
    def bare(self) -> Iterator[None]:
        """Without the correction that may be attached."""
        found = [*corrections(self.network), *([self.correction] if self.correction is not None else [])]
        with _off(found, "enabled"), eagerly() if found else nullcontext():
            yield

    def evaluating(self) -> AbstractContextManager[None]:
        """With the network in evaluation mode (no dropout), and back as it was afterwards."""
        return evaluating(self.network)


def evaluating(network: Any) -> AbstractContextManager[None]:
    """With a network in evaluation mode, and back as it was afterwards."""
    return _off(network.modules() if isinstance(network, nn.Module) else (), "training")


@contextmanager
def _off(objects: Iterable[Any], name: str) -> Iterator[None]:
    """With an attribute of some objects set to False, and back as it was afterwards."""
    before = [(one, getattr(one, name)) for one in objects]
    try:
        for one, _ in before:
            setattr(one, name, False)
        yield
    finally:
        for one, was in before:
            setattr(one, name, was)


def _numbers(values: Any) -> list[float]:
    """As numbers; none, if they are something else."""
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError):
        return []


def _checked(batch_size: int | None) -> int | None:
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise ModelError(f"batch_size is a whole number of at least 1, not {batch_size!r}")
    return batch_size
