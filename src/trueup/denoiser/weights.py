"""Which weights a network has: a hash that knows half precision, adapters and packed weights."""

from __future__ import annotations

import hashlib
import re
import types
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trueup.denoiser.adapters import adapted_layers, adapters, base_name
from trueup.denoiser.network import held, unwrapped
from trueup.denoiser.sharded import PACKED, SAMPLED, Seen, is_spread, parameters, seen, unseen

_VALUES = 256  # that 8 bits tell apart
_TELLS = 4 * _VALUES  # weights, of which floating point ones hardly share values
_DISTINCT, _ROWS = 2**16, 4  # weights and rows that are looked at
_WRAPPERS = re.compile(r"\b_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")  # of parts of it
_COARSER = (torch.float32, torch.float16, torch.bfloat16)
PRECISIONS = tuple(str(dtype).removeprefix("torch.") for dtype in _COARSER)  # of a fingerprint, finest first

# Parts of a fingerprint that tell what became of weights; each is kept by dtype, as the whole is.
BASE = " base"  # all but the adapters at work
VECTORS = " vectors"  # biases and norms, which neither a fused LoRA nor weight quantisation changes
ADAPTER = "adapter "  # and its name: a hash of where it is at work and how strongly
QUANTISED = "quantised"  # there if weights are packed


def fingerprint(network: Any) -> dict[str, str]:
    """Hash a network's weights as they are and as each coarser dtype would hold them.

    A calibration made in float32 is then recognised by the same network in half precision. Adapters that are
    at work belong to the weights, those that rest do not. Beside the whole are parts of it (`BASE`, ...), by
    which a network that is not the same can be told what it is. Empty for a network without weights, and for
    one whose weights cannot be seen. Of a network that ranks hold together all of them must ask, and all are
    told the same, which is what one process would be told of it whole.
    """
    modules = [one for one in held(network) if isinstance(one, nn.Module)]
    network = unwrapped(modules[0], fsdp=False) if len(modules) == 1 else None  # of several, who knows which
    if network is None or unseen(network):
        return {}
    working = adapters(network)
    base, own = _split(network, working)
    if not base:
        return {}
    # A network in half precision, even if some of its layers are kept in float32, is known at half only.
    halves = {p.dtype for _, p in base} & set(_COARSER[1:])
    dtypes = tuple(halves) if len(halves) == 1 else _COARSER
    scales = {
        f"{ADAPTER}{name}": _text_hash((_WRAPPERS.sub("", place), scale) for place, scale in places)
        for name, places in sorted(working.items())
    }
    parts = {"": sorted([*base, *own], key=_by_name)}
    parts |= {BASE: base} if working else {}
    parts[VECTORS] = [(name, p) for name, p in base if len(p.shape) == 1 and p.dtype.is_floating_point]
    found: dict[str, str] = {}
    for part, tensors in parts.items():
        extra = "" if part or not working else _text_hash(scales.items())
        found |= {f"{_name(dtype)}{part}": _hash(tensors, dtype, extra) for dtype in dtypes if tensors}
    packed = [name for name, p in base if p.dtype in PACKED]
    return found | scales | ({QUANTISED: _text_hash(packed)} if packed else {})


def few_values(network: nn.Module) -> str | None:
    """How most weights show that they were quantised, in words: by their dtype, or by taking few values."""
    found: dict[str, int] = {}
    total = 0
    for _, p in () if is_spread(network) else _tensors(unwrapped(network)):
        if isinstance(p, Tensor) and p.dim() > 1 and p.numel() >= _TELLS:
            total += p.numel()
            how = _name(p.dtype) if p.dtype in PACKED else _levels(p)
            if how is not None:
                found[how] = found.get(how, 0) + p.numel()
    if 2 * sum(found.values()) <= total:
        return None
    how = max(found, key=lambda name: found[name])
    return f"its weights are {how}"


def _levels(p: Tensor) -> str | None:
    """Whether a matrix, or each of its rows, takes no more values than 8 bits tell apart."""
    if not p.is_floating_point():
        return None

    def few(values: Tensor) -> bool:
        return 1 < len(values.float().unique()) <= _VALUES

    rows = p.reshape(len(p), -1)[:_ROWS]
    by_row = rows.shape[1] >= _TELLS and all(map(few, rows))
    whole = few(p.reshape(-1)[:: max(1, p.numel() // _DISTINCT)])
    return f"rounded to {_VALUES} values or fewer" if whole or by_row else None


def same_weights(ours: dict[str, str], theirs: dict[str, str], *, part: str = "", of: str = "") -> bool:
    """Whether two fingerprints agree at the finest dtype that both have: our `part` with theirs `of` it."""
    finest = next((n for n in PRECISIONS if n + part in ours and n + of in theirs), None)
    return finest is not None and ours[finest + part] == theirs[finest + of]


def _split(network: nn.Module, working: Container[str]) -> tuple[list[tuple[str, Seen]], ...]:
    """The tensors that are a network's own, and those of the adapters at work, by name."""
    layers = {place for place, _ in adapted_layers(network)}
    base, own = [], []
    for name, tensor in _tensors(network):
        p = tensor if isinstance(tensor, Seen) else seen(tensor)
        before, adapts = base_name(name, layers) if layers else (name, False)
        if not adapts:
            base.append((_WRAPPERS.sub("", before), p))
        elif any(part in working for part in name.split(".")):
            own.append((_WRAPPERS.sub("", before), p))
    return sorted(base, key=_by_name), sorted(own, key=_by_name)


def _tensors(network: nn.Module) -> Iterator[tuple[str, Tensor | Seen]]:
    """Parameters, what packed ones consist of, and packed weights that are kept elsewhere."""
    for name, p in parameters(network):
        yield from [(name, p)] if isinstance(p, Seen) else _opened(name, p)
    for name, buffer in network.named_buffers():
        if buffer.dtype in PACKED and buffer.device.type != "meta":
            yield name, buffer.detach()
    for name, module in network.named_modules():  # torch.ao's have a method `weight`
        weight = module.weight() if isinstance(getattr(module, "weight", None), types.MethodType) else None
        if isinstance(weight, Tensor) and weight.is_quantized:
            yield f"{name}.weight", weight.int_repr()
            yield f"{name}.values", weight.flatten()[:SAMPLED].dequantize()


def _opened(name: str, p: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or the plain ones inside one that torchao or quanto made."""
    if not hasattr(p, "__tensor_flatten__"):
        yield name, p
        return
    for inner in p.__tensor_flatten__()[0]:
        yield from _opened(f"{name}.{inner}", getattr(p, inner))


def _hash(tensors: list[tuple[str, Seen]], dtype: torch.dtype, extra: str) -> str:
    digest = hashlib.blake2b(extra.encode(), digest_size=16)
    for name, p in tensors:
        with torch._C.DisableTorchFunctionSubclass():
            values = p.values.to(dtype).to(torch.float32) if p.values.is_floating_point() else p.values
            digest.update(f"{name}{p.shape}".encode())
            digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _text_hash(texts: Iterable[Any]) -> str:
    return hashlib.blake2b("\n".join(map(repr, texts)).encode(), digest_size=16).hexdigest()


def _by_name(pair: tuple[str, Any]) -> str:
    return pair[0]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
