"""The denoising loss before and after a calibration, on images that it was not made from."""

from __future__ import annotations

from typing import Any

from trueup.calibration import Calibration
from trueup.data import Samples, Transform
from trueup.denoiser import Denoiser
from trueup.errors import DataError
from trueup.estimate import measure
from trueup.estimate.confirm import score
from trueup.statistics import mean_and_error, student_quantile
from trueup.sources import split_row


class _From:
    """The samples of indexed data from one on, as data."""

    def __init__(self, samples: Samples, first: int):
        self.samples, self.first = samples, first

    def __len__(self) -> int:
        return max(0, len(self.samples) - self.first)

    def __getitem__(self, index: int) -> Any:
        image, _ = split_row(self.samples.source[self.first + index])
        return image, self.samples.label(self.first + index)


def first_unused(calibration: Calibration, samples: Samples) -> int | None:
    """The first sample that a calibration was not made from; None if that was other data.

    Samples are read as the calibration read them, mirrored or resized, however they are read here.
    """
    if calibration.generated:
        return 0
    made = calibration.provenance.get("transform") or {}
    transform = Transform(**made, data_range=samples.transform.data_range)
    model_range = calibration.provenance.get("data_range")
    model_range = tuple(model_range) if model_range else None
    same = Samples(samples.source, samples.shape, model_range, transform, samples.skip_bad)
    same.signed = samples.signed
    digest = 0
    try:
        for batch in same.batches(64, limit=calibration.data_images):
            digest = (digest + sum(batch.digests)) & ((1 << 64) - 1)
    except DataError:  # not in the calibration's way: other data
        return None
    return same.position if f"{digest:016x}" == calibration.data_fingerprint else None


def denoising_loss(
    denoiser: Denoiser,
    calibration: Calibration,
    samples: Samples,
    first: int,
    images: int,
    seed: int,
    batch_size: int | None,
    notes: list[str],
    progress: bool | None,
) -> tuple[list[dict[str, float]], int]:
    """Denoising loss per level before and after, on `images` images from `first` on."""
    held = _From(samples, first)
    if not len(held):
        notes.append("all images were used for the calibration: there are none to measure the loss on")
        return [], 0
    transform = samples.transform
    moments = measure(
        denoiser,
        held,
        images=images,
        levels=calibration.t,
        seed=seed + 1,
        batch_size=batch_size,
        edges=calibration.correction.bands.edges,
        resize=transform.resize,
        crop=transform.crop,
        flip=transform.flip,
        data_range=transform.data_range or (denoiser.data_range if samples.signed else None),
        skip_bad=samples.skip_bad,
        progress=progress,
    )
    folds = moments.used()
    before, _ = mean_and_error(folds.second[0, :, :, 0].sum((2, 3)), folds.rows[0])
    gain, error = mean_and_error(score(folds, calibration.correction).gain().sum(2), folds.rows[0])
    reach = student_quantile(0.975, max(folds.folds - 1, 1)) * error
    levels = zip(calibration.t.tolist(), before.tolist(), gain.tolist(), reach.tolist(), strict=True)
    rows = [{"t": t, "before": b, "after": b - g, "gain": g, "reach": r} for t, b, g, r in levels]
    return rows, moments.images
