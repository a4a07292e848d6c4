"""Does a calibration from few images ever make a model worse?

    python benchmarks/never_harm.py --model RAW EMA --data cifar10.npy

For 20, 50 and 200 images, several disjoint sets each and both families: the loss removed at every level on
held-out images, and on an exact denoiser (a Gaussian mixture), where anything removed is a mistake. A level
counts as harmed when its loss rises by more than three standard errors of the held-out measurement.
"""

from __future__ import annotations

import torch

import trueup
from trueup.analytic import GaussianMixture

from common import finish, gains, levels_with, load_images, load_model, measure, parser, table


def exact_model() -> tuple[GaussianMixture, object]:
    generator = torch.Generator().manual_seed(0)
    means = torch.nn.functional.interpolate(
        torch.randn(5, 3, 4, 4, generator=generator), size=16, mode="bilinear"
    )
    mixture = GaussianMixture(0.6 * means.double(), std=0.3)
    return mixture, mixture.denoiser(trueup.process.DiscreteVP.linear())


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--images", type=int, nargs="+", default=[20, 50, 200])
    p.add_argument("--repeats", type=int, default=6)
    options = p.parse_args()
    images = load_images(options)
    cases = [(path, load_model(path, options), None) for path in options.model]
    mixture, exact = exact_model()
    cases.append(("exact", exact, mixture))
    results = {}
    rows = [
        ["model", "images", "family", "levels harmed", "worst level", "of its loss", "total gain, worst set"]
    ]
    for name, denoiser, source in cases:
        levels = levels_with(denoiser)
        need = max(options.images) * options.repeats
        data = images if source is None else source.sample(need + options.held_out, seed=1)
        held_out = measure(denoiser, data[need : need + options.held_out], options, levels=levels, seed=1000)
        loss = held_out.second[:, :, 0].sum((0, 2, 3)) / held_out.rows.sum()
        for count in options.images:
            fits = {"shift": [], "spectral": []}
            for repeat in range(options.repeats):
                part = data[repeat * count : (repeat + 1) * count]
                moments = measure(denoiser, part, options, levels=levels, seed=repeat)
                for family, kept in fits.items():
                    kept.append(gains(held_out, trueup.fit(moments, family=family).correction))
            for family, kept in fits.items():
                gain, error = (torch.stack([pair[i] for pair in kept]) for i in (0, 1))  # (repeats, L)
                harmed = int((gain < -3 * error).sum())
                worst = divmod(int(gain.argmin()), len(levels))
                value = float(gain[worst])
                rows.append(
                    [name, str(count), family, f"{harmed} of {gain.numel()}"]
                    + [
                        f"{value:.3f} (t={int(levels[worst[1]])})",
                        f"{100 * value / float(loss[worst[1]]):.3f}%",
                    ]
                    + [f"{float(gain.sum(1).min()):.2f}"]
                )
                results[f"{name} {count} {family}"] = {
                    "harmed": harmed,
                    "worst": value,
                    "gain": gain.tolist(),
                }
                print(" ".join(rows[-1]), flush=True)
    print()
    print(table(rows))
    finish(options, results)


if __name__ == "__main__":
    main()
