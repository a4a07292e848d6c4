"""What a network looks like to us: one call (x_t, t, y) -> output, with its process and parametrization."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trueup.errors import ModelError
from trueup.parametrization import Parametrization
from trueup.process import NoiseProcess

_SAMPLED = 4096  # weights hashed per tensor: enough to tell checkpoints apart, quick for billions
_COARSER = (torch.float32, torch.float16, torch.bfloat16)


def prediction(raw: Any) -> Tensor:
    """The tensor inside whatever a network returns: itself, `.sample`, or the first of a tuple."""
    if isinstance(raw, Tensor):
        return raw
    sample = getattr(raw, "sample", None)
    if isinstance(sample, Tensor):
        return sample
    if isinstance(raw, (tuple, list)) and raw and isinstance(raw[0], Tensor):
        return raw[0]
    raise ModelError(
        f"the network returned {type(raw).__name__}; expected a tensor, a tuple, or an object with .sample"
    )


def carries_correction(network: Any) -> bool:
    """Whether a calibration is attached to a network (see `trueup.attach`)."""
    modules = (network, getattr(network, "_orig_mod", None))  # compiled, and what was compiled
    hooks = [hook for module in modules for hook in getattr(module, "_forward_hooks", {}).values()]
    return any(getattr(hook, "corrects_output", False) for hook in (*hooks, network))


class Denoiser:
    """Any network with the noise it was trained on and what it predicts.

    `network` is called as `network(x_t, t)`, or `network(x_t, t, y)` for a conditional one, with x_t of
    shape (B, *shape) and t of shape (B,). `shape` is one sample's, channels first. `data_range` is what
    the network was trained on; None means the data is not images (latents, say) and is not rescaled.
    A conditional network gets a label y per row; `null_label` is the one that stands for none. `call` is what
    to call in place of the network. `scheduler_config` is that of the
    diffusers scheduler the network came with; samplers of that name are set up like it.

    >>> from trueup.process import ContinuousVP
    >>> net = Denoiser(lambda x_t, t: x_t, ContinuousVP(), "noise", shape=(1, 8, 8))
    >>> net(torch.zeros(2, 1, 8, 8), torch.tensor([0.1, 0.5])).shape
    torch.Size([2, 1, 8, 8])
    """

    def __init__(
        self,
        network: Callable[..., Any],
        process: NoiseProcess,
        parametrization: Parametrization | str,
        shape: Sequence[int],
        *,
        data_range: tuple[float, float] | None = (-1.0, 1.0),
        conditional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        call: Callable[..., Any] | None = None,
        null_label: Any = None,
        scheduler_config: Mapping[str, Any] | None = None,
        description: str | None = None,
    ):
        if not callable(network):
            raise ModelError(f"a network must be callable, got {type(network).__name__}")
        if not isinstance(process, NoiseProcess):
            raise ModelError("process must be a NoiseProcess: see trueup.process, or pass a scheduler")
        self.network = network
        self.process = process
        self.parametrization = (
            parametrization
            if isinstance(parametrization, Parametrization)
            else Parametrization(parametrization)
        )
        self.shape = tuple(int(n) for n in shape) if isinstance(shape, Iterable) else (int(shape),)
        if len(self.shape) < 2 or min(self.shape) < 1:
            raise ModelError(f"shape is one sample's, (channels, *spatial), got {self.shape}")
        self.data_range = data_range
        self.conditional = conditional
        self.null_label = null_label
        self.scheduler_config = None if scheduler_config is None else dict(scheduler_config)
        self._call = call or network
        weight = next(network.parameters(), None) if isinstance(network, nn.Module) else None
        self.device = torch.device(device or (weight.device if weight is not None else "cpu"))
        self._dtype = dtype
        self.whole_times: bool | None = None  # takes no others; None until somebody has tried
        self.description = description or type(network).__name__

    @property
    def dtype(self) -> torch.dtype:
        """What the network is fed: what was asked for, or whatever its weights are now."""
        weight = next(self.network.parameters(), None) if isinstance(self.network, nn.Module) else None
        return self._dtype or (weight.dtype if weight is not None else torch.float32)

    def __call__(self, x_t: Tensor, t: Tensor, y: Any = None) -> Tensor:
        """The network's prediction, mean channels only (a learned variance is cut off)."""
        return self.with_variance(x_t, t, y)[:, : self.shape[0]]

    def with_variance(self, x_t: Tensor, t: Tensor, y: Any = None) -> Tensor:
        """The network's prediction, with the channels of a learned variance if it has one."""
        times = t
        if self.process.integer_times and not t.is_floating_point():
            times = t.to(torch.int64)
        args = (times, y) if self.conditional else (times,)
        output = prediction(self._call(x_t.to(self.dtype), *args))
        channels = self.shape[0]
        if (output.shape[:1], output.shape[2:]) != (x_t.shape[:1], x_t.shape[2:]):
            raise ModelError(
                f"the network returned {tuple(output.shape)} for an input of {tuple(x_t.shape)}: "
                "the batch and spatial sizes must agree"
            )
        if output.shape[1] not in (channels, 2 * channels):
            raise ModelError(
                f"the network returned {output.shape[1]} channels for {channels}: expected {channels}, "
                f"or {2 * channels} with a learned variance"
            )
        return output

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
        }

    @torch.inference_mode()
    def has_own_call(self, x_t: Tensor, t: Tensor, y: Any = None) -> bool:
        """Whether `call` changes what goes into the network or comes out of it, found by trying."""
        if not isinstance(self.network, nn.Module) or self._call is self.network:
            return False
        seen: list[tuple[Any, Tensor]] = []

        def look(module: nn.Module, args: Any, kwargs: Any, raw: Any) -> None:
            seen.append(((*args, *kwargs.values()), prediction(raw)))

        handle = self.network.register_forward_hook(look, with_kwargs=True)
        try:
            output = self(x_t, t, y)
        finally:
            handle.remove()
        if len(seen) != 1:
            return True
        inputs, raw = seen[0]
        same = [
            isinstance(v, Tensor) and v.shape == x_t.shape and torch.equal(v.to(x_t), x_t) for v in inputs
        ]
        return not (any(same) and torch.equal(raw[:, : self.shape[0]], output))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """With the network in evaluation mode (no dropout), and back as it was afterwards."""
        modules = list(self.network.modules()) if isinstance(self.network, nn.Module) else []
        training = [module.training for module in modules]
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            for module, was in zip(modules, training, strict=True):
                module.training = was

    def to(self, device: torch.device | str) -> Denoiser:
        """Move the network; returns self."""
        try:
            self.device = torch.device(device)
            if isinstance(self.network, nn.Module):
                self.network.to(self.device)
        except (RuntimeError, AssertionError) as error:
            raise ModelError(f"device {device!s} cannot be used: {' '.join(str(error).split())}") from None
        return self


def fingerprint(network: Any) -> dict[str, str]:
    """Hash a network's weights as they are and as each coarser dtype would hold them.

    A calibration made in float32 is then recognised by the same network in half precision.
    """
    if not isinstance(network, nn.Module):
        return {}
    parameters = sorted(
        (
            (name.replace("_orig_mod.", "").removeprefix("module."), p.detach())  # torch.compile, DDP
            for name, p in network.named_parameters()
            if p.device.type != "meta"
        ),
        key=lambda named: named[0],
    )
    if not parameters:
        return {}
    # A network in half precision, even if some of its layers are kept in float32, is known at half only.
    halves = {p.dtype for _, p in parameters} & set(_COARSER[1:])
    dtypes = tuple(halves) if len(halves) == 1 else _COARSER
    return {str(dtype).removeprefix("torch."): _hash(parameters, dtype) for dtype in dtypes}


def same_weights(ours: dict[str, str], theirs: dict[str, str]) -> bool:
    """Whether two fingerprints agree at the finest dtype that both have."""
    common = [str(d).removeprefix("torch.") for d in _COARSER]
    common = [name for name in common if name in ours and name in theirs]
    return bool(common) and ours[common[0]] == theirs[common[0]]


def _hash(parameters: list[tuple[str, Tensor]], dtype: torch.dtype) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, p in parameters:
        flat = p.reshape(-1)
        stride = max(1, flat.numel() // _SAMPLED)
        values = flat[::stride].to("cpu")
        if values.is_floating_point():
            values = values.to(dtype).to(torch.float32)
        digest.update(f"{name}{tuple(p.shape)}".encode())
        digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()
