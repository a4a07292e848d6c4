"""What lies around and behind a network: wrappers, what it returns, corrections it carries."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trueup.errors import ModelError

_DEEPEST = 5  # calls within calls that are looked at for networks


def unwrapped(network: Any, *, fsdp: bool = True) -> Any:
    """The network inside torch.compile, DataParallel, DistributedDataParallel and, unless said, FSDP."""
    inner = getattr(network, "_orig_mod", None)  # torch.compile
    if inner is None and fsdp:
        inner = getattr(network, "_fsdp_wrapped_module", None)
    if inner is None and isinstance(network, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = network.module
    return network if inner is None else unwrapped(inner, fsdp=fsdp)


def signature(network: Any) -> inspect.Signature:
    """What a network takes: of a module that passes everything on (a PeftModel) what the one inside takes."""
    network = unwrapped(network)
    found = inspect.signature(network.forward)
    inside = list(network.children()) if isinstance(network, nn.Module) else []
    anything = all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found.parameters.values())
    return signature(inside[0]) if anything and len(inside) == 1 else found


def prediction(raw: Any) -> Tensor:
    """The tensor inside whatever a network returns: itself, `.sample`, or the first of a tuple."""
    if isinstance(raw, Tensor):  # torch 2.4 cannot compile the question whether a tensor has a `.sample`
        return raw
    first = raw[0] if isinstance(raw, (tuple, list)) and raw else None
    for found in (getattr(raw, "sample", None), first):
        if isinstance(found, Tensor):
            return found
    raise ModelError(
        f"the network returned {type(raw).__name__}; expected a tensor, a tuple, or an object with .sample"
    )


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values, what is no number included."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


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


def holds_network(function: types.FunctionType) -> bool:
    """Whether a function calls a network that a copy of the function would share."""
    inside = (part for one in held(function) for part in (one, *getattr(one, "__dict__", {}).values()))
    return any(isinstance(part, nn.Module) for part in inside)


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
