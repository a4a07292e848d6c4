"""Corrections by class and by embedding beside one for all conditions, on images and conditions held out.

    python benchmarks/conditions.py --model models/fashion-cfg --data fashion.npy \
        --labels fashion_labels.npy --part loss samples \
        --test fashion-test.npy --test-labels fashion-test-labels.npy
    python benchmarks/conditions.py --model models/fashion-text --data fashion.npy \
        --labels captions.npy --part loss

loss: what each correction takes off the likelihood bound's diffusion term on images it was not made from, and
once more where some classes have 5 images only; embeddings are held out, too. samples: Fréchet distance
(EfficientNet-lite0) and, class by class, the Wasserstein distance of mean brightness, at guidance 1 and 3.
Networks are those of benchmarks/networks.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

import trueup
from trueup.estimate import classes_of, fit, measure
from trueup.estimate.conditions import keys
from trueup.evaluation import build_reference
from trueup.fitting import judge, labels_of
from trueup.metrics import GaussianStatistics, colours, frechet, load_features, wasserstein
from trueup.sampling import image_maker, sample_batches
from trueup.statistics import Number, trapezoid_weights

from common import comparison_parser, finish, numbers, plus_minus, table
from networks import load

RARE = 5  # images of every third class in the second table


def bound(denoiser, calibration, images, labels, options) -> torch.Tensor:
    """Nats of the likelihood bound's diffusion term of every image, (n,), with what is attached."""
    process = denoiser.process
    levels = torch.linspace(0, 1, options.levels, dtype=torch.float64)
    lam = torch.lerp(process.lam(process.t_max), process.lam(process.t_min), levels)
    t = torch.unique(process.snap(process.t_of_lam(lam)))
    weights = trapezoid_weights(process.lam(t))
    generator = torch.Generator(denoiser.device).manual_seed(1)
    total = torch.zeros(len(images), dtype=torch.float64)
    x0 = torch.from_numpy(images).permute(0, 3, 1, 2).to(denoiser.device).float() / 127.5 - 1
    with trueup.attach(denoiser, calibration, gains="least-squares"), torch.inference_mode():
        for time, weight in zip(t, weights, strict=True):
            for part in torch.arange(len(images)).split(options.batch_size):
                own = x0[part.to(denoiser.device)]
                eps = torch.randn(own.shape, generator=generator, device=denoiser.device)
                found = denoiser.eps(process.noised(own, eps, time), time, labels[part].to(denoiser.device))
                loss = (found - eps).square().flatten(1).sum(1)
                total[part] += float(weight) * loss.double().cpu()  # equation 26
    return total


def forms(calibration) -> dict:
    """Nothing, the correction of all conditions, and the whole."""
    nothing = calibration.correction.with_gains("none")
    pooled = replace(calibration, classes=(), conditions=None)
    return {"none": replace(pooled, correction=nothing), "pooled": pooled, "by condition": calibration}


def loss(denoiser, images, labels, options, entry: dict) -> None:
    by_class = not labels.is_floating_point()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    out, rest = order[: options.held_out], order[options.held_out :]
    if not by_class:  # conditions that occur in what is held out are not in what is fitted
        said = keys(labels)
        rest = rest[~torch.isin(said[rest], said[out])]
    sets = {"all": rest[: options.images]}
    if by_class:
        rare = labels[rest] % 3 == 0
        few = torch.cat([rest[labels[rest] == y][:RARE] for y in labels.unique().tolist() if y % 3 == 0])
        sets[f"{RARE} images of classes 0, 3, 6, 9"] = torch.cat([rest[~rare][: options.images], few])
    for name, chosen in sets.items():
        data = trueup.Images(images[chosen.numpy()], labels=labels[chosen], count=None)
        kind = {"classes": classes_of(data, denoiser)} if by_class else {"per_embedding": True}
        moments = measure(denoiser, data, trust=True, progress=False, **kind)
        calibration = fit(moments)
        print(calibration.summary().split("bits/dim of the bound")[-1], flush=True)
        found = {
            form: bound(denoiser, cal, images[out.numpy()], labels[out], options)
            for form, cal in forms(calibration).items()
        }
        rows = [["condition", "images", "pooled over none, nats", "by condition over pooled, nats"]]
        groups = {"all": torch.ones(len(out), dtype=torch.bool)}
        if by_class:
            groups |= {f"class {y}": labels[out] == y for y in labels.unique().tolist()}
        for group_name, mask in groups.items():
            gains = [
                Number.mean((found[a] - found[b])[mask])
                for a, b in (("none", "pooled"), ("pooled", "by condition"))
            ]
            entry[f"{name}, {group_name}"] = [numbers(gain) for gain in gains]
            rows.append([group_name, str(int(mask.sum())), *map(plus_minus, gains)])
        print(f"\n{name}: {len(chosen)} images\n\n{table(rows)}", flush=True)


def samples(denoiser, images, labels, options, entry: dict) -> None:
    data = trueup.Images(images[: options.images], labels=labels[: options.images])
    moments = measure(denoiser, data, trust=True, progress=False, classes=classes_of(data, denoiser))
    calibration = judge(denoiser, fit(moments), labels=labels_of(data, denoiser), progress=False)
    test, test_labels = np.load(options.test), torch.from_numpy(np.load(options.test_labels)).long()
    features = load_features("efficientnet", device=denoiser.device)
    reference = build_reference(trueup.Images(test), denoiser, features, progress=False).pooled
    scatter = reference.covariance * (reference.count - 1)
    on_device = (value.to(denoiser.device) for value in (reference.mean, scatter))
    reference = GaussianStatistics(*on_device, reference.count)
    brightness = {int(y): colours(_as_images(test[(test_labels == y).numpy()])) for y in test_labels.unique()}
    drawn_labels = torch.arange(10).repeat(options.samples // 10)
    to_images, rows = image_maker(denoiser), [["guidance", "correction", "Fréchet distance", "brightness W1"]]
    for guidance in (1.0, 3.0):
        for form, cal in forms(calibration).items():
            parts, seen = [], []
            for _, x in sample_batches(
                denoiser,
                len(drawn_labels),
                solver="dpm-solver-3",
                nfe=options.nfe,
                calibration=cal,
                labels=drawn_labels,
                guidance=guidance,
                progress=False,
            ):
                shown = to_images(x)
                parts.append(features(shown).pooled)
                seen.append(colours(shown))
            distance, colour = frechet(torch.cat(parts), reference), torch.cat(seen)
            by_class = [
                wasserstein(colour[drawn_labels[: len(colour)] == y], brightness[y]).value for y in range(10)
            ]
            entry[f"{guidance:g}, {form}"] = {"frechet": numbers(distance), "brightness": by_class}
            rows.append([f"{guidance:g}", form, plus_minus(distance), f"{np.mean(by_class):.2f}"])
            print(rows[-1], flush=True)
    print(f"\n{options.samples} samples\n\n{table(rows)}", flush=True)


def _as_images(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).permute(0, 3, 1, 2)


def main() -> None:
    p = comparison_parser(__doc__)
    for action in p._actions:
        action.required = action.required and action.dest != "test"
    p.add_argument("--labels", required=True, metavar="FILE", help=".npy of classes or embeddings")
    p.add_argument("--test-labels", metavar="FILE", help=".npy of classes of the test images")
    p.add_argument("--part", choices=["loss", "samples"], nargs="+", default=["loss"])
    p.add_argument("--images", type=int, default=2000, help="behind the calibrations")
    p.add_argument("--levels", type=int, default=25)
    p.add_argument("--nfe", type=int, default=30, help="evaluations of a sample")
    options = p.parse_args()
    results: dict = {}
    for path in options.model:
        denoiser = load(path, options.device, options.batch_size)
        if options.half:
            denoiser.network.half().to(memory_format=torch.channels_last)
        images, labels = np.load(options.data), torch.from_numpy(np.load(options.labels))
        labels = labels if labels.is_floating_point() else labels.long()
        for part in options.part:
            entry = results.setdefault(f"{path} {part}", {})
            {"loss": loss, "samples": samples}[part](denoiser, images, labels, options, entry)
            finish(options, results)


if __name__ == "__main__":
    main()
