"""Networks of EDM's code bases: preconditioned, told sigma, and returning denoised data.

`net(x, sigma, class_labels)` of EDM (EDM, VP, VE and iDDPM preconditioning) and of EDM2 predicts the data
under noise that explodes, whatever its coefficients are inside. Labels are one-hot rows there, and zeros
stand for none; here they are numbers, and `label_dim`, the one after the last class, stands for none.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from trueup.denoiser.denoiser import Denoiser
from trueup.denoiser.network import unwrapped
from trueup.errors import ModelError
from trueup.process import VE

_SAID = ("img_resolution", "img_channels", "label_dim")
_SIGMAS = (0.002, 80.0)  # what EDM samples between
_MOST = 1000.0  # networks that say more (EDM's infinity, iDDPM's 20,000) are not used there


def is_preconditioned(model: Any) -> bool:
    """Whether this is a network as EDM's code bases have them, known by what it says and takes."""
    net = unwrapped(model)
    if not isinstance(net, nn.Module) or not all(isinstance(getattr(net, n, None), int) for n in _SAID):
        return False
    return list(inspect.signature(net.forward).parameters)[1:2] == ["sigma"]


def preconditioned(
    model: Any,
    data_range: tuple[float, float] | None = None,
    autoencoder: Any = None,
    *,
    device: torch.device | str | None = None,
    batch_size: int | None = None,
) -> Denoiser:
    """The denoiser of such a network; pictures, of 1 or 3 channels, are in -1..1, all else is left as it is.

        denoiser = preconditioned(net)  # trueup.calibrate(net, ...) does it by itself

    The raw network inside (`net.model`, EDM2's `net.unet`) sees scaled data and ln(sigma)/4; alone it is
    `Denoiser(net.model, process.EDM(net.sigma_data), "edm", shape, call=lambda x, t: net.model(x, t, None))`.
    """
    net = unwrapped(model)
    channels, size, classes = int(net.img_channels), int(net.img_resolution), int(net.label_dim)
    picture = channels in (1, 3) and autoencoder is None
    return Denoiser(
        model,
        VE(*_sigmas(net)),
        "data",
        (channels, size, size),
        call=_OneHot(model, classes) if classes else None,
        data_range=data_range if data_range is not None else (-1.0, 1.0) if picture else None,
        conditional=classes > 0,
        null_label=classes or None,
        autoencoder=autoencoder,
        device=device,
        batch_size=batch_size,
    )


def _sigmas(net: Any) -> tuple[float, float]:
    """Between which noise a network is used: as it says, and EDM's own ends where it names none."""
    try:
        known = float(getattr(net, "sigma_min", 0.0)), float(getattr(net, "sigma_max", math.inf))
    except (TypeError, ValueError):
        raise ModelError(f"{type(net).__name__}: sigma_min and sigma_max must be numbers") from None
    return known[0] if known[0] > 0 else _SIGMAS[0], known[1] if known[1] <= _MOST else _SIGMAS[1]


class _OneHot:
    """A network called with labels as it takes them; an object, so that copies call the copied network."""

    def __init__(self, network: nn.Module, classes: int):
        self.network = network
        self.rows = torch.eye(classes + 1, classes)  # of the labels; the last is that of none

    def __call__(self, x_t: Tensor, sigma: Tensor, y: Tensor) -> Any:
        if y.is_floating_point() or y.ndim != 1:
            shape = tuple(y.shape)
            raise ModelError(f"this network takes class numbers, one a row, and got {y.dtype} of {shape}")
        self.rows = self.rows.to(x_t.device)
        return self.network(x_t, sigma, nn.functional.embedding(y, self.rows))
