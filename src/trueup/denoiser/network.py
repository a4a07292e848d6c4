"""What lies around and behind a network: wrappers, what it returns, and corrections it carries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trueup.errors import ModelError


class Correcting(Protocol):
    """What corrects a network's outputs: a forward hook, or what a `Denoiser` holds."""

    corrects_output: bool
    enabled: bool


def unwrapped(network: Any) -> Any:
    """The network inside torch.compile, DataParallel, DistributedDataParallel and FSDP."""
    inner = getattr(network, "_orig_mod", None)  # torch.compile
    if inner is None:
        inner = getattr(network, "_fsdp_wrapped_module", None)
    if inner is None and isinstance(network, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = network.module
    return network if inner is None else unwrapped(inner)


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


def corrections(network: Any) -> list[Correcting]:
    """The corrections on a network, whatever wraps it, or on a part of it (see `trueup.attach`)."""
    modules = network.modules() if isinstance(network, nn.Module) else ()
    hooks: Iterator[Any] = (hook for module in modules for hook in module._forward_hooks.values())
    return [hook for hook in hooks if getattr(hook, "corrects_output", False)]


@contextmanager
def eagerly() -> Iterator[None]:
    """Without compiled code, which does not look for hooks that came after it."""
    if not hasattr(torch.compiler, "set_stance"):  # before 2.6
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
