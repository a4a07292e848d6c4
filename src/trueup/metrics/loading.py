"""Features by name."""

from __future__ import annotations

import importlib
from os import PathLike

import torch

from trueup.errors import TrueupError
from trueup.metrics.features import Features, ModuleFeatures

NAMES = {
    "inception": "trueup.metrics.inception:Inception",
    "efficientnet": "trueup.metrics.efficientnet:EfficientNet",
    "pixels": "trueup.metrics.features:Pixels",
}


def load_features(
    spec: str, *, weights: str | PathLike[str] | None = None, device: torch.device | str = "cpu"
) -> Features:
    """The extractor called "inception", "efficientnet" or "pixels", or yours as "package.module:attribute".

    >>> load_features("pixels").name
    'pixels'
    """
    if weights is not None and spec != "inception":
        raise TrueupError(f"weights can be given for inception only, not for {spec}")
    module, colon, attribute = NAMES.get(spec, spec).partition(":")
    if not (colon and module and attribute):
        known = f"{', '.join(NAMES)}, or package.module:attribute"
        raise TrueupError(f"no features are called {spec!r}: use {known}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise TrueupError(f"cannot import the features {spec}: {error}") from None
    if isinstance(found, type):
        try:
            found = found() if weights is None else found(weights)
        except TypeError as error:
            raise TrueupError(f"{spec} cannot be made without arguments: {error}") from None
    if not callable(found):
        raise TrueupError(f"{spec} is a {type(found).__name__}, which cannot be called on images")
    return (found if isinstance(found, Features) else ModuleFeatures(found, spec)).to(device)
