"""Does loading ever keep the network waiting?

    python benchmarks/loading.py                      # JPEGs of 256x256 that become 64x64 samples
    python benchmarks/loading.py --size 512 --shape 256 --images 2000

Images per second of the loader alone, of the network alone (on samples that are there) and of both together,
`trueup.estimate.measure` itself, from a folder of JPEGs, from tar shards and from a .npy file, in one run.
Both together can be no faster than the slower one: what is left of that is the last column. `one by one` is
the loader alone without threads.
"""

from __future__ import annotations

import argparse
import io
import tarfile
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from diffusers import DDPMScheduler, UNet2DModel
from PIL import Image

from trueup.estimate import measure
from trueup.hf import as_denoiser
from trueup.images import Images, open_images

from common import table


def write(folder: Path, count: int, size: int, shape: int) -> dict[str, Path]:
    """The same pictures in a folder, in ten shards, and as an array of samples."""
    rough = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    (folder / "jpegs").mkdir()
    (folder / "shards").mkdir()
    samples = np.zeros((count, shape, shape, 3), np.uint8)
    with ExitStack() as opened:
        names = [folder / "shards" / f"{k:03}.tar" for k in range(10)]
        tars = [opened.enter_context(tarfile.open(path, "w")) for path in names]
        for k in range(count):
            picture = Image.fromarray(rough[k]).resize((size, size), Image.Resampling.BICUBIC)
            samples[k] = np.asarray(picture.resize((shape, shape)))
            file = io.BytesIO()
            picture.save(file, "JPEG", quality=90)
            (folder / "jpegs" / f"{k:06}.jpg").write_bytes(file.getvalue())
            info = tarfile.TarInfo(f"{k:06}.jpg")
            info.size = file.tell()
            file.seek(0)
            tars[k % 10].addfile(info, file)
    np.save(folder / "samples.npy", samples)
    return {
        "folder of JPEGs": folder / "jpegs",
        "tar shards": folder / "shards",
        ".npy": folder / "samples.npy",
    }


def seconds(work) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--images", type=int, default=500)
    p.add_argument("--size", type=int, default=256, help="of the JPEGs")
    p.add_argument("--shape", type=int, default=64, help="of the samples")
    p.add_argument("--width", type=int, default=16, help="channels of the network")
    p.add_argument("--levels", type=int, default=2, help="evaluations an image")
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = p.parse_args()
    network = UNet2DModel(
        sample_size=options.shape,
        layers_per_block=1,
        block_out_channels=(options.width, 2 * options.width),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    network = network.to(options.device)
    how = {"batch_size": options.batch_size, "device": options.device}
    denoiser = as_denoiser(network, scheduler=DDPMScheduler(), **how)
    levels = torch.linspace(10, 990, options.levels).round().tolist()
    how = {"levels": levels, "trust": True, "progress": False}
    with tempfile.TemporaryDirectory() as name:
        places = write(Path(name), options.images, options.size, options.shape)

        def images(source) -> Images:
            return Images(source, count=options.images, resize="shorter", crop="center")

        def load(source) -> None:
            for _ in open_images(images(source), denoiser).batches(options.batch_size):
                pass

        def load_one_by_one(source) -> None:
            samples = open_images(images(source), denoiser)
            for index in range(options.images):
                samples.at(index)

        ready = torch.cat([b.x0 for b in open_images(images(places[".npy"]), denoiser).batches(256)])
        measure(denoiser, ready[: options.batch_size], **how)  # warm
        alone = seconds(lambda: measure(denoiser, Images(ready, count=options.images), **how))
        rows = []
        for kind, source in places.items():
            single, loader = seconds(lambda s=source: load_one_by_one(s)), seconds(lambda s=source: load(s))
            both = seconds(lambda s=source: measure(denoiser, images(s), **how))
            rates = [options.images / t for t in (single, loader, alone, both)]
            rows.append([kind, *(f"{rate:.0f}" for rate in rates), f"{max(loader, alone) / both:.2f}"])
    heads = ["images/s from", "one by one", "loader", "network", "both", "both / slower of the two"]
    print(table([heads, *rows]))


if __name__ == "__main__":
    main()
