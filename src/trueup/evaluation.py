"""`evaluate`: sample with and without a calibration from the same seeds, and compare both with the data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueup import __version__
from trueup.artifact import load
from trueup.attachment import attach
from trueup.calibration import Calibration
from trueup.comparison import MEASURES, Change, Comparison, Row
from trueup.data import Samples, Transform
from trueup.denoiser import Denoiser
from trueup.errors import DataError, TrueupError
from trueup.held_out import denoising_loss, first_unused
from trueup.hf import as_denoiser
from trueup.metrics import (
    FeatureBatch,
    Features,
    ModuleFeatures,
    Reference,
    colours,
    load_features,
    measures,
    wasserstein,
)
from trueup.sampling import as_solver, pictures, sample_batches
from trueup.sampling.draw import Solver, check_labels, count_evaluations, find_trajectory, without_trajectory
from trueup.sampling.store import Kept
from trueup.trajectory.maps import Sampler, Trajectory, find

REFERENCE_IMAGES = 10_000
LOSS_IMAGES = 200  # at most: the denoising loss is known well from few
FEWEST_SAMPLES = 8  # fewer have no intervals
_DECODED = 16  # latents decoded at once: an autoencoder takes more memory than the network
ToImages = Callable[[Tensor], Tensor]


def evaluate(
    model: Any,
    calibration: Calibration | str | PathLike[str],
    data: Any = None,
    *,
    solvers: Any = ("dpm-solver-3",),
    nfe: int | Sequence[int] = (20,),
    grid: str | None = None,
    samples: int = 1000,
    images: int = REFERENCE_IMAGES,
    features: str | Features | Callable[[Tensor], Any] = "efficientnet",
    weights: str | PathLike[str] | None = None,
    reference: Reference | str | PathLike[str] | None = None,
    labels: Any = None,
    guidance: float = 1.0,
    null_label: Any = None,
    trajectory: bool | None = None,
    decode: ToImages | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    resize: str | None = None,
    crop: str | None = None,
    flip: bool = False,
    data_range: tuple[float, float] | None = None,
    skip_bad: bool = False,
    scheduler: Any = None,
    device: torch.device | str | None = None,
    run: str | PathLike[str] | None = None,
    force: bool = False,
    progress: bool | None = None,
) -> Comparison:
    """Sample with and without a calibration from the same seeds, and compare both with the data.

    data, resize, crop, flip, data_range: as in `calibrate`; without data, a `reference` saved before serves
    for all but the denoising loss. images: how many of the data to compare with. solvers and nfe: every one
    of the first at every one of the second. features: a name (see `trueup.metrics.load_features`), or what
    maps images to (B, d); weights are those of inception. decode: turns latents into images (see
    `trueup.hf.as_decoder`); without it latents are compared as they are. trajectory: as in `sample`. run: a
    directory that keeps the features of what was sampled, to go on from after an interruption; force
    replaces what was sampled there with other settings.
    """
    denoiser = as_denoiser(model, scheduler=scheduler, device=device)
    calibration = calibration if isinstance(calibration, Calibration) else load(calibration)
    if data is None and reference is None:
        raise DataError("evaluating needs data to compare with, or a reference made from it")
    if not isinstance(samples, int) or samples < FEWEST_SAMPLES:
        raise TrueupError(f"a comparison needs {FEWEST_SAMPLES} samples or more, not {samples!r}")
    attach(denoiser, calibration).remove()  # or say now that it does not fit
    classes = check_labels(denoiser, labels, guidance)
    chosen: list[tuple[Solver, int | None]] = []
    numbers = nfe if isinstance(nfe, Sequence) else [nfe]
    for given in solvers if isinstance(solvers, (list, tuple)) else [solvers]:
        solver = as_solver(given, denoiser, grid)
        chosen += [(solver, None)] if solver.adaptive else [(solver, number) for number in numbers]
    kept_on = [find_trajectory(calibration, solver, n, guidance, trajectory) for solver, n in chosen]
    kept_on = [None if made is None or made.empty else made for made in kept_on]
    evaluations = [count_evaluations(solver, number, denoiser, classes) for solver, number in chosen]
    if isinstance(features, str):
        extract: Features = load_features(features, weights=weights)
    elif isinstance(features, Features):
        extract = features
    else:
        extract = ModuleFeatures(features, getattr(features, "__qualname__", type(features).__name__))
    extract.to(denoiser.device)
    to_images = image_maker(denoiser, decode)

    source = None
    if data is not None:
        transform = Transform(resize, crop, flip, data_range)
        source = Samples(data, denoiser.shape, denoiser.data_range, transform, skip_bad)
    if reference is None:
        assert source is not None
        reference = build_reference(source, extract, to_images, images=images, progress=progress)
    elif not isinstance(reference, Reference):
        reference = Reference.load(reference)
    reference.check(extract)

    conditions = {"set of labels": labels, "guidance": guidance, "null label": null_label, "seed": seed}
    decoder = None if decode is None else getattr(decode, "identity", repr(decode))

    def sampled(
        solver: Solver, number: int | None, used: Calibration | None, applied: Trajectory | None
    ) -> dict[str, Tensor]:
        which = "uncalibrated" if used is None else "calibrated"
        name = solver.name if number is None else f"{solver.name}-{number}"
        kept = None
        if run is not None:
            settings = {
                **denoiser.identity(),
                **conditions,
                "solver": repr(solver),
                "number of evaluations": number,
                "decoder": decoder,
                "set of features": [extract.name, extract.preprocessing, extract.weights],
                "calibration": None if used is None else used.identity,
            }
            if used is not None and applied is not None:
                settings["trajectory"] = applied.identity
            kept = Kept(Path(run) / f"{name}-{which}", settings, force=force)
        batches = sample_batches(
            denoiser,
            samples,
            start=min(kept.done, samples) if kept is not None else 0,
            solver=solver,
            nfe=number,
            calibration=used,
            labels=labels,
            guidance=guidance,
            null_label=null_label,
            trajectory=used is not None and applied is not None,
            seed=seed,
            batch_size=batch_size,
            progress=progress,
            description=f"{name}, {which}",
        )
        return _features(batches, extract, to_images, kept, samples)

    notes: list[str] = []
    rows = []
    for (solver, number), made, applied in zip(chosen, evaluations, kept_on, strict=True):
        before, after = (sampled(solver, number, used, applied) for used in (None, calibration))
        if applied is not None:
            notes.append(f"after: the calibration's trajectory of {applied.sampler} is applied as well")
        elif calibration.trajectories and trajectory is None and number is not None:
            sampler = Sampler.of(solver, solver.budget(number), guidance)
            if find(calibration.trajectories, sampler) is None:
                notes.append(f"{solver.name}-{number}: {without_trajectory(calibration)}")
        changes, colour = _compare(before, after, reference, notes)
        rows.append(Row(solver.name, repr(solver), number, made, changes, colour))
    loss: list[dict[str, float]] = []
    loss_images, held_out = 0, True
    if source is not None and not source.indexed:
        notes.append("the data is a stream, read once: no denoising loss")
    elif source is not None:
        first = first_unused(calibration, source)
        held_out = first is not None
        if not held_out:
            notes.append("cannot tell which images the calibration was made from: the loss is on the first")
        most = min(images, LOSS_IMAGES)
        loss, loss_images = denoising_loss(
            denoiser, calibration, source, first or 0, most, seed, batch_size, notes, progress
        )
    return Comparison(
        rows=rows,
        samples=samples,
        seed=seed,
        features={
            "name": extract.name,
            "preprocessing": extract.preprocessing,
            "weights": extract.weights,
            "dimensions": extract.dimensions,
        },
        reference={
            "images": reference.count,
            "fingerprint": reference.fingerprint,
            "mean_colour": reference.colours.double().mean(0).tolist(),
            "loss_images": loss_images,
            "loss_held_out": held_out,
        },
        calibration={
            "family": calibration.family,
            "estimator": calibration.estimator,
            "images": calibration.evidence.images,
            "generated": calibration.generated,
            "verdict": calibration.verdict(),
            "identity": calibration.identity,
        },
        settings={"trueup": __version__, **denoiser.identity(), **conditions, "decoder": decoder},
        loss=loss,
        notes=notes,
    )


def image_maker(denoiser: Denoiser, decode: ToImages | None = None) -> ToImages:
    """What makes pictures of a model's samples, 8-bit; latents without a decoder stay as they are."""
    if decode is not None:
        return lambda x: torch.cat(
            [pictures(decode(part.to(denoiser.device)), (-1.0, 1.0)) for part in x.split(_DECODED)]
        )
    if denoiser.data_range is None:
        return lambda x: x.cpu()
    data_range = denoiser.data_range
    return lambda x: pictures(x, data_range)


def build_reference(
    source: Samples,
    features: Features,
    to_images: ToImages,
    *,
    images: int = REFERENCE_IMAGES,
    batch_size: int = 64,
    progress: bool | None = None,
) -> Reference:
    """What samples are compared with: features of the first `images` of the data."""
    from tqdm import tqdm

    shown = sys.stderr.isatty() if progress is None else progress
    total = min(len(source), images) if source.indexed else None
    digest = 0
    with tqdm(
        total=total, desc="features of the data", unit="image", disable=not shown, file=sys.stderr
    ) as bar:

        def batches() -> Iterator[Tensor]:
            nonlocal digest
            for batch in source.batches(batch_size, limit=images):
                yield to_images(batch.x0)
                digest = (digest + sum(batch.digests)) & ((1 << 64) - 1)
                bar.update(len(batch.index))

        reference = Reference.build(features, batches(), fingerprint="")
    return replace(reference, fingerprint=f"{digest:016x}")


def _features(
    batches: Iterator[tuple[Tensor, Tensor]],
    features: Features,
    to_images: ToImages,
    kept: Kept | None,
    count: int,
) -> dict[str, Tensor]:
    """Features and colours of samples, {name: (count, ...)}; what was kept before is not made again."""
    parts: list[dict[str, Tensor]] = []
    for index, x in batches:
        images = to_images(x)
        rows = {name: v.cpu() for name, v in features(images)._asdict().items() if v is not None}
        rows["colours"] = colours(images).cpu()
        if kept is not None:
            kept.add(index, **rows)
        else:
            parts.append(rows)
    if kept is not None:
        return kept.tensors(count)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _compare(
    before: dict[str, Tensor], after: dict[str, Tensor], reference: Reference, notes: list[str]
) -> tuple[dict[str, Change], dict[str, list[float]]]:
    """Every measure of both, and their mean colours."""
    found = []
    for made in (before, after):
        batch = FeatureBatch(made["pooled"], made.get("spatial"), made.get("logits"))
        estimates, warnings = measures(batch, reference)
        notes += [warning for warning in warnings if warning not in notes]
        ours, data = made["colours"].double(), reference.colours
        if ours.shape[1] > 1:
            estimates["colour"] = wasserstein(ours, data)
        estimates["brightness"] = wasserstein(ours.mean(1, keepdim=True), data.mean(1, keepdim=True))
        found.append(estimates)
    changes = {
        name: Change.of(found[0][name], found[1][name], more_is_better)
        for name, (_, more_is_better) in MEASURES.items()
        if name in found[0]
    }
    means = (made["colours"].double().mean(0).tolist() for made in (before, after))
    return changes, dict(zip(("before", "after"), means, strict=True))
