"""One calibration under many samplers: made once, it serves all of them, at any number of evaluations.

    python benchmarks/schedulers.py --model RAW EMA --data cifar10.npy --test cifar10-test.npy

Every row: the same starting noise before and after. Schedulers are diffusers' with their defaults but for
clipping, which is off (it hides colour drift). Fréchet distances (EfficientNet-lite0 features, not
Inception's) are to the test images; W1 is the Wasserstein distance of per-image mean colour, 0..255.
"""

from __future__ import annotations

import numpy as np

import trueup
from trueup.sampling import as_solver

from common import Quality, change, comparison_parser, finish, load_model, numbers, plus_minus, table

SOLVERS = [
    "dpm-solver-1",
    "dpm-solver-2",
    "dpm-solver-3",
    "ddpm",
    "ddim",
    "pndm",
    "dpm++2m",
    "dpm++2s",
    "dpm++2m-sde",
    "unipc",
    "deis",
    "euler",
    "euler-a",
    "heun",
    "kdpm2",
]


def main() -> None:
    p = comparison_parser(__doc__)
    p.add_argument("--images", type=int, default=500, help="behind the calibration")
    p.add_argument("--nfe", type=int, nargs="+", default=[20])
    p.add_argument("--solvers", nargs="+", default=SOLVERS)
    options = p.parse_args()
    images, test = (np.load(path, mmap_mode="r") for path in (options.data, options.test))
    results = {}
    for path in options.model:
        denoiser = load_model(path, options)
        denoiser.scheduler_config = None  # a plain scheduler for this noise, nothing clipped
        calibration = trueup.calibrate(denoiser, trueup.Images(images, count=options.images), progress=False)
        quality = Quality(denoiser, test)
        rows = [["sampler", "evaluations", "FD before", "FD after", "difference", "W1 before", "W1 after"]]
        entry = {}
        for nfe in options.nfe:
            for solver in options.solvers:
                before, after = (
                    quality(denoiser, used, solver, nfe, options.samples, options.batch_size)
                    for used in (None, calibration)
                )
                made = as_solver(solver, denoiser).evaluations(nfe, denoiser)
                rows.append(
                    [
                        solver,
                        f"{made}",
                        plus_minus(before[0]),
                        plus_minus(after[0]),
                        change(before[0], after[0]),
                    ]
                    + [plus_minus(before[1]), plus_minus(after[1])]
                )
                entry[f"{solver} {nfe}"] = [[numbers(e) for e in pair] for pair in (before, after)]
                print(" | ".join(rows[-1]), flush=True)
        print(f"\n{path}: {options.samples} samples each, calibrated from {options.images} images\n")
        print(table(rows))
        results[path] = entry
    finish(options, results)


if __name__ == "__main__":
    main()
