"""Held-out denoising loss and sample colour, uncalibrated, with the shift and with the spectral family.

    python benchmarks/families.py --model RAW EMA --data cifar10.npy [--samples 2000]

The loss removed per level is measured on images neither family was fitted on. Samples: DDIM, 20 steps,
the same starting noise for every row; W1 is the Wasserstein distance of per-image mean colour (0..255)
to the data's, averaged over channels.
"""

from __future__ import annotations

import numpy as np
import torch

import trueup
from trueup.estimate import fit
from trueup.metrics import wasserstein

from common import (
    FINDINGS_LEVELS,
    finish,
    gains,
    levels_with,
    load_images,
    load_model,
    measure,
    parser,
    table,
)


def ddim(denoiser, calibration, count: int, steps: int, clip: bool) -> torch.Tensor:
    """Per-image mean colours of samples, (count, C), in 0..255."""
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler(clip_sample=clip)
    settings = {"solver": scheduler, "nfe": steps, "seed": 7, "progress": False}
    x = trueup.sample(denoiser, count, calibration=calibration, **settings)
    return ((x.clamp(-1, 1) + 1) * 127.5).flatten(2).mean(2).double()


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--images", type=int, nargs="+", default=[50, 200, 800])
    p.add_argument("--samples", type=int, default=0, help="samples per row; 0 skips sampling")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--sample-with", type=int, default=200, help="images behind the calibrations sampled with")
    options = p.parse_args()
    images = load_images(options)
    largest = max(options.images)
    held_images = images[largest : largest + options.held_out]
    data_colour = torch.from_numpy(np.asarray(images[:10000]).reshape(-1, images[0].size // 3, 3).mean(1))
    results = {}
    for path in options.model:
        denoiser = load_model(path, options)
        levels = levels_with(denoiser)
        held_out = measure(denoiser, held_images, options, levels=levels, seed=1000)
        loss = held_out.second[0, :, :, 0].sum((0, 2, 3)) / held_out.rows[0].sum(0)
        shown = [int((held_out.t == t).nonzero()) for t in FINDINGS_LEVELS]
        rows = [["images", "family", *(f"t={t}" for t in FINDINGS_LEVELS), "all levels", "least, in s.e."]]
        rows.append(
            ["", "loss before", *(f"{float(loss[i]):.4g}" for i in shown), f"{float(loss.sum()):.5g}", ""]
        )
        fits, entry = {}, {"t": held_out.t.tolist(), "loss": loss.tolist()}
        for count in options.images:
            moments = measure(denoiser, images[:count], options, levels=levels)
            for family in ("shift", "spectral"):
                cal = fit(moments, family=family)
                fits[count, family] = cal
                gain, error = gains(held_out, cal.correction)
                worst = float((gain / error.clamp_min(1e-12)).min())
                rows.append(
                    [f"{count}", family, *(f"{float(gain[i]):.3f}" for i in shown)]
                    + [f"{float(gain.sum()):.2f}", f"{worst:.1f}"]
                )
                entry[f"{family} {count}"] = gain.tolist()
        print(f"\n{path}: loss removed on {len(held_images)} other images, {len(levels)} levels\n")
        print(table(rows))
        for count in options.images:
            total = {f: sum(entry[f"{f} {count}"]) for f in ("shift", "spectral")}
            print(f"{count} images: spectral / shift = {total['spectral'] / total['shift']:.2f}")
        if options.samples:
            base = min(options.images, key=lambda n: abs(n - options.sample_with))
            rows = [["sampler", "calibration", "mean colour", "s.d. of mean colour", "W1"]]
            for clip in (False, True):
                for family in ("none", "shift", "spectral"):
                    used = fits.get((base, family))
                    colour = ddim(denoiser, used, options.samples, options.steps, clip)
                    w1 = wasserstein(colour, data_colour).value
                    show = lambda v: ", ".join(f"{float(x):.0f}" for x in v)  # noqa: E731
                    name = f"DDIM {options.steps}" + (", clipped" if clip else "")
                    rows.append([name, family, show(colour.mean(0)), show(colour.std(0)), f"{w1:.1f}"])
                    entry[f"W1 {family} clip={clip}"] = w1
            rows.append(["", "data", show(data_colour.mean(0)), show(data_colour.std(0)), ""])
            print(f"\n{options.samples} samples, calibrations from {base} images\n")
            print(table(rows))
        results[path] = entry
    finish(options, results)


if __name__ == "__main__":
    main()
