"""What turns images into features: the protocol, and the two simplest extractors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trueup.denoiser import fingerprint
from trueup.errors import DataError


class FeatureBatch(NamedTuple):
    """What is known of B images: pooled features; spatial ones, logits and colours where there are any."""

    pooled: Tensor  # (B, d)
    spatial: Tensor | None = None  # (B, s)
    logits: Tensor | None = None  # (B, classes)
    colours: Tensor | None = None  # (B, C), see `colours`


@runtime_checkable
class Features(Protocol):
    """A network that images are compared by. Its name, preprocessing and weights stand in every result."""

    name: str
    preprocessing: str
    weights: str | None
    dimensions: int

    def __call__(self, images: Tensor) -> FeatureBatch:
        """Features of images (B, C, H, W), uint8 with one channel or three unless it says otherwise."""

    def to(self, device: torch.device | str) -> Features:
        """Move it; returns self."""


def colours(images: Tensor) -> Tensor:
    """Mean of every channel of every image, (n, C) float64: on 0..255 for uint8, as they are for floats.

    >>> colours(torch.full((2, 3, 4, 4), 7, dtype=torch.uint8)).tolist()
    [[7.0, 7.0, 7.0], [7.0, 7.0, 7.0]]
    """
    if images.dim() < 3:
        raise DataError(f"images must be (n, channels, *spatial), got {tuple(images.shape)}")
    return images.flatten(2).cpu().double().mean(2)  # not every device has float64


def look_at(images: Tensor, features: Features) -> FeatureBatch:
    """Features of images with their colours, on the CPU."""
    found = features(images)._replace(colours=colours(images))
    return FeatureBatch._make(rows if rows is None else rows.cpu() for rows in found)


def as_rgb(images: Tensor, name: str) -> Tensor:
    """uint8 images with three channels, a single one repeated; anything else raises DataError."""
    if images.dim() != 4 or images.shape[1] not in (1, 3) or images.dtype != torch.uint8:
        got = f"{images.dtype} {tuple(images.shape)}"
        raise DataError(f"{name} needs uint8 images (B, C, H, W) of 1 or 3 channels, got {got}")
    return images.expand(-1, 3, -1, -1)


class Extractor:
    """What extractors share: a module or a function, and where it is."""

    network: Any = None
    device = torch.device("cpu")
    weights: str | None = None
    dimensions = 0  # known with the first images, if not before

    def to(self, device: torch.device | str) -> Any:
        """Move it; returns self."""
        self.device = torch.device(device)
        if isinstance(self.network, nn.Module):
            self.network.to(self.device)
        return self


class Pixels(Extractor):
    """The values themselves, flattened: for tests, and for latents that have no decoder.

    >>> Pixels()(torch.zeros(2, 3, 4, 4)).pooled.shape
    torch.Size([2, 48])
    """

    name = "pixels"
    preprocessing = "8-bit values over 255, others as they are"

    def __call__(self, images: Tensor) -> FeatureBatch:
        """The images' values as float32."""
        pooled = images.to(self.device).flatten(1).float() / (255 if images.dtype == torch.uint8 else 1)
        self.dimensions = pooled.shape[1]
        return FeatureBatch(pooled)


class ModuleFeatures(Extractor):
    """Any module or function of your own that returns (B, d), or a FeatureBatch.

    `preprocess` is applied to the images first; describe it in `name` if two of them must be told apart.

    >>> module = ModuleFeatures(nn.Flatten(), "flat", preprocess=lambda images: images.float() / 255)
    >>> module(torch.zeros(2, 3, 4, 4, dtype=torch.uint8)).pooled.shape
    torch.Size([2, 48])
    """

    def __init__(
        self, module: Callable[..., Any], name: str, preprocess: Callable[[Tensor], Tensor] | None = None
    ):
        self.network = module.eval() if isinstance(module, nn.Module) else module
        self.name, self.preprocess = name, preprocess
        self.preprocessing = "none" if preprocess is None else getattr(preprocess, "__name__", "its own")
        self.weights = next(iter(fingerprint(module).values()), None)
        self.to("cpu")

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> FeatureBatch:
        """What the module makes of the images, in float32."""
        images = images.to(self.device)
        try:
            found = self.network(self.preprocess(images) if self.preprocess else images)
        except (TypeError, ValueError) as error:
            raise DataError(f"{self.name} cannot be called on images: {error}") from None
        batch = found if isinstance(found, FeatureBatch) else FeatureBatch(found)
        for rows in batch:
            if rows is not None and (not isinstance(rows, Tensor) or rows.dim() != 2):
                what = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
                raise DataError(f"{self.name} must return (B, d) features for B images, got {what}")
        self.dimensions = batch.pooled.shape[1]
        return FeatureBatch._make(rows if rows is None else rows.float() for rows in batch)
