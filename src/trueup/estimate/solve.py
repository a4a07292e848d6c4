"""From moments to a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from trueup.calibration import Calibration, Evidence
from trueup.correction import Correction
from trueup.errors import TrueupError
from trueup.estimate.collect import measure
from trueup.estimate.confirm import confirmed_scale, cross_validate, realised_scale
from trueup.estimate.moments import Moments
from trueup.estimate.regress import Centred, Mean, Slope, mean_residual, slopes
from trueup.estimate.shrink import effective_columns, kernel_weights, noise_correlation, shrinker
from trueup.estimate.statistics import mean_and_error, squared_norm, trapezoid_weights
from trueup.parametrization import Parametrization
from trueup.process import NoiseProcess
from trueup.trajectory.marginals import band_variance

FAMILIES = ("shift", "spectral", "none")
ESTIMATORS = ("plain", "paired", "regressed", "shrunk")
PAIRED_FOLDS = (
    1.5  # fold f scores what g fitted and g what f fitted: between 1 (all signal) and 2 (all noise)
)
FEWEST_FOLDS = 4  # fewer cannot say how far they scatter
INFLATION_WIDTH = 1.0  # lam over which the excess of fold scatter over model variance is averaged


def calibrate(
    model: Any,
    data: Any,
    *,
    images: int | None = 500,
    family: str = "spectral",
    estimator: str = "shrunk",
    levels: Sequence[float] | Tensor | None = None,
    mean_images: int = 0,
    seed: int = 0,
    antithetic: bool = False,
    batch_size: int | None = None,
    resize: str | None = None,
    crop: str | None = None,
    flip: bool = False,
    data_range: tuple[float, float] | None = None,
    edges: Sequence[float] | None = None,
    scheduler: Any = None,
    process: NoiseProcess | None = None,
    parametrization: Parametrization | str | None = None,
    device: torch.device | str | None = None,
    run: str | PathLike[str] | None = None,
    skip_bad: bool = False,
    progress: bool | None = None,
) -> Calibration:
    """Measure a network on images and fit the correction that images it has not seen confirm.

    model: a diffusers pipeline, a diffusers model or saved directory (with `scheduler` if it has none of
    its own, or `process` and `parametrization` by hand), or a `Denoiser` around any network.

    data: a folder of images, .npy/.npz, a tensor, a dataset or an iterable; with labels, for a conditional
    network, as (image, label) pairs, rows with `image` and `label`, or an .npz with both. resize ("shorter",
    "exact"), crop ("center"), flip and data_range say how an image becomes a sample; nothing is done unasked.

    images: how many to use, None for all. family: "shift" (the paper's) or "spectral". estimator: "shrunk",
    or the unshrunk "plain" (the paper's), "paired", "regressed". levels: times of the network's process; the
    default covers all of it. mean_images: read so many more images for the data's mean alone. antithetic: run
    every image with its noise and with the noise negated. edges: band edges, see `trueup.bands`. batch_size:
    found when not given, halved when memory runs out. run: a directory that keeps what was measured, to go on
    from after an interruption or to add images to. skip_bad: leave out images that cannot be used. progress:
    show a bar; by default when standard error is a terminal.
    """
    _check(family, estimator)
    moments = measure(
        model,
        data,
        images=images,
        levels=levels,
        mean_images=mean_images,
        seed=seed,
        antithetic=antithetic,
        batch_size=batch_size,
        resize=resize,
        crop=crop,
        flip=flip,
        data_range=data_range,
        edges=edges,
        scheduler=scheduler,
        process=process,
        parametrization=parametrization,
        device=device,
        run=run,
        skip_bad=skip_bad,
        progress=progress,
    )
    return fit(moments, family=family, estimator=estimator)


def fit(moments: Moments, *, family: str = "spectral", estimator: str = "shrunk") -> Calibration:
    """Fit a calibration to moments; fast, no network involved."""
    _check(family, estimator)
    if moments.images == 0:
        raise TrueupError("these moments hold no samples")
    moments = moments.used()
    parametrization = Parametrization(**moments.provenance["parametrization"])

    centred = Centred(moments)
    shrink = _shrinkage(centred, family, parametrization) if estimator == "shrunk" else None

    def once(part: Centred) -> Correction:
        return _estimate(part, family, estimator, parametrization, shrink)

    correction = once(centred)
    shift = mean_residual(
        centred, "paired" if moments.images < 8 else "shrunk", parametrization, *_no_slopes(moments)
    )
    residual = centred.fold_sums(shift.combination) + moments.rows.reshape(-1, 1, 1, 1) * shift.offset
    held = cross_validate(moments, residual, lambda part: once(Centred(part))) if moments.folds > 1 else None
    scale = torch.ones(moments.levels, moments.bands.count, dtype=torch.float64)
    if estimator == "shrunk" and (held is None or moments.folds < FEWEST_FOLDS):
        scale = 0 * scale
        correction = correction.scaled(scale)
    elif estimator == "shrunk" and held is not None:
        scale = confirmed_scale(held, moments.rows, moments.images, moments.lam)
        realised = realised_scale(held, correction, moments, scale)
        correction, scale = correction.scaled(scale), realised
    weights = trapezoid_weights(moments.lam)
    dimensions = moments.first.shape[-1] * moments.shape[0]

    nothing = torch.full((moments.levels,), torch.nan, dtype=torch.float64)
    gain, gain_se = nothing, nothing
    bound, bound_se = nothing[0], nothing[0]
    if held is not None:
        by_fold = held.gain(scale).sum(2)  # (F, L)
        gain, gain_se = mean_and_error(by_fold, moments.rows)
        bound, bound_se = mean_and_error(by_fold @ weights, moments.rows)  # equation 26
        if moments.folds < FEWEST_FOLDS:
            gain_se, bound_se = nothing, nothing[0]
        if moments.levels == 1:  # one level says nothing about an integral over all of them
            bound, bound_se = nothing[0], nothing[0]
        gain_se, bound_se = PAIRED_FOLDS**0.5 * gain_se, PAIRED_FOLDS**0.5 * bound_se
    gram = torch.einsum("flck,glck->lfg", residual, residual)
    eta2 = squared_norm(gram, moments.rows)
    eta_bound = squared_norm(torch.einsum("l,lfg->fg", weights, gram), moments.rows)
    loss, loss_se = mean_and_error(moments.second[:, :, 0].sum((2, 3)), moments.rows)
    evidence = Evidence(
        images=moments.images,
        folds=moments.folds,
        dimensions=dimensions,
        loss=loss,
        loss_se=loss_se,
        eta2=eta2.value,
        eta2_se=eta2.error,
        eta2_low=eta2.low,
        eta2_high=eta2.high,
        gain=gain,
        gain_se=gain_se,
        shift_se=(moments.draws * shift.variance * moments.bands.sizes).sum((1, 2)).sqrt(),
        scale=scale,
        bound_gain=(float(bound), float(bound_se)),
        shift_bound_gain=(float(eta_bound.value), float(eta_bound.low), float(eta_bound.high)),
    )
    return Calibration(
        correction=correction,
        t=moments.t,
        shape=moments.shape,
        evidence=evidence,
        family=family,
        estimator=estimator,
        data_mean=moments.data_first / max(moments.data_rows, 1),
        data_variance=_data_variance(moments),
        data_variance_se=_data_variance_error(moments),
        data_images=moments.data_rows,
        data_fingerprint=f"{moments.data_digest:016x}",
        provenance=dict(moments.provenance),
    )


def _check(family: str, estimator: str) -> None:
    if family not in FAMILIES:
        raise TrueupError(f"unknown family {family!r}; choose from {', '.join(FAMILIES)}")
    if estimator not in ESTIMATORS:
        raise TrueupError(f"unknown estimator {estimator!r}; choose from {', '.join(ESTIMATORS)}")
    if family == "spectral" and estimator == "plain":
        raise TrueupError("plain is the paper's estimator of a constant shift: use family='shift' with it")


def _no_slopes(moments: Moments) -> tuple[Tensor, Tensor]:
    zero = torch.zeros_like(moments.second[0, :, 0])  # (L, C, bands)
    return zero, zero


@dataclass
class Shrinkage:
    """The operators of equation 21, one (L, L) matrix per band, for the two slopes and the mean."""

    innovation: Tensor
    u: Tensor
    mean: Tensor


def _estimate(
    centred: Centred, family: str, estimator: str, parametrization: Parametrization, shrink: Shrinkage | None
) -> Correction:
    """Slopes and mean residual, shrunk and smoothed where operators are given; equations 14 to 18 and 21."""
    moments = centred.moments
    a, d = _no_slopes(moments)
    if family == "none":
        return Correction(moments.lam, torch.zeros_like(moments.first[0, :, 0]), a, d, moments.bands)
    if family == "spectral" and moments.images > 2:
        innovation, on_u, rho = slopes(centred)
        a, on_input = innovation.value, on_u.value
        if shrink is not None:
            a = torch.einsum("blm,mcb->lcb", shrink.innovation, a)
            on_input = torch.einsum("blm,mcb->lcb", shrink.u, on_input)
        d = on_input - rho * a
    b = mean_residual(centred, estimator, parametrization, a, d).value
    if shrink is not None:
        b = _apply_by_band(shrink.mean, b, moments)
    return Correction(moments.lam, b, a, d, moments.bands)


def _apply_by_band(operator: Tensor, b: Tensor, moments: Moments) -> Tensor:
    out = torch.zeros_like(b)
    for k, index in enumerate(moments.bands.members):
        out[..., index] = torch.einsum("lm,mck->lck", operator[k], b[..., index])
    return out


def _shrinkage(centred: Centred, family: str, parametrization: Parametrization) -> Shrinkage:
    """Choose the operators from all images; held-out fits reuse them on their own estimates.

    Choosing them anew without each fold would let a fold's own support decide how much of it is kept, which
    evens out what the folds say and makes them look more certain than they are.
    """
    moments = centred.moments
    nothing = torch.zeros(moments.bands.count, moments.levels, moments.levels, dtype=torch.float64)
    shrink = Shrinkage(nothing, nothing, nothing)
    if moments.folds < 2:
        return shrink
    a, d = _no_slopes(moments)
    if family == "spectral" and moments.images > 2:
        innovation, on_u, rho = slopes(centred)
        shrink.innovation = _slope_operator(innovation, moments)
        shrink.u = _slope_operator(on_u, moments)
        a = torch.einsum("blm,mcb->lcb", shrink.innovation, innovation.value)
        d = torch.einsum("blm,mcb->lcb", shrink.u, on_u.value) - rho * a
    shrink.mean = _mean_operator(mean_residual(centred, "shrunk", parametrization, a, d), centred)
    return shrink


def _slope_operator(slope: Slope, moments: Moments) -> Tensor:
    """For one direction's slopes, all bands at once; channels are the columns."""
    folds, bands, channels = moments.folds, moments.bands.count, moments.shape[0]
    influence = [slope.influence[..., k] for k in range(bands)]  # (F, L, C) each
    model = slope.variance.mean(1)  # (L, bands)
    robust = slope.influence.square().sum(0).mean(1) * folds / (folds - 1)
    weights = kernel_weights(moments.lam, INFLATION_WIDTH)
    excess = torch.where(model > 0, robust / model.clamp_min(1e-300), torch.ones_like(model))
    variance = model * (weights @ excess).clamp_min(1.0)
    sd = torch.where(variance > 0, variance, torch.ones_like(variance)).sqrt().T  # absent slopes are zero
    columns = torch.full((bands,), float(channels), dtype=torch.float64)
    effective = torch.tensor(
        [effective_columns(influence[k] / sd[k][None, :, None]) for k in range(bands)], dtype=torch.float64
    )
    gram = torch.einsum("lcb,mcb->blm", slope.value, slope.value)
    return shrinker(gram, sd, noise_correlation(influence), columns, effective, moments.lam)


def _mean_operator(mean: Mean, centred: Centred) -> Tensor:
    """For the map, band by band; a band's coefficients and channels are the columns."""
    moments = centred.moments
    rows = moments.rows.reshape(-1, 1, 1, 1)
    fold_means = centred.fold_sums(mean.combination) / rows + mean.offset
    deviations = (fold_means - mean.value) * rows.sqrt()  # (F, L, C, K)
    members = moments.bands.members
    by_band = [deviations[..., index].flatten(2) for index in members]
    values = [mean.value[..., index].flatten(1) for index in members]  # (L, C * size)
    variance = mean.variance.mean(1)  # (L, bands)
    if moments.draws > 1:  # two draws of one image are not two images: let the folds say
        scatter = torch.stack([part.square().mean(2).sum(0) for part in by_band], 1)
        scatter = scatter / (moments.folds - 1) / centred.n
        ratio = scatter / variance.clamp_min(1e-300)
        variance = variance * (kernel_weights(moments.lam, INFLATION_WIDTH) @ ratio)
    sd = variance.clamp_min(1e-300).sqrt().T  # (bands, L)
    gram = torch.stack([value @ value.T for value in values])
    columns = torch.tensor([value.shape[1] for value in values], dtype=torch.float64)
    effective = torch.tensor(
        [effective_columns(part / sd[k][None, :, None]) for k, part in enumerate(by_band)],
        dtype=torch.float64,
    )
    return shrinker(gram, sd, noise_correlation(by_band), columns, effective, moments.lam)


def _data_variance(moments: Moments) -> Tensor:
    """Variance of the data per channel and band about its mean map, one coefficient's, (C, bands)."""
    n = max(moments.data_rows, 1)
    mean = moments.data_first / n
    power = moments.data_second / n - moments.bands.sum(mean.square())
    return power.clamp_min(0.0) / moments.bands.sizes * (n / max(n - 1, 1))


def _data_variance_error(moments: Moments) -> Tensor:
    """Standard error of the data's variance, (C, bands), from the scatter of folds.

    Moments hold no sums of x0 by fold, but x0 = (sigma/alpha) (u - eps_hat + residual) at any level. Where
    all levels are so noisy that little of x0 is left in them, the error is that of Gaussian data.
    """
    if float(moments.alpha[0]) < 0.1 * float(moments.sigma[0]):
        return _data_variance(moments) * (2 / max(moments.data_rows, 1)) ** 0.5
    scale = float(moments.sigma[0] / moments.alpha[0])
    r, o, u = (moments.first[:, 0, i] for i in range(3))  # (F, C, K)
    rr, ro, ru, oo, ou, uu = (moments.second[:, 0, i] for i in range(6))  # (F, C, bands)
    first, second = scale * (u - o + r), scale**2 * (uu + oo + rr - 2 * ou + 2 * ru - 2 * ro)
    mean = first.sum(0) / moments.rows.sum()
    _, error = band_variance(moments.bands, mean, first, second, moments.rows)
    return error * (moments.images / max(moments.data_rows, 1)) ** 0.5
