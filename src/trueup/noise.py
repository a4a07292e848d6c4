"""Noise that depends on (seed, sample, level) and on nothing else.

A counter-based generator: entry j of the noise of one sample at one level is a hash of
(seed, sample, level, j), so batch size, order, rank, device and restarts cannot change it.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from trueup.errors import TrueupError

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # the finalizer constants of splitmix64


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def checked_seed(seed: Any) -> int:
    """A seed that files can hold, or an error that says what seeds are."""
    number = _whole(seed)
    if not 0 <= number < 2**53:
        raise TrueupError(f"a seed is a whole number, at least 0 and below 2**53, not {seed!r}")
    return number


def _whole(seed: Any) -> int:
    try:
        if isinstance(seed, (bool, Tensor)):
            raise TypeError
        return operator.index(seed)
    except TypeError:
        raise TrueupError(
            f"a seed is a whole number, at least 0 and below 2**53, not {str(seed)[:60]!r}"
        ) from None


def mix(value: int) -> int:
    """A 64-bit hash of an integer."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MIX[1]) & _MASK
    return value ^ (value >> 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)  # torch shifts int64 arithmetically


def _mix(x: Tensor) -> Tensor:
    x = _shift_right(x, 30).bitwise_xor_(x).mul_(_signed(_MIX[0]))
    x = _shift_right(x, 27).bitwise_xor_(x).mul_(_signed(_MIX[1]))
    return _shift_right(x, 31).bitwise_xor_(x)


def level_key(t: float) -> int:
    """A level's key is its time, so the same level in another grid draws the same noise."""
    return int(level_keys(torch.tensor([float(t)], dtype=torch.float64))[0])


def level_keys(t: Tensor) -> Tensor:
    """The keys of several times."""
    return (t.to(torch.float64) + 0.0).view(torch.int64)  # -0.0 is the level 0.0


def normal(seed: int, samples: Tensor, level: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Standard normal noise (len(samples), *shape), float32.

    >>> a = normal(0, torch.tensor([5, 9]), level_key(500.0), (3, 4, 4), torch.device("cpu"))
    >>> b = normal(0, torch.tensor([9]), level_key(500.0), (3, 4, 4), torch.device("cpu"))
    >>> torch.equal(a[1:], b)
    True
    """
    return normals(seed, samples, torch.tensor([level]), shape, device)[0]


def normals(
    seed: int, samples: Tensor, levels: Tensor, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """The noise of several levels, (len(levels), len(samples), *shape), in as few steps as that of one."""
    seed = _whole(seed)  # or what somebody hashed
    where = torch.device("cpu") if device.type == "mps" else device  # MPS has no 64-bit products
    samples, levels = samples.to(where, torch.int64), levels.to(where, torch.int64)
    count = math.prod(shape)
    pairs = (count + 1) // 2
    streams = _mix(levels ^ _signed(mix(seed + _GOLDEN)))
    rows = _mix(samples * _signed(_GOLDEN) + streams[:, None])  # (L, B)
    index = torch.arange(pairs, device=where, dtype=torch.int64) * _signed(_GOLDEN)
    bits = _mix(_mix(rows[..., None] + index))  # (L, B, pairs)
    radius = (_shift_right(bits, 32) + 1).to(torch.float32).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
    angle = (bits & 0xFFFFFFFF).to(torch.float32).mul_(2 * math.pi * 2.0**-32)  # Box-Muller
    both = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=2)[..., :count]
    return both.reshape(len(levels), len(samples), *shape).to(device)


def hashed(values: Tensor, key: int = 0) -> Tensor:
    """A 64-bit hash of every whole number of a tensor, as int64; another one for every key.

    >>> bool((hashed(torch.arange(1000)) == hashed(torch.arange(1000), key=1)).any())
    False
    """
    return _mix(_mix(values.to(torch.int64) * _signed(_GOLDEN) + _signed(mix(key + _GOLDEN))))
