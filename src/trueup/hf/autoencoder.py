"""Between latents and pictures: an autoencoder of diffusers, with its scaling."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trueup.denoiser import fingerprint, in_parts, prediction
from trueup.errors import ModelError
from trueup.hf.loading import config_of, load_network

_AT_ONCE = 16  # an autoencoder takes more memory than the network


class Autoencoder:
    """Pictures in -1..1 to latents in the network's own scale, and back; a directory is loaded if needed."""

    def __init__(self, module: nn.Module | str | Path, device: torch.device | str | None = None):
        self._given = module if isinstance(module, (str, Path)) else _checked(module)
        self._device = device
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # of pictures, by their latents'

    @cached_property
    def module(self) -> Any:
        """The autoencoder itself."""
        given = self._given
        module = _checked(load_network(Path(given))) if isinstance(given, (str, Path)) else given
        return module if self._device is None else module.to(self._device)

    @cached_property
    def identity(self) -> dict[str, str]:
        """Hashes of its weights."""
        return fingerprint(self.module)

    def picture_shape(self, latent: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the pictures whose latents have this one; found by decoding one, where it must be."""
        if latent not in self._shapes:
            config = config_of(self.module)
            blocks = config.get("block_out_channels")
            if blocks is None:
                self._shapes[latent] = tuple(self.decode(torch.zeros(1, *latent)).shape[1:])
            else:  # as diffusers' pipelines count
                factor = 2 ** (len(blocks) - 1)
                self._shapes[latent] = (int(config.get("in_channels", 3)), *(factor * n for n in latent[1:]))
        return self._shapes[latent]

    @torch.inference_mode()
    def encode(self, pictures: Tensor) -> Tensor:
        """Latents of pictures, the mean of each one's distribution."""
        return torch.cat(in_parts(lambda part: self._encode(pictures[part]), len(pictures), _AT_ONCE)[0])

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        """Pictures of latents."""
        return torch.cat(in_parts(lambda part: self._decode(latents[part]), len(latents), _AT_ONCE)[0])

    def _encode(self, pictures: Tensor) -> Tensor:
        found = self.module.encode(self._beside(pictures))
        distribution = getattr(found, "latent_dist", None)
        named = (getattr(found, name, None) for name in ("latents", "latent"))
        if distribution is not None:
            latents = distribution.mode()
        else:
            latents = next((value for value in named if isinstance(value, Tensor)), None)
            latents = prediction(found) if latents is None else latents
        scale, shift = self._scaling(latents)
        latents = ((latents - shift) * scale).float()
        if not torch.isfinite(latents).all():
            raise ModelError("the autoencoder returned latents that are not finite: load it in float32")
        return latents

    def _beside(self, x: Tensor) -> Tensor:
        """On the device where the autoencoder runs, which hooks may move it to, and in its dtype."""
        weight, hook = next(self.module.parameters()), getattr(self.module, "_hf_hook", None)
        return x.to(getattr(hook, "execution_device", None) or weight.device, weight.dtype)

    def _decode(self, latents: Tensor) -> Tensor:
        latents = self._beside(latents)
        scale, shift = self._scaling(latents)
        return prediction(self.module.decode(latents / scale + shift)).float()

    def _scaling(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Network latents are (latents - shift) * scale."""
        config = config_of(self.module)
        scale, shift = config.get("scaling_factor") or 1.0, config.get("shift_factor") or 0.0
        mean, std = config.get("latents_mean"), config.get("latents_std")
        if mean is not None and std is not None:  # per channel
            wide = (1, -1, *[1] * (like.ndim - 2))
            return scale / like.new_tensor(std).view(wide), like.new_tensor(mean).view(wide)
        return like.new_tensor(scale), like.new_tensor(shift)


def _checked(module: Any) -> Any:
    if not (hasattr(module, "decode") and hasattr(module, "encode")):
        raise ModelError(f"{type(module).__name__} is no autoencoder: it has no encode and decode")
    return module
