"""Does the memory that calibrating takes grow with the number of images?

    python benchmarks/memory.py

Peak resident memory of `trueup.calibrate` with a run directory, in a process of its own, over two numbers of
small pictures read from a folder, with a small network, so that the pictures are what there is to hold.
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

from common import table

_CALIBRATE = """
import resource, sys, trueup, trueup.hf
model, data, count = sys.argv[1:]
denoiser = trueup.hf.as_denoiser(model, batch_size=256)
images = trueup.Images(data, count=int(count))
trueup.calibrate(denoiser, images, levels=[100, 500, 900], run=f"{model}.{count}", trust=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--images", type=int, nargs=2, default=[1_000, 50_000])
    p.add_argument("--size", type=int, default=8)
    options = p.parse_args()
    few, many = options.images
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        network = UNet2DModel(
            sample_size=options.size,
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
        pictures = np.random.default_rng(0).integers(
            0, 256, (many, options.size, options.size), dtype=np.uint8
        )
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
    print(table([*rows, ["ratio", f"{peaks[1] / peaks[0]:.3f}"]]))


if __name__ == "__main__":
    main()
