"""Colours: how far the mean brightness of each channel has drifted, image by image."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.metrics.features import FeatureBatch
from trueup.metrics.gaussian import check_pair
from trueup.metrics.measures import measure
from trueup.metrics.reference import Reference
from trueup.statistics import Number


@measure("colour", "colour drift (W1)")
def colour(generated: FeatureBatch, reference: Reference) -> Number | None:
    """Drift of the channels' means; of one channel that is the brightness."""
    if generated.colours is None or generated.colours.shape[1] == 1:
        return None
    return wasserstein(generated.colours, reference.colours)


@measure("brightness", "brightness drift (W1)")
def brightness(generated: FeatureBatch, reference: Reference) -> Number | None:
    """Drift of the mean over channels."""
    if generated.colours is None:
        return None
    return wasserstein(*(v.double().mean(1, keepdim=True) for v in (generated.colours, reference.colours)))


def wasserstein(generated: Tensor, reference: Tensor) -> Number:
    """Mean over columns of the exact one-dimensional Wasserstein distance, ∫ |F - F_ref| dx.

    The influence of an image is the Kantorovich potential at it, whose slope is -sign(F - F_ref). Where the
    distributions agree that sign is noise: the distance stays above zero, by less the more images there are.

    >>> wasserstein(torch.tensor([[1.0], [1.0], [4.0]]), torch.tensor([[0.0], [2.0]])).value
    1.333...
    """
    check_pair(reference, generated, 1, "a distance needs images")
    pairs = zip(generated.double().T.contiguous(), reference.double().T.contiguous(), strict=True)
    distances, potentials = zip(*(_wasserstein(*pair) for pair in pairs), strict=True)
    return Number.influenced(sum(distances) / len(distances), torch.stack(potentials).mean(0))


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
