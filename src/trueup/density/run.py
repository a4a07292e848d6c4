"""`trueup.likelihood`: images in, bits per dimension out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueup import distributed
from trueup.calibration import Calibration
from trueup.denoiser import Denoiser, in_parts
from trueup.density.bound import VARIANCES, Bound
from trueup.density.exact import TOLERANCE, Exact
from trueup.density.flow import Divergence
from trueup.density.opening import Sides
from trueup.density.result import Likelihood
from trueup.errors import Argument, DataError, ModelError, TrueupError
from trueup.files import printable
from trueup.images import Batch, open_images
from trueup.noise import checked_seed, hashed
from trueup.progress import Progress
from trueup.sampling.store import NOTE, Kept
from trueup.statistics import Number

IMAGES = {"bound": 200, "ode": 32}  # by method
_LOOKED_AT = 32  # images whose frequencies say where the loss lies


def likelihood(
    model: Any,
    data: Any,
    calibration: Calibration | str | PathLike[str] | None = None,
    *,
    method: str = "bound",
    steps: int | None = None,
    variance: str | None = None,
    draws: int = 8,
    importance: bool = True,
    tolerance: float = TOLERANCE,
    trace: str = "rademacher",
    probes: int = 1,
    start: str = "noise",
    seed: int = 0,
    trust: bool = False,
    run: str | PathLike[str] | None = None,
    force: bool = False,
    progress: bool | None = None,
) -> Likelihood:
    """The likelihood of images under a model, and with a calibration also under the calibrated one.

    method "bound": the variational bound, `draws` noise levels per image, drawn where the loss is
    (importance=False: evenly in time). steps: None is continuous time; T is the bound of a chain of T steps,
    whose reverse variance is "small", "large" or "learned_range" (default: what the scheduler says).
    method "ode": exact, by the probability flow, to a tolerance; trace "rademacher" or "gaussian"
    (Hutchinson's estimator, with `probes` probes) or "exact". start "noise" begins at the image with the
    least noise the model knows, which bounds the likelihood of clean images; "data" at the image itself,
    8-bit ones dequantized uniformly, as is usual: the bias of that is stated. 8-bit images give bits/dim of
    a probability, floating point samples and latents those of a density.

    data: 200 images (32 by the ODE), unless `Images` says otherwise; those that the calibration was made from
    are passed over, those that occur twice count once, and groups of `Images` count as one each. A network
    that seems to be used wrongly is refused, unless `trust`. run: a directory that keeps what was done, to go
    on after an interruption; force replaces what was done there with other settings.
    """
    if method not in IMAGES:
        raise TrueupError(f"method is one of {', '.join(IMAGES)}, not {method!r}")
    sides = Sides(model, calibration)
    denoiser = sides.denoiser
    how: Bound | Exact
    if method == "bound":
        how = Bound(denoiser, steps, variance or _variance(denoiser, steps), draws, importance, seed)
        options: dict[str, Any] = {"steps": steps, "draws": draws, "importance": importance}
    else:
        how = Exact(denoiser, Divergence(trace, probes, seed), tolerance, start, seed)
        options = {"tolerance": tolerance, "trace": trace, "probes": probes, "start": start}
    begun = run is not None and not force and (Path(run) / NOTE).exists()  # was looked at before
    samples, notes = sides.open(data, IMAGES[method], exact=True, trust=trust or begun), sides.notes
    settings = {
        **denoiser.identity(),
        "method": method,
        "description": how.describe(),
        "seed": checked_seed(seed),
        **options,
        "calibration": None if sides.calibration is None else sides.calibration.identity,
        "way of reading images": samples.images.transform(),
    }
    kept = None if run is None else Kept(Path(run), settings, force=force)
    with denoiser.evaluating(), torch.inference_mode(False), sides.attached:
        rows = _collect(sides, how, kept, progress)
    asked = samples.images.count
    if samples.images is data and asked is not None and len(rows["sample"]) < asked:
        notes.append(f"there are no more than {len(rows['sample'])} images, {asked} were asked for")
    if samples.images.resize is not None:
        notes.append("the likelihood is that of the images as they were resized")
    discrete = bool(rows["eight_bit"][0])
    if not discrete:
        own = "floating point data: bits/dim are of a density in the model's own range"
        notes.append(f"{own}, and do not compare with those of 8-bit images")
    return Likelihood(
        method=method,
        description=how.describe(),
        dimensions=math.prod(denoiser.shape),
        discrete=discrete,
        index=[int(i) for i in rows["sample"]],
        terms={name: _pair(rows, name) for name in how.terms},
        settings=settings,
        group=rows.get("group"),
        evaluations=[float(rows[f"evaluations_{side}"].mean()) for side in sides.names],
        start_bias=_pair(rows, "bias") if (method, start) == ("ode", "data") else None,
        promised=_promise(sides.calibration) if method == "bound" and steps is None else None,
        notes=notes,
    )


def _pair(rows: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor | None]:
    return rows[f"{name}_before"], rows.get(f"{name}_after")


def _promise(calibration: Calibration | None) -> Number | None:
    """What a calibration of all levels says the bound gains in nats."""
    if calibration is None or math.isnan(calibration.evidence.bound_gain.low):
        return None
    process = calibration.process
    ends = process.lam(torch.tensor([process.t_min, process.t_max], dtype=torch.float64))
    of_all = torch.allclose(ends, process.lam(calibration.t[[0, -1]]), atol=0.05)
    return calibration.evidence.bound_gain if of_all else None


def _variance(denoiser: Denoiser, steps: int | None) -> str:
    """What the scheduler says of the reverse variance."""
    if steps is None:
        return "small"
    named = str((denoiser.scheduler_config or {}).get("variance_type") or "fixed_small")
    found = named.removeprefix("fixed_").removesuffix("_log")
    if found not in VARIANCES:
        problem = f"reverse variances of type {named!r} are not known"
        raise ModelError(problem, "pass {}", Argument("variance", "small"))
    return found


def _collect(sides: Sides, how: Bound | Exact, kept: Kept | None, progress: bool | None) -> dict[str, Tensor]:
    """What every image came out as, {name: (N,)}; what was kept before is not made again."""
    samples, expected = sides.samples, sides.samples.expected()
    parts: list[dict[str, Tensor]] = []
    groups: list[Tensor] = []
    done = 0 if kept is None else kept.done
    done = done if expected is None else min(done, expected)
    names = ["sample", "digest", "eight_bit"]
    names += [f"{name}_{side}" for name in (*how.terms, "evaluations") for side in sides.names]
    before = kept.tensors(done, *names) if kept is not None and done else None
    for name, values in (before or {}).items():
        if values.ndim != 1 or values.is_floating_point() == (name in ("sample", "digest")):
            assert kept is not None
            raise TrueupError(f"{printable(name)} in {kept.folder} makes no sense: delete it to start over")
    seen, at_once = 0, sides.denoiser.batch_size
    fitting: int | None = at_once
    size = at_once if samples.indexed else max(at_once, _LOOKED_AT)  # a stream's first must be at hand
    bar = Progress(expected, "likelihood", unit="image", done=done, show=progress)

    def left() -> Iterator[tuple[Batch, bool, int]]:
        """What is left of each batch to do, whether it is of 8-bit images, and how many there are so far."""
        nonlocal seen
        for batch in sides.batches(size):
            if batch.group is not None and samples.images.groups is not None:
                groups.append(batch.group)
            if seen == 0:
                how.prepare(_to_look_at(sides, batch), sides.calibration)
            skip = min(max(0, done - seen), len(batch))
            if kept is not None and before is not None:
                known = {name: before[name][seen : seen + skip] for name in ("digest", "sample")}
                _check_same(known, batch, samples.name, kept)
            seen += len(batch)
            if skip == len(batch):
                continue
            # Latents have a density, whatever pictures they were encoded from.
            discrete = bool(samples.eight_bit) and samples.model_range is not None
            yield batch.rows(slice(skip, None)), discrete, seen

    def measured(task: tuple[Batch, bool, int]) -> dict[str, Tensor]:
        nonlocal fitting
        rest, eight_bit, _ = task
        made, fitting = in_parts(partial(_measure, sides, how, rest, eight_bit, bar), len(rest), fitting)
        return _joined(made)

    with bar:
        for (rest, eight_bit, reached), made in distributed.dealt(left(), measured):
            rows = made | {"sample": rest.index, "digest": _digests(rest)}
            rows["eight_bit"] = torch.full((len(rest),), float(eight_bit))
            if kept is not None:
                kept.add(torch.arange(reached - len(rest), reached), **rows)
            else:
                parts.append(rows)
            bar.update(reached - bar.done)
    rows = _joined(parts) if kept is None else kept.tensors(seen)
    return rows | ({"group": torch.cat(groups)} if groups else {})


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _measure(
    sides: Sides, how: Bound | Exact, batch: Batch, eight_bit: bool, bar: Progress, part: slice
) -> dict[str, Tensor]:
    """Both sides of rows of a batch, telling how far it got."""
    rows, first = batch.rows(part), bar.done
    found: dict[str, Tensor] = {}
    for turn, side in enumerate(sides.names):

        def advance(share: Tensor, turn: int = turn) -> None:
            bar.update(first + (turn * len(rows) + float(share.sum())) / len(sides.names) - bar.done)

        with sides.on(side):
            found |= {f"{name}_{side}": values for name, values in how(rows, eight_bit, advance).items()}
    return found


def _to_look_at(sides: Sides, batch: Batch) -> Tensor:
    """The first images, as many whatever is asked for; of a stream those of its first batch."""
    images = sides.samples.images
    if sides.samples.indexed:
        images = images if images.count is None else replace(images, count=_LOOKED_AT)
        first = open_images(images, sides.denoiser, exact=True)
        batch = next(first.batches(_LOOKED_AT, without=sides.without, unique=True), batch)
    return batch.x0[:_LOOKED_AT]


def _digests(batch: Batch) -> Tensor:
    """Of each image with its label."""
    if batch.y is None:
        return batch.digests
    return batch.digests ^ hashed(batch.y.reshape(len(batch), -1).double().view(torch.int64)).sum(1)


def _check_same(known: dict[str, Tensor], batch: Batch, name: str, kept: Kept) -> None:
    """Raise if an image is not the one that was measured before."""
    rows = len(known["digest"])
    same = (_digests(batch)[:rows] == known["digest"]) & (batch.index[:rows] == known["sample"])
    if not same.all():
        which = f"sample {int(batch.index[:rows][~same][0])} of {name}"
        advice = "put the images back, or use a new run directory"
        raise DataError(f"{which} is not what it was when {kept.folder} was begun: {advice}")
