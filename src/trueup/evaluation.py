"""`evaluate`: sample with and without a calibration from the same seeds, and compare both with the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueup import __version__
from trueup.calibration import Attachment, Calibration, Trajectory, as_calibration
from trueup.comparison import SIDES, Change, Comparison, Row
from trueup.denoiser import Denoiser
from trueup.density import Objectives, objectives
from trueup.errors import TrueupError
from trueup.hf import as_denoiser
from trueup.images import Batch, Images, Samples, as_images
from trueup.metrics import (
    MEASURES,
    FeatureBatch,
    Features,
    ModuleFeatures,
    Reference,
    load_features,
    measures,
)
from trueup.metrics.features import look_at
from trueup.progress import Progress
from trueup.sampling import Solver, as_solver, pictures, sample_batches
from trueup.sampling.draw import check_labels, count_evaluations, find_trajectory, without_trajectory
from trueup.sampling.store import Kept

REFERENCE_IMAGES = 10_000
LOSS_IMAGES = 200  # at most: the denoising loss is known well from few
FEWEST_SAMPLES = 8  # fewer have no intervals
_AT_ONCE = 64  # images of the data
_MADE_OF = {  # a reference, and what to know about it
    "decoded latents": "the data holds latents: samples are compared with what the decoder makes of those, "
    "which hides what the autoencoder loses. Give pictures to compare with pictures",
    "samples as they are": "these are no pictures: samples and data are compared by their values. For the "
    "pictures of latents, give the Denoiser their autoencoder",
}
ToImages = Callable[[Tensor], Tensor]


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
    trajectory: bool | None = None,
    loss: bool = True,
    seed: int = 0,
    run: str | PathLike[str] | None = None,
    force: bool = False,
    progress: bool | None = None,
) -> Comparison:
    """Sample with and without a calibration from the same seeds, and compare both with the data.

    data: images to compare with (10,000, unless `Images` says otherwise), a `trueup.metrics.Reference` made
    from them, or its file. solvers and nfe: every one of the first at every one of the second. features: a
    name (see `trueup.metrics.load_features`), or what maps images to (B, d). Latents are compared as the
    pictures that the Denoiser's autoencoder makes of them. trajectory: as in `sample`. loss: whether the
    denoising loss is measured, too, on images that the calibration was not made from; a file has none.
    run: a directory that keeps the features of what was sampled, to go on from after an interruption; force
    replaces what was sampled there with other settings.
    """
    denoiser, calibration = as_denoiser(model), as_calibration(calibration)
    if not isinstance(samples, int) or samples < FEWEST_SAMPLES:
        raise TrueupError(f"a comparison needs {FEWEST_SAMPLES} samples or more, not {samples!r}")
    Attachment(denoiser, calibration)  # or say now that it does not fit
    classes = check_labels(denoiser, labels, guidance)
    chosen: list[tuple[Solver, int | None]] = []
    numbers = nfe if isinstance(nfe, Sequence) else [nfe]
    for given in solvers if isinstance(solvers, (list, tuple)) else [solvers]:
        solver = as_solver(given, denoiser)
        chosen += [(solver, None)] if solver.adaptive else [(solver, number) for number in numbers]
    kept_on = [find_trajectory(calibration, solver, n, guidance, trajectory) for solver, n in chosen]
    kept_on = [None if made is None or made.empty else made for made in kept_on]
    made_each = [count_evaluations(solver, number, denoiser, classes) for solver, number in chosen]
    extract = _features(features).to(denoiser.device)
    reference = _open_reference(data, denoiser, extract, progress)
    notes = [note for note in (_MADE_OF.get(reference.made_of),) if note is not None]
    conditions = {
        "set of labels": None if classes is None else classes.tolist(),
        "guidance": guidance,
        "null label": denoiser.null_label,
        "seed": seed,
        "decoder": None if denoiser.autoencoder is None else denoiser.autoencoder.identity,
    }
    draw = _Draw(denoiser, extract, samples, labels, guidance, conditions, run, force, progress)
    rows, spent = [], {}
    for (solver, number), made, applied in zip(chosen, made_each, kept_on, strict=True):
        if applied is not None:
            notes.append(f"after: the calibration's trajectory of {applied.sampler} is applied as well")
        elif trajectory is None and number is not None and calibration.trajectories:
            known = find_trajectory(calibration, solver, number, guidance, None)  # an idle one, or none
            notes += [] if known else [f"{_name(solver, number)}: {without_trajectory(calibration)}"]
        both = draw(solver, number, None, None), draw(solver, number, calibration, applied)
        rows.append(_row(solver, number, made, both, reference, notes))
        if made is not None:
            spent[f"samples by {_name(solver, number)}"] = 2 * samples * made
    found = None
    if loss and reference.images is not None:
        found = _loss(denoiser, calibration, reference.images, seed, notes, progress)
        spent |= {} if found is None else {"the denoising loss": found.evaluations}
    return Comparison(
        rows=rows,
        samples=samples,
        seed=seed,
        features={
            name: getattr(extract, name) for name in ("name", "preprocessing", "weights", "dimensions")
        },
        reference={
            "images": reference.count,
            "made_of": reference.made_of,
            "fingerprint": reference.fingerprint,
            "mean_colour": reference.colours.double().mean(0).tolist(),
        },
        calibration={
            "family": calibration.family,
            "estimator": calibration.estimator,
            "images": calibration.evidence.images,
            "generated": calibration.generated,
            "verdict": calibration.verdict(),
            "identity": calibration.identity,
        },
        settings={"trueup": __version__, **denoiser.identity(), **conditions},
        evaluations=spent,
        loss=found,
        notes=notes,
    )


def image_maker(denoiser: Denoiser) -> ToImages:
    """What makes pictures of a model's samples, 8-bit; latents without an autoencoder stay as they are."""
    data_range, autoencoder = denoiser.data_range, denoiser.autoencoder
    if data_range is not None:
        return lambda x: pictures(x, data_range)
    if autoencoder is not None:
        return lambda x: pictures(autoencoder.decode(x.to(denoiser.device)), (-1.0, 1.0))
    return lambda x: x.cpu()


def build_reference(
    data: Any, denoiser: Denoiser, features: Features, *, progress: bool | None = None
) -> Reference:
    """What a model's samples are compared with: the data's pictures, or what is decoded from its latents."""
    latent = denoiser.data_range is None
    autoencoder = denoiser.autoencoder if latent else None
    images = as_images(data, REFERENCE_IMAGES)
    samples = Samples(
        images,
        denoiser.shape,
        denoiser.data_range,
        autoencoder=autoencoder,
        encode=False,
    )
    to_images, digest, of = image_maker(denoiser), 0, "samples as they are" if latent else "pictures"

    def seen(batch: Batch) -> Tensor:
        nonlocal of
        if autoencoder is None:
            return to_images(batch.x0)
        of = "decoded latents" if tuple(batch.x0.shape[1:]) == denoiser.shape else "pictures"
        return to_images(batch.x0) if of == "decoded latents" else pictures(batch.x0, (-1.0, 1.0))

    def batches() -> Iterator[Tensor]:
        nonlocal digest
        with Progress(samples.expected(), "features of the data", unit="image", show=progress) as bar:
            for batch in samples.batches(_AT_ONCE):
                yield seen(batch)
                digest = (digest + int(batch.digests.sum())) & ((1 << 64) - 1)
                bar.update(len(batch))

    reference = Reference.build(features, batches())
    return replace(reference, fingerprint=f"{digest:016x}", made_of=of, images=images)


def _open_reference(data: Any, denoiser: Denoiser, features: Features, progress: bool | None) -> Reference:
    """The reference, or the one that is made from images."""
    if isinstance(data, (str, PathLike)) and Path(data).suffix == ".safetensors":
        data = Reference.load(data)
    if not isinstance(data, Reference):
        data = build_reference(data, denoiser, features, progress=progress)
    data.check(features)
    return data


def _features(features: str | Features | Callable[[Tensor], Any]) -> Features:
    if isinstance(features, str):
        return load_features(features)
    if isinstance(features, Features):
        return features
    return ModuleFeatures(features, getattr(features, "__qualname__", type(features).__name__))


def _name(solver: Solver, number: int | None) -> str:
    return solver.name if number is None else f"{solver.name}-{number}"


class _Draw:
    """Samples, looked at: `draw(solver, nfe, calibration, trajectory)`; what a run has is not made again."""

    def __init__(
        self,
        denoiser: Denoiser,
        features: Features,
        count: int,
        labels: Any,
        guidance: float,
        conditions: dict[str, Any],
        run: str | PathLike[str] | None,
        force: bool,
        progress: bool | None,
    ):
        self.denoiser, self.features, self.count = denoiser, features, count
        self.conditions, self.run, self.force = conditions, run, force
        self.how = {"labels": labels, "guidance": guidance, "seed": conditions["seed"], "progress": progress}

    def __call__(
        self,
        solver: Solver,
        number: int | None,
        calibration: Calibration | None,
        trajectory: Trajectory | None,
    ) -> FeatureBatch:
        which = "uncalibrated" if calibration is None else "calibrated"
        name = f"{_name(solver, number)}-{which}"
        kept = self._kept(name, solver, number, calibration, trajectory)
        to_images, parts = image_maker(self.denoiser), []
        for index, x in sample_batches(
            self.denoiser,
            self.count,
            start=0 if kept is None else min(kept.done, self.count),
            solver=solver,
            nfe=number,
            calibration=calibration,
            trajectory=trajectory is not None,
            description=f"sampling, {_name(solver, number)}, {which}",
            **self.how,
        ):
            seen = look_at(to_images(x), self.features)
            rows = {name: values for name, values in seen._asdict().items() if values is not None}
            if kept is None:
                parts.append(rows)
            else:
                kept.add(index, **rows)
        if kept is not None:
            return FeatureBatch(**kept.tensors(self.count))
        return FeatureBatch(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def _kept(
        self,
        name: str,
        solver: Solver,
        number: int | None,
        calibration: Calibration | None,
        trajectory: Trajectory | None,
    ) -> Kept | None:
        if self.run is None:
            return None
        settings = {
            **self.denoiser.identity(),
            **self.conditions,
            "solver": repr(solver),
            "number of evaluations": number,
            "set of features": [self.features.name, self.features.preprocessing, self.features.weights],
            "calibration": None if calibration is None else calibration.identity,
            "trajectory": None if trajectory is None else trajectory.identity,
        }
        return Kept(Path(self.run) / name, settings, force=self.force)


def _row(
    solver: Solver,
    number: int | None,
    evaluations: int | None,
    both: tuple[FeatureBatch, FeatureBatch],
    reference: Reference,
    notes: list[str],
) -> Row:
    """Every measure of both sides, and their mean colours."""
    found = []
    for batch in both:
        numbers, told = measures(batch, reference)
        found.append(numbers)
        notes += [note for note in told if note not in notes]
    before, after = found
    changes = {name: Change(before[name], after[name], MEASURES[name].more_is_better) for name in before}
    colours = [batch.colours.double().mean(0).tolist() for batch in both if batch.colours is not None]
    return Row(
        solver.name, repr(solver), number, evaluations, changes, dict(zip(SIDES, colours, strict=True))
    )


def _loss(
    denoiser: Denoiser,
    calibration: Calibration,
    images: Images,
    seed: int,
    notes: list[str],
    progress: bool | None,
) -> Objectives | None:
    """The denoising loss at the calibration's levels, of the network run without and with it attached."""
    if not Samples(images, denoiser.shape, denoiser.data_range).indexed:
        notes.append("the data is a stream, read once: no denoising loss")
        return None
    few = replace(images, count=min(images.count or LOSS_IMAGES, LOSS_IMAGES))
    found = objectives(denoiser, few, calibration, levels=calibration.t, seed=seed, progress=progress)
    notes += found.notes
    return found
