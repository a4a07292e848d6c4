"""What calibrating and being calibrated cost, as ratios taken in one run.

    python benchmarks/overhead.py --model DIR --data cifar10.npy [--device cuda]
    python benchmarks/overhead.py --model DIR --data cifar10.npy --compiled 50000          # a GPU

Forwards and corrections are timed in turn, so that a drifting machine slows both alike, and the least time of
each is compared: whatever else the machine does only ever adds. The correction is the forward hook itself.

--compiled N: a whole calibration from N images (those of the file, shifted and mirrored until there are so
many) with the network in half precision and compiled, against a bare loop of its calls, timed before, between
and after. How far its moments are from those of the network in single precision, from a tenth of the images
and the same noise, is told in standard errors.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import numpy as np
import torch

import trueup
from trueup.calibration.hook import CorrectOutput
from trueup.denoiser import Denoiser
from trueup.estimate import Moments, default_levels, fit
from trueup.estimate.measuring import add_batch, check_finite, measure
from trueup.images import open_images

from common import finish, load_images, load_model, numbers, parser, table


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.inference_mode()
def forward_ratio(denoiser, cal, batch: int, rounds: int, on_device: bool) -> tuple[float, float]:
    """(bare seconds, 1 + correction / bare) of one forward: the least time of each, taken in turn."""
    x_t = torch.randn(batch, *denoiser.shape, device=denoiser.device)
    t = torch.full((batch,), 400, device=denoiser.device) if on_device else torch.tensor(400)
    network, hook = denoiser.network, CorrectOutput(cal, denoiser.binding())
    output = network(x_t, t)

    def timed(call, repeats: int) -> float:
        start = clock(denoiser.device)
        for _ in range(repeats):
            call()
        return (clock(denoiser.device) - start) / repeats

    inner = 20 if denoiser.device.type == "cuda" else 1
    bare, correction = [], []
    for _ in range(rounds):
        bare.append(timed(lambda: network(x_t, t), inner))
        correction.append(timed(lambda: hook(network, (x_t, t), {}, output), 10 * inner))
    return min(bare), 1 + min(correction) / min(bare)


@torch.inference_mode()
def calibration_ratio(denoiser, images, batch: int, rounds: int) -> float:
    """Bare forward loop's time over the calibration's, for the same evaluations."""
    levels = default_levels(denoiser.process)[:: 5 if denoiser.device.type == "cpu" else 1]
    moments = Moments.empty(denoiser.process, levels, denoiser.shape).to(denoiser.device)
    samples = open_images(images, denoiser)
    x_t = torch.randn(batch, *denoiser.shape, device=denoiser.device)
    bare, calibrating = [], []
    for _ in range(rounds):
        start = clock(denoiser.device)
        for t in levels.repeat(3):
            denoiser.network(x_t, torch.full((batch,), int(t), device=denoiser.device))
        bare.append(clock(denoiser.device) - start)
        start = clock(denoiser.device)
        for loaded in samples.batches(batch, limit=3 * batch):
            check_finite(moments)
            add_batch(moments, denoiser, loaded, seed=0)
        calibrating.append(clock(denoiser.device) - start)
    return min(bare) / min(calibrating)


def many(images: np.ndarray, count: int) -> np.ndarray:
    """So many different pictures: shifted by whole pixels and mirrored, as often as it takes."""
    made = np.empty((count, *images.shape[1:]), images.dtype)
    for k, start in enumerate(range(0, count, len(images))):
        turned = np.roll(images[:, :, ::-1] if k % 2 else images, (k // 2, k // 3), (1, 2))
        made[start : start + len(images)] = turned[: count - start]
    return made


def compiled_rate(denoiser: Denoiser, images: np.ndarray, options: argparse.Namespace) -> None:
    """A calibration's rate over that of the bare compiled network, in half precision, and what that costs."""
    device, batch, few = denoiser.device, options.batch_size, options.compiled // 10
    images, levels = many(images, options.compiled), default_levels(denoiser.process)
    how = {"trust": True, "progress": False}
    network = denoiser.network.eval()
    exact = measure(denoiser, trueup.Images(images[:few]), **how)
    network = torch.compile(network.half().to(memory_format=torch.channels_last), dynamic=False)
    about = (denoiser.process, denoiser.parametrization, denoiser.shape)
    fast = Denoiser(network, *about, batch_size=batch, data_range=denoiser.data_range)
    x_t = torch.randn(batch, *denoiser.shape, device=device).half()
    x_t = x_t.contiguous(memory_format=torch.channels_last)
    times = [torch.full((batch,), int(t), device=device) for t in levels]

    @torch.inference_mode()
    def bare() -> float:
        """Evaluations a second."""
        start, calls = clock(device), max(1, options.compiled // (5 * batch))
        for _ in range(calls):
            for t in times:
                network(x_t, t)
        return calls * len(times) * batch / (clock(device) - start)

    rough = measure(fast, trueup.Images(images[:few]), **how)  # compiles, too
    bare()
    before, found = bare(), []
    for _ in range(options.rounds):
        start = clock(device)
        measured = measure(fast, trueup.Images(images), **how)
        found.append((measured.images * len(times) / (clock(device) - start), before, after := bare()))
        before = after
    ratios = sorted(2 * rate / (one + other) for rate, one, other in found)
    one, other = (fit(m, family="shift", estimator="regressed") for m in (exact, rough))
    off = (one.correction.b - other.correction.b).square().sum((1, 2)).sqrt() / one.evidence.shift_se
    scores = [fit(m).uncalibration for m in (exact, rough)]
    print(
        f"calibration, {options.compiled:,} images at {len(times)} levels, batches of {batch}: "
        + "; ".join(
            f"{rate:,.0f} evaluations a second (bare {a:,.0f} before, {b:,.0f} after)" for rate, a, b in found
        )
    )
    print(f"calibration rate / bare compiled loop: {', '.join(f'{r:.3f}' for r in ratios)}")
    print(
        f"half from single precision, {few:,} images: eta off by {float(off.max()):.2f} standard errors at "
        f"most, {float(off.median()):.2f} in the middle; uncalibration {scores[1]} and {scores[0]} bits/dim"
    )
    scores = [numbers(s) for s in scores]
    finish(options, {"rates": found, "ratios": ratios, "off": off.tolist(), "uncalibration": scores})


def cpu_seconds(code: list[str], repeats: int = 7) -> float:
    """Least CPU time of a fresh interpreter."""
    times = []
    for _ in range(repeats):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"import resource,subprocess;subprocess.run({code!r},check=True,"
                "stdout=subprocess.DEVNULL);u=resource.getrusage(resource.RUSAGE_CHILDREN);"
                "print(u.ru_utime+u.ru_stime)",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        times.append(float(done.stdout))
    return min(times)


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--rounds", type=int, default=20)
    p.add_argument("--compiled", type=int, metavar="N", help="the rate of a compiled network, N images")
    options = p.parse_args()
    images = load_images(options)
    denoiser = load_model(options.model[0], options)
    if options.compiled:
        compiled_rate(denoiser, images, options)
        return
    denoiser.network.eval()
    few, fewer = (trueup.Images(images, count=count) for count in (24, 8))
    cal = trueup.calibrate(denoiser, few, estimator="regressed", levels=range(0, 1000, 37))
    shift = trueup.calibrate(denoiser, fewer, family="shift", estimator="paired", levels=[0, 500, 999])
    rows = [["what", "ratio"]]
    where = f"{options.device}, batch 16"
    for name, fitted in (("spectral", cal), ("shift", shift)):
        for on_device in (False, True) if options.device != "cpu" else (False,):
            bare, ratio = forward_ratio(denoiser, fitted, 16, options.rounds, on_device)
            times = ", t on the device" if on_device else ""
            rows.append(
                [f"{name} attached / bare forward ({where}{times}, {1e3 * bare:.1f} ms)", f"{ratio:.4f}"]
            )
    for batch in (16, 64, 256) if options.device != "cpu" else (16,):
        ratio = calibration_ratio(denoiser, images, batch, max(3, options.rounds // 3))
        rows.append(
            [f"calibration rate / bare forward loop ({options.device}, batch {batch})", f"{ratio:.3f}"]
        )
    if options.device != "cpu":
        print(table(rows))  # imports are a matter of the CPU
        return
    bare_import = cpu_seconds([sys.executable, "-c", "import torch, trueup"])
    torch_alone = cpu_seconds([sys.executable, "-c", "import torch"])
    both = cpu_seconds(
        [sys.executable, "-c", "import torch, trueup; trueup.calibrate, trueup.attach, trueup.load"]
    )
    rows.append(["import trueup, over import torch", f"{bare_import - torch_alone:.3f} s"])
    rows.append(["import trueup, all names touched, over import torch", f"{both - torch_alone:.3f} s"])
    rows.append(
        ["trueup --help", f"{cpu_seconds([sys.executable, '-m', 'trueup.cli', '--help']):.3f} s of CPU"]
    )
    print(table(rows))


if __name__ == "__main__":
    main()
