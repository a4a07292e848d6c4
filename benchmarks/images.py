"""How many images a calibration needs, the paper's table 3: its estimator and ours, with data or without.

    python benchmarks/images.py --model RAW EMA --data cifar10.npy --test cifar10-test.npy

Calibrates from 50 to 50,000 random images, and from the model's own samples (DPM-Solver-3 in 50
evaluations), then samples with DPM-Solver-3 in 20, the same seeds in every row. `plain` is the published
estimator of the published shift. Fréchet distances (EfficientNet-lite0 features, not Inception's) are to the
test images.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import trueup
from trueup.estimate import fit, measure
from trueup.sampling import generate

from common import Quality, change, comparison_parser, finish, load_model, numbers, plus_minus, table

FITS = {"plain": ("shift", "plain"), "shift": ("shift", "shrunk"), "spectral": ("spectral", "shrunk")}


def main() -> None:
    p = comparison_parser(__doc__)
    p.add_argument("--images", type=int, nargs="+", default=[50, 100, 500, 2000, 10000, 50000])
    p.add_argument("--generated", type=int, nargs="*", default=[500, 2000, 10000])
    p.add_argument("--solver", default="dpm-solver-3")
    p.add_argument("--nfe", type=int, default=20)
    p.add_argument("--fits", nargs="+", choices=FITS, default=list(FITS))
    options = p.parse_args()
    fits = {name: FITS[name] for name in options.fits}
    images, test = (np.load(path, mmap_mode="r") for path in (options.data, options.test))
    results = {}
    for path in options.model:
        denoiser = load_model(path, options)
        quality = Quality(denoiser, test)

        def measured(calibration, denoiser=denoiser, quality=quality):
            return quality(
                denoiser, calibration, options.solver, options.nfe, options.samples, options.batch_size
            )

        base = measured(None)
        print(f"\n{path}: uncalibrated FD {plus_minus(base[0])}, W1 {plus_minus(base[1])}\n", flush=True)
        generated = generate(denoiser, max(options.generated), progress=False) if options.generated else None
        sources = [("data", images, n) for n in options.images if n <= len(images)]
        sources += [("generated", generated, n) for n in options.generated]
        entry, found = {"uncalibrated": [numbers(e) for e in base]}, {}
        rows = [["images", "from", *(f"FD, {name}" for name in fits), *(f"W1, {name}" for name in fits)]]
        rows[0].append("last FD against uncalibrated")
        with tempfile.TemporaryDirectory() as folder:
            for origin, source, count in sources:
                data, run = trueup.Images(source, count=count), Path(folder) / origin
                moments = measure(denoiser, data, run=run, progress=False)
                for name, (family, estimator) in fits.items():
                    calibration = fit(moments, family=family, estimator=estimator)
                    found[origin, count, name] = measured(calibration)
                here = [found[origin, count, name] for name in fits]
                rows.append(
                    [
                        f"{count:,}",
                        origin,
                        *(plus_minus(e[0]) for e in here),
                        *(plus_minus(e[1]) for e in here),
                    ]
                    + [change(base[0], here[-1][0])]
                )
                entry[f"{origin} {count}"] = {n: [numbers(e) for e in found[origin, count, n]] for n in fits}
                print(" | ".join(rows[-1]), flush=True)
        print(table(rows))
        most = max(n for o, n, _ in found if o == "data")
        for count in options.images[:-1]:
            if count < most:
                few, all_ = (found["data", n, options.fits[-1]][0] for n in (count, most))
                print(f"{options.fits[-1]}, {count:,} images less {most:,}: FD {change(all_, few)}")
        results[path] = entry
    finish(options, results)


if __name__ == "__main__":
    main()
