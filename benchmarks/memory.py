"""What calibrating holds, and what that grows with.

    python benchmarks/memory.py                 # images: 1,000 and 50,000 small pictures from a folder
    python benchmarks/memory.py shapes          # latents, pixels, video: above a bare loop, and the file
    python benchmarks/memory.py growth          # images 100 to 50,000, and pictures 8x8 to 1024x1024
    python benchmarks/memory.py kept            # what means of some coefficients alone lose
    python benchmarks/memory.py plan            # evaluations and GPU-hours of three large models, computed

Peak resident memory, each in a process of its own. The first is of `trueup.calibrate` with a run directory
and a small network. `shapes` and `growth` have a network that only scales its input, so that all is ours: the
bare loop draws noise and calls it, at as many levels and with as many images. Times are of one core, and
ours alone. `kept` measures the bundled network with all means, and with fewer and fewer. `plan` runs nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from diffusers import DDPMScheduler, UNet2DModel
from PIL import Image

import trueup
from trueup import bands
from trueup.bands import KEPT, WHOLE, Bands
from trueup.estimate import default_levels, fit, measure
from trueup.fitting import gains
from trueup.fitting.solve import TRAJECTORIES, fit_cost

from common import table

# TFLOP of a forward (two a multiplication and addition), noise, rows of an evaluation in use. DiT's paper
# counts 118.6 G multiplications; SDXL's U-Net at 1024 pixels has about 3.0 T; a transformer's FLOP are 2
# parameters tokens + 4 layers width tokens^2: 1.3 G, 30, 1536 and 21x30x52 for latents of 16x21x60x104.
_TOKENS = 21 * 30 * 52
MODELS = {
    "DiT-XL/2, ImageNet at 256": (0.237, trueup.process.DiscreteVP.linear(), 1),
    "SDXL at 1024": (6.0, trueup.process.DiscreteVP.scaled_linear(), 2),
    "video, 1.3 G parameters": (
        (2 * 1.3e9 * _TOKENS + 4 * 30 * 1536 * _TOKENS**2) / 1e12,
        trueup.process.Flow(),
        2,
    ),
}
SHAPES = [(3, 32, 32), (4, 64, 64), (4, 128, 128), (16, 128, 128), (16, 21, 60, 104), (3, 1024, 1024)]

_CALIBRATE = """
import resource, sys, trueup, trueup.hf
model, data, count = sys.argv[1:]
denoiser = trueup.hf.as_denoiser(model, batch_size=256)
images = trueup.Images(data, count=int(count))
trueup.calibrate(denoiser, images, levels=[100, 500, 900], run=f"{model}.{count}", trust=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


_OURS = """
import os, resource, sys, tempfile, time, torch, trueup
from trueup.estimate import fit, measure
from trueup.noise import level_keys, normals
torch.set_num_threads(1)
shape, count, levels, kind = tuple(map(int, sys.argv[1].split("x"))), *map(int, sys.argv[2:4]), sys.argv[4]

class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.share = torch.nn.Parameter(torch.tensor(0.9))
    def forward(self, x, t):
        return self.share * x

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return count
    def __getitem__(self, i):
        if i >= count:
            raise IndexError(i)
        return 0.5 * torch.randn(shape, generator=torch.Generator().manual_seed(i)) + 0.2

process = trueup.process.DiscreteVP.linear()
net = trueup.Denoiser(Scaled(), process, "noise", shape, data_range=None)
t = torch.linspace(0, 999, levels).round().double()
began, size = time.process_time(), 0
if kind == "bare":
    with torch.inference_mode():
        for first in range(0, count, net.batch_size):
            index = torch.arange(first, min(first + net.batch_size, count))
            x0 = torch.stack([Data()[i] for i in index.tolist()])
            for one in t:
                eps = normals(0, index, level_keys(one[None]), shape, net.device)[0]
                net.predict(process.noised(x0, eps, one), one)
else:
    made = fit(measure(net, trueup.Images(Data(), count=count), levels=t, trust=True, progress=False))
    with tempfile.TemporaryDirectory() as folder:
        made.save(folder + "/x")
        size = os.path.getsize(folder + "/x")
    with trueup.attach(net, made):
        net.predict(torch.zeros(1, *shape), 500.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, time.process_time() - began, size)
"""


def ours(shape: tuple[int, ...], count: int, levels: int, kind: str = "ours") -> tuple[float, float, float]:
    """Peak memory in MiB, seconds of CPU time and bytes of the file."""
    arguments = ["x".join(map(str, shape)), str(count), str(levels), kind]
    how = {"check": True, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", _OURS, *arguments], **how)  # type: ignore[call-overload]
    peak, seconds, size = map(float, done.stdout.split())
    return peak, seconds, size


def by_shape(shapes: list[tuple[int, ...]], count: int, levels: int) -> list[list[str]]:
    """A row for each: above the bare loop, a file, and how long an evaluation takes without a network."""
    rows = [["sample", "sums", "peak", "above bare", "file", "file at most", "CPU an evaluation"]]
    for shape in shapes:
        peak, seconds, size = ours(shape, count, levels)
        bare, bare_seconds, _ = ours(shape, count, levels, "bare")
        kept = shape[0] * Bands.of(shape).length
        each = 1e3 * (seconds - bare_seconds) / (count * levels)
        memory = [
            f"{16 * levels * 3 * kept * 8 / 2**20:.0f} MiB",
            f"{peak:.0f} MiB",
            f"{peak - bare:.0f} MiB",
        ]
        files = [f"{size / 1e6:.2f} MB", f"{4 * (2 * levels + 1) * kept / 1e6:.1f} MB"]  # maps of every band
        rows.append(["x".join(map(str, shape)), *memory, *files, f"{each:.1f} ms"])
        print(*rows[-1], sep="  ", file=sys.stderr)
    return rows


def by_images(counts: list[int], levels: int) -> list[list[str]]:
    """A row for each number of images: nothing but their indices and digests is kept of them."""
    rows = [["images", "peak", "CPU an image", "file"]]
    for count in counts:
        peak, seconds, size = ours((1, 8, 8), count, levels)
        rows.append(
            [f"{count:,}", f"{peak:.0f} MiB", f"{1e3 * seconds / count:.2f} ms", f"{size / 1e6:.3f} MB"]
        )
        print(*rows[-1], sep="  ", file=sys.stderr)
    return rows


def by_kept(images: int) -> list[list[str]]:
    """A row for each share of means kept, of the bundled network: nats that the likelihood bound gains."""
    rows = [["means kept", "share", "shift", "spectral"]]
    for most in (10**6, 400, 200, 100, 50):
        bands.WHOLE, bands.KEPT = (WHOLE, KEPT) if most > 10**5 else (1, most)
        bands._usual.cache_clear()
        data = trueup.Images("bundled:images", count=images)
        moments = measure("bundled:raw", data, trust=True, progress=False)
        gains = [fit(moments, family=family).evidence.bound_gain for family in ("shift", "spectral")]
        box = moments.bands.box
        share = f"{moments.bands.length / moments.bands.index.numel():.0%}"
        rows.append(["x".join(map(str, box)), share, *(f"{g.value:.2f} ± {g.error:.2f}" for g in gains)])
    return rows


def by_plan(sustained: float) -> list[list[str]]:
    """A row for each model: evaluations to measure, judge and fit a solver of 8, and hours of a GPU."""
    rows = [["model", "TFLOP a forward", "measure 500", "judge", "solver of 8", "GPU-hours", "50,000 images"]]
    for name, (flops, process, rows_each) in MODELS.items():
        levels = len(default_levels(process))
        each = [500 * levels, 3 * gains.TRAJECTORIES * (gains.INTERVALS + 1)]
        solver = rows_each * fit_cost(TRAJECTORIES, 8)  # guided: two rows each
        hours = (sum(each) + solver) * flops / sustained / 3600
        many = 50_000 * levels * flops / sustained / 3600
        counts = [f"{n:,}" for n in (*each, solver)]
        took = [f"{h:,.0f}" if h >= 10 else f"{h:.2g}" for h in (hours, many)]
        rows.append([name, f"{flops:.3g}", *counts, *took])
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "what", nargs="?", default="folder", choices=("folder", "shapes", "growth", "kept", "plan")
    )
    p.add_argument("--images", type=int, nargs="+")
    p.add_argument("--levels", type=int, default=25)
    p.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    p.add_argument("--size", type=int, default=8)
    p.add_argument("--sustained", type=float, default=200.0, metavar="TFLOP/S", help="of a GPU, for `plan`")
    options = p.parse_args()
    count = (options.images or [4 if options.what == "shapes" else 100])[0]
    tables = {
        "shapes": lambda: [by_shape(SHAPES, count, options.levels)],
        "plan": lambda: [by_plan(options.sustained)],
        "kept": lambda: [by_kept(count)],
        "growth": lambda: [
            by_images(options.images or [100, 1_000, 10_000, 50_000], 3),
            by_shape([(3, n, n) for n in options.sizes], 4, options.levels),
        ],
        "folder": lambda: [from_folder(*(options.images or [1_000, 50_000]), options.size)],
    }
    for rows in tables[options.what]():
        print(table(rows))


def from_folder(few: int, many: int, size: int) -> list[list[str]]:
    """Two numbers of small pictures, and the ratio of what they take."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        network = UNet2DModel(
            sample_size=size,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(8,),
            norm_num_groups=4,
            add_attention=False,
            down_block_types=("DownBlock2D",),
            up_block_types=("UpBlock2D",),
        )
        network.save_pretrained(folder / "model")
        DDPMScheduler().save_pretrained(folder / "model")
        pictures = np.random.default_rng(0).integers(0, 256, (many, size, size), dtype=np.uint8)
        for k, picture in enumerate(pictures):
            place = folder / "images" / f"{k // 1000:03}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(place / f"{k % 1000:03}.png")
        rows = [["images", "peak memory"]]
        peaks = []
        for count in (few, many):
            done = subprocess.run(
                [sys.executable, "-c", _CALIBRATE, folder / "model", folder / "images", str(count)],
                check=True,
                capture_output=True,
                text=True,
            )
            peaks.append(int(done.stdout) / 1024)
            rows.append([f"{count:,}", f"{peaks[-1]:.0f} MiB"])
    return [*rows, ["ratio", f"{peaks[1] / peaks[0]:.3f}"]]


if __name__ == "__main__":
    main()
