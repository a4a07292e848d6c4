"""Calibrate a sampler, or see how far it drifts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from trueup.calibration import Attachment, Calibration, Sampler, Trajectory, as_calibration
from trueup.calibration.trajectory import find
from trueup.errors import TrueupError
from trueup.hf import as_denoiser
from trueup.images import open_images
from trueup.noise import check_seed, mix
from trueup.sampling.draw import as_solver, sampler_of
from trueup.trajectory.drift import Drift
from trueup.trajectory.fitting import fit
from trueup.trajectory.marginals import Marginals
from trueup.trajectory.walk import TRAJECTORIES, Walk

MATERIAL = 0.02  # nats per dimension that samples miss before anything is done; all spreads 14% short, say
_OWN_STREAM = 0x747261  # so that nothing is fitted on the very samples it is then judged by


def calibrate_sampler(
    model: Any,
    calibration: Calibration | str | PathLike[str],
    *,
    solver: Any = "dpm-solver-3",
    nfe: int | list[int] = 20,
    trajectories: int = TRAJECTORIES,
    labels: Any = None,
    guidance: float = 1.0,
    seed: int = 0,
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
    check_seed(seed)
    denoiser, calibration = as_denoiser(model), as_calibration(calibration)
    marginals = Marginals.of_calibration(calibration, denoiser)
    chosen = as_solver(solver, denoiser)
    numbers: Any = nfe if isinstance(nfe, (list, tuple, range)) else [nfe]
    if not numbers:
        raise TrueupError("say how many evaluations: nfe")
    settings = {"trajectories": trajectories, "labels": labels, "guidance": guidance, "progress": progress}
    walks = [Walk(denoiser, chosen, number, marginals, **settings) for number in numbers]
    made = list(calibration.trajectories)
    with Attachment(denoiser, calibration):
        for walk in walks:
            sampler = sampler_of(chosen, walk.nfe, guidance)
            trajectory = _calibrate(walk, sampler, seed, labels)
            made = [old for old in made if old.sampler.differences(sampler)] + [trajectory]
    return replace(calibration, trajectories=tuple(made))


def _calibrate(walk: Walk, sampler: Sampler, seed: int, labels: Any) -> Trajectory:
    """Fit the maps on some trajectories; keep them if others, before and after, say that they help."""
    others = mix(seed ^ mix(_OWN_STREAM))
    before = walk.misses(others, f"{sampler}, as it is")
    after, marginals, bands = before, walk.marginals, walk.marginals.bands
    # One that changes nothing.
    shift = torch.zeros(len(walk.states), *marginals.mean.shape, dtype=torch.float64)
    gain = torch.ones(len(walk.states), len(marginals.mean), bands.count, dtype=torch.float64)
    made_with, count = {"seed": seed, "labels": _told(labels)}, len(walk.index)
    trajectory = Trajectory(sampler, walk.states, bands, marginals.mean, shift, gain, {}, count, made_with)
    if float(before[-1].nats.sum()) > MATERIAL * marginals.mean.numel():
        fitted = _fit(walk, trajectory, mix(seed ^ _OWN_STREAM))
        tried = walk.misses(others, f"{sampler}, corrected", fitted)
        if float(tried[-1].nats.sum()) < float(before[-1].nats.sum()):
            trajectory, after = fitted, tried
    for name, misses in (("before", before), ("after", after)):
        for kind, part in (("", "nats"), ("_se", "nats_se"), ("_total_se", "total_se")):
            trajectory.evidence[name + kind] = torch.stack([getattr(miss, part) for miss in misses])
    return trajectory


def _told(labels: Any) -> Any:
    """Labels as a file states them: numbers, or how many rows there were."""
    if labels is None:
        return None
    values = torch.as_tensor(labels)
    return values.reshape(-1).tolist() if values.ndim < 2 else f"{len(values)} rows"


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
    trajectories: int = TRAJECTORIES,
    labels: Any = None,
    guidance: float = 1.0,
    corrected: bool = True,
    seed: int = 0,
    progress: bool | None = None,
) -> Drift:
    """How far a sampler's states drift from where they belong.

    data: `Images`, or whatever holds some, for the network as it is; or a `Calibration` made from them, or
    its file, for the network with that attached and, if corrected, with its trajectory for this sampler.
    """
    is_file = isinstance(data, (str, PathLike)) and str(data).endswith(".safetensors")
    calibration = as_calibration(data) if is_file or isinstance(data, Calibration) else None
    check_seed(seed)
    denoiser = as_denoiser(model)
    denoiser.check_bare()
    chosen = as_solver(solver, denoiser)
    settings = {"trajectories": trajectories, "labels": labels, "guidance": guidance, "progress": progress}
    if calibration is None:
        marginals = Marginals.of_data(open_images(data, denoiser))
    else:
        marginals = Marginals.of_calibration(calibration, denoiser)
    walk = Walk(denoiser, chosen, nfe, marginals, **settings)
    sampler = sampler_of(chosen, nfe, guidance)
    applied = find(calibration.trajectories, sampler) if calibration is not None and corrected else None
    with Attachment(denoiser, calibration) if calibration is not None else nullcontext():
        misses = walk.misses(mix(seed ^ mix(_OWN_STREAM ^ 1)), f"{sampler}", applied)
    generated = calibration is not None and calibration.generated is not None
    return Drift(sampler, walk.states, marginals.bands, misses, trajectories, marginals.images, generated)
