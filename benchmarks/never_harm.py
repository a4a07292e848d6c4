"""Does a calibration from few images ever make a model worse, at any noise level?

    python benchmarks/never_harm.py --model RAW EMA --data cifar10.npy
    python benchmarks/never_harm.py ... --levels 500      # measured at one level only, used everywhere

For 20, 50 and 200 images, several disjoint sets each and both families: the loss removed on held-out images
at every level it was measured at, and at random times over the whole process, half of them even in t and half
even in lam. The last model is an exact denoiser (a Gaussian mixture), where anything removed is a mistake. A
time counts as harmed when its loss rises by more than three standard errors of the held-out measurement.
"""

from __future__ import annotations

import torch

import trueup
from trueup.analytic import GaussianMixture
from trueup.estimate import default_levels, fit

from common import finish, gains, load_images, load_model, measure, parser, table


def exact_model() -> tuple[GaussianMixture, object]:
    generator = torch.Generator().manual_seed(0)
    means = torch.nn.functional.interpolate(
        torch.randn(5, 3, 4, 4, generator=generator), size=16, mode="bilinear"
    )
    mixture = GaussianMixture(0.6 * means.double(), std=0.3)
    return mixture, mixture.denoiser(trueup.process.DiscreteVP.linear())


def random_times(process: trueup.process.NoiseProcess, count: int, seed: int) -> torch.Tensor:
    """Half even in t, half even in lam."""
    share = torch.rand(2, count // 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    top, bottom = float(process.lam(process.t_min)), float(process.lam(process.t_max))
    even_in_t = process.t_min + share[0] * (process.t_max - process.t_min)
    even_in_lam = process.t_of_lam(bottom + share[1] * (top - bottom))
    return torch.unique(process.snap(torch.cat([even_in_t, even_in_lam])))


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--images", type=int, nargs="+", default=[20, 50, 200])
    p.add_argument("--repeats", type=int, default=6)
    p.add_argument("--times", type=int, default=60, help="random times of the scan")
    p.add_argument("--levels", type=float, nargs="+", help="levels to measure (default: all of the process)")
    options = p.parse_args()
    images = load_images(options)
    cases = [(path, load_model(path, options), None) for path in options.model]
    mixture, exact = exact_model()
    cases.append(("exact", exact, mixture))
    results = {}
    head = ["model", "images", "family", "where", "harmed", "worst", "of its loss"]
    rows = [[*head, "total gain, worst and mean set"]]
    for name, denoiser, source in cases:
        need = max(options.images) * options.repeats
        data = images if source is None else source.sample(need + options.held_out, seed=1)
        unseen = data[need : need + options.held_out]
        default = default_levels(denoiser.process)
        where = {"levels": default if options.levels is None else torch.tensor(options.levels).double()}
        where["random times"] = random_times(denoiser.process, options.times, seed=1)
        held_out = {
            place: measure(denoiser, unseen, options, levels=t, seed=1000) for place, t in where.items()
        }
        for count in options.images:
            fits = {"shift": [], "spectral": []}
            for repeat in range(options.repeats):
                part = data[repeat * count : (repeat + 1) * count]
                moments = measure(denoiser, part, options, levels=where["levels"], seed=repeat)
                for family, kept in fits.items():
                    kept.append(fit(moments, family=family).correction)
            for family, corrections in fits.items():
                for place, truth in held_out.items():
                    found = [gains(truth, correction.at(truth.lam)) for correction in corrections]
                    gain, error = (torch.stack([pair[i] for pair in found]) for i in (0, 1))  # (repeats, L)
                    loss = truth.second[:, :, :, 0].sum((0, 1, 3, 4)) / truth.rows.sum((0, 1))
                    harmed = int((gain < -3 * error).sum())
                    worst = divmod(int((gain / loss).argmin()), len(loss))
                    value, share = float(gain[worst]), float((gain / loss)[worst])
                    totals = gain.sum(1)
                    rows.append(
                        [name, str(count), family, place, f"{harmed} of {gain.numel()}"]
                        + [f"{value:.3f} (t={float(where[place][worst[1]]):g})", f"{100 * share:.3f}%"]
                        + [f"{float(totals.min()):.2f}, {float(totals.mean()):.2f}"]
                    )
                    results[f"{name} {count} {family} {place}"] = {
                        "harmed": harmed,
                        "worst": value,
                        "t": where[place].tolist(),
                        "gain": gain.tolist(),
                    }
                    print(" ".join(rows[-1]), flush=True)
    print()
    print(table(rows))
    finish(options, results)


if __name__ == "__main__":
    main()
