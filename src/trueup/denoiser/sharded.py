"""Networks whose weights are not all here: spread over ranks (FSDP, tensor parallel), or kept elsewhere.

They are called like any other, by all ranks in step. What is seen of their weights is what is seen of
others: a few of each tensor, wherever they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SAMPLED = 4096  # weights of a tensor: enough to tell checkpoints apart, quick for billions
PACKED = frozenset(
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.itemsize == 1
) - {torch.bool}  # of quantised weights: int8, uint8, float8, whatever this torch has
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Seen:
    """What is seen of a tensor: some of its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor  # on the CPU; of packed ones their bytes


def is_spread(network: Any) -> bool:
    """Whether the ranks of a job hold a network together, so that all must call it, and with the same."""
    if not (isinstance(network, nn.Module) and dist.is_available() and dist.is_initialized()):
        return False
    wrapped = any(hasattr(module, "_fsdp_wrapped_module") for module in network.modules())
    return wrapped or any("_flat_param" in n or _is_dtensor(p) for n, p in network.named_parameters())


def unseen(network: nn.Module) -> bool:
    """Whether some of the weights cannot be seen from here."""
    inside = any(getattr(module, "_is_fsdp_managed_module", False) for module in network.modules())
    inside = inside and not any(_is_dtensor(p) for p in network.parameters())  # of FSDP's first form
    return (inside and not _units(network)) or any(_absent(network))


@contextmanager
def uninferred(network: Any) -> Iterator[bool]:
    """Out of inference mode, if a network is spread: what it gathers there could not be trained again."""
    leave = torch.is_inference_mode_enabled() and is_spread(network)
    with torch.inference_mode(False) if leave else nullcontext(), torch.no_grad() if leave else nullcontext():
        yield leave


def seen(p: Tensor) -> Seen:
    """A tensor that is here."""
    with torch._C.DisableTorchFunctionSubclass():  # a parameter of GGUF or bitsandbytes does more
        flat = p.reshape(-1)
        flat = flat.contiguous().view(torch.uint8) if p.dtype in PACKED else flat  # not all can be sliced
        return Seen(tuple(p.shape), p.dtype, flat[:: max(1, p.numel() // SAMPLED)].to("cpu", copy=True))


def parameters(network: nn.Module) -> Iterator[tuple[str, Tensor | Seen]]:
    """The parameters by name; of those that are spread or elsewhere what is seen of them.

    All ranks that hold a network must ask. A unit of FSDP is gathered at a time, as for a call; of a DTensor
    only what is seen travels.
    """
    spread: list[tuple[str, Any]] = []
    elsewhere, units = dict(_elsewhere(network)), _units(network)
    for name, p in network.named_parameters():
        if any(_plain(name).startswith(prefix) for prefix, _ in units):
            continue
        if _is_dtensor(p):
            spread.append((name, p.detach()))
        elif p.device.type != "meta":
            yield name, p.detach()
        elif name in elsewhere:
            yield name, elsewhere[name]
    yield from zip([name for name, _ in spread], _met([p for _, p in spread]), strict=True)
    for prefix, unit in units:
        yield from _gathered(prefix, unit, [other for other, _ in units])


def _is_dtensor(p: Any) -> bool:
    return hasattr(p, "placements") and hasattr(p, "device_mesh")


def _units(network: nn.Module) -> list[tuple[str, Any]]:
    """The units of FSDP's first form, by the beginning of their parameters' names."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # else nobody used it
    if fsdp is None:
        return []
    kind = fsdp.FullyShardedDataParallel
    found = [(_plain(n), m) for n, m in network.named_modules() if isinstance(m, kind)]
    return [(f"{name}." if name else "", unit) for name, unit in found]


def _plain(name: str) -> str:
    """A name without FSDP's own, which it leaves out of some and not of others."""
    return name.replace("_fsdp_wrapped_module.", "")


def _gathered(prefix: str, unit: Any, prefixes: Sequence[str]) -> Iterator[tuple[str, Seen]]:
    """What is seen of the parameters of one unit, without those of the units inside it."""
    inner = [other for other in prefixes if other != prefix and other.startswith(prefix)]
    with torch.inference_mode(False), unit.summon_full_params(unit, recurse=False, writeback=False):
        named = [(prefix + _plain(name), p.detach()) for name, p in unit.named_parameters()]
        found = [(n, seen(p)) for n, p in named if not any(n.startswith(other) for other in inner)]
    yield from found


def _met(tensors: Sequence[Any]) -> list[Seen]:
    """What is seen of DTensors: every rank says what it holds of it, in one sum for each mesh."""
    found: dict[int, Tensor] = {}
    by_mesh: dict[Any, list[int]] = {}
    for k, p in enumerate(tensors):
        by_mesh.setdefault(p.device_mesh, []).append(k)
    for mesh, members in by_mesh.items():
        parts = [_held(tensors[k]) for k in members]
        total = torch.cat(parts).to(mesh.device_type)
        for axis in range(mesh.ndim):
            dist.all_reduce(total, group=mesh.get_group(axis))
        found |= zip(members, total.cpu().split([len(part) for part in parts]), strict=True)
    made = []
    for k, p in enumerate(tensors):
        bits = found[k].to(_BITS[p.dtype.itemsize])
        made.append(Seen(tuple(p.shape), p.dtype, bits if p.dtype in PACKED else bits.view(p.dtype)))
    return made


def _held(p: Any) -> Tensor:
    """What this rank holds of what is seen of a DTensor: its bits as int64, and 0 where another holds it."""
    places = torch.arange(0, p.numel(), max(1, p.numel() // SAMPLED))
    bits = torch.zeros(len(places), dtype=torch.int64)
    mesh = p.device_mesh.get_coordinate()
    copies = [at for at, how in zip(mesh, p.placements, strict=True) if how.is_replicate()]
    if any(copies):  # the first of them speaks
        return bits
    (chunk,) = p.__create_chunk_list__()
    own = torch.ones_like(places, dtype=torch.bool)
    at, stride, left = torch.zeros_like(places), 1, places
    for size, start, count in reversed(list(zip(p.shape, chunk.offsets, chunk.sizes, strict=True))):
        here = left % size - start
        left, own = left // size, own & (here >= 0) & (here < count)
        at, stride = at + here * stride, stride * count
    local = p.to_local().reshape(-1)
    values = local[at[own].to(local.device)].to("cpu").contiguous()
    bits[own] = values.view(_BITS[p.dtype.itemsize]).to(torch.int64)
    return bits


def _absent(network: nn.Module) -> Iterator[str]:
    """Parameters that are nowhere."""
    elsewhere = dict(_elsewhere(network))
    return (n for n, p in network.named_parameters() if p.device.type == "meta" and n not in elsewhere)


def _elsewhere(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters that accelerate keeps on the CPU or on disk until they are needed."""
    for prefix, module in network.named_modules():
        hook = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", [hook]):
            weights = getattr(one, "weights_map", None)
            if weights is None:
                continue
            for name, p in module.named_parameters():
                try:
                    value = weights[name] if p.device.type == "meta" else None
                except KeyError:
                    continue
                if isinstance(value, Tensor) and value.device.type != "meta":
                    yield f"{prefix}.{name}" if prefix else name, value
