"""What lies around and behind a network: wrappers, what it returns, and corrections it carries."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trueup.errors import ModelError


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
    first = raw[0] if isinstance(raw, (tuple, list)) and raw else None
    for found in (raw, getattr(raw, "sample", None), first):
        if isinstance(found, Tensor):
            return found
    raise ModelError(
        f"the network returned {type(raw).__name__}; expected a tensor, a tuple, or an object with .sample"
    )


def corrections(network: Any) -> list[Any]:
    """The corrections on a network, whatever wraps it, or on a part of it (see `trueup.attach`)."""
    modules = network.modules() if isinstance(network, nn.Module) else ()
    hooks = (hook for module in modules for hook in module._forward_hooks.values())
    return [hook for hook in hooks if getattr(hook, "corrects_output", False)]


def eagerly() -> AbstractContextManager[Any]:
    """Without compiled code, which does not look for hooks that came after it."""
    stance = getattr(torch.compiler, "set_stance", None)  # since 2.6
    return nullcontext() if stance is None else stance("force_eager")
