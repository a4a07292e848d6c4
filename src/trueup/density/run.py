"""`trueup.likelihood`: images in, bits per dimension out."""

from __future__ import annotations

import math
import sys
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueup.calibration import Calibration
from trueup.data import Batch, Samples, Transform, digests
from trueup.denoiser import Denoiser
from trueup.density.bound import VARIANCES, Bound
from trueup.density.exact import STARTS, Exact
from trueup.density.flow import Divergence
from trueup.density.opening import first_image, open_both
from trueup.density.result import Likelihood
from trueup.errors import DataError, ModelError, TrueupError
from trueup.estimate.evaluate import default_batch_size
from trueup.noise import mix
from trueup.sampling.store import Kept

METHODS = ("bound", "ode")
TOLERANCE = 1e-4
_LOOKED_AT = 32  # images whose frequencies say where the loss lies


def likelihood(
    model: Any,
    data: Any,
    calibration: Calibration | str | PathLike[str] | None = None,
    *,
    method: str = "bound",
    images: int | None = None,
    steps: int | None = None,
    variance: str | None = None,
    draws: int = 8,
    importance: bool = True,
    tolerance: float = TOLERANCE,
    trace: str = "rademacher",
    probes: int = 1,
    start: str = "noise",
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

    images: how many (default: 200 by the bound, 32 by the ODE); a calibration's own images, where the data
    begins with them, are passed over. run: a directory that keeps what was done, to go on after an
    interruption. The rest is as in `calibrate`.
    """
    denoiser, calibration = open_both(model, calibration, scheduler, device)
    if method not in METHODS:
        raise TrueupError(f"method is one of {', '.join(METHODS)}, not {method!r}")
    if start not in STARTS:
        raise TrueupError(f"start is one of {', '.join(STARTS)}, not {start!r}")
    check_tolerance(tolerance)
    for name, value in (("images", images), ("draws", draws), ("batch_size", batch_size)):
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise TrueupError(f"{name} is a whole number of at least 1, not {value!r}")
    transform = Transform(resize, crop, flip, data_range)
    samples = Samples(data, denoiser.shape, denoiser.data_range, transform, skip_bad, exact=True)
    notes: list[str] = []
    first = first_image(calibration, samples, notes)
    count = images or (200 if method == "bound" else 32)
    size = batch_size or default_batch_size(denoiser)
    how: Bound | Exact
    if method == "bound":
        chosen = variance or _variance(denoiser, steps)
        how = Bound(denoiser, calibration, steps, chosen, draws, importance, seed, size)
        size = max(size, _LOOKED_AT)
    else:
        how = Exact(denoiser, calibration, Divergence(trace, probes, seed), tolerance, start, seed)
    description = how.describe()
    settings = {
        **denoiser.identity(),
        "method": method,
        "description": description,
        "seed": seed,
        **({"steps": steps, "draws": draws, "importance": importance} if method == "bound" else {}),
        **(
            {"tolerance": tolerance, "trace": trace, "probes": probes, "start": start}
            if method == "ode"
            else {}
        ),
        "calibration": None if calibration is None else calibration.identity,
        "first image": first,
        "way of reading images": [resize, crop, flip, data_range],
    }
    kept = None if run is None else Kept(Path(run), settings, force=force)
    with denoiser.evaluating(), torch.inference_mode(False):
        rows = _collect(denoiser, samples, first, count, size, how, kept, progress)
    if not len(rows["sample"]):
        raise DataError(f"{samples.name} holds no samples to measure the likelihood of")
    if samples.skipped:
        notes.append(f"{len(samples.skipped)} images left out: {'; '.join(samples.skipped[:3])}")
    if images is not None and len(rows["sample"]) < images:
        notes.append(f"there are no more than {len(rows['sample'])} images, {images} were asked for")
    if resize is not None:
        notes.append("the likelihood is that of the images as they were resized")
    if not bool(rows["eight_bit"][0]):
        notes.append(
            "floating point data: bits/dim are of a density in the model's own range, and do not compare "
            "with those of 8-bit images"
        )
    promised = _promise(calibration) if method == "bound" and steps is None else None
    biased = method == "ode" and start == "data"
    return _result(rows, method, description, denoiser, settings, notes, promised, biased)


def check_tolerance(tolerance: float) -> None:
    """Raise unless it is one."""
    if not isinstance(tolerance, (int, float)) or not 0 < tolerance < 1:
        raise TrueupError(f"tolerance is a number between 0 and 1, not {tolerance!r}")


def _promise(calibration: Calibration | None) -> tuple[float, float] | None:
    """What a calibration of all levels says the bound gains in nats, and its 95% reach."""
    if calibration is None:
        return None
    process, e = calibration.process, calibration.evidence
    levels = process.lam(torch.tensor([process.t_min, process.t_max], dtype=torch.float64))
    ends = calibration.correction.lam[[0, -1]]
    if not torch.allclose(levels, ends, atol=0.05) or math.isnan(e.bound_gain.low):
        return None
    return e.bound_gain.value, e.bound_gain.reach


def _variance(denoiser: Denoiser, steps: int | None) -> str:
    """What the scheduler says of the reverse variance."""
    if steps is None:
        return "small"
    named = str((denoiser.scheduler_config or {}).get("variance_type") or "fixed_small")
    found = named.removeprefix("fixed_").removesuffix("_log")
    if found not in VARIANCES:
        raise ModelError(f"reverse variances of type {named!r} are not known: pass variance='small'")
    return found


def _collect(
    denoiser: Denoiser,
    samples: Samples,
    first: int,
    count: int,
    size: int,
    how: Bound | Exact,
    kept: Kept | None,
    progress: bool | None,
) -> dict[str, Tensor]:
    """What every image came out as, {name: (N,)}; what was kept before is not made again."""
    from tqdm import tqdm

    shown = sys.stderr.isatty() if progress is None else progress
    total = min(count, max(0, len(samples) - first)) if samples.indexed else count
    parts: list[dict[str, Tensor]] = []
    done = 0 if kept is None else min(kept.done, total)
    seen = 0
    bar = tqdm(total=total, initial=done, desc="likelihood", unit="image", disable=not shown, file=sys.stderr)
    with bar:
        for batch in samples.batches(size, first, limit=count):
            if denoiser.conditional and batch.y is None:
                raise DataError("the network is conditional: the data must come with labels")
            eight_bit = samples.eight_bit
            assert eight_bit is not None
            if seen == 0:  # the first images say where to look, also when going on from later ones
                how.prepare(_to_look_at(samples, first, batch))
            skip = min(max(0, done - seen), len(batch.index))
            if kept is not None and skip:
                _check_same(kept.tensors(seen + skip)["digest"][seen:], batch, samples.name, kept)
            seen += len(batch.index)
            if skip == len(batch.index):
                continue
            part = Batch(batch.index[skip:], batch.x0[skip:], None if batch.y is None else batch.y[skip:])
            start = bar.n

            def advance(share: Tensor, start: float = start) -> None:
                bar.n = round(start + float(share.sum()), 1)
                bar.refresh()

            rows = how(part, eight_bit, advance)
            rows["sample"], rows["digest"] = part.index, _digests(part)
            rows["eight_bit"] = torch.full((len(part.index),), float(eight_bit))
            if kept is not None:
                kept.add(torch.arange(seen - len(part.index), seen), **rows)
            else:
                parts.append(rows)
            bar.n = seen
            bar.refresh()
    if kept is not None:
        return kept.tensors(seen) if seen else {"sample": torch.zeros(0)}
    if not parts:
        return {"sample": torch.zeros(0)}
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _to_look_at(samples: Samples, first: int, batch: Batch) -> Tensor:
    """The first images, as many whatever is asked for; of a stream, those at hand."""
    if not samples.indexed:
        return batch.x0[:_LOOKED_AT]
    place, skipped = samples.position, list(samples.skipped)
    looked_at = next(samples.batches(_LOOKED_AT, first)).x0
    samples.position, samples.skipped = place, skipped
    return looked_at


def _digests(batch: Batch) -> Tensor:
    """Of each image with its label."""
    labels = [0] * len(batch.index) if batch.y is None else digests(batch.y.reshape(len(batch.index), -1))
    pairs = zip(batch.digests, labels, strict=True)
    return torch.tensor([mix(image ^ mix(label)) >> 1 for image, label in pairs], dtype=torch.int64)


def _check_same(digests: Tensor, batch: Batch, name: str, kept: Kept) -> None:
    """Raise if an image is not the one that was measured before."""
    same = _digests(batch)[: len(digests)] == digests
    if not same.all():
        raise DataError(
            f"sample {int(batch.index[: len(digests)][~same][0])} of {name} is not what it was when "
            f"{kept.folder} was begun: put the images back, or use a new run directory"
        )


def _result(
    rows: dict[str, Tensor],
    method: str,
    description: str,
    denoiser: Denoiser,
    settings: dict[str, Any],
    notes: list[str],
    promised: tuple[float, float] | None,
    biased: bool,
) -> Likelihood:
    after = settings["calibration"] is not None
    terms: dict[str, tuple[Tensor, Tensor | None]]
    bias: tuple[Tensor, Tensor | None] | None = None
    evaluations: tuple[float, float | None]
    if method == "bound":
        terms = {"prior": (rows["prior"], rows["prior"] if after else None)}
        for name in ("diffusion", "decoder"):
            terms[name] = (rows[f"{name}_before"], rows[f"{name}_after"] if after else None)
        evaluations = float(rows["evaluations"][0]), None
    else:
        terms = {"total": (rows["nats_before"], rows["nats_after"] if after else None)}
        evaluations = (
            float(rows["evaluations_before"].mean()),
            float(rows["evaluations_after"].mean()) if after else None,
        )
        if biased:
            bias = rows["bias_before"], rows["bias_after"] if after else None
    return Likelihood(
        method=method,
        description=description,
        dimensions=math.prod(denoiser.shape),
        discrete=bool(rows["eight_bit"][0]),
        index=[int(i) for i in rows["sample"]],
        terms=terms,
        settings=settings,
        evaluations=evaluations,
        start_bias=bias,
        promised=promised,
        notes=notes,
    )
