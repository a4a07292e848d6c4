"""What fine-tuning without EMA and int8 weights do to a network, and what calibrating takes back.

    python benchmarks/drift.py --model models/cifar10-small/ema --data cifar10.npy --test cifar10-test.npy \
        --half --out drift.json
    python benchmarks/drift.py ... --dry --device cpu --steps 3 --samples 16 --images 24

finetune: Adam at a constant rate on the brighter half of the images (above their median of mean brightness),
raw last weights, no EMA; calibrated with images of that half, and compared with the brighter half of the test
images. quantise: weights of every convolution and linear layer rounded to a symmetric grid of so many bits,
with one scale a tensor (the naive way) or one an output channel; "and activations": inputs of these layers
too, one scale a tensor, by their largest magnitude in the batch. Rounded values are kept as floats: what is
measured is the rounding. Calibrated with data, and with the full-precision original's own samples.

Of each network: the uncalibration score (bits/dim that calibrating gains of the likelihood bound), Fréchet
distance (EfficientNet-lite0 features) and W1 of mean colour (0..255) of samples before and after, by DDIM in
20 evaluations, and in 8 (before: UniPC, after: the solver fitted to the calibrated network), from the same
noise. Of quantised ones also how far their eps is from the original's, on images that made no calibration:
mean square over pixels and levels, before and after (least squares). Data also correct what the original
gets wrong, and so lead away from it.
"""

from __future__ import annotations

import copy
import time

import numpy as np
import torch
from torch import nn

import trueup
from trueup.estimate import fit, measure
from trueup.fitting import fit_solver, judge
from trueup.sampling import generate

from common import Quality, change, comparison_parser, finish, load_model, numbers, plus_minus, table

HEAD = ["network", "calibrated with", "uncalibration score, bits/dim", "sampler", "FD", "W1 of colour"]
SCHEMES = {  # name: bits, one scale an output channel, activations too
    "int8 by tensor": (8, False, False),
    "int8 by channel": (8, True, False),
    "int8 by tensor, and activations": (8, False, True),
    "int4 by channel": (4, True, False),
}


def brighter(images: np.ndarray, middle: float | None = None) -> tuple[np.ndarray, float]:
    """The images above a mean brightness, by default their median."""
    level = images.reshape(len(images), -1).mean(1)
    middle = float(np.median(level)) if middle is None else middle
    return images[level > middle], middle


def pixels(images: np.ndarray) -> torch.Tensor:
    """(B, H, W) or (B, H, W, C) as (B, C, H, W)."""
    found = torch.from_numpy(images)
    return found[:, None] if found.dim() == 3 else found.permute(0, 3, 1, 2)


def levels(options) -> list[float] | None:
    return [0, 500, 999] if options.dry else None


def tuned(denoiser, images: np.ndarray, options) -> float:
    """Train the network on the images; returns the last hundred steps' mean loss."""
    network, device, process = denoiser.network.float().train(), denoiser.device, denoiser.process
    x0 = pixels(images).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=options.rate)
    generator = torch.Generator(device).manual_seed(0)
    losses = torch.zeros(options.steps, device=device)
    autocast = torch.autocast(denoiser.device.type, torch.bfloat16, enabled=device.type == "cuda")
    for step in range(options.steps):
        index = torch.randint(len(x0), (options.train_batch,), generator=generator, device=device)
        clean = x0[index].float() / 127.5 - 1
        flip = torch.rand(len(clean), 1, 1, 1, generator=generator, device=device) < 0.5
        clean = torch.where(flip, clean.flip(-1), clean)
        t = torch.randint(1000, (len(clean),), generator=generator, device=device)
        eps = torch.randn(clean.shape, generator=generator, device=device)
        alpha, sigma = process.scales(t, clean)
        with autocast:
            found = network(alpha * clean + sigma * eps, t).sample
        loss = (found.float() - eps).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses[step] = loss.detach()
    network.eval()
    if options.half:
        network.half().to(memory_format=torch.channels_last)
    return float(losses[-100:].mean())


def rounded(x: torch.Tensor, bits: int, by_channel: bool = False) -> torch.Tensor:
    """The nearest points of a symmetric grid of so many bits."""
    wide, top = x.float(), 2 ** (bits - 1) - 1
    largest = (
        wide.flatten(1).abs().amax(1).reshape(-1, *[1] * (x.dim() - 1)) if by_channel else wide.abs().amax()
    )
    scale = (largest / top).clamp_min(1e-12)
    return ((wide / scale).round().clamp(-top, top) * scale).to(x.dtype)


@torch.no_grad()
def quantised(network: nn.Module, bits: int, by_channel: bool, activations: bool) -> None:
    """Round a network's weights, and its layers' inputs as they come."""
    for module in network.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            module.weight.copy_(rounded(module.weight, bits, by_channel))
            if activations:
                module.register_forward_pre_hook(lambda _, args: (rounded(args[0], bits), *args[1:]))


class Row:
    """The measures of one network, printed as they come."""

    def __init__(self, quality: Quality, options, results: dict):
        self.quality, self.options, self.results, self.rows = quality, options, results, [HEAD]

    def __call__(self, name: str, denoiser, data, made_of: str):
        """Calibrate with `data`, draw before and after; the calibration."""
        started = time.monotonic()
        cal = fit(measure(denoiser, data, levels=levels(self.options), trust=True, progress=False))
        if not self.options.dry:
            cal = judge(denoiser, cal, progress=False)
            how = {"trajectories": self.options.trajectories, "progress": False}
            cal = fit_solver(denoiser, cal, nfe=self.options.nfe, **how)
        score = cal.uncalibration
        entry = {
            "uncalibration": numbers(score),
            "gains": cal.gains,
            "verdict": cal.verdict(),
            "samplers": {},
        }
        self.results.setdefault(name, {})[made_of] = entry
        nfe = self.options.nfe
        for sampler, before, after, evaluations in (
            ("DDIM, 20", "ddim", "ddim", 20),
            (f"UniPC -> fitted, {nfe}", "unipc", "unipc" if self.options.dry else "fitted", nfe),
        ):
            found = [
                self.quality(denoiser, c, solver, evaluations, self.options.samples, self.options.batch_size)
                for c, solver in ((None, before), (cal, after))
            ]
            cells = []
            entry["samplers"][sampler] = {}
            for k, name_of in enumerate(("FD", "W1")):
                first, second = found[0][k], found[1][k]
                entry["samplers"][sampler][name_of] = [numbers(first), numbers(second)]
                cells.append(f"{first.value:.3g} -> {second.value:.3g} ({change(first, second)})")
            self.rows.append([name, made_of, plus_minus(score), sampler, *cells])
            print(" | ".join(self.rows[-1]), flush=True)
        entry["seconds"] = time.monotonic() - started
        finish(self.options, self.options.everything)
        return cal


@torch.inference_mode()
def apart(ours, original, images: np.ndarray, cal, options) -> float:
    """Mean square of the difference between two networks' eps over pixels and levels, on noised images."""
    device, process = ours.device, ours.process
    x0 = pixels(images).to(device).float() / 127.5 - 1
    eps = torch.randn(x0.shape, generator=torch.Generator(device).manual_seed(3), device=device)
    times = process.snap(
        torch.linspace(process.t_min, process.t_max, 3 if options.dry else 25, dtype=torch.float64)
    )

    def difference() -> float:
        total = 0.0
        for t in times:
            x_t = process.noised(x0, eps, t)
            total += float((ours.eps(x_t, t) - original.eps(x_t, t)).square().mean())
        return total / len(times)

    if cal is None:
        return difference()
    with trueup.attach(ours, cal, gains="least-squares"):
        return difference()


def finetune(path: str, options, results: dict) -> list[list[str]]:
    denoiser = load_model(path, options)
    images, middle = brighter(np.load(options.data))
    test, _ = brighter(np.load(options.test), middle)
    row = Row(Quality(denoiser, test), options, results)
    kept = trueup.Images(images[: options.images])
    row("before the fine-tune", denoiser, kept, f"{options.images} images of the brighter half")
    started = time.monotonic()
    results["training loss"] = tuned(denoiser, images[options.images :], options)
    results["training seconds"] = time.monotonic() - started
    print(
        f"{options.steps} steps in {results['training seconds']:.0f} s, loss {results['training loss']:.4f}"
    )
    row(f"after {options.steps} steps", denoiser, kept, f"{options.images} images of the brighter half")
    return row.rows


def quantise(path: str, options, results: dict) -> list[list[str]]:
    original, images = load_model(path, options), np.load(options.data)
    row = Row(Quality(original, np.load(options.test)), options, results)
    data = trueup.Images(images[: options.images])
    row("full precision", original, data, f"{options.images} images")
    own = generate(original, options.images, nfe=50)
    shown = images[options.images :][: options.images]
    for name in options.scheme or SCHEMES:
        denoiser = load_model(path, options)
        quantised(denoiser.network, *SCHEMES[name])
        assert denoiser.fingerprint() != original.fingerprint()
        results.setdefault(name, {})["apart from the original"] = distances = {}
        distances["uncalibrated"] = apart(denoiser, original, shown, None, options)
        for made_of, source in ((f"{options.images} images", data), ("the original's samples", own)):
            cal = row(name, denoiser, copy.copy(source), made_of)
            distances[made_of] = apart(denoiser, original, shown, cal, options)
        print(f"{name}: eps apart from the original's by", distances, flush=True)
    return row.rows


PARTS = {"finetune": finetune, "quantise": quantise}


def main() -> None:
    p = comparison_parser(__doc__)
    p.add_argument("--part", choices=list(PARTS), nargs="+", default=list(PARTS))
    p.add_argument("--images", type=int, default=200, help="behind each calibration")
    p.add_argument("--steps", type=int, default=1500, help="of the fine-tune")
    p.add_argument("--train-batch", type=int, default=128)
    p.add_argument("--rate", type=float, default=2e-4, help="Adam's")
    p.add_argument("--scheme", choices=list(SCHEMES), nargs="+", help="only these")
    p.add_argument("--nfe", type=int, default=8, help="of the fitted solver")
    p.add_argument("--trajectories", type=int, default=128)
    p.add_argument("--dry", action="store_true", help="three levels, no judging, no fitted solver")
    options = p.parse_args()
    options.everything = everything = {}
    for path in options.model:
        for part in options.part:
            results = everything.setdefault(f"{path} {part}", {})
            rows = PARTS[part](path, options, results)
            print(f"\n{path}, {part}: {options.samples} samples\n\n{table(rows)}\n", flush=True)
            finish(options, everything)


if __name__ == "__main__":
    main()
