"""Precision and recall by nearest neighbours (Kynkäänniemi et al. 2019, arXiv:1904.06991)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from trueup.metrics.features import FeatureBatch
from trueup.metrics.gaussian import check_pair
from trueup.metrics.measures import measure
from trueup.metrics.reference import LIMIT, Reference
from trueup.statistics import Number, group_index

NEIGHBOURS = 3
_ENTRIES = 2**23  # distances at once, as in `kernel`


@measure("precision", "precision", more_is_better=True)
def _precision(generated: FeatureBatch, reference: Reference) -> Number:
    return precision(reference.rows, generated.pooled[:LIMIT])


@measure("recall", "recall", more_is_better=True)
def _recall(generated: FeatureBatch, reference: Reference) -> Number:
    return recall(reference.rows, generated.pooled[:LIMIT])


def precision(reference: Tensor, generated: Tensor, k: int = NEIGHBOURS) -> Number:
    """Share of generated images inside the reference's manifold: a mean over generated images.

    A manifold is a ball around every image of the set, out to its k-th nearest other image.

    >>> line = torch.arange(10.0)[:, None]
    >>> precision(line, line[:5] + 0.5, k=1).value
    1.0
    """
    reference, generated = _centred(reference, generated, k)
    balls = _radii(reference, 1, k)[:, 0]
    inside = torch.zeros(len(generated), dtype=torch.bool, device=generated.device)
    for start, squares in _squared_distances(reference, generated):
        inside |= (squares <= balls[start : start + len(squares), None]).any(0)
    share = inside.double()
    return Number.influenced(float(share.mean()), share - share.mean())


def recall(reference: Tensor, generated: Tensor, k: int = NEIGHBOURS) -> Number:
    """Share of the reference inside the generated images' manifold.

    The balls are the generated images': their influence is by the jackknife over groups, and equal within a
    group; its standard error comes out about 1.4 times the real scatter (benchmarks/intervals.py), on the
    safe side.

    >>> line = torch.arange(10.0)[:, None]
    >>> recall(line, line[:5] + 0.5, k=1).value
    0.6
    """
    reference, generated = _centred(reference, generated, k)
    groups = group_index(len(generated)).to(generated.device)
    sizes = groups.bincount()
    balls = _radii(generated, len(sizes), k)  # (n, 1 + groups)
    covered = torch.zeros(balls.shape[1], dtype=torch.float64, device=generated.device)
    for _, squares in _squared_distances(reference, generated):
        covered += torch.stack([(squares <= radii).any(1).sum() for radii in balls.T])
    share = float(covered[0]) / len(reference)
    influence = None
    if len(generated) - int(sizes.max()) > k:  # every ball is left with its neighbours
        jackknife = (len(generated) - sizes) / sizes * (share - covered[1:] / len(reference))
        influence = jackknife[groups] - jackknife[groups].mean()
    return Number.influenced(share, influence)


def _centred(reference: Tensor, generated: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Both about the reference's mean: distances do not change, their rounding shrinks."""
    check_pair(reference, generated, k + 1, f"{k} neighbours of each take more than {k} images")
    centre = reference.double().mean(0)
    return reference.double() - centre, generated.double() - centre


def _radii(rows: Tensor, groups: int, k: int) -> Tensor:
    """Squared distance to the k-th nearest other row: (n, 1 + G), of all rows, then without each group.

    A row of the group left out has no ball: -1, which no squared distance reaches.
    """
    radii = rows.new_full((len(rows), 1 + groups), -1.0)
    for start, squares in _squared_distances(rows, rows):
        part = radii[start : start + len(squares)]
        squares[:, start : start + len(squares)].fill_diagonal_(math.inf)  # itself, not its duplicates
        nearest = [_smallest(columns, k) for columns in squares.tensor_split(groups, 1)]
        part[:, 0] = _smallest(torch.cat(nearest, 1), k)[:, -1]
        for group in range(groups if groups > 1 else 0):
            part[:, 1 + group] = _smallest(torch.cat(nearest[:group] + nearest[group + 1 :], 1), k)[:, -1]
    for group, members in enumerate(radii.tensor_split(groups)):
        members[:, 1 + group] = -1.0
    return radii


def _smallest(values: Tensor, k: int) -> Tensor:
    return values.topk(min(k, values.shape[1]), largest=False, sorted=True).values


def _squared_distances(a: Tensor, b: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Row index and squared distances (rows, len(b)), some rows of `a` at a time."""
    size_a, size_b = a.square().sum(1), b.square().sum(1)
    step = max(1, _ENTRIES // len(b))
    for start in range(0, len(a), step):
        sizes = size_a[start : start + step, None] + size_b
        squares = torch.addmm(sizes, a[start : start + step], b.T, alpha=-2.0)
        yield start, squares.masked_fill_(squares < 1e-13 * sizes, 0.0)  # equal rows, but for rounding
