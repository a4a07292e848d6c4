"""`evaluate`: sample with and without a calibration from the same seeds, and compare both with the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup import __version__, distributed
from trueup.calibration import Attachment, Calibration, as_calibration
from trueup.comparison import Change, Comparison, Row
from trueup.denoiser import Denoiser
from trueup.density import Objectives, objectives
from trueup.density.opening import SIDES
from trueup.errors import TrueupError
from trueup.estimate.shares import told_of
from trueup.hf import as_denoiser
from trueup.images import Batch, Images, Samples, as_images
from trueup.metrics import MEASURES, FeatureBatch, Features, ModuleFeatures, Reference, load_features
from trueup.metrics.features import look_at
from trueup.metrics.measures import measures
from trueup.progress import Progress
from trueup.sampling import Solver, as_solver, image_maker, pictures, sample_batches
from trueup.sampling.draw import DEFAULT, check_labels, choose_solver, count_evaluations
from trueup.sampling.fitted import Fitted
from trueup.sampling.solver import solvers_for
from trueup.sampling.store import Kept
from trueup.solvers import FITTED

REFERENCE_IMAGES = 10_000
LOSS_IMAGES = 200  # at most: the denoising loss is known well from few
FEWEST_SAMPLES = 8  # fewer have no intervals
BESIDE_FITTED = "unipc"  # of the usual solvers the best in few steps, uncalibrated (docs/results.md)
_AT_ONCE = 64  # images of the data
_MADE_OF = {  # a reference, and what to know about it
    "decoded latents": "the data holds latents: samples are compared with what the decoder makes of those, "
    "which hides what the autoencoder loses. Give pictures to compare with pictures",
    "samples as they are": "these are no pictures: samples and data are compared by their values. For the "
    "pictures of latents, give the Denoiser their autoencoder",
}
_OF_FITTED = (
    "a fitted solver is made for the calibrated network: the uncalibrated one beside it is drawn with the "
    "solver that its heading names, the best of the others asked for, or one that is good in few steps"
)


def evaluate(
    model: Any,
    calibration: Calibration | str | PathLike[str],
    data: Any,
    *,
    solvers: Any = ("dpm-solver-3",),
    nfe: int | Sequence[int] = (20,),
    samples: int = 1000,
    features: str | Features | Callable[[Tensor], Any] = "efficientnet",
    labels: Any = None,
    guidance: float = 1.0,
    loss: bool = True,
    seed: int = 0,
    run: str | PathLike[str] | None = None,
    force: bool = False,
    progress: bool | None = None,
) -> Comparison:
    """Sample with and without a calibration from the same seeds, and compare both with the data.

    data: images to compare with (10,000, unless `Images` says otherwise), a `trueup.metrics.Reference` made
    from them, or its file. solvers and nfe: every one of the first at every one of the second; "fitted" is
    the calibration's own, which belongs to the calibrated network: its row has, as the uncalibrated side, the
    best of the other solvers with as many evaluations, or UniPC (DPM-Solver where that does not work).
    features: a name (see `trueup.metrics.load_features`), or what maps images to (B, d). Latents are compared
    as the pictures that the Denoiser's autoencoder makes of them. loss: whether the denoising loss is
    measured, too, on images that the calibration was not made from; a file has none. run: a directory that
    keeps the features of what was sampled, to go on from after an interruption; force replaces what was
    sampled there with other settings.
    """
    denoiser, calibration = as_denoiser(model), as_calibration(calibration)
    denoiser.check_bare()
    if not isinstance(samples, int) or samples < FEWEST_SAMPLES:
        raise TrueupError(f"a comparison needs {FEWEST_SAMPLES} samples or more, not {samples!r}")
    Attachment(denoiser, calibration)  # or say now that it does not fit
    classes = check_labels(denoiser, labels, guidance)
    plan: list[tuple[Solver, int | None, int | None]] = []
    for given in _listed(solvers):
        numbers = [n.item() if isinstance(n, np.integer) else n for n in _listed(nfe)]
        if given != FITTED and as_solver(given, denoiser).adaptive:
            numbers = [None]
        for number in numbers:
            solver = choose_solver(given, denoiser, calibration, number, guidance)
            plan.append((solver, number, count_evaluations(solver, number, denoiser, classes)))
    if isinstance(features, str):
        features = load_features(features)
    elif not isinstance(features, Features):
        features = ModuleFeatures(features, getattr(features, "__qualname__", type(features).__name__))
    extract = features.to(denoiser.device)
    if isinstance(data, (str, PathLike)) and Path(data).suffix == ".safetensors":
        data = Reference.load(data)
    is_made = isinstance(data, Reference)
    reference = data if is_made else build_reference(data, denoiser, extract, progress=progress)
    reference.check(extract)
    notes = [note for note in (_MADE_OF.get(reference.made_of),) if note is not None]
    conditions = {
        "set of labels": None if classes is None else classes.tolist(),
        "guidance": guidance,
        "null label": denoiser.null_label,
        "seed": seed,
        "decoder": None if denoiser.autoencoder is None else denoiser.autoencoder.identity,
    }
    how = {"labels": labels, "guidance": guidance, "seed": seed, "progress": progress}
    spent: dict[str, int] = {}

    def drawn(solver: Solver, number: int | None, put_on: Calibration | None) -> FeatureBatch:
        name = solver.name if number is None else f"{solver.name}-{number}"
        side = "uncalibrated" if put_on is None else "calibrated"
        settings = {
            **denoiser.identity(),
            **conditions,
            "solver": repr(solver),
            "number of evaluations": number,
            "set of features": [extract.name, extract.preprocessing, extract.weights],
            "calibration": None if put_on is None else put_on.identity,
        }
        kept = None if run is None else Kept(Path(run) / f"{name}-{side}", settings, force=force)
        evaluations, what = count_evaluations(solver, number, denoiser, classes), f"samples by {name}"
        if evaluations is not None:
            spent[what] = spent.get(what, 0) + samples * evaluations
        about = {"nfe": number, "calibration": put_on, "description": f"sampling, {name}, {side}"}
        return _draw(denoiser, extract, samples, kept, {**how, "solver": solver, **about})

    rows: dict[int, Row] = {}
    before: dict[int, FeatureBatch] = {}
    # Usual solvers first: a fitted one is compared with the best of them.
    for place in sorted(range(len(plan)), key=lambda place: isinstance(plan[place][0], Fitted)):
        solver, number, evaluations = plan[place]
        other, usual = None, [p for p in before if plan[p][1] == number]
        if not isinstance(solver, Fitted):
            first = before[place] = drawn(solver, number, None)
        elif usual:
            best = min(usual, key=lambda p: rows[p].changes["frechet"].before.value)
            other, first = plan[best][0].name, before[best]
        else:
            few = DEFAULT if solver.solver.nfe >= 3 else "dpm-solver-1"
            other = BESIDE_FITTED if BESIDE_FITTED in solvers_for(denoiser) else few
            first = drawn(as_solver(other, denoiser), number, None)
        both = [first, drawn(solver, number, calibration)]
        colours = {side: _mean_colour(batch.colours) for side, batch in zip(SIDES, both, strict=True)}
        # What is made of features takes the first rank alone.
        changes, told = distributed.by_first(lambda both=both: _changes(both, reference))  # type: ignore[misc]
        notes += [note for note in told if note not in notes]
        rows[place] = Row(solver.name, repr(solver), number, evaluations, changes, colours, other)
    if len(before) < len(plan):
        notes.append(_OF_FITTED)
    found = None
    if loss and reference.images is not None:
        found = _loss(denoiser, calibration, reference.images, notes, seed=seed, progress=progress)
        spent |= {} if found is None else {"the denoising loss": found.evaluations}
    seen_by = {name: getattr(extract, name) for name in ("name", "preprocessing", "weights", "dimensions")}
    compared = {name: getattr(reference, name) for name in ("made_of", "fingerprint")}
    about = {
        name: getattr(calibration, name) for name in ("family", "estimator", "gains", "generated", "identity")
    }
    return Comparison(
        rows=[rows[place] for place in range(len(plan))],
        samples=samples,
        seed=seed,
        features=seen_by,
        reference={**compared, "images": reference.count, "mean_colour": _mean_colour(reference.colours)},
        calibration={**about, "images": calibration.evidence.images, "verdict": calibration.verdict()},
        settings={"trueup": __version__, **denoiser.identity(), **conditions},
        evaluations=spent,
        loss=found,
        notes=notes,
    )


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple, range, np.ndarray)) else [given]


def build_reference(
    data: Any, denoiser: Denoiser, features: Features, *, progress: bool | None = None
) -> Reference:
    """What a model's samples are compared with: the data's pictures, or what is decoded from its latents."""
    latent = denoiser.data_range is None
    autoencoder = denoiser.autoencoder if latent else None
    images = as_images(data, REFERENCE_IMAGES)
    samples = Samples(
        images, denoiser.shape, denoiser.data_range, autoencoder=autoencoder, encode=False, conditional=False
    )
    if distributed.size() > 1:
        distributed.agree(told_of(samples))
    to_images, digest, of = image_maker(denoiser), 0, "samples as they are" if latent else "pictures"

    def kind(batch: Batch) -> str:
        if autoencoder is None:
            return of
        return "decoded latents" if tuple(batch.x0.shape[1:]) == denoiser.shape else "pictures"

    def seen(batch: Batch) -> FeatureBatch:
        as_read = latent and kind(batch) == "pictures"
        return look_at(pictures(batch.x0, (-1.0, 1.0)) if as_read else to_images(batch.x0), features)

    def batches() -> Iterator[FeatureBatch]:
        nonlocal digest, of
        with Progress(samples.expected(), "features of the data", unit="image", show=progress) as bar:
            for batch, found in distributed.dealt(samples.batches(_AT_ONCE), seen):
                yield found
                of = kind(batch)
                digest = (digest + int(batch.digests.sum())) & ((1 << 64) - 1)
                bar.update(len(batch))

    reference = Reference.of(features, batches())
    return replace(reference, fingerprint=f"{digest:016x}", made_of=of, images=images)


def _draw(
    denoiser: Denoiser, features: Features, count: int, kept: Kept | None, how: dict[str, Any]
) -> FeatureBatch:
    """Samples, looked at; what a run has is not made again."""
    to_images, parts = image_maker(denoiser), []

    def seen(x: Tensor) -> dict[str, Tensor]:
        found = look_at(to_images(x), features)._asdict()
        return {name: values for name, values in found.items() if values is not None}

    start = 0 if kept is None else min(kept.done, count)
    for index, rows in sample_batches(denoiser, count, start=start, make=seen, **how):
        if kept is None:
            parts.append(rows)
        else:
            kept.add(index, **rows)
    if kept is not None:
        return FeatureBatch(**kept.tensors(count))
    return FeatureBatch(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def _changes(both: list[FeatureBatch], reference: Reference) -> tuple[dict[str, Change], list[str]]:
    """Every measure of both sides, and what to know about them."""
    (before, first), (after, second) = (measures(batch, reference) for batch in both)
    changes = {name: Change(before[name], after[name], MEASURES[name].more_is_better) for name in before}
    return changes, [*dict.fromkeys(first + second)]


def _mean_colour(colours: Tensor | None) -> list[float]:
    assert colours is not None
    return colours.double().mean(0).tolist()


def _loss(
    denoiser: Denoiser, calibration: Calibration, images: Images, notes: list[str], **how: Any
) -> Objectives | None:
    """The denoising loss at the calibration's levels, of the network run without and with it attached."""
    if not Samples(images, denoiser.shape, denoiser.data_range).indexed:
        notes.append("the data is a stream, read once: no denoising loss")
        return None
    few = replace(images, count=min(images.count or LOSS_IMAGES, LOSS_IMAGES))
    found = objectives(
        denoiser, few, calibration, levels=calibration.t, gains=calibration.gains, trust=True, **how
    )
    notes += found.notes
    return found
