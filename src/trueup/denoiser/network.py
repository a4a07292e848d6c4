"""What lies around and behind a network: wrappers, what it returns, corrections it carries, its weights."""

from __future__ import annotations

import hashlib
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trueup.errors import ModelError

_SAMPLED = 4096  # weights hashed per tensor: enough to tell checkpoints apart, quick for billions
_WRAPPERS = re.compile(r"\b_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")  # of parts of it
_COARSER = (torch.float32, torch.float16, torch.bfloat16)


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
    """The corrections at work on a network, whatever wraps it, or on a part of it (see `trueup.attach`)."""
    modules = network.modules() if isinstance(network, nn.Module) else ()
    hooks: Any = (hook for module in modules for hook in module._forward_hooks.values())
    return [hook for hook in hooks if getattr(hook, "corrects_output", False) and hook.enabled]


def eagerly() -> AbstractContextManager[Any]:
    """Without compiled code, which does not look for hooks that came after it."""
    stance = getattr(torch.compiler, "set_stance", None)  # since 2.6
    return nullcontext() if stance is None else stance("force_eager")


def fingerprint(network: Any) -> dict[str, str]:
    """Hash a network's weights as they are and as each coarser dtype would hold them.

    A calibration made in float32 is then recognised by the same network in half precision. Empty for a
    network without weights, and for one whose weights are spread over devices and cannot be seen whole.
    """
    network = unwrapped(network)
    if not isinstance(network, nn.Module) or is_sharded(network):
        return {}
    named = ((_WRAPPERS.sub("", name), p.detach()) for name, p in network.named_parameters())
    parameters = sorted((pair for pair in named if pair[1].device.type != "meta"), key=lambda pair: pair[0])
    if not parameters:
        return {}
    # A network in half precision, even if some of its layers are kept in float32, is known at half only.
    halves = {p.dtype for _, p in parameters} & set(_COARSER[1:])
    dtypes = tuple(halves) if len(halves) == 1 else _COARSER
    return {str(dtype).removeprefix("torch."): _hash(parameters, dtype) for dtype in dtypes}


def is_sharded(network: nn.Module) -> bool:
    """Whether a network holds only its share of the weights (FSDP, tensor parallel)."""
    return any("_flat_param" in name or hasattr(p, "placements") for name, p in network.named_parameters())


def same_weights(ours: dict[str, str], theirs: dict[str, str]) -> bool:
    """Whether two fingerprints agree at the finest dtype that both have."""
    names = (str(dtype).removeprefix("torch.") for dtype in _COARSER)
    finest = next((name for name in names if name in ours and name in theirs), None)
    return finest is not None and ours[finest] == theirs[finest]


def _hash(parameters: list[tuple[str, Tensor]], dtype: torch.dtype) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, p in parameters:
        values = p.reshape(-1)[:: max(1, p.numel() // _SAMPLED)].to("cpu")
        if values.is_floating_point():
            values = values.to(dtype).to(torch.float32)
        digest.update(f"{name}{tuple(p.shape)}".encode())
        digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()
