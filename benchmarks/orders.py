"""DPM-Solver's orders and budgets, the paper's table 1, and its blow-up of order 3 in 10 evaluations.

    python benchmarks/orders.py --model RAW EMA --data cifar10.npy --test cifar10-test.npy

Full orders only, order * floor(nfe/order) evaluations, as the paper's tables mark with a dagger. `plain` is
the published shift estimated as published; spectral is our default. Fréchet distances (EfficientNet-lite0
features, not Inception's) are to the test images.
"""

from __future__ import annotations

import tempfile

import numpy as np

import trueup
from trueup.estimate import fit, measure
from trueup.sampling import DPMSolver

from common import Quality, change, comparison_parser, finish, load_model, numbers, plus_minus, table


def main() -> None:
    p = comparison_parser(__doc__)
    p.add_argument("--images", type=int, default=500, help="behind the default calibration, and plain's few")
    p.add_argument("--many", type=int, default=50000, help="behind plain's many")
    p.add_argument("--nfe", type=int, nargs="+", default=[10, 15, 20, 30])
    p.add_argument("--orders", type=int, nargs="+", default=[1, 2, 3])
    options = p.parse_args()
    images, test = (np.load(path, mmap_mode="r") for path in (options.data, options.test))
    results = {}
    for path in options.model:
        denoiser = load_model(path, options)
        quality = Quality(denoiser, test)
        with tempfile.TemporaryDirectory() as run:
            few, many = (
                measure(denoiser, trueup.Images(images, count=count), run=run, progress=False)
                for count in (options.images, min(options.many, len(images)))
            )
        calibrations = {
            "uncalibrated": None,
            f"plain, {few.images:,}": fit(few, family="shift", estimator="plain"),
            f"plain, {many.images:,}": fit(many, family="shift", estimator="plain"),
            f"spectral, {few.images:,}": fit(few),
        }
        rows = [["order", "evaluations", *(f"FD {name}" for name in calibrations), "spectral's difference"]]
        entry = {}
        for order in options.orders:
            for nfe in options.nfe:
                solver = DPMSolver(order, allocation="fixed")
                found = [
                    quality(denoiser, used, solver, nfe, options.samples, options.batch_size)[0]
                    for used in calibrations.values()
                ]
                rows.append(
                    [
                        f"{order}",
                        f"{solver.evaluations(nfe, denoiser)}",
                        *map(plus_minus, found),
                        change(found[0], found[-1]),
                    ]
                )
                entry[f"{order} {nfe}"] = dict(zip(calibrations, map(numbers, found), strict=True))
                print(" | ".join(rows[-1]), flush=True)
        print(f"\n{path}: {options.samples} samples each\n")
        print(table(rows))
        results[path] = entry
    finish(options, results)


if __name__ == "__main__":
    main()
