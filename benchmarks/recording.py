"""What recording beside training finds, how soon, and what it costs.

    python benchmarks/recording.py figure3 --model DIR --data cifar10.npy --out out
    python benchmarks/recording.py overhead --out out
    python benchmarks/recording.py loop --data cifar10.npy --minutes 2.5 --out out

figure3 is the paper's: batches as in training stream through a trained network, and the mean output recorded
so far is compared with that of many more evaluations, at several t: h_phi as published, h_phi of the paired
residual, the plain mean at the nearest level, and the closed form. overhead times training steps with and
without `update`, in turn. loop trains a network with recorders on the raw weights and on their average, and
compares the latter with measuring the final average on other noise. Each writes OUT/recording-NAME.json, the
first and last a picture too.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import trueup
from trueup.estimate import default_levels, fit, measure
from trueup.parametrization import Parametrization
from trueup.process import DiscreteVP
from trueup.recording import ShallowNetwork

from common import load_model, median, numbers, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train import build

PROCESS, NOISE = DiscreteVP.linear(), Parametrization("noise")
NAMES = {
    "published": "h_phi as published",
    "paired": "h_phi, paired",
    "mean": "mean of the residual",
    "closed": "closed form (Recorder)",
}


class Stream:
    """Batches as a training loop draws them, on a device."""

    def __init__(self, path: str, device, process=PROCESS, prediction=NOISE, seed: int = 0):
        images = torch.from_numpy(np.load(path))
        self.images = images.permute(0, 3, 1, 2).to(device)  # (N, C, H, W)
        self.shape, self.prediction, self.device = tuple(self.images.shape[1:]), prediction, device
        times = torch.arange(process.t_max + 1, dtype=torch.float64)
        self.scales = torch.stack([process.alpha(times), process.sigma(times)]).float().to(device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def draw(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x_t, t, the target, and the images' places."""
        how = {"generator": self.generator, "device": self.device}
        index = torch.randint(len(self.images), (count,), **how)
        t = torch.randint(self.scales.shape[1], (count,), **how)
        x0 = self.images[index].float() / 127.5 - 1
        eps = torch.randn(x0.shape, **how)
        alpha, sigma = self.scales[:, t].reshape(2, -1, 1, 1, 1)
        return alpha * x0 + sigma * eps, t, self.prediction.target(x0, eps, alpha, sigma), index


def write(options: argparse.Namespace, name: str, results: dict) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"recording-{name}.json").write_text(json.dumps(results, indent=1))


@torch.no_grad()
def figure3(options: argparse.Namespace) -> None:
    denoiser = load_model(options.model, options)
    process, device = denoiser.process, denoiser.device
    stream = Stream(options.data, device, process, denoiser.parametrization)
    times = default_levels(process)[2::4]
    data = trueup.Images(np.load(options.data, mmap_mode="r"), count=options.truth, seed=1)
    how = {"levels": times, "seed": 1, "trust": True, "progress": False}
    known = fit(measure(denoiser, data, **how), family="shift", estimator="regressed")
    truth, noise = known.correction.b, known.evidence.shift_se.square()  # (T, C, K), (T,)
    bands, lam = known.correction.bands, known.correction.lam

    about = {"prediction": denoiser.parametrization, "shape": denoiser.shape}
    recorder = trueup.Recorder(process, **about, half_life=None)
    shallow = {
        name: ShallowNetwork(
            process, **about, paired=name == "paired", learning_rate=options.learning_rate, device=device
        )
        for name in ("published", "paired")
    }

    def found() -> dict[str, Tensor]:
        """DCT of the mean residual at `times`, (T, C, K), by each."""
        maps = {name: bands.dct(h.eta(times).cpu().double()).flatten(2) for name, h in shallow.items()}
        moments = recorder.moments().used()
        at = torch.tensor([int((moments.t - t).abs().argmin()) for t in times])
        rows = moments.rows[0].sum(0)[at].clamp_min(1)
        maps["mean"] = moments.first[0].sum(0)[at, 0] / rows[:, None, None]
        maps["closed"] = recorder.calibration(family="shift").correction.at(lam).b
        return maps

    checkpoints = [2**k for k in range(30) if 2**k * options.batch_size / 64 >= 4 and 2**k < options.steps]
    checkpoints = [*checkpoints, options.steps]
    seen, curves = [], {name: [] for name in NAMES}
    denoiser.network.eval()
    for step in range(1, options.steps + 1):
        x_t, t, target, index = stream.draw(options.batch_size)
        output = denoiser.predict(x_t, t)
        recorder.update(x_t, t, output, target, index=index)
        for h in shallow.values():
            h.update(x_t, t, output, target)
        if step in checkpoints:
            seen.append(step * options.batch_size)
            for name, value in found().items():
                error = (value - truth).square().sum((1, 2)) - noise  # of the estimate alone
                curves[name].append((error / math.prod(denoiser.shape)).tolist())
            print(f"{seen[-1]:>9,} samples", {k: f"{sum(v[-1]) / len(times):.2e}" for k, v in curves.items()})
    size = (truth.square().sum((1, 2)) - noise) / math.prod(denoiser.shape)
    floor = (noise / math.prod(denoiser.shape)).tolist()
    errors = {name: np.array(curve) for name, curve in curves.items()}  # (checkpoints, T)
    fewer = {
        name: [needed(seen, errors[name][:, i], errors["published"][:, i]) for i in range(len(times))]
        for name in ("paired", "mean", "closed")
    }
    heads = [f"error, {word}" for word in NAMES.values()]
    rows = [["t", "|eta|^2 per pixel", *heads, "samples, published / closed"]]
    for i, t in enumerate(times.tolist()):
        last = [f"{curves[name][-1][i]:.2e}" for name in NAMES]
        rows.append([f"{t:g}", f"{float(size[i]):.2e}", *last, f"{fewer['closed'][i]:.0f}"])
    print(table(rows))
    for name, ratios in fewer.items():
        print(f"{NAMES[name]}: {np.exp(np.mean(np.log(ratios))):.1f} times fewer samples than as published")
    results = {"t": times.tolist(), "samples": seen, "error": curves, "size": size.tolist(), "floor": floor}
    write(options, "figure3", {**results, "fewer": fewer, "model": options.model})
    draw_figure3(results, options.out / "recording-figure3.png")


def needed(seen: list[int], ours: np.ndarray, theirs: np.ndarray) -> float:
    """How many times fewer samples reach the least error of `theirs`; at least, if the first suffice."""
    best = int(np.argmin(theirs))
    goal = max(theirs[best], 1e-30)
    reached = np.flatnonzero(ours <= goal)
    if not len(reached):
        return seen[best] / seen[-1]
    first = int(reached[0])
    if first == 0 or ours[first] <= 0 or ours[first - 1] <= 0:
        return seen[best] / seen[first]
    x, y = np.log(seen[first - 1 : first + 1]), np.log(ours[first - 1 : first + 1])
    return seen[best] / float(np.exp(np.interp(np.log(goal), y[::-1], x[::-1])))


def draw_figure3(results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    count = len(results["t"])
    figure, axes = plt.subplots(1, count, figsize=(2.6 * count, 3), sharey=True, layout="constrained")
    for i, (axis, t) in enumerate(zip(np.atleast_1d(axes), results["t"], strict=True)):
        for name, word in NAMES.items():
            error = np.array(results["error"][name])[:, i]
            axis.loglog(results["samples"], np.where(error > 0, error, np.nan), marker=".", label=word)
        axis.axhline(results["size"][i], color="grey", linewidth=0.8, linestyle=":")
        axis.set_title(f"t = {t:g}", fontsize=9)
        axis.set_xlabel("samples seen, at all t")
    np.atleast_1d(axes)[0].set_ylabel("squared error of the mean output, per pixel")
    np.atleast_1d(axes)[0].legend(fontsize=6)
    figure.savefig(path, dpi=150)


class Training:
    """A plain training loop: a step gives what a recorder takes."""

    def __init__(self, options: argparse.Namespace, shape: tuple[int, ...], draw):
        torch.manual_seed(options.seed)
        self.device, self.draw, self.decay = torch.device(options.device), draw, options.ema
        self.half = self.device.type == "cuda"
        self.network = build(shape[1], shape[0], options.width, dropout=0.0).to(self.device).train()
        self.ema = copy.deepcopy(self.network).eval().requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=options.learning_rate)
        self.steps = 0

    def step(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x_t, t, output, target, index of the batch it was trained on."""
        x_t, t, eps, index = self.draw()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            output = self.network(x_t, t).sample
            loss = (output.float() - eps).square().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        keep = min(self.decay, (1 + self.steps) / (10 + self.steps))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.ema.parameters()), list(self.network.parameters()), 1 - keep)
        self.steps += 1
        return x_t, t, output, eps, index


def overhead(options: argparse.Namespace) -> None:
    shape, device = (3, options.size, options.size), torch.device(options.device)
    x_t, eps = torch.randn(2, options.batch_size, *shape, device=device)
    t = torch.randint(1000, (options.batch_size,), device=device)
    training = Training(
        options, shape, lambda: (x_t, t, eps, torch.arange(options.batch_size, device=device))
    )
    recorder = trueup.Recorder(PROCESS, "noise", shape)

    def timed(record: bool) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(options.steps):
            made = training.step()
            if record:
                recorder.update(*made[:4], index=made[4])
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / options.steps

    for record in (False, True):
        timed(record)  # allocations, and whatever is compiled
    pairs = []
    for k in range(options.rounds):
        both = [timed(record) for record in ((False, True) if k % 2 else (True, False))]
        pairs.append(both if k % 2 else both[::-1])
    bare, recorded = torch.tensor(pairs, dtype=torch.float64).T
    (ratio, low, high), least = median((recorded / bare).tolist()), float(recorded.min() / bare.min())
    print(f"a step takes {1e3 * float(bare.median()):.2f} ms")
    print(f"with update() {ratio:.4f} ({low:.4f} to {high:.4f}) times as long, by the median of the rounds")
    print(f"least of each: {least:.4f}; {options.rounds} rounds of {options.steps} steps each, in turn")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    results = {"seconds": float(bare.median()), "ratio": [ratio, low, high], "least": least, "device": where}
    write(options, "overhead", {**results, "batch_size": options.batch_size, "width": options.width})


def loop(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    stream = Stream(options.data, device, seed=options.seed)
    training = Training(options, stream.shape, lambda: stream.draw(options.batch_size))
    about = {"prediction": "noise", "shape": stream.shape, "half_life": options.half_life}
    raw = trueup.Recorder(PROCESS, **about, model="raw")
    ema = trueup.Recorder(PROCESS, **about, every=options.every, model="ema")
    end, history = time.monotonic() + 60 * options.minutes, []
    while training.steps < options.steps and time.monotonic() < end:
        x_t, t, output, eps, index = training.step()
        raw.update(x_t, t, output, eps, index=index)
        ema.observe(training.ema, x_t, t, eps, index=index)
        if training.steps % options.log_every == 0:
            loss = float((output.detach().float() - eps).square().mean())
            now = {"raw": numbers(raw.uncalibration()), "ema": numbers(ema.uncalibration())}
            history.append({"step": training.steps, "loss": loss, **now})
            print(f"step {training.steps}: loss {loss:.4f}, raw {raw.log()}, ema {ema.log()}", flush=True)
    training.network.eval()
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    ema.calibration(training.ema).save(options.out / "recording-ema.safetensors")
    raw.calibration(training.network).save(options.out / "recording-raw.safetensors")
    seconds = time.monotonic() - start

    how = {"batch_size": options.evaluate_at_once, "data_range": (-1.0, 1.0)}
    call = lambda x_t, t: training.ema(x_t, t).sample  # noqa: E731
    denoiser = trueup.Denoiser(training.ema, PROCESS, "noise", stream.shape, call=call, **how)
    data = trueup.Images(np.load(options.data, mmap_mode="r"), count=options.post_hoc, seed=3)
    after = measure(denoiser, data, seed=11, trust=True, progress=False)
    one, other = (fit(m, family="shift", estimator="regressed") for m in (ema.moments(), after))
    at = [int((other.t - t).abs().argmin()) for t in one.t]
    difference = (one.correction.b - other.correction.b[at]).square().sum((1, 2)).sqrt()
    error = (one.evidence.shift_se.square() + other.evidence.shift_se[at].square()).sqrt()
    size = other.evidence.eta2.value[at].clamp_min(0).sqrt()
    ratios = difference / error
    rows = [["t", "|eta|, after", "|difference|", "its standard error", "ratio"]]
    for i, t in enumerate(one.t.tolist()):
        values = (size[i], difference[i], error[i])
        rows.append([f"{t:g}", *(f"{float(v):.4f}" for v in values), f"{float(ratios[i]):.2f}"])
    print(table(rows))
    share = float((ratios <= 2).double().mean())
    scores = {"recorded": ema.uncalibration(), "after": fit(after).uncalibration}
    print(f"within 2 standard errors at {100 * share:.0f}% of {len(ratios)} levels")
    print(f"uncalibration, bits/dim: recorded {scores['recorded']}, measured afterwards {scores['after']}")
    results = {
        "history": history,
        "t": one.t.tolist(),
        "ratio": ratios.tolist(),
        "difference": difference.tolist(),
        "error": error.tolist(),
        "size": size.tolist(),
        "within": share,
        "uncalibration": {name: numbers(score) for name, score in scores.items()},
        "steps": training.steps,
        "fit_seconds": seconds / 2,
        "settings": {n: v for n, v in vars(options).items() if isinstance(v, (int, float, str))},
    }
    write(options, "loop", results)
    draw_loop(history, options.out / "recording-loop.png")


def draw_loop(history: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for name, word in (("raw", "raw weights"), ("ema", "their moving average")):
        value, low, high = np.array([entry[name] for entry in history], dtype=float).reshape(-1, 3).T
        steps = [entry["step"] for entry in history]
        (line,) = axis.plot(steps, value, label=word)
        axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.2)
    axis.set_yscale("symlog", linthresh=1e-3)
    axis.set_xlabel("training steps")
    axis.set_ylabel("uncalibration, bits/dim")
    axis.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    gpu = torch.cuda.is_available()
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--out", type=Path, default=Path("out"), help="folder for numbers and pictures")
    shared.add_argument("--device", default="cuda" if gpu else "cpu")
    shared.add_argument("--seed", type=int, default=0)
    trained = argparse.ArgumentParser(add_help=False, parents=[shared])
    trained.add_argument("--width", type=int, default=64)
    trained.add_argument("--ema", type=float, default=0.999)
    trained.add_argument("--learning-rate", type=float, default=3e-4)
    trained.add_argument("--batch-size", type=int, default=128)

    q = commands.add_parser("figure3", parents=[shared])
    q.add_argument("--model", required=True, metavar="DIR")
    q.add_argument("--data", required=True, metavar="FILE", help=".npy of uint8 images, (N, H, W, C)")
    q.add_argument("--steps", type=int, default=4000)
    q.add_argument("--batch-size", type=int, default=256)
    q.add_argument("--truth", type=int, default=20_000, help="images the truth is measured on, at each t")
    q.add_argument("--learning-rate", type=float, default=1e-3, help="of h_phi")
    q.add_argument("--beta-schedule", default="linear", help="for directories without a scheduler")
    q.add_argument("--half", action="store_true", help="the network in half precision")
    q.set_defaults(run=figure3)

    q = commands.add_parser("overhead", parents=[trained])
    q.add_argument("--size", type=int, default=32, help="of the images")
    q.add_argument("--steps", type=int, default=16 if gpu else 1, help="timed together")
    q.add_argument("--rounds", type=int, default=40 if gpu else 6)
    q.set_defaults(run=overhead)

    q = commands.add_parser("loop", parents=[trained])
    q.add_argument("--data", required=True, metavar="FILE", help=".npy of uint8 images, (N, H, W, C)")
    q.add_argument("--steps", type=int, default=1_000_000)
    q.add_argument("--minutes", type=float, default=2.0)
    q.add_argument("--half-life", type=float, default=500)
    q.add_argument("--every", type=int, default=4)
    q.add_argument("--log-every", type=int, default=100)
    q.add_argument("--post-hoc", type=int, default=2000, help="images the final average is measured on")
    q.add_argument("--evaluate-at-once", type=int, default=500 if gpu else 50)
    q.set_defaults(run=loop)
    options = p.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
