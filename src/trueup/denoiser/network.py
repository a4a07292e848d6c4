"""What lies around and behind a network: wrappers, what it returns, corrections it carries, its weights."""

from __future__ import annotations

import dis
import hashlib
import re
import types
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trueup.errors import ModelError

_SAMPLED = 4096  # weights hashed per tensor: enough to tell checkpoints apart, quick for billions
_WRAPPERS = re.compile(r"\b_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")  # of parts of it
_DEEPEST = 5  # calls within calls that are looked at for networks
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
    """The corrections at work on a network, whatever wraps or calls it, or on a part of it."""
    found = held(network)
    modules = {module: None for one in found if isinstance(one, nn.Module) for module in one.modules()}
    hooks = [hook for module in modules for hook in module._forward_hooks.values()]
    known = (hook for hook in (*hooks, *found) if getattr(hook, "corrects_output", False) is True)
    return [hook for hook in known if hook.enabled]


def held(network: Any) -> list[Any]:
    """A network and what it calls, where that shows: in closures, globals, partials and objects."""
    found: dict[int, Any] = {}
    layer = [network]
    for _ in range(_DEEPEST):
        layer = [one for one in layer if id(one) not in found]
        found.update((id(one), one) for one in layer)
        layer = [part for one in layer for part in _parts(one)]
    return list(found.values())


def _parts(one: Any) -> Iterable[Any]:
    if isinstance(one, (nn.Module, type)):
        return ()
    if isinstance(one, types.FunctionType):
        names = {step.argval for step in dis.get_instructions(one) if step.opname == "LOAD_GLOBAL"}
        cells = (cell.cell_contents for cell in one.__closure__ or () if cell != types.CellType())
        return *cells, *(one.__defaults__ or ()), *(one.__globals__.get(name) for name in sorted(names))
    if isinstance(one, partial):
        return one.func, *one.args, *one.keywords.values()
    if isinstance(one, types.MethodType):
        return one.__func__, one.__self__, *getattr(one.__self__, "__dict__", {}).values()
    if isinstance(one, (tuple, list)):
        return one[:8]
    return vars(one).values() if callable(one) and hasattr(one, "__dict__") else ()


def eagerly() -> AbstractContextManager[Any]:
    """Without compiled code, which does not look for hooks that came after it."""
    stance = getattr(torch.compiler, "set_stance", None)  # since 2.6
    return nullcontext() if stance is None else stance("force_eager")


def fingerprint(network: Any) -> dict[str, str]:
    """Hash a network's weights as they are and as each coarser dtype would hold them.

    A calibration made in float32 is then recognised by the same network in half precision. Empty for a
    network without weights, and for one whose weights are spread over devices and cannot be seen whole.
    """
    modules = [one for one in held(network) if isinstance(one, nn.Module)]
    network = unwrapped(modules[0]) if len(modules) == 1 else None  # of several, who knows which
    if network is None or is_sharded(network):
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
