"""Shrinking towards zero and smoothing over noise levels, as one linear operator per band.

Estimates at L noise levels, Y = truth + noise, with noise correlated across levels because the levels
share their images. Truth has a Gaussian-process prior over lam whose amplitude is measured locally,
as a lower confidence bound, so that what the data does not support gets amplitude zero (equations 19
to 21 of docs/math.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

AMPLITUDE_WIDTH = 0.8  # lam over which an amplitude is shared
AMPLITUDE_SIGMAS = 1.5  # how far below its estimate the amplitude is taken
AMPLITUDE_ONSET = 0.01  # below this, in units of the noise, an amplitude rises linearly: a root would jump
LENGTHS = (0.5, 1.2, 3.0, 8.0)  # candidate correlation lengths over lam, averaged by their evidence
MOST_EVIDENCE = 200.0  # nats that the best of them can be ahead: more would make the average a choice
CORRELATION_FLOOR = 0.1  # share of noise taken as independent between levels
SEEN = 0.01  # standard errors: deviations below say nothing of what they correlate with
_ROUNDS = 3  # in which weights and amplitude of several groups follow from each other
POOL_WEIGHT = 40.0  # how many degrees of freedom the correlation pooled over bands counts for


def kernel_weights(lam: Tensor, width: float) -> Tensor:
    """Gaussian weights over lam, rows sum to one, (L, L)."""
    weights = torch.exp(-0.5 * ((lam[:, None] - lam[None, :]) / width) ** 2)
    return weights / weights.sum(1, keepdim=True)


def noise_correlation(deviations: list[Tensor]) -> Tensor:
    """Correlation of the noise between levels, (bands, L, L), from fold deviations (F, L, columns).

    Deviations are in units of their standard error. A band with few coefficients knows its own correlation
    badly, so each is pulled towards the average; where next to nothing deviates, nothing is known.
    """
    own, weight = [], []
    for deviation in deviations:
        folds, levels, columns = deviation.shape
        rows = deviation.transpose(0, 1).reshape(levels, -1)
        size = (rows.square().sum(1, keepdim=True) + SEEN**2 * (folds - 1) * columns).sqrt()
        rows = rows / size.clamp_min(1e-300)
        own.append(rows @ rows.T)
        weight.append((folds - 1) * columns)
    correlation = torch.stack(own)
    correlation = correlation + torch.diag_embed(1 - torch.diagonal(correlation, dim1=1, dim2=2))
    share = torch.tensor(weight, dtype=correlation.dtype)[:, None, None]
    correlation = (share * correlation + POOL_WEIGHT * correlation.mean(0)) / (share + POOL_WEIGHT)
    eye = torch.eye(correlation.shape[-1], dtype=correlation.dtype)
    return (1 - CORRELATION_FLOOR) * correlation + CORRELATION_FLOOR * eye


def effective_columns(deviation: Tensor) -> float:
    """How many independent numbers the columns amount to, (tr S)^2 / tr(S^2), from fold deviations.

    Channels of one frequency err together (brightness), so three of them count for less than three.
    """
    folds, _, columns = deviation.shape
    if columns <= 1 or folds < 4:
        return 1.0
    gram = torch.einsum("flm,glm->lfg", deviation, deviation)
    diagonal = torch.diagonal(gram, dim1=1, dim2=2)
    trace = diagonal.sum(1) / (folds - 1)
    trace2 = (gram.square().sum((1, 2)) - diagonal.square().sum(1)) / (folds * (folds - 1))
    ratio = (trace.square() / trace2.clamp_min(1e-300)).clamp(1.0, float(columns))
    return float(ratio.log().mean().exp())


class Noisy(NamedTuple):
    """Estimates at all levels, as far as shrinking them needs to know them."""

    gram: Tensor  # (bands, L, L), Y Y' summed over columns
    sd: Tensor  # (bands, L), the noise of one column
    deviations: list[Tensor]  # (F, L, columns) of each band, those of the folds in units of the noise


def shrinkers(groups: Sequence[Noisy], lam: Tensor) -> list[Tensor]:
    """The operators (bands, L, L) that turn estimates at all levels into shrunk, smoothed ones, one a group.

    Groups, classes say, have one amplitude, found from all of them; how much of it there is in each, and how
    smooth that is, depends on its own noise and evidence.
    """
    like = groups[0].gram
    correlations = [noise_correlation(group.deviations) for group in groups]
    # A band of which nothing is kept has none, and nothing is made of it.
    columns = torch.tensor([max(part.shape[2], 1) for part in groups[0].deviations], dtype=like.dtype)
    effective = torch.tensor(
        [[effective_columns(part) for part in group.deviations] for group in groups], dtype=like.dtype
    )[..., None]  # (groups, bands, 1)
    sd = torch.stack([group.sd for group in groups])  # (groups, bands, L)
    sd, total = sd / sd.mean(0), effective.sum(0)
    in_noise = [g.gram / (g.sd[:, :, None] * g.sd[:, None, :]) for g in groups]  # in units of the noise
    # Local amplitude, equation 20: how far the mean square stands above the noise.
    above = torch.stack([torch.diagonal(part, dim1=1, dim2=2) for part in in_noise]) / columns[:, None] - 1.0
    power, said = torch.zeros_like(sd[0]), sd.square() * above
    for _ in range(_ROUNDS):  # each group counts for how well it knows it, equation 57
        weight = effective / (power + sd.square()).square()
        weight = weight / weight.sum(0)
        power = (weight * said).sum(0).clamp_min(0.0)
    # The noise that all groups together are as good as, and how far each is from it.
    reference = ((weight.square() * sd**4 / effective).sum(0) * total) ** 0.25
    better, excess = reference / sd, (weight * said).sum(0) / reference.square()
    weights = kernel_weights(lam, AMPLITUDE_WIDTH)
    common = (effective[..., None] * torch.stack(correlations)).sum(0) / total[..., None]
    spread = torch.einsum("ij,bjk,ik->bi", weights, common.square(), weights)
    bound = excess @ weights.T - AMPLITUDE_SIGMAS * (2.0 / total * spread).sqrt()
    bound = bound.clamp_min(0.0)
    amplitude = bound / (bound + AMPLITUDE_ONSET).sqrt()  # (bands, L)
    made = [
        _posteriors(part, correlation, amplitude * own, columns, lam)
        for part, correlation, own in zip(in_noise, correlations, better, strict=True)
    ]
    operators = []
    for (evidence, candidates), group in zip(made, groups, strict=True):
        # An average over models, no correction at all (evidence 0) among them: equation 21.
        shares = (evidence / (1 + evidence.amax(0) / MOST_EVIDENCE)).softmax(0)  # (models, bands)
        operator = torch.einsum("mb,mbij->bij", shares, candidates)
        operators.append(operator * group.sd[:, :, None] / group.sd[:, None, :])
    return operators


def _posteriors(
    gram: Tensor, correlation: Tensor, amplitude: Tensor, columns: Tensor, lam: Tensor
) -> tuple[Tensor, Tensor]:
    """Evidence (models, bands) and operators (models, bands, L, L), in units of the noise; equation 21."""
    eigenvalue, vector = torch.linalg.eigh(correlation)  # in coordinates where the noise is white
    root = eigenvalue.clamp_min(1e-3).sqrt()
    whiten = (vector / root[:, None, :]) @ vector.transpose(1, 2)
    colour = (vector * root[:, None, :]) @ vector.transpose(1, 2)
    white_gram = whiten @ gram @ whiten
    distance = (lam[:, None] - lam[None, :]).abs()
    evidences, candidates = [torch.zeros(len(gram), dtype=gram.dtype)], [torch.zeros_like(gram)]
    for length in LENGTHS:
        scaled = distance * (3**0.5 / length)
        matern = (1 + scaled) * torch.exp(-scaled)
        prior = matern * amplitude[:, :, None] * amplitude[:, None, :]
        strength, basis = torch.linalg.eigh(whiten @ prior @ whiten)
        strength = strength.clamp_min(0.0)
        keep = strength / (1 + strength)
        power = torch.einsum("bij,bik,bkj->bj", basis, white_gram, basis)
        evidences.append(0.5 * ((power * keep).sum(1) - columns * strength.log1p().sum(1)))
        candidates.append(colour @ (basis * keep[:, None, :]) @ basis.transpose(1, 2) @ whiten)
    return torch.stack(evidences), torch.stack(candidates)
