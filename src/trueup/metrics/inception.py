"""FID's Inception-v3: the network of the 2015-12-05 TensorFlow graph, whose weights everybody's FID uses."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.errors import TrueupError
from trueup.metrics.features import Extractor, FeatureBatch, as_rgb
from trueup.metrics.weights import find_or_download, load_weights

_RELEASE = "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights"
URL = f"{_RELEASE}/pt_inception-2015-12-05-6726825d.pth"
SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"

Kernel = int | tuple[int, int]
Layer = tuple[str, int, Kernel, int]  # name, channels, kernel, stride
_WIDE, _TALL = (1, 7), (7, 1)


class Convolution(nn.Module):
    """Convolution, batch normalisation, ReLU. Strided ones are not padded, the others keep the size."""

    def __init__(self, inputs: int, outputs: int, kernel: Kernel, stride: int, padded: bool):
        super().__init__()
        height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        padding = (height // 2, width // 2) if padded else 0
        self.conv = nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """ReLU of the normalised convolution."""
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Mixed(nn.Module):
    """Branches side by side. A branch is a chain of layers; its last step may fork into two.

    `pool` is the branch that pools first: "average" (which here does not count the padding, as TensorFlow's
    does not), "max", or "shrink", a max pool of stride 2 without a convolution after it.
    """

    def __init__(self, inputs: int, branches: Sequence[Sequence[Layer]], pool: str, pooled: int = 0):
        super().__init__()
        self.pool, self.branches = pool, [[name for name, *_ in branch] for branch in branches]
        for branch in branches:
            channels = inputs
            for name, outputs, kernel, stride in branch:
                self.add_module(name, Convolution(channels, outputs, kernel, stride, padded=stride == 1))
                channels = channels if name.endswith("a") else outputs  # "b" forks off where "a" does
        if pooled:
            self.branch_pool = Convolution(inputs, pooled, 1, 1, padded=True)

    def forward(self, x: Tensor) -> Tensor:
        """All branches' channels together."""
        outputs = []
        for branch in self.branches:
            y = x
            for name in branch:
                if name.endswith("a"):
                    outputs.append(self.get_submodule(name)(y))  # the fork's first half
                else:
                    y = self.get_submodule(name)(y)
            outputs.append(y)
        if self.pool == "average":
            x = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
        else:
            x = F.max_pool2d(x, 3, *((2, 0) if self.pool == "shrink" else (1, 1)))
        outputs.append(x if self.pool == "shrink" else self.branch_pool(x))
        return torch.cat(outputs, 1)


def _chain(name: str, *layers: tuple[int, Kernel], stride: int = 1) -> list[Layer]:
    """Layers (channels, kernel), counted from 1; the stride is that of the last."""
    last = len(layers)
    return [(f"{name}_{i}", *layer, stride if i == last else 1) for i, layer in enumerate(layers, 1)]


def _double(stride: int) -> list[Layer]:
    return _chain("branch3x3dbl", (64, 1), (96, 3), (96, 3), stride=stride)


def _block_a(inputs: int, pooled: int) -> Mixed:
    fives = _chain("branch5x5", (48, 1), (64, 5))
    return Mixed(inputs, [[("branch1x1", 64, 1, 1)], fives, _double(stride=1)], "average", pooled)


def _block_c(n: int) -> Mixed:
    sevens = _chain("branch7x7", (n, 1), (n, _WIDE), (192, _TALL))
    double = _chain("branch7x7dbl", (n, 1), (n, _TALL), (n, _WIDE), (n, _TALL), (192, _WIDE))
    return Mixed(768, [[("branch1x1", 192, 1, 1)], sevens, double], "average", 192)


def _block_d() -> Mixed:
    threes = _chain("branch3x3", (192, 1), (320, 3), stride=2)
    sevens = _chain("branch7x7x3", (192, 1), (192, _WIDE), (192, _TALL), (192, 3), stride=2)
    return Mixed(768, [threes, sevens], "shrink")


def _block_e(inputs: int, pool: str) -> Mixed:
    def fork(name: str) -> list[Layer]:
        return [(f"{name}a", 384, (1, 3), 1), (f"{name}b", 384, (3, 1), 1)]

    threes = _chain("branch3x3", (384, 1)) + fork("branch3x3_2")
    double = _chain("branch3x3dbl", (448, 1), (384, 3)) + fork("branch3x3dbl_3")
    return Mixed(inputs, [[("branch1x1", 320, 1, 1)], threes, double], pool, 192)


class InceptionNetwork(nn.Module):
    """The layers, under the names of the weights' file.

    >>> sum(p.numel() for p in InceptionNetwork().parameters())
    23850960
    """

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, 3, 2, padded=False)
        self.Conv2d_2a_3x3 = Convolution(32, 32, 3, 1, padded=False)
        self.Conv2d_2b_3x3 = Convolution(32, 64, 3, 1, padded=True)
        self.Conv2d_3b_1x1 = Convolution(64, 80, 1, 1, padded=False)
        self.Conv2d_4a_3x3 = Convolution(80, 192, 3, 1, padded=False)
        self.Mixed_5b = _block_a(192, 32)
        self.Mixed_5c = _block_a(256, 64)
        self.Mixed_5d = _block_a(288, 64)
        self.Mixed_6a = Mixed(288, [[("branch3x3", 384, 3, 2)], _double(stride=2)], "shrink")
        self.Mixed_6b = _block_c(128)
        self.Mixed_6c = _block_c(160)
        self.Mixed_6d = _block_c(160)
        self.Mixed_6e = _block_c(192)
        self.Mixed_7a = _block_d()
        self.Mixed_7b = _block_e(1280, "average")
        self.Mixed_7c = _block_e(2048, "max")  # the graph pools so here, against the paper; FID needs it
        self.fc = nn.Linear(2048, 1008)

    def forward(self, x: Tensor) -> FeatureBatch:
        """Pooled features, spatial features and logits of images (B, 3, 299, 299) in [-1, 1]."""
        x = F.max_pool2d(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x))), 3, 2)
        x = F.max_pool2d(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)), 3, 2)
        x = self.Mixed_6a(self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x))))
        x = self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(x)))
        spatial = x[:, :7].flatten(1)  # of the 1x1 branch, which comes first: (B, 7 * 17 * 17)
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(self.Mixed_6e(x))))
        pooled = x.mean((2, 3))
        logits = pooled @ self.fc.weight.T  # no bias, as in the first Inception Score's code
        return FeatureBatch(pooled, spatial, logits)


class Inception(Extractor):
    """Features of FID (2048), sFID (2023, as in ADM's evaluator) and the Inception Score (1008 logits)."""

    name = "inception-v3"
    preprocessing = "bilinear to 299 px (no antialiasing, corners not aligned), scaled to [-1, 1]"
    dimensions = 2048

    def __init__(self, weights: str | PathLike[str] | None = None):
        tensors, self.weights = load_weights(find_or_download(URL, SHA256, weights), SHA256)
        self.network = InceptionNetwork().eval()
        try:
            self.network.load_state_dict(tensors)
        except RuntimeError:
            raise TrueupError(f"the weights in {weights or URL} are not those of FID's network") from None

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> FeatureBatch:
        """Features of uint8 images (B, C, H, W)."""
        x = as_rgb(images, self.name).to(self.device).float() / 255
        x = F.interpolate(x, (299, 299), mode="bilinear", align_corners=False)
        return self.network(2 * x - 1)
