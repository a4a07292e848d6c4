"""Colours: how far the mean brightness of each channel has drifted, image by image."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.errors import DataError
from trueup.metrics.estimate import Estimate
from trueup.metrics.gaussian import rows_of


def colours(images: Tensor) -> Tensor:
    """Mean of every channel of every image, (n, C) float64: on 0..255 for uint8, as they are for floats.

    >>> colours(torch.full((2, 3, 4, 4), 7, dtype=torch.uint8)).tolist()
    [[7.0, 7.0, 7.0], [7.0, 7.0, 7.0]]
    """
    if images.dim() < 3:
        raise DataError(f"images must be (n, channels, *spatial), got {tuple(images.shape)}")
    return images.flatten(2).double().mean(2)


def wasserstein(generated: Tensor, reference: Tensor) -> Estimate:
    """Mean over columns of the exact one-dimensional Wasserstein distance, ∫ |F - F_ref| dx.

    The influence of an image is the Kantorovich potential at it, whose slope is -sign(F - F_ref). Where the
    distributions agree that sign is noise: the distance stays above zero, by less the more images there are.

    >>> wasserstein(torch.tensor([[1.0], [1.0], [4.0]]), torch.tensor([[0.0], [2.0]])).value
    1.333...
    """
    for name, rows in (("generated", generated), ("reference", reference)):
        if not len(rows_of(rows, f"{name} columns")):
            raise DataError(f"a distance needs {name} images, got none")
    if reference.shape[1] != generated.shape[1]:
        raise DataError(f"{generated.shape[1]} generated columns, {reference.shape[1]} of the reference")
    columns = [
        _wasserstein(a.contiguous(), b.contiguous())
        for a, b in zip(generated.double().T, reference.double().T, strict=True)
    ]
    value = sum(distance for distance, _ in columns) / len(columns)
    return Estimate(value, torch.stack([potential for _, potential in columns]).mean(0))


def _wasserstein(generated: Tensor, reference: Tensor) -> tuple[float, Tensor]:
    """Distance and centred potential of one column: both sums over the gaps between neighbouring values."""
    points = torch.cat([generated, reference]).sort().values
    gaps = points.diff()
    ours = torch.searchsorted(generated.sort().values, points[:-1], right=True).double() / len(generated)
    theirs = torch.searchsorted(reference.sort().values, points[:-1], right=True).double() / len(reference)
    difference = ours - theirs
    rises = torch.cat([gaps.new_zeros(1), (difference.sign() * gaps).cumsum(0)])
    potential = -rises[torch.searchsorted(points, generated)]
    return float((difference.abs() * gaps).sum()), potential - potential.mean()
