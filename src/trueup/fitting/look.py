"""Samples kept to be looked at: how their bands are beside the data's, and a few as small pictures."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from trueup.bands import band_variance
from trueup.calibration import Attachment, Calibration, Drawn
from trueup.calibration.drawn import MOST, PICTURES, small
from trueup.denoiser import Denoiser
from trueup.fitted import FittedSolver
from trueup.fitting.moments import Moments, dct_of, seen
from trueup.fitting.teacher import deal
from trueup.noise import mix, normal
from trueup.progress import Progress
from trueup.sampling import image_maker
from trueup.sampling.draw import STARTING_NOISE, network_for
from trueup.sampling.fitted import follow

OWN_STREAM = 0x6761696E  # of the samples that judge, and of all that are compared with them


def look_at(x: Tensor, denoiser: Denoiser, data: Moments, **how: Any) -> Drawn:
    """What to keep of samples (n, *shape); how: the other fields of `Drawn`."""
    bands, z = data.bands, dct_of(data.bands, seen(x, denoiser)).cpu()
    kept = bands.keep(z.unflatten(-1, bands.spatial))
    variance, error = band_variance(bands, kept, bands.sum_all(z.square()), torch.ones(len(z)).to(z))
    sizes, share = bands.sizes.to(z), bands.share.to(z)
    off = bands.sum((kept.mean(0) - data.mean).square()) / sizes
    off -= share * (data.variance / data.images + variance / len(z))
    return Drawn(
        **how,
        samples=len(x),
        variance=variance.double(),
        variance_se=error.double(),
        off=off.double(),
        pictures=shown(x[:PICTURES], denoiser),
    )


def shown(x: Tensor, denoiser: Denoiser) -> Tensor | None:
    """Samples as small 8-bit pictures; None where they are none: latents nobody decodes, other axes."""
    if denoiser.data_range is None and denoiser.autoencoder is None:
        return None
    to_images = image_maker(denoiser)
    parts = []
    for row in x.split(1):  # an autoencoder takes much memory, and these are few
        image = to_images(row)
        image = image[:, :, image.shape[2] // 2] if image.ndim == 5 else image  # a frame of a video
        if image.ndim != 4 or image.shape[1] not in (1, 3):
            return None
        parts.append(small(image.double()).round().to(torch.uint8))
    return torch.cat(parts)


def with_solvers(
    denoiser: Denoiser,
    calibration: Calibration,
    made: list[FittedSolver],
    labels: Any,
    progress: bool | None,
) -> Calibration:
    """The calibration with samples of its new solvers, from the noise of those that judged it.

    Guided samples, and those of other labels than the data's, do not compare with them: none are drawn.
    A file holds `MOST` sets: those of the solvers that were fitted first make room.
    """
    solvers = [solver for solver in made if solver.guidance == 1.0]
    there = [one for one in calibration.drawn if not (one.fitted and one.nfe in {s.nfe for s in solvers})]
    calibration.drawn = tuple(there)
    first = next((one for one in there if one.before), None)
    data, solvers = Moments.of(calibration, labels), solvers[:4]
    if first is None or data is None or not solvers:
        return calibration
    network = network_for(denoiser, labels)
    deal(network, first.samples, mix(first.seed ^ OWN_STREAM))
    noise = normal(network.seed, network.index, STARTING_NOISE, denoiser.shape, denoiser.device)  # type: ignore[arg-type]
    total = first.samples * sum(solver.nfe for solver in solvers)
    corrected = nullcontext() if calibration.empty else Attachment(denoiser, calibration)
    with corrected, Progress(total, "drawing with what was fitted", show=progress) as bar:
        network.advance = bar.update
        for solver in solvers:
            how = {"gains": solver.gains, "fitted": True, "nfe": solver.nfe, "seed": first.seed}
            there.append(look_at(follow(solver, network, noise), denoiser, data, **how))
    judged, fitted = ([one for one in there if one.fitted == kind] for kind in (False, True))
    calibration.drawn = (*judged, *fitted[-(MOST - len(judged)) :])
    return calibration
