"""A calibration made at one size, used at others: how much of the loss it removes there.

    python benchmarks/sizes.py --model RAW EMA --data cifar10.npy

Calibrated from 200 images as they are. Measured on images it has not seen, at other sizes: centre crops,
enlargements (bicubic) and mosaics of several images; the network is run without the calibration, with it
attached (which resizes it), and with one that was made from 200 images of that size. Shares are of the
denoising loss integrated over lam, with 95% intervals over images.

With --nfe, solvers are fitted at the first size and used at others, as the rule they started from and with
their fitted steps resized: the error of samples to the limit, 99 evaluations of DPM-Solver-3 at that size.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

import trueup
from trueup.bands import Bands, resampled
from trueup.calibration import Calibration
from trueup.denoiser import Denoiser
from trueup.density import objectives
from trueup.estimate import fit
from trueup.fitted import FittedSolver
from trueup.fitting.moments import whitened
from trueup.sampling.fitted import Fitted

from common import finish, load_images, load_model, measure, parser, table


def crop(images: np.ndarray, height: int, width: int) -> np.ndarray:
    top, left = (images.shape[1] - height) // 2, (images.shape[2] - width) // 2
    return images[:, top : top + height, left : left + width]


def enlarged(images: np.ndarray, height: int, width: int) -> np.ndarray:
    pixels = torch.from_numpy(np.array(images)).movedim(-1, 1).float()
    made = torch.nn.functional.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
    return made.clamp(0, 255).round().to(torch.uint8).movedim(1, -1).numpy()


def mosaic(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Tiles of the images beside one another, each in as many mosaics as a mosaic has tiles."""
    down, across = height // images.shape[1], width // images.shape[2]
    tiles = [np.roll(images, 7 * i, 0) for i in range(down * across)]
    rows = [np.concatenate(tiles[i * across : (i + 1) * across], 2) for i in range(down)]
    return np.concatenate(rows, 1)


def sizes(n: int) -> list[tuple[str, tuple[int, int]]]:
    """What is tried of images of n x n: name and size, whole numbers of four pixels."""
    small, large = 4 * (n * 3 // 16), 4 * (n * 3 // 8)
    return [
        ("as it is", (n, n)),
        ("crop", (small, small)),
        ("crop", (n, small)),
        ("enlarged", (large, large)),
        ("enlarged", (2 * n, 2 * n)),
        ("mosaic", (n, 2 * n)),
        ("mosaic", (2 * n, 2 * n)),
    ]


MAKE = {"as it is": lambda images, *_: images, "crop": crop, "enlarged": enlarged, "mosaic": mosaic}


def with_steps(solver: FittedSolver, spatial: tuple[int, int]) -> FittedSolver:
    """A solver with its fitted steps at another size, by equation 63: `FittedSolver.resized` drops them."""
    bands, old = solver.bands.resized(spatial)
    offset = resampled(solver.offset, solver.bands.spatial, spatial)
    return replace(solver, bands=bands, tables=solver.tables[..., old], offset=offset)


def steps(denoiser: Denoiser, made: Calibration, nfe: list[int], count: int) -> list[dict]:
    """Errors to the limit at other sizes, whitened and per pixel."""
    made = trueup.fit_solver(denoiser, made, nfe=nfe, progress=False)
    n, found = denoiser.shape[1], []
    rows = [["evaluations", "size", "UniPC", "the rule alone", "with fitted steps"]]
    for number in nfe:
        solver = made.solver(number)
        rule = replace(solver, tables=0 * solver.tables, offset=0 * solver.offset)
        for size in sorted({size for _, size in sizes(n) if max(size) < 2 * n or min(size) == n}):
            there = denoiser.with_batch_size(count)
            there.shape = (denoiser.shape[0], *size)
            draw = {"calibration": made, "progress": False}
            limit = trueup.sample(there, count, solver="dpm-solver-3", nfe=99, **draw)
            errors = []
            for used in ("unipc", Fitted(rule), Fitted(with_steps(solver, size))):
                x = trueup.sample(there, count, solver=used, nfe=number, **draw)
                error = float(whitened(Bands(size), x, limit).mean())
                errors.append((error, float((x - limit).square().mean())))
            rows.append([f"{number}", f"{size[0]} x {size[1]}", *(f"{a:.3f} ({b:.4f})" for a, b in errors)])
            found.append({"nfe": number, "size": size, "errors": errors})
    print(
        f"\n{count} samples: whitened error to the limit (squared error per pixel)\n\n{table(rows)}",
        flush=True,
    )
    return found


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--images", type=int, default=200)
    p.add_argument("--nfe", type=int, nargs="+", default=[], help="fit solvers for so many evaluations too")
    p.add_argument("--samples", type=int, default=100)
    p.set_defaults(held_out=400)
    options = p.parse_args()
    images = np.asarray(load_images(options)[: options.images + options.held_out])
    images = images[..., None] if images.ndim == 3 else images
    used, held = images[: options.images], images[options.images :]
    results = {}
    for path in options.model:
        denoiser = load_model(path, options).with_batch_size(options.batch_size)
        made = fit(measure(denoiser, used, options))
        heads = ["images", "size", "loss", "removed by the calibration, %", "by one of that size, %"]
        print(f"\n{path}: {options.images} images to calibrate, {len(held)} others to measure\n")
        print(table([heads]), flush=True)
        results[path] = []
        for name, size in sizes(images.shape[1]):
            there = denoiser.with_batch_size(options.batch_size)
            there.shape = (denoiser.shape[0], *size)
            own = made if name == "as it is" else fit(measure(there, MAKE[name](used, *size), options))
            shares = []
            data = trueup.Images(MAKE[name](held, *size), count=len(held))
            for calibration in (made, own):
                found = objectives(there, data, calibration, trust=True, progress=False)
                loss, drop = (found.total("g2", which) for which in ("before", "drop"))
                shares.append(drop.scaled(100 / loss.value))
            told = [f"{share.value:.2f} ± {share.reach:.2f}" for share in shares]
            row = [name, f"{size[0]} x {size[1]}", f"{loss.value:.4g}", *told]
            print("| " + " | ".join(row) + " |", flush=True)
            plain = [[share.value, share.low, share.high] for share in shares]
            results[path].append({"images": name, "size": size, "loss": loss.value, "removed": plain})
        if options.nfe:
            results[path] += steps(denoiser, made, options.nfe, options.samples)
    finish(options, results)


if __name__ == "__main__":
    main()
