"""What sums beside the moments have in common: they add up, decay, move and are kept by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

S = TypeVar("S", bound="Sums")


class Sums:
    """Sums over evaluations, by fold and noise level, (F, L, ...) each."""

    NAMES: ClassVar[tuple[str, ...]]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return tuple(getattr(self, name) for name in self.NAMES)

    def decay(self, factor: float) -> None:
        """Let everything so far count `factor` times as much, in place."""
        for sums in self.tensors:
            sums.mul_(factor)

    def to(self: S, device: torch.device | str) -> S:
        """The same sums on another device."""
        return self._with(*(sums.to(device) for sums in self.tensors))

    def at(self: S, folds: Tensor, levels: Tensor) -> S:
        """Of some folds and levels alone."""
        return self._with(*(sums[folds][:, levels] for sums in self.tensors))

    def plus(self: S, other: Sums) -> S:
        """With the sums of others added."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return self._with(*(ours + theirs.to(ours.device) for ours, theirs in pairs))

    def named(self) -> dict[str, Tensor]:
        """As they are called in a file."""
        return {f"condition.{name}": sums.cpu() for name, sums in zip(self.NAMES, self.tensors, strict=True)}

    def _with(self: S, *sums: Tensor) -> S:
        changed: dict[str, Any] = dict(zip(self.NAMES, sums, strict=True))
        return replace(self, **changed)  # type: ignore[type-var]
