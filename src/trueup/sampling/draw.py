"""Drawing samples: any network, any solver, and seeds that belong to images."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from trueup import distributed
from trueup.calibration import Attachment, Calibration, as_calibration
from trueup.denoiser import Denoiser
from trueup.errors import Argument, ModelError, TrueupError
from trueup.hf import as_denoiser
from trueup.noise import checked_seed, normal
from trueup.progress import Progress
from trueup.sampling.fitted import Fitted
from trueup.sampling.network import Network
from trueup.sampling.schedulers import SchedulerSolver
from trueup.sampling.solver import Solver, named, solver_names
from trueup.solvers import check_name

STARTING_NOISE = -1  # the noise key of x_T
DEFAULT = "dpm-solver-3"


def as_solver(solver: Any, denoiser: Denoiser) -> Solver:
    """A solver from its name, from a `Solver` or from a diffusers scheduler; checked against the network.

    Names are those of `trueup.sampling.solver_names`, and the class names of diffusers' schedulers.
    """
    if isinstance(solver, type):
        solver = solver.__name__
    if isinstance(solver, str):
        check_name(solver, solver_names())
        known = solver in solver_names()
        return named(solver, denoiser) if known else SchedulerSolver.named(solver, denoiser)
    if not isinstance(solver, Solver):
        solver = SchedulerSolver(solver)
    if isinstance(solver, SchedulerSolver):
        solver.check(denoiser)
    return solver


def sample(
    model: Any,
    count: int,
    *,
    solver: Any = None,
    nfe: int | None = 20,
    calibration: Calibration | str | PathLike[str] | None = None,
    labels: Any = None,
    guidance: float = 1.0,
    seed: int = 0,
    progress: bool | None = None,
) -> Tensor:
    """Draw `count` samples, (count, *shape) in the model's own range, on the CPU.

    Image i of a seed is the same image whatever `count`, the batch size or the device, and with a calibration
    it starts from the same noise: pairs before and after are comparable.

    solver: see `as_solver`. By default the one that the calibration has fitted to this model for so many
    evaluations and this guidance (see `fit_solver`), or DPM-Solver-3. nfe: how many evaluations of the
    network it may make, per image; some solvers make fewer. labels: for a conditional network, one for all or
    a sequence that image i takes label i of, over and over. guidance: classifier-free guidance's scale, for a
    network with a null_label.
    """
    how: dict[str, Any] = {"solver": solver, "nfe": nfe, "calibration": calibration, "labels": labels}
    how |= {"guidance": guidance, "seed": seed, "progress": progress}
    return torch.cat([x for _, x in sample_batches(model, count, make=lambda x: x.cpu(), **how)])


def sample_batches(
    model: Any,
    count: int,
    *,
    start: int = 0,
    solver: Any = None,
    nfe: int | None = 20,
    calibration: Calibration | str | PathLike[str] | None = None,
    labels: Any = None,
    guidance: float = 1.0,
    seed: int = 0,
    progress: bool | None = None,
    description: str = "sampling",
    make: Callable[[Tensor], Any] = lambda x: x,
) -> Iterator[tuple[Tensor, Any]]:
    """`sample` in batches of (index, x), images `start` to `count`, on the model's device.

    Mistakes are said at once. The model is corrected only while a batch is being drawn. make: what to make of
    each x; on the CPU, if ranks work together, who then draw a batch each and have those of all.
    """
    denoiser = as_denoiser(model)
    for name, value, least in (("count", count, 1), ("start", start, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise TrueupError(f"{name} is a whole number of at least {least}, not {value!r}")
    seed = checked_seed(seed)
    calibration = None if calibration is None else as_calibration(calibration)
    chosen = choose_solver(solver, denoiser, calibration, nfe, guidance)
    network = network_for(denoiser, labels, guidance)
    classes = network.y
    evaluations = count_evaluations(chosen, nfe, denoiser, classes)
    attachment = None if calibration is None else Attachment(denoiser, calibration)  # checked, and off
    total = None if evaluations is None else evaluations * (count - start)

    def drawn(index: Tensor) -> Any:
        network.index = index
        if classes is not None:
            network.y = classes[index % len(classes)]
        with attachment.at_work() if attachment is not None else nullcontext():
            x = draw(chosen, network, nfe)
        return make(x)

    def batches() -> Iterator[tuple[Tensor, Any]]:
        size, ranks = denoiser.batch_size, distributed.size()
        with ExitStack() as stack:
            if attachment is not None:
                stack.callback(attachment.remove)
            bar = stack.enter_context(Progress(total, description, show=progress))
            network.seed, network.advance = seed, lambda rows: bar.update(rows * ranks)  # all go as fast
            indices = (torch.arange(i, min(i + size, count)) for i in range(start, count, size))
            yield from distributed.dealt(indices, drawn)

    return batches()


def network_for(denoiser: Denoiser, labels: Any = None, guidance: float = 1.0) -> Network:
    """The network as a solver calls it, everything checked; its `y` are the labels to go round in."""
    classes = check_labels(denoiser, labels, guidance)
    if not isinstance(guidance, (int, float)) or not math.isfinite(guidance):
        raise TrueupError(f"guidance is a number, not {guidance!r}")
    if guidance != 1.0 and denoiser.null_label is None:
        text = "guidance needs the label that stands for none"
        raise TrueupError(text, "say which that is as {}", Argument("null_label"))
    if guidance != 1.0 and denoiser.vocabulary is not None:
        denoiser.vocabulary.check_guidance()
    return Network(denoiser, guidance=guidance, y=None if classes is None else classes.to(denoiser.device))


def check_labels(denoiser: Denoiser, labels: Any, guidance: float = 1.0) -> Tensor | None:
    """Labels to go round in, or None for a network without."""
    if not denoiser.conditional:
        if labels is not None or guidance != 1.0:
            advice = "leave them out (a Denoiser of one that takes some needs conditional=True)"
            raise TrueupError(
                "this network is unconditional, and takes no labels, prompts or guidance", advice
            )
        return None
    said = denoiser.vocabulary
    if labels is None:
        noun = "labels" if said is None else "prompts"
        advice = f"say which {noun} to sample as {{}}"
        raise TrueupError("this network is conditional", advice, Argument(noun, said="labels"))
    one = isinstance(labels, (str, Mapping))
    if said is not None and not isinstance(labels, (Tensor, int)):
        labels = said.numbers([labels] if one else list(labels))
    elif one or (isinstance(labels, (list, tuple)) and any(isinstance(label, str) for label in labels)):
        raise TrueupError("this network has no text encoder, so that it cannot be told prompts: pass numbers")
    try:
        values = torch.atleast_1d(torch.as_tensor(labels))
    except (TypeError, ValueError):
        raise TrueupError(f"labels are numbers, or a tensor with a row each, not {labels!r}") from None
    if not len(values):
        raise TrueupError("there is no label among the labels")
    return values


def choose_solver(
    solver: Any, denoiser: Denoiser, calibration: Calibration | None, nfe: int | None, guidance: float = 1.0
) -> Solver:
    """The solver asked for; by default, or as "fitted", the one that the calibration has for this model."""
    if solver not in (None, Fitted.name):
        return as_solver(solver, denoiser)
    there = () if calibration is None else calibration.solvers
    if solver is None and not (nfe is not None and any(made.is_for(nfe, guidance) for made in there)):
        return as_solver(DEFAULT, denoiser)
    if calibration is None or nfe is None:
        raise TrueupError("a fitted solver is part of a calibration: pass one, and nfe (see fit_solver)")
    found = calibration.solver(nfe, guidance)
    gains = "none" if calibration.empty else calibration.gains
    if found.gains != gains:
        problem = (
            f"the solver for {found.purpose} was fitted to the correction as {found.gains!r}, not {gains!r}"
        )
        warnings.warn(f"{problem}: fit it again (trueup.fit_solver), or name another solver", stacklevel=4)
    return Fitted(found)


@torch.inference_mode()
def draw(solver: Solver, network: Network, nfe: int | None) -> Tensor:
    """The network's batch of samples, from the noise of their seed and indices."""
    denoiser = network.denoiser
    assert network.index is not None
    noise = normal(network.seed, network.index, STARTING_NOISE, denoiser.shape, denoiser.device)
    if denoiser.dtype == torch.float64:  # half precision is for networks alone
        noise = noise.double()
    with denoiser.evaluating():
        x = solver.solve(network, noise, nfe)
    if not torch.isfinite(x).all():
        advice = "use more evaluations, or another solver"
        raise ModelError(f"{solver.name} ran into values that are not finite: {advice}")
    return x


def count_evaluations(solver: Solver, nfe: int | None, denoiser: Denoiser, y: Any = None) -> int | None:
    """How many evaluations a solver makes of the `nfe` it may; None if it decides for itself."""
    if not solver.adaptive and (not isinstance(nfe, int) or isinstance(nfe, bool) or nfe < 1):
        raise TrueupError(f"nfe is a whole number of network evaluations, not {nfe!r}")
    return solver.evaluations(nfe, denoiser, y)


def pictures(x: Tensor, data_range: tuple[float, float]) -> Tensor:
    """Samples in a model's range as 8-bit pictures, (B, C, H, W) uint8 on the CPU."""
    low, high = data_range
    return ((x.clamp(low, high) - low) * (255 / (high - low))).round().to(torch.uint8).cpu()


def image_maker(denoiser: Denoiser) -> Callable[[Tensor], Tensor]:
    """What makes pictures of a model's samples, 8-bit; latents without an autoencoder stay as they are."""
    data_range, autoencoder = denoiser.data_range, denoiser.autoencoder
    if data_range is not None:
        return lambda x: pictures(x, data_range)
    if autoencoder is not None:
        return lambda x: pictures(autoencoder.decode(x.to(denoiser.device)), (-1.0, 1.0))
    return lambda x: x.cpu()
