"""Are the default noise levels close enough together?

    python benchmarks/levels.py --model RAW EMA --data cifar10.npy

Levels are measured twice as densely as the default. A calibration fitted at the default levels is
interpolated to the levels between them and compared there, on held-out images, with one fitted at all of
them. What interpolation costs must be small next to the uncertainty of the gain itself.
"""

from __future__ import annotations

import torch

from trueup.calibration.correction import LEVEL_SPACING
from trueup.estimate import fit

from common import finish, gains, load_images, load_model, measure, parser, table


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--images", type=int, default=500)
    options = p.parse_args()
    images = load_images(options)
    rows = [
        [
            "model",
            "family",
            "total gain between levels, all levels fitted",
            "interpolated",
            "cost",
            "its s.e. of gain",
        ]
    ]
    results = {}
    for path in options.model:
        denoiser = load_model(path, options)
        process = denoiser.process
        top, bottom = float(process.lam(process.t_min)), float(process.lam(process.t_max))
        count = 2 * round((top - bottom) / LEVEL_SPACING) + 1
        dense = torch.unique(
            process.snap(process.t_of_lam(torch.linspace(top, bottom, count, dtype=torch.float64)))
        )
        dense = dense[: len(dense) - 1 + len(dense) % 2]
        moments = measure(denoiser, images[: options.images], options, levels=dense)
        held_out = measure(
            denoiser,
            images[options.images : options.images + options.held_out],
            options,
            levels=dense,
            seed=1000,
        )
        for family in ("shift", "spectral"):
            full = fit(moments, family=family)
            half = fit(moments.at_levels(torch.arange(0, moments.levels, 2)), family=family)
            direct, _ = gains(held_out, full.correction)
            between, _ = gains(held_out, half.correction.at(moments.lam))
            odd = torch.arange(1, len(dense), 2)
            error = full.evidence.gain.error[odd]
            lost = (direct - between)[odd]
            rows.append(
                [path, family, f"{float(direct[odd].sum()):.3f}", f"{float(between[odd].sum()):.3f}"]
                + [f"{float(lost.sum()):.3f}", f"{float(error.square().sum().sqrt()):.3f}"]
            )
            worst = int((lost / error.clamp_min(1e-9)).argmax())
            results[f"{path} {family}"] = {
                "t": dense[odd].tolist(),
                "lost": lost.tolist(),
                "se": error.tolist(),
            }
            print(
                f"{path} {family}: worst level t={int(dense[odd][worst])}, lost {float(lost[worst]):.4f}, "
                f"standard error of its gain {float(error[worst]):.4f}"
            )
    print()
    print(table(rows))
    finish(options, results)


if __name__ == "__main__":
    main()
