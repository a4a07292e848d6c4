"""Rows of features kept for the measures that need every pair."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.errors import DataError
from trueup.metrics.gaussian import rows_of


class FeatureStore:
    """Keeps the first `limit` rows it is given, in float32 on the CPU, and counts all of them.

    >>> store = FeatureStore(limit=3).update(torch.zeros(2, 5)).update(torch.zeros(2, 5))
    >>> store.kept, store.seen, tuple(store.rows.shape)
    (3, 4, (3, 5))
    """

    def __init__(self, limit: int = 10_000):
        if limit < 1:
            raise DataError(f"a store keeps one row or more, got a limit of {limit}")
        self.limit = limit
        self.kept = 0
        self.seen = 0
        self._parts: list[Tensor] = []

    def update(self, features: Tensor) -> FeatureStore:
        """Take in rows (n, d); returns self."""
        room = self.limit - self.kept
        self.seen += len(rows_of(features))
        if room and len(features):
            self._parts.append(features[:room].detach().to("cpu", torch.float32, copy=True))
            self.kept += len(self._parts[-1])
        return self

    @property
    def rows(self) -> Tensor:
        """The rows kept, (kept, d)."""
        if not self._parts:
            raise DataError("no features were given: there are no rows")
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts)]
        return self._parts[0]
