"""The noise levels that a network is measured at, and the classes that are kept apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index

import torch
from torch import Tensor

from trueup.calibration.correction import LEVEL_SPACING
from trueup.errors import ModelError, TrueupError
from trueup.files import line
from trueup.process import NoiseProcess
from trueup.stored import LARGEST_LABEL


def default_levels(process: NoiseProcess) -> Tensor:
    """Times evenly spaced in lam, about LEVEL_SPACING apart, over the whole process.

    >>> from trueup.process import DiscreteVP
    >>> levels = default_levels(DiscreteVP.linear())
    >>> len(levels), levels[0].item(), levels[-1].item()
    (25, 0.0, 999.0)
    """
    top, bottom = float(process.lam(process.t_min)), float(process.lam(process.t_max))
    count = round((top - bottom) / LEVEL_SPACING) + 1
    lam = torch.linspace(top, bottom, max(count, 2), dtype=torch.float64)
    return torch.unique(process.snap(process.t_of_lam(lam)))


def check_levels(process: NoiseProcess, levels: Sequence[float] | Tensor | None) -> Tensor:
    """Times that were asked for, rising and as the network knows them; None: the default ones."""
    if levels is None:
        return default_levels(process)
    try:
        given = levels if isinstance(levels, Tensor) else list(levels)
        asked = torch.as_tensor(given, dtype=torch.float64).flatten()
    except (TypeError, ValueError, RuntimeError):
        raise ModelError(f"levels are times, for instance [0, 500, 999], not {levels!r}") from None
    if not len(asked):
        raise ModelError("needs at least one noise level")
    if not torch.isfinite(asked).all() or (asked < process.t_min).any() or (asked > process.t_max).any():
        raise ModelError(f"levels are times between {process.t_min:g} and {process.t_max:g}")
    return torch.unique(process.snap(asked))


def check_classes(classes: Iterable[int]) -> tuple[int, ...]:
    """Labels that were asked for, as whole numbers that a file holds."""
    try:
        labels = tuple(index(label) for label in classes)
    except TypeError:
        given = line(repr(classes), 80)
        raise TrueupError(f"classes are a list of labels, such as range(10), not {given}") from None
    for label in labels:
        if abs(label) > LARGEST_LABEL:
            raise TrueupError(f"a label is a whole number of at most 2**62, not {label}")
    return labels
