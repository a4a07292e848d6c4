"""Run the network on noised data and collect its moments."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueup import distributed
from trueup.calibration.conditions import Projection, pooled
from trueup.calibration.hook import FIRED
from trueup.calibration.pictures import size_of_picture
from trueup.calibration.shares import Shares
from trueup.denoiser import CORRECTED, Denoiser, in_parts
from trueup.denoiser.sharded import is_spread
from trueup.errors import Argument, DataError, ModelError
from trueup.estimate.conditions import Conditions, keys, see
from trueup.estimate.diagnose import check_use, refuse_nonsense
from trueup.estimate.levels import check_classes, check_levels
from trueup.estimate.moments import Moments
from trueup.estimate.pictures import Pictures
from trueup.estimate.run import SHARDS, Resumed, Run, settings_of
from trueup.estimate.shares import checked_share, dealing, in_order, in_share, of_all_ranks, told_of
from trueup.files import line
from trueup.hf import as_denoiser
from trueup.hf.hub import names_of
from trueup.images import Batch, Ranks, Samples, as_images, open_images, sent
from trueup.noise import checked_seed, level_key, level_keys, normal, normals
from trueup.progress import Progress
from trueup.stored import digest_of

IMAGES = 500
NEEDS_LABELS = (
    "the network is conditional: the data must come with labels, as (image, label) pairs, a column or an "
    ".npz array named `label`, Images(..., labels=[...]), or for a folder a metadata.csv, a table (captions) "
    "or sub-folders named after classes"
)
_AT_ONCE = 2**21  # values of x_t at levels whose bookkeeping is done together; at least one level's
_CHEAP = 0.02  # seconds: a checkpoint that takes no longer is written after every batch
_SAVING = 100.0  # others when so many times as long was spent measuring


def measure(
    model: Any,
    data: Any,
    *,
    levels: Sequence[float] | Tensor | None = None,
    edges: Sequence[float] | None = None,
    mean_images: int = 0,
    classes: Sequence[int] = (),
    per_embedding: bool = False,
    seed: int = 0,
    run: str | PathLike[str] | None = None,
    share: tuple[int, int] | None = None,
    trust: bool = False,
    progress: bool | None = None,
) -> Moments:
    """Measure a network's residuals on images at every level; 500 of them, unless `Images` says otherwise.

    levels: times; the default covers the whole process. edges: of the bands, see `trueup.bands`. mean_images:
    so many more are read, without being run through the network, to know the data's mean better (the x0
    control of equation 16). classes: keep the sums of these labels apart; where the network's null label is
    one of them, every image is also run with that. per_embedding: keep sums of what the conditions say, which
    are embeddings; images of one condition then share a fold, so that `Images` may have no groups. Of
    conditions that are pictures sums are kept unasked. run: a
    directory that keeps what was measured: called again, it goes on from there, and with more images it adds
    to them. A network that seems to be used wrongly is refused, unless `trust`. Images that occur twice count
    once.

    share: (k, n), measure the k-th of n shares of the images and nobody else's; `trueup.estimate.merge` adds
    them. The ranks of a job that work together (`trueup.distributed.together`) each measure a part, and all
    return the moments of all.
    """
    own = (1, 1) if share is None else checked_share(share)
    if own[1] > 1 and mean_images:
        raise DataError("mean_images are those of all shares: leave them out")
    if own[1] > 1 and distributed.size() > 1:
        raise DataError("ranks that work together split the images themselves: leave out the share")
    seed, denoiser = checked_seed(seed), as_denoiser(model)
    denoiser.check_bare()
    if distributed.size() > 1 and is_spread(denoiser.network):
        problem = "ranks hold this network together, so that all of them must measure the same images"
        raise ModelError(f"{problem}: call this outside of trueup.distributed.together()")
    if not isinstance(mean_images, int) or mean_images < 0:
        raise DataError(f"mean_images is a whole number of at least 0, not {mean_images!r}")
    images = as_images(data, IMAGES)
    if per_embedding and images.groups is not None:
        problem = "images with one embedding are kept together, and cannot be kept together by groups as well"
        raise DataError(problem, "leave the groups out")
    if run is not None and images.index is None:
        images = replace(images, index=Path(run) / SHARDS)
    samples, process = open_images(images, denoiser), denoiser.process
    provenance = {
        "model": denoiser.description,
        "weights": denoiser.fingerprint(),
        "parametrization": denoiser.parametrization.settings(),
        "data_range": list(denoiser.data_range) if denoiser.data_range else None,
        "seed": seed,
        "transform": samples.images.transform(),
        # Not data but samples, see `trueup.sampling.generate`.
        "generated": getattr(samples.images.source, "origin", None),
        "grouping": samples.images.groups is not None,
        "chosen": samples.chosen(),
        **names_of(denoiser.network),
    }
    classes = check_classes(classes)
    null = _null_class(denoiser) if classes else None
    if null in classes:
        provenance["null_label"] = null
    if per_embedding:
        provenance["per_embedding"] = True
    picture = None if classes else _picture(samples, denoiser)
    if picture is not None and per_embedding:
        problem = "these conditions are pictures, whose bands are looked at unasked"
        raise DataError(problem, "leave out {}", Argument("per_embedding", True))
    if picture is not None:
        provenance["condition"] = list(picture)
    provenance |= denoiser.told()
    kinds: dict[str, Any] = {"edges": edges, "classes": classes, "provenance": provenance}
    moments = Moments.empty(process, check_levels(process, levels), denoiser.shape, **kinds)
    if distributed.size() > 1:
        size = {"batch size": denoiser.batch_size}
        distributed.agree({**settings_of(moments), **size, **told_of(samples)})
    if run is not None and own[1] > 1:
        run = Path(run) / f"share-{own[0]}-of-{own[1]}"
    with Run(run) if run is not None else nullcontext() as kept:
        found = Resumed(moments, {}) if kept is None else kept.resume(moments, samples)
        moments, known = found.moments, found.known
        moments.provenance["chosen"] = provenance["chosen"]  # of what is asked for now
        if moments.images:
            labelled = denoiser.conditional and samples.indexed
            _bind(denoiser, moments, samples.at(int(moments.indices[0])).y if labelled else None)
        if per_embedding and moments.conditions is None:
            seen: tuple[Projection, int] = found.seen or _embeddings(samples, denoiser)
            cells = (moments.folds, moments.levels)
            moments.conditions = Conditions.empty(*seen, cells, denoiser.shape[0], moments.bands)
        if picture is not None and moments.conditions is None:
            cells = (moments.folds, moments.levels)
            moments.conditions = Pictures.empty(picture, cells, denoiser.shape[0], moments.bands)
        if not trust and not known:
            check_use(denoiser, samples)
        moments = _measure(denoiser, samples, moments, known, kept, progress, own)
        if distributed.size() > 1:
            moments = of_all_ranks(moments, samples)
    if not moments.images:
        why = f" that can be used: {samples.skipped[0]}" if samples.skipped else ""
        of = f"share {own[0]} of {own[1]} of {samples.name}" if own[1] > 1 else samples.name
        raise DataError(f"{of} holds no samples{why}")
    moments = in_order(moments)
    moments.duplicates = samples.duplicates + samples.held_back
    if own[1] > 1:
        of = digest_of(told_of(samples), [])
        moments.provenance["shares"] = Shares((own[0],), own[1], denoiser.batch_size, of).settings()
    if mean_images and samples.images.count is not None:  # else all there are were measured
        samples.images = replace(samples.images, count=moments.images + mean_images)
        known = dict(zip(moments.indices.tolist(), moments.digests.tolist(), strict=True))
        for batch in samples.batches(256, **_new(known)):
            _note(moments, batch, mean_only=True)
    moments.skipped = samples.skipped
    return moments


def classes_of(data: Any, model: Any) -> list[int]:
    """The labels that are in the data, and the network's null label, if it has one."""
    denoiser, found = as_denoiser(model), set()
    samples = open_images(data, denoiser, count=IMAGES)
    if isinstance(samples.images.source, Iterator):
        raise DataError(
            "which classes there are cannot be seen in images that can be read only once: name them"
        )
    if not denoiser.conditional:
        raise DataError("the network takes no labels, so that it has no classes to be calibrated for")
    if denoiser.vocabulary is not None:
        problem = "this network is told prompts, which are no classes"
        raise DataError(problem, "calibrate it by their embeddings, with {}", Argument("per_embedding", True))
    null = _null_class(denoiser)
    for batch in samples.batches(256):
        if batch.y is None:
            raise DataError(NEEDS_LABELS)
        if batch.y.is_floating_point() or batch.y.ndim != 1:
            raise DataError("classes are whole numbers, one a sample: these labels are something else")
        found |= set(batch.y.tolist())
    if len(found) < 2:
        only = f"all images have the label {found.pop()}" if found else f"{samples.name} holds no samples"
        raise DataError(f"{only}: classes need two or more to differ")
    return sorted(found | (set() if null is None else {null}))


def _null_class(denoiser: Denoiser) -> int | None:
    """The network's null label, which is a class among others."""
    try:
        return None if denoiser.null_label is None else index(denoiser.null_label)
    except TypeError:
        null = line(repr(denoiser.null_label), 80)
        problem = f"classes are whole numbers, and the null label of this network is {null}"
        raise DataError(f"{problem}: give it the number that stands for none") from None


def _embeddings(samples: Samples, denoiser: Denoiser) -> tuple[Projection, int]:
    """What to look at in the embeddings that come with images."""
    if not denoiser.conditional:
        raise DataError("the network takes no condition, so that no correction can depend on one")
    if isinstance(samples.images.source, Iterator):
        raise DataError(
            "embeddings are looked at before images are measured, and these can be read only once"
        )

    def all_of() -> Iterator[Tensor]:
        for batch in samples.batches(256):
            if batch.y is None:
                raise DataError(NEEDS_LABELS)
            c = denoiser.embedding(batch.y)
            if not c.is_floating_point() or c.ndim < 2:
                raise DataError("these labels are no embeddings but classes: calibrate by class (per_class)")
            yield pooled(c)

    return see(all_of())


def _picture(samples: Samples, denoiser: Denoiser) -> tuple[int, ...] | None:
    """The size of what the network is told, where that is pictures."""
    if not denoiser.conditional or denoiser.vocabulary is not None:
        return None
    first = samples.first(1)
    return None if first is None else size_of_picture(first.y, denoiser.shape)


def _bind(denoiser: Denoiser, moments: Moments, y: Any) -> None:
    """Note how the network is called, the same from the first sample to the last."""
    if denoiser.conditional and y is None:
        return  # nobody can tell
    binding = denoiser.binding(y)
    found = None if binding is None else binding.settings()
    if moments.provenance.setdefault("binding", found) != found:
        raise ModelError("this run was begun with another `call`: repeat it, or use a new run directory")


def _new(known: dict[int, int]) -> dict[str, Any]:
    """What to ask for to get samples that are not among those measured, by index or by content."""
    return {"skip": known, "without": known.values(), "unique": True}


def _note(moments: Moments, batch: Batch, mean_only: bool = False) -> None:
    known_as: dict[str, Any] = {"y": batch.y, "group": batch.group, "mean_only": mean_only}
    moments.add_samples(batch.index, batch.x0, batch.digests, **known_as)


def _measure(
    denoiser: Denoiser,
    samples: Samples,
    moments: Moments,
    known: dict[int, int],
    run: Run | None,
    progress: bool | None,
    share: tuple[int, int],
) -> Moments:
    """Measure what nobody has yet; known: the samples that somebody has."""
    count, done = samples.images.count, len(known)
    if count is not None and done > count:
        raise DataError(
            f"this run has measured {done} images already, more than the {count} asked for: "
            "ask for at least as many, or use a new run directory"
        )
    expected, seed = samples.expected(), moments.provenance["seed"]
    each = moments.levels * (1 if moments.provenance.get("null_label") is None else 2)
    if expected is not None:
        expected = in_share(expected, denoiser.batch_size, share)
    total = math.inf if expected is None else expected * each
    counts = each * distributed.size()  # the first rank speaks for all, who go as fast
    if denoiser.device.type != "mps":  # which has no float64
        moments = moments.to(denoiser.device)
    saved, cost = time.monotonic(), 0.0  # when the last checkpoint was written, and how long that took
    kept = len(moments.indices)  # samples in the last checkpoint
    before: _AllFinite | None = None
    latest: _AllFinite | None = None
    bar = Progress(
        None if expected is None else total, "measuring", done=min(done * each, total), show=progress
    )
    own: dict[str, Any] = {"mine": dealing(share), **_new(known)}
    if distributed.size() > 1:
        own["ranks"] = Ranks(distributed.rank(), distributed.size(), distributed.gather)
    with denoiser.evaluating(), bar:
        for batch in samples.batches(denoiser.batch_size, **own):
            if denoiser.conditional and batch.y is None:
                raise DataError(NEEDS_LABELS)
            if not len(moments.indices):
                check_responds(denoiser, batch, seed)
            if isinstance(moments.conditions, Conditions) and batch.y is not None:
                batch = replace(batch, group=keys(denoiser.embedding(batch.y)))
            _bind(denoiser, moments, batch.y)
            add_batch(moments, denoiser, batch, seed)
            before, latest = latest, _AllFinite(moments)
            if before is not None and not before:  # while this batch runs
                check_finite(moments)
            if run is not None:
                run.note(batch, samples)
                if cost < _CHEAP or time.monotonic() - saved >= _SAVING * cost:
                    check_finite(moments)
                    started = time.monotonic()
                    run.save(moments, samples)
                    saved, kept = time.monotonic(), len(moments.indices)
                    cost = saved - started
            bar.update(min(len(batch) * counts, total - bar.done))
    check_finite(moments)
    if run is not None and len(moments.indices) > kept:
        run.save(moments, samples)
    return moments.to("cpu")


@torch.inference_mode()
def add_batch(moments: Moments, denoiser: Denoiser, batch: Batch, seed: int) -> None:
    """Evaluate a batch of samples at every level and add what came out. Only classes wait for a GPU."""
    device, process = denoiser.device, denoiser.process
    there = batch.to(device)
    wide = (-1, *[1] * there.x0.ndim)
    alpha, sigma = (sent(v, device, torch.float32).reshape(wide) for v in (moments.alpha, moments.sigma))
    keys = sent(level_keys(moments.t), torch.device("cpu") if device.type == "mps" else device)
    times = sent(moments.t, device, torch.int64 if process.integer_times else torch.float32)
    positions = torch.arange(moments.levels, device=moments.first.device)

    null = moments.provenance.get("null_label")
    told, by_condition = [there], moments.classes or moments.conditions is not None
    if null is not None and batch.y is not None:
        others = batch.rows(batch.y != null)  # those that were not told so anyway
        if len(others):
            told.append(replace(others, y=torch.full_like(batch.y, null)[: len(others)]).to(device))

    def work(batch: Batch, levels: slice, part: slice) -> None:
        rows, a, s = batch.rows(part), alpha[levels], sigma[levels]
        eps = normals(seed, rows.index, keys[levels], denoiser.shape, device)  # (l, B, C, *spatial)
        x_t = a * rows.x0 + s * eps  # equation 1
        outputs = [denoiser.predict(x, t, rows.y) for x, t in zip(x_t, times[levels], strict=True)]
        said = rows.y if by_condition else None
        if said is not None and moments.conditions is not None:
            said = denoiser.embedding(said)
        with torch.autocast(device.type, enabled=False):
            eps_hat = denoiser.parametrization.to_eps(torch.stack(outputs).float(), x_t, a, s)
            count = len(eps)
            moments.add(
                positions[levels].repeat_interleave(len(rows)),
                rows.index.repeat(count),
                *(v.flatten(0, 1) for v in (eps_hat, eps, x_t / s)),
                y=None if said is None else said.repeat(count, *[1] * (said.ndim - 1)),
                group=None if rows.group is None else rows.group.repeat(count),
            )

    at_once = max(1, _AT_ONCE // there.x0.numel())
    for rows, start in product(told, range(0, moments.levels, at_once)):
        in_parts(partial(work, rows, slice(start, start + at_once)), len(rows))
    _note(moments, replace(batch, x0=there.x0))


def check_finite(moments: Moments) -> None:
    """Raise if the network returned nonsense. Waits for the device."""
    refuse_nonsense(moments.second.movedim(2, 0), moments.t)


class _AllFinite:
    """Whether all sums are finite now: asked later, a GPU is waited for no further than to here."""

    def __init__(self, moments: Moments):
        finite = moments.second.isfinite().all()
        self._event = torch.cuda.Event() if finite.is_cuda else None
        self._finite = finite.to("cpu", non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(finite.device))

    def __bool__(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return bool(self._finite)


@torch.inference_mode()
def check_responds(denoiser: Denoiser, batch: Batch, seed: int) -> None:
    """Raise if the network answers the same whatever it is given, or corrected."""
    process, before = denoiser.process, FIRED.count
    outputs = []
    for t in process.snap(process.t_of_lam(torch.tensor([1.0, -1.0], dtype=torch.float64))):
        rows = batch.rows(slice(0, 2)).to(denoiser.device)
        eps = normal(seed, rows.index, level_key(float(t)), denoiser.shape, denoiser.device)
        outputs += list(denoiser.predict(process.noised(rows.x0, eps, t), t, rows.y))
    if FIRED.count > before:  # wherever it is hidden in what is called
        raise ModelError(CORRECTED)
    if all(torch.equal(output, outputs[0]) for output in outputs):
        raise ModelError("the network returns the same values whatever it is given: are its weights loaded?")
