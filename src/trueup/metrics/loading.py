"""Features by name."""

from __future__ import annotations

import importlib
from os import PathLike

import torch

from trueup.errors import TrueupError
from trueup.metrics.features import Features, ModuleFeatures, Pixels

NAMES = ("inception", "efficientnet", "pixels")


def load_features(
    spec: str, *, weights: str | PathLike[str] | None = None, device: torch.device | str = "cpu"
) -> Features:
    """The extractor called "inception", "efficientnet" or "pixels", or yours as "package.module:attribute".

    >>> load_features("pixels").name
    'pixels'
    """
    if weights is not None and spec != "inception":
        raise TrueupError(f"weights can be given for inception only, not for {spec}")
    if spec == "pixels":
        return Pixels(device)
    if spec == "inception":
        from trueup.metrics.inception import Inception

        return Inception(weights, device)
    if spec == "efficientnet":
        from trueup.metrics.efficientnet import EfficientNet

        return EfficientNet(device)
    module, colon, attribute = spec.partition(":")
    if not (colon and module and attribute):
        raise TrueupError(
            f"no features are called {spec!r}: use {', '.join(NAMES)}, or package.module:attribute"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise TrueupError(f"cannot import the features {spec}: {error}") from None
    if isinstance(found, type):
        try:
            found = found()
        except TypeError as error:
            raise TrueupError(f"{spec} cannot be made without arguments: {error}") from None
    if isinstance(found, Features):
        return found.to(device)
    if not callable(found):
        raise TrueupError(f"{spec} is a {type(found).__name__}, which cannot be called on images")
    return ModuleFeatures(found, spec, device=device)
