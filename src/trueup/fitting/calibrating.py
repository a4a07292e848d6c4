"""Calibrate a model: the network measured and corrected, judged by its samples, and a solver fitted to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueup import distributed
from trueup.calibration import Calibration
from trueup.denoiser import Denoiser
from trueup.errors import DataError
from trueup.estimate import classes_of, fit, measure
from trueup.estimate.measuring import IMAGES, NEEDS_LABELS
from trueup.estimate.run import SHARDS
from trueup.estimate.solve import check_names
from trueup.fitting.gains import TRAJECTORIES, judge
from trueup.fitting.moments import DataLabels
from trueup.fitting.solve import checked_numbers, fit_solver
from trueup.hf import as_denoiser
from trueup.images import as_images, open_images

_LABELS = 4 * TRAJECTORIES  # that are looked at


def calibrate(
    model: Any,
    data: Any,
    *,
    family: str = "spectral",
    estimator: str = "shrunk",
    levels: Sequence[float] | Tensor | None = None,
    nfe: int | list[int] | None = None,
    labels: Any = None,
    guidance: float = 1.0,
    trajectories: int = 128,
    per_class: bool | Sequence[int] = False,
    per_embedding: bool = False,
    seed: int = 0,
    run: str | PathLike[str] | None = None,
    trust: bool = False,
    progress: bool | None = None,
) -> Calibration:
    """Measure a network on images and fit the correction that images it has not seen confirm.

    model: a diffusers pipeline, a saved directory, its name on the Hub, a `Denoiser` of any network, or what
    `trueup.hf.as_denoiser` makes of a diffusers model with its scheduler. data: `Images`, or 500 of a folder,
    an array, a dataset or whatever else `Images` takes.

    A few samples, drawn without the correction and with two forms of it, then say which form to attach for
    sampling (`Calibration.gains`): the lowest loss does not make the best samples. nfe: fit solvers for so
    many evaluations as well; for labels (or prompts) and guidance as they will be used, by default labels as
    in the data and none (see `fit_solver`, also for trajectories).

    per_class: a correction for every class as well, drawn towards that of all as far as its own images do not
    say more; True for the labels that are in the data, or a list of them. A null label is a class of its own.
    per_embedding: the same for conditions that are embeddings, of prompts say: a correction that is linear in
    what they have in common, kept where conditions it was not fitted on confirm it. Conditions that are
    pictures (M, *spatial) need no option: their frequencies are regressors where held-out images confirm it.

    family: "shift" (the paper's) or "spectral". estimator: "shrunk", or the unshrunk "plain" (the paper's),
    "paired", "regressed". levels: times of the network's process; the default covers all of it. run: a
    directory that keeps what was measured, to go on from after an interruption or to add images to. trust:
    calibrate even if the network seems to be used wrongly. progress: show a bar; by default a bar in a
    terminal and a line now and then elsewhere.

    The ranks of a job that work together (`with trueup.distributed.together(): ...`) share all of this, and
    all return the same.
    """
    check_names(family, estimator)
    numbers = None if nfe is None else checked_numbers(nfe)
    denoiser = as_denoiser(model)
    data = as_images(data, IMAGES)
    if run is not None and data.index is None:
        data = replace(data, index=Path(run) / SHARDS)
    once = denoiser.conditional and isinstance(open_images(data, denoiser).source, Iterator)
    if once and numbers is not None:
        problem = "a solver is fitted to labels as they are in the data, and these can be read only once"
        raise DataError(f"{problem}: pass a list or a dataset, or fit it afterwards (trueup.fit_solver)")
    named = isinstance(per_class, Sequence)
    classes = list(per_class) if named else classes_of(data, denoiser) if per_class else ()  # type: ignore[arg-type]
    measuring: dict[str, Any] = {"levels": levels, "classes": classes, "trust": trust}
    measuring |= {"per_embedding": per_embedding}
    moments = measure(denoiser, data, seed=seed, run=run, progress=progress, **measuring)
    calibration = distributed.by_first(lambda: fit(moments, family=family, estimator=estimator))
    if once:  # its labels are gone, so that samples cannot judge
        return calibration
    of_data = labels_of(data, denoiser)
    calibration = judge(denoiser, calibration, labels=of_data, seed=seed, progress=progress)
    if numbers is None:
        return calibration
    how: dict[str, Any] = {"labels": of_data if labels is None else labels, "guidance": guidance}
    how |= {"trajectories": trajectories, "seed": seed, "progress": progress}
    where = None if run is None else Path(run) / "solvers"
    return fit_solver(denoiser, calibration, nfe=numbers, run=where, **how)


def labels_of(data: Any, denoiser: Denoiser) -> DataLabels | None:
    """Labels as often as they are in the data, for a conditional network: for `judge` and `fit_solver`."""
    if not denoiser.conditional:
        return None
    found: list[Tensor] = []
    images = as_images(data, IMAGES)
    samples = open_images(images, denoiser)
    if samples.indexed and images.count is None:  # all, in their order, which may be by class: some of all
        samples = open_images(replace(images, count=_LABELS), denoiser)
    samples.encode = False  # only labels are looked at
    for batch in samples.batches(TRAJECTORIES):
        if batch.y is None:
            raise DataError(NEEDS_LABELS)
        found.append(batch.y.cpu())
        if samples.indexed and sum(map(len, found)) >= _LABELS:
            break  # of a stream, nobody knows in what order it comes
    return torch.cat(found).as_subclass(DataLabels)
