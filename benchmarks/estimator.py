"""Squared error of the estimated shift, for every estimator, at equal network evaluations.

    python benchmarks/estimator.py --model DIR --data cifar10.npy

Truth is the regressed mean residual on other images, its own noise subtracted from every error. All
estimators are computed from the same evaluations: --images images at the default levels and those shown.
"""

from __future__ import annotations

import math

import torch

from trueup.estimate import Moments, fit
from trueup.estimate.regress import Centred, mean_residual

from common import FINDINGS_LEVELS, finish, levels_with, load_images, load_model, measure, parser, table

ESTIMATORS = ("plain", "paired", "regressed", "shrunk")


def output_power(moments: Moments) -> torch.Tensor:
    """E|eps_hat|^2 at every level: the variance of what the published estimator averages."""
    centred = Centred(moments.used())
    eps_hat = centred.eps_hat()
    mean = centred.mean_of(eps_hat).square().sum((1, 2))
    return (centred.dot(eps_hat, eps_hat).sum((1, 2)) / centred.n.flatten()) + mean


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--images", type=int, default=50)
    p.add_argument("--repeats", type=int, default=4)
    options = p.parse_args()
    images = load_images(options)
    results = {}
    for path in options.model:
        denoiser = load_model(path, options)
        used = options.images * options.repeats
        truth_moments = measure(
            denoiser, images[used : used + options.held_out], options, levels=FINDINGS_LEVELS, seed=1000
        ).used()
        centred = Centred(truth_moments)
        zero = torch.zeros_like(centred.second[0, :, 0])
        mean = mean_residual(centred, "regressed", zero, zero)
        sizes = truth_moments.bands.sizes
        truth, truth_noise = mean.value, (mean.variance * sizes).sum((1, 2))  # (L, C, K), (L,)
        errors = {name: [] for name in ESTIMATORS}
        power = 0.0
        for repeat in range(options.repeats):
            part = images[repeat * options.images : (repeat + 1) * options.images]
            moments = measure(denoiser, part, options, levels=levels_with(denoiser), seed=repeat)
            rows = [int((moments.t == t).nonzero()) for t in truth_moments.t]
            power = power + output_power(moments)[rows] / options.repeats
            for name in ESTIMATORS:
                b = fit(moments, family="shift", estimator=name).correction.b[rows]
                errors[name].append((b - truth).square().sum((1, 2)) - truth_noise)
        mean_error = {name: torch.stack(e).mean(0) for name, e in errors.items()}
        ratio = mean_error["plain"] / mean_error["shrunk"]
        needed = power / mean_error["shrunk"]
        rows = [["t", "true \\|eta\\|^2", *ESTIMATORS, "plain / shrunk", "images plain would need"]]
        for i in reversed(range(len(truth_moments.t))):
            size = float(truth[i].square().sum() - truth_noise[i])
            rows.append(
                [f"{int(truth_moments.t[i])}", f"{size:.3g}"]
                + [f"{float(mean_error[name][i]):.3g}" for name in ESTIMATORS]
                + [f"{float(ratio[i]):.0f}x", f"{float(needed[i]):,.0f}"]
            )
        geometric = math.exp(float(ratio.log().mean()))
        print(
            f"\n{path}: {options.images} images, mean of {options.repeats} sets, "
            f"truth from {options.held_out} others\n"
        )
        print(table(rows))
        print(f"\nplain / shrunk: geometric mean {geometric:.0f}x, least {float(ratio.min()):.0f}x")
        results[path] = {
            "t": truth_moments.t.tolist(),
            "errors": {k: v.tolist() for k, v in mean_error.items()},
            "geometric_mean": geometric,
        }
    finish(options, results)


if __name__ == "__main__":
    main()
