"""Drawing samples: any network, any solver, and seeds that belong to images."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from trueup.artifact import load
from trueup.attachment import attach
from trueup.calibration import Calibration
from trueup.denoiser import Denoiser
from trueup.errors import ModelError, TrueupError
from trueup.estimate.evaluate import default_batch_size
from trueup.hf import as_denoiser
from trueup.noise import normal
from trueup.process import EDM, ContinuousVP, DiscreteVP, NoiseProcess
from trueup.sampling.dpm_solver import DPMSolver
from trueup.sampling.network import Network, takes_whole_times_only
from trueup.sampling.schedulers import SchedulerSolver, unknown
from trueup.trajectory.maps import Sampler, Trajectory, choose, find
from trueup.trajectory.states import Adjust

STARTING_NOISE = -1  # the noise key of x_T
Solver = DPMSolver | SchedulerSolver


def as_solver(solver: Any, denoiser: Denoiser, grid: str | None = None) -> Solver:
    """A solver from its name, a `DPMSolver`, or a diffusers scheduler; checked against the network.

    Names are `dpm-solver-1`, `-2`, `-3`, with `-fixed` or `-adaptive` after them, those in
    `trueup.sampling.schedulers.NAMES`, and the class names of diffusers' schedulers.
    """
    if isinstance(solver, str) and solver.startswith("dpm-solver"):
        order, _, allocation = solver.removeprefix("dpm-solver-").partition("-")
        if order not in ("1", "2", "3") or allocation not in ("", "fixed", "adaptive"):
            raise TrueupError(unknown(solver))
        solver = DPMSolver(int(order), allocation=allocation or "fast")
    elif isinstance(solver, (str, type)):
        solver = SchedulerSolver.named(solver if isinstance(solver, str) else solver.__name__, denoiser)
    if isinstance(solver, DPMSolver):
        return replace(solver, grid=grid) if grid is not None else solver
    if grid is not None:
        raise TrueupError("a grid belongs to DPM-Solver; a scheduler has its own")
    solver = solver if isinstance(solver, SchedulerSolver) else SchedulerSolver(solver)
    solver.check(denoiser)
    return solver


def sample(
    model: Any,
    count: int,
    *,
    solver: Any = "dpm-solver-3",
    nfe: int | None = 20,
    grid: str | None = None,
    calibration: Calibration | str | PathLike[str] | None = None,
    labels: Any = None,
    guidance: float = 1.0,
    null_label: Any = None,
    trajectory: bool | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    scheduler: Any = None,
    device: torch.device | str | None = None,
    progress: bool | None = None,
) -> Tensor:
    """Draw `count` samples, (count, *shape) in the model's own range, on the CPU.

    Image i of a seed is the same image whatever `count`, the batch size or the device, and with a calibration
    it starts from the same noise: pairs before and after are comparable.

    solver: see `as_solver`. nfe: how many evaluations of the network it may make, per image; some solvers
    make fewer. labels: for a conditional network, one for all or a sequence that image i takes label i of,
    over and over. guidance: classifier-free guidance's scale, with the label that means none. trajectory:
    whether to keep the sampler's states on the marginals (see `calibrate_sampler`); by default where the
    calibration knows how for this sampler; True insists on it.
    """
    batches = sample_batches(
        model,
        count,
        solver=solver,
        nfe=nfe,
        grid=grid,
        calibration=calibration,
        labels=labels,
        guidance=guidance,
        null_label=null_label,
        trajectory=trajectory,
        seed=seed,
        batch_size=batch_size,
        scheduler=scheduler,
        device=device,
        progress=progress,
    )
    return torch.cat([x.cpu() for _, x in batches])


def sample_batches(
    model: Any,
    count: int,
    *,
    start: int = 0,
    solver: Any = "dpm-solver-3",
    nfe: int | None = 20,
    grid: str | None = None,
    calibration: Calibration | str | PathLike[str] | None = None,
    labels: Any = None,
    guidance: float = 1.0,
    null_label: Any = None,
    trajectory: bool | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    scheduler: Any = None,
    device: torch.device | str | None = None,
    progress: bool | None = None,
    description: str = "sampling",
) -> Iterator[tuple[Tensor, Tensor]]:
    """`sample` in batches of (index, x), images `start` to `count`, on the model's device."""
    denoiser = as_denoiser(model, scheduler=scheduler, device=device)
    for name, value, least in (("count", count, 1), ("batch_size", batch_size or 1, 1), ("start", start, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise TrueupError(f"{name} is a whole number of at least {least}, not {value!r}")
    chosen = as_solver(solver, denoiser, grid)
    network = network_for(denoiser, chosen, nfe, labels, guidance, null_label, batch_size)
    classes = network.y
    evaluations = count_evaluations(chosen, nfe, denoiser, classes)
    calibration = load(calibration) if isinstance(calibration, (str, PathLike)) else calibration
    adjust = find_trajectory(calibration, chosen, nfe, guidance, trajectory)
    if adjust is None and trajectory is None and calibration is not None and calibration.trajectories:
        warnings.warn(f"{without_trajectory(calibration)} (or pass trajectory=False)", stacklevel=3)
    if adjust is not None and nfe is not None:
        adjust.check(chosen.states(denoiser, nfe, network.whole_times))
    attached = attach(denoiser, calibration) if calibration is not None else nullcontext()
    show = sys.stderr.isatty() if progress is None else progress
    total = None if evaluations is None else evaluations * (count - start)
    bar = tqdm(total=total, desc=description, unit="eval", disable=not show, file=sys.stderr)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        size = network.at_once or 1
        with attached, denoiser.evaluating(), bar:
            for first in range(start, count, size):
                index = torch.arange(first, min(first + size, count))
                if classes is not None:
                    network.y = classes[index % len(classes)]
                advance = partial(_advance, bar, len(index))
                yield index, draw(chosen, network, index, seed, nfe, advance, adjust)

    return batches()


def network_for(
    denoiser: Denoiser,
    solver: Solver,
    nfe: int | None,
    labels: Any = None,
    guidance: float = 1.0,
    null_label: Any = None,
    batch_size: int | None = None,
) -> Network:
    """The network as a solver calls it, everything checked; its `y` are the labels to go round in."""
    classes = check_labels(denoiser, labels, guidance)
    count_evaluations(solver, nfe, denoiser, classes)
    network = Network(
        denoiser,
        guidance=guidance,
        null_label=_null_label(denoiser, guidance, null_label),
        at_once=batch_size or 4 * default_batch_size(denoiser),
        whole_times=takes_whole_times_only(denoiser, classes),
    )
    network.y = None if classes is None else classes.to(denoiser.device)
    return network


def find_trajectory(
    calibration: Calibration | None,
    solver: Solver,
    nfe: int | None,
    guidance: float = 1.0,
    wanted: bool | None = None,
) -> Trajectory | None:
    """The trajectory to apply: the one for this sampler; wanted: True insists on it, False wants none."""
    if wanted is False or (wanted is None and (calibration is None or not calibration.trajectories)):
        return None
    if calibration is None:
        raise TrueupError("a trajectory is part of a calibration: pass one")
    if nfe is None or solver.adaptive:
        if wanted:
            raise TrueupError(f"{solver.name} chooses its own steps: there are no trajectories for it")
        return None
    sampler = Sampler.of(solver, solver.budget(nfe), guidance)
    if wanted:
        return choose(calibration.trajectories, sampler)
    return find(calibration.trajectories, sampler)


def without_trajectory(calibration: Calibration) -> str:
    """What to say when a calibration has trajectories, and none for the sampler at hand."""
    there = "; ".join(str(made.sampler) for made in calibration.trajectories)
    return f"no trajectory for this sampler, only for {there}: samples are drawn without one"


def _advance(bar: Any, images: int, evaluations: int) -> None:
    bar.update(images * evaluations)


@torch.inference_mode()
def draw(
    solver: Solver,
    network: Network,
    index: Tensor,
    seed: int,
    nfe: int | None,
    advance: Callable[[int], Any],
    adjust: Adjust | None = None,
) -> Tensor:
    """One batch of samples, from the noise of their indices."""
    denoiser = network.denoiser
    x = normal(seed, index, STARTING_NOISE, denoiser.shape, denoiser.device)
    x = x.double() if denoiser.dtype == torch.float64 else x  # half precision is for networks alone
    if isinstance(solver, DPMSolver):
        process = denoiser.process
        x = solver.solve(network, x * prior_std(process), nfe, advance, adjust=adjust)
        if isinstance(process, EDM):  # whose networks see x_t scaled by c_in
            x = x / float(process.alpha(solver.end_time(process, nfe)))
    else:
        x = solver.solve(network, x, nfe, advance, seed=seed, index=index, adjust=adjust)
    if not torch.isfinite(x).all():
        raise ModelError(
            f"{solver.name} ran into values that are not finite: use more evaluations, or another solver"
        )
    return x


def prior_std(process: NoiseProcess) -> float:
    """Standard deviation of the noise a sampler starts from."""
    if isinstance(process, (DiscreteVP, ContinuousVP)):
        return 1.0
    return float(process.sigma(process.t_max))


def count_evaluations(
    solver: Solver, nfe: int | None, denoiser: Denoiser, labels: Tensor | None = None
) -> int | None:
    """How many evaluations a solver makes of the `nfe` it may; None if it decides for itself."""
    whole = isinstance(solver, DPMSolver) and takes_whole_times_only(denoiser, labels)
    if solver.adaptive:
        if whole:
            raise TrueupError(
                f"{solver.name} needs times between the timesteps, and this network knows whole ones only: "
                "use dpm-solver-3"
            )
        return None
    if not isinstance(nfe, int) or isinstance(nfe, bool) or nfe < 1:
        raise TrueupError(f"nfe is a whole number of network evaluations, not {nfe!r}")
    if isinstance(solver, DPMSolver):
        return solver.evaluations(nfe, denoiser.process, whole)
    return solver.evaluations(nfe)


def check_labels(denoiser: Denoiser, labels: Any, guidance: float = 1.0) -> Tensor | None:
    """Labels to go round in, or None for a network without."""
    if not denoiser.conditional:
        if labels is not None or guidance != 1.0:
            raise TrueupError(
                "this network takes no labels and cannot be guided; a Denoiser of one that does needs "
                "conditional=True"
            )
        return None
    if labels is None:
        raise TrueupError("this network is conditional: say which labels to sample")
    try:
        values = torch.as_tensor(labels)
    except (TypeError, ValueError):
        raise TrueupError(f"labels are numbers, or a tensor with a row each, not {labels!r}") from None
    values = values.reshape(1) if values.ndim == 0 else values
    if not len(values):
        raise TrueupError("there is no label among the labels")
    return values


def _null_label(denoiser: Denoiser, guidance: float, null_label: Any) -> Any:
    if not isinstance(guidance, (int, float)) or not math.isfinite(guidance):
        raise TrueupError(f"guidance is a number, not {guidance!r}")
    if guidance == 1.0:
        return None
    null = denoiser.null_label if null_label is None else null_label
    if null is None:
        raise TrueupError("guidance needs the label that stands for none: pass null_label")
    return null


def pictures(x: Tensor, data_range: tuple[float, float]) -> Tensor:
    """Samples in a model's range as 8-bit pictures, (B, C, H, W) uint8 on the CPU."""
    low, high = data_range
    return ((x.clamp(low, high) - low) * (255 / (high - low))).round().to(torch.uint8).cpu()
