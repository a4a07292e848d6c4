"""Turn Fashion-MNIST's own files into one array file.

    apt-get install dataset-fashion-mnist
    python examples/fashion_mnist.py /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz fashion.npy

Writes (N, 28, 28, 1) bytes.
"""

import gzip
import sys
from pathlib import Path

import numpy as np


def main(source: str, out: str) -> None:
    raw = gzip.decompress(Path(source).read_bytes())
    magic, count, height, width = np.frombuffer(raw, ">i4", 4)
    if magic != 0x803:
        raise SystemExit(f"{source} is not an idx file of images")
    np.save(out, np.frombuffer(raw, np.uint8, offset=16).reshape(count, height, width, 1))
    print(f"{count} images -> {out}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
