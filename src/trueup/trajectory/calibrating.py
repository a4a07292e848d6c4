"""Calibrate a sampler, or see how far it drifts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from trueup.artifact import load
from trueup.attachment import attach
from trueup.calibration import Calibration
from trueup.data import Samples, Transform
from trueup.denoiser import Denoiser
from trueup.errors import DataError, MismatchError, TrueupError
from trueup.hf import as_denoiser
from trueup.noise import mix
from trueup.sampling.draw import as_solver
from trueup.trajectory.drift import Drift
from trueup.trajectory.fitting import fit
from trueup.trajectory.maps import Sampler, Trajectory, find
from trueup.trajectory.marginals import FEWEST_IMAGES, Marginals, too_few
from trueup.trajectory.walk import TRAJECTORIES, Walk, network_and_states

MATERIAL = 0.02  # nats per dimension that samples miss before anything is done; all spreads 14% short, say
_OWN_STREAM = 0x747261  # so that nothing is fitted on the very samples it is then judged by


def calibrate_sampler(
    model: Any,
    calibration: Calibration | str | PathLike[str],
    *,
    solver: Any = "dpm-solver-3",
    nfe: int | list[int] = 20,
    grid: str | None = None,
    trajectories: int = TRAJECTORIES,
    labels: Any = None,
    guidance: float = 1.0,
    null_label: Any = None,
    seed: int = 0,
    batch_size: int | None = None,
    scheduler: Any = None,
    device: torch.device | str | None = None,
    progress: bool | None = None,
) -> Calibration:
    """The calibration, and with it what keeps a sampler's states on the marginals.

    A few trajectories are drawn with the calibrated network; after every step the moments of the states are
    compared with those of noised data, which the calibration knows, and an affine map per channel and band
    that restores them is fitted, before the next step is taken. Other trajectories, without and with the
    maps, say what they do; a sampler that is nearly right, or that they do not improve, is left alone.

    `sample` and `Attachment.on_step_end` apply it, for this solver, number of evaluations and guidance;
    several can be in one calibration, and an older one for the same sampler is replaced. No data are needed.
    labels: for a conditional network, as often as they are in the data: its moments are those of all labels.
    """
    denoiser = as_denoiser(model, scheduler=scheduler, device=device)
    calibration = calibration if isinstance(calibration, Calibration) else load(calibration)
    marginals = marginals_of(calibration, denoiser)
    chosen = as_solver(solver, denoiser, grid)
    numbers: list[Any] = list(nfe) if isinstance(nfe, (list, tuple, range)) else [nfe]
    if not numbers:
        raise TrueupError("say how many evaluations: nfe")
    walks = []
    for number in numbers:
        network, states = network_and_states(
            denoiser,
            chosen,
            number,
            trajectories=trajectories,
            labels=labels,
            guidance=guidance,
            null_label=null_label,
            batch_size=batch_size,
        )
        walks.append(Walk(chosen, number, network, states, marginals, trajectories, progress))
    made = list(calibration.trajectories)
    with attach(denoiser, calibration):
        for walk in walks:
            sampler = Sampler.of(chosen, chosen.budget(walk.nfe), guidance)
            trajectory = _calibrate(walk, sampler, seed, labels)
            made = [old for old in made if old.sampler.differences(sampler)] + [trajectory]
    return replace(calibration, trajectories=tuple(made))


def _calibrate(walk: Walk, sampler: Sampler, seed: int, labels: Any) -> Trajectory:
    """Fit the maps on some trajectories; keep them if others, before and after, say that they help."""
    others = mix(seed ^ mix(_OWN_STREAM))
    before = walk.misses(others, f"{sampler}, as it is")
    trajectory = _identity(walk, sampler, {"seed": seed, "labels": _told(labels)})
    after = before
    dimensions = trajectory.shift[0].numel()
    if float(before[-1].nats.sum()) > MATERIAL * dimensions:
        fitted = _fit(walk, trajectory, mix(seed ^ _OWN_STREAM))
        tried = walk.misses(others, f"{sampler}, corrected", fitted)
        if float(tried[-1].nats.sum()) < float(before[-1].nats.sum()):
            trajectory, after = fitted, tried
    for name, misses in (("before", before), ("after", after)):
        trajectory.evidence[name] = torch.stack([miss.nats for miss in misses])
        trajectory.evidence[f"{name}_se"] = torch.stack([miss.nats_se for miss in misses])
        trajectory.evidence[f"{name}_total_se"] = torch.stack([miss.total_se for miss in misses])
    return trajectory


def _told(labels: Any) -> Any:
    """Labels as a file states them: numbers, or how many rows there were."""
    if labels is None:
        return None
    values = torch.as_tensor(labels)
    return values.reshape(-1).tolist() if values.ndim < 2 else f"{len(values)} rows"


def _identity(walk: Walk, sampler: Sampler, provenance: dict[str, Any]) -> Trajectory:
    """A trajectory that changes nothing."""
    marginals, steps = walk.marginals, len(walk.states)
    (channels, size), bands = marginals.mean.shape, marginals.bands
    shift = torch.zeros(steps, channels, size, dtype=torch.float64)
    gain = torch.ones(steps, channels, bands.count, dtype=torch.float64)
    count = len(walk.index)
    return Trajectory(sampler, walk.states, bands, marginals.mean, shift, gain, {}, count, provenance)


def _fit(walk: Walk, trajectory: Trajectory, seed: int) -> Trajectory:
    """State by state: each is fitted after those before it were corrected."""
    shift, gain = trajectory.shift.clone(), trajectory.gain.clone()

    def restore(i: int, x: Tensor) -> Tensor:
        if walk.states.inner[i]:
            return x
        shift[i], gain[i] = fit(walk.moments(i, x), walk.target(i))
        return replace(trajectory, shift=shift, gain=gain)(i, x)

    walk.go(seed, f"{trajectory.sampler}, fitting", restore)
    return replace(trajectory, shift=shift, gain=gain)


def check_sampler(
    model: Any,
    data: Any,
    *,
    solver: Any = "dpm-solver-3",
    nfe: int = 20,
    grid: str | None = None,
    trajectories: int = TRAJECTORIES,
    images: int | None = None,
    labels: Any = None,
    guidance: float = 1.0,
    null_label: Any = None,
    corrected: bool = True,
    seed: int = 0,
    batch_size: int | None = None,
    resize: str | None = None,
    crop: str | None = None,
    flip: bool = False,
    data_range: tuple[float, float] | None = None,
    skip_bad: bool = False,
    scheduler: Any = None,
    device: torch.device | str | None = None,
    progress: bool | None = None,
) -> Drift:
    """How far a sampler's states drift from where they belong.

    data: images, as in `calibrate`, for the network as it is; or a `Calibration` made from them, or its file,
    for the network with that attached and, if corrected, with the trajectory it has for this sampler.
    """
    if isinstance(data, (str, PathLike)) and str(data).endswith(".safetensors"):
        data = load(data)
    denoiser = as_denoiser(model, scheduler=scheduler, device=device)
    chosen = as_solver(solver, denoiser, grid)
    network, states = network_and_states(
        denoiser,
        chosen,
        nfe,
        trajectories=trajectories,
        labels=labels,
        guidance=guidance,
        null_label=null_label,
        batch_size=batch_size,
    )
    sampler = Sampler.of(chosen, chosen.budget(nfe), guidance)
    calibration = data if isinstance(data, Calibration) else None
    if calibration is None:
        transform = Transform(resize, crop, flip, data_range)
        samples = Samples(data, denoiser.shape, denoiser.data_range, transform, skip_bad)
        marginals = Marginals.of_data(samples, images)
    else:
        marginals = marginals_of(calibration, denoiser)
    applied = None
    if calibration is not None and corrected:
        applied = find(calibration.trajectories, sampler)
    walk = Walk(chosen, nfe, network, states, marginals, trajectories, progress)
    with attach(denoiser, calibration) if calibration is not None else nullcontext():
        misses = walk.misses(mix(seed ^ mix(_OWN_STREAM ^ 1)), f"{sampler}", applied)
    generated = calibration is not None and calibration.generated is not None
    return Drift(sampler, states, marginals.bands, misses, trajectories, marginals.images, generated)


def marginals_of(calibration: Calibration, denoiser: Denoiser) -> Marginals:
    """The moments of the data behind a calibration of a denoiser."""
    if calibration.shape != denoiser.shape:
        raise MismatchError(
            f"this calibration is of samples of shape {calibration.shape}, the model's are {denoiser.shape}"
        )
    if calibration.data_images < FEWEST_IMAGES:
        raise DataError(too_few(calibration.data_images))
    return Marginals(
        calibration.correction.bands,
        calibration.data_mean,
        calibration.data_variance,
        calibration.data_variance_se,
        calibration.data_images,
    )
