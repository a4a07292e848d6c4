"""diffusers models, pipelines and saved directories as denoisers.

The only module that imports diffusers, and only when it must load something from disk; everything
else works on the objects it is handed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trueup import process as processes
from trueup.denoiser import Denoiser, fingerprint, prediction
from trueup.errors import ModelError
from trueup.files import bundled
from trueup.parametrization import Parametrization
from trueup.schedules import schedule

_NETWORKS = ("unet", "transformer")
_TIME_NAMES = ("timestep", "timesteps", "t", "time", "sigma", "noise_labels")
_AUTOENCODERS = ("vae", "vqvae")


def _config(obj: Any) -> dict[str, Any]:
    config = dict(getattr(obj, "config", {}) or {})
    config.setdefault("_class_name", type(_uncompiled(obj)).__name__)
    return config


def _uncompiled(obj: Any) -> Any:
    return getattr(obj, "_orig_mod", obj)  # what torch.compile wrapped


def is_pipeline(obj: Any) -> bool:
    """Something with a denoising network and a scheduler inside."""
    return hasattr(obj, "scheduler") and any(isinstance(getattr(obj, n, None), nn.Module) for n in _NETWORKS)


def network_of(pipeline: Any) -> nn.Module:
    """The denoising network of a pipeline."""
    for name in _NETWORKS:
        module = getattr(pipeline, name, None)
        if isinstance(module, nn.Module):
            return module
    raise ModelError(f"{type(pipeline).__name__} has neither a unet nor a transformer")


def is_diffusers_model(obj: Any) -> bool:
    """An nn.Module that carries a diffusers config."""
    config = getattr(obj, "config", None)
    return isinstance(obj, nn.Module) and isinstance(config, Mapping) and "_class_name" in _config(obj)


def as_denoiser(
    model: Any,
    *,
    scheduler: Any = None,
    process: processes.NoiseProcess | None = None,
    parametrization: Parametrization | str | None = None,
    model_range: tuple[float, float] | None = None,
    device: torch.device | str | None = None,
) -> Denoiser:
    """A denoiser from a denoiser, a pipeline, a diffusers model with its scheduler, or a saved directory.

    `scheduler` may be a diffusers scheduler, its config, or a directory holding scheduler_config.json;
    `process` and `parametrization` say the same by hand and win over it. `model_range` is what the network
    was trained on; without it -1..1, and latents are taken as they are.
    """
    if isinstance(model, Denoiser):
        if scheduler is not None or process is not None or parametrization is not None:
            raise ModelError("a Denoiser already carries its process and parametrization")
        return model.to(device) if device is not None else model
    network, found, latent = _open(model)
    config = _scheduler_config(scheduler) if scheduler is not None else found
    if process is None or parametrization is None:
        if config is None:
            raise ModelError(
                f"{_name(model)} has no scheduler, and a network alone does not say what noise it was "
                "trained on: pass scheduler=, or process= and parametrization="
            )
        read_process, read_parametrization = schedule(config)
        process = process or read_process
        parametrization = parametrization or read_parametrization
    settings = _config(network)
    if settings.get("guidance_embeds"):
        raise ModelError(
            f"{settings['_class_name']} is distilled from guided outputs (guidance_embeds): they are not "
            "conditional expectations, so there is nothing to calibrate"
        )
    _check_inputs(network, settings["_class_name"])
    labels = ("num_class_embeds", "num_embeds_ada_norm", "class_embed_type")
    conditional = any(settings.get(name) for name in labels)
    shape = _sample_shape(settings)
    denoiser = Denoiser(
        network,
        process,
        parametrization,
        shape,
        data_range=model_range or (None if latent else (-1.0, 1.0)),
        conditional=conditional,
        call=_with_labels(network) if conditional else None,
        null_label=settings.get("num_embeds_ada_norm"),  # DiT's has a row more than there are classes
        scheduler_config=config,
        description=str(settings["_class_name"]),
    )
    return denoiser.to(device) if device is not None else denoiser


class Decoder:
    """Turns latents into images in -1..1 with an autoencoder of diffusers."""

    def __init__(self, autoencoder: nn.Module):
        self.autoencoder: Any = autoencoder
        config = _config(autoencoder)
        self.scale, self.shift = config.get("scaling_factor") or 1.0, config.get("shift_factor") or 0.0
        self.mean, self.std = config.get("latents_mean"), config.get("latents_std")
        self.identity = fingerprint(autoencoder)

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Images of latents in the network's own scale."""
        x = x.to(next(self.autoencoder.parameters()))
        wide = (1, -1, *[1] * (x.ndim - 2))
        if self.mean is not None and self.std is not None:  # per channel
            x = x * x.new_tensor(self.std).view(wide) / self.scale + x.new_tensor(self.mean).view(wide)
        else:
            x = x / self.scale + self.shift
        return prediction(self.autoencoder.decode(x)).float()


def as_decoder(vae: Any, device: torch.device | str | None = None) -> Decoder:
    """A decoder from an autoencoder of diffusers or its directory."""
    module = _load_network(Path(vae)) if isinstance(vae, (str, Path)) else vae
    if not (isinstance(module, nn.Module) and hasattr(module, "decode")):
        raise ModelError(f"{_name(vae)} is no autoencoder: it has no decode")
    return Decoder(module.to(device) if device is not None else module)


def find_decoder(model: Any) -> Any:
    """The autoencoder beside a network: a pipeline's own, or in a directory; None if there is none."""
    if isinstance(model, (str, Path)):
        places = (Path(model), Path(model).parent)
        found = (p / name for p in places for name in _AUTOENCODERS if (p / name / "config.json").exists())
        return next(found, None)
    return next((v for name in _AUTOENCODERS if (v := getattr(model, name, None)) is not None), None)


def _with_labels(network: nn.Module) -> Any:
    return lambda x_t, t, y: network(x_t, t, class_labels=y)


def _check_inputs(network: nn.Module, name: str) -> None:
    """Refuse networks that are not called as (x_t, t), or that need what only the caller can supply."""
    parameters = list(inspect.signature(_uncompiled(network).forward).parameters.values())
    second = parameters[1].name if len(parameters) > 1 else "missing"
    if second not in _TIME_NAMES:
        raise ModelError(
            f"{name} cannot be called as network(x_t, t): its second argument is {second}, not the time. "
            "Wrap it in a trueup.Denoiser whose `call` knows its arguments"
        )
    required = {p.name for p in parameters[2:] if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    needed = (required | {"encoder_hidden_states"}) - {"class_labels"}  # text is optional in name only
    more = [p.name for p in parameters if p.name in needed]
    if more:
        raise ModelError(
            f"{name} takes more than a sample, a time and a label ({', '.join(more)}): wrap it in a "
            "trueup.Denoiser whose `call` passes them"
        )


def _sample_shape(config: Mapping[str, Any]) -> tuple[int, ...]:
    size, channels = config.get("sample_size"), config.get("in_channels")
    if size is None or channels is None:
        raise ModelError(
            f"{config.get('_class_name')} does not state its sample size: "
            "wrap it in a trueup.Denoiser with shape="
        )
    if config.get("out_channels") not in (None, channels, 2 * channels):
        raise ModelError(
            f"{config.get('_class_name')} takes {channels} channels and returns {config['out_channels']}: "
            "the others are a condition. Wrap it in a trueup.Denoiser whose `call` passes them"
        )
    spatial = (size, size) if isinstance(size, int) else tuple(size)
    if config.get("_class_name") == "UNet1DModel" and isinstance(size, int):
        spatial = (size,)
    return (int(channels), *spatial)


def _name(model: Any) -> str:
    return str(model) if isinstance(model, (str, Path)) else type(model).__name__


def _open(model: Any) -> tuple[nn.Module, dict[str, Any] | None, bool]:
    """The network, its scheduler's config where there is one, and whether it works on latents."""
    if isinstance(model, (str, Path)):
        return _load(bundled(model))
    if is_pipeline(model):
        found = _config(model.scheduler) if model.scheduler is not None else None
        return network_of(model), found, any(getattr(model, n, None) is not None for n in _AUTOENCODERS)
    if is_diffusers_model(model):
        return model, None, False
    raise ModelError(
        f"cannot read {type(model).__name__} as a diffusion model: pass a diffusers pipeline, model or "
        "directory, or wrap your network as trueup.Denoiser(network, process, parametrization, shape)"
    )


def _scheduler_config(scheduler: Any) -> dict[str, Any]:
    if isinstance(scheduler, Mapping):
        return dict(scheduler)
    if isinstance(scheduler, (str, Path)):
        path = Path(scheduler)
        path = path / "scheduler_config.json" if path.is_dir() else path
        return _read_json(path)
    if hasattr(scheduler, "config"):
        return _config(scheduler)
    raise ModelError(f"cannot read a noise schedule from {type(scheduler).__name__}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _load(path: Path) -> tuple[nn.Module, dict[str, Any] | None, bool]:
    if not path.is_dir():
        raise ModelError(
            f"{path} is not a directory: expected what save_pretrained writes (a name on the Hub must be "
            "downloaded first)"
        )
    if (path / "model_index.json").exists():
        index = _read_json(path / "model_index.json")
        component = next((n for n in _NETWORKS if _names(index, n)), None)
        if component is None:
            raise ModelError(f"{path}/model_index.json names neither a unet nor a transformer")
        # Some pipelines, the original DDPM ones among them, keep every file in one directory.
        network = _load_network(path / component if (path / component).is_dir() else path)
        places = (path / "scheduler", path)
        latent = any(_names(index, n) for n in _AUTOENCODERS)
    elif (path / "config.json").exists():
        network = _load_network(path)
        places = (path, path.parent / "scheduler")
        latent = any((path.parent / n / "config.json").exists() for n in _AUTOENCODERS)
    else:
        raise ModelError(f"{path} has neither model_index.json nor config.json: not a diffusers directory")
    found = next((p for place in places if (p := place / "scheduler_config.json").exists()), None)
    return network, _read_json(found) if found is not None else None, latent


def _names(index: Mapping[str, Any], component: str) -> bool:
    entry = index.get(component)  # [library, class], or [null, null]
    return isinstance(entry, list) and any(entry)


def _load_network(path: Path) -> nn.Module:
    config = _read_json(path / "config.json")
    try:
        import diffusers
    except ImportError:
        raise ModelError("loading a directory needs diffusers: pip install 'trueup[diffusers]'") from None
    cls: Any = getattr(diffusers, str(config.get("_class_name")), None)
    is_network = isinstance(cls, type) and issubclass(cls, nn.Module)
    if not is_network:
        raise ModelError(
            f"{path}/config.json names {config.get('_class_name')!r}, which is no network of this diffusers"
        )
    files = sorted(p.name for p in path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path} holds no .safetensors weights (pickled .bin weights are never loaded)")
    variant = "fp16" if all(".fp16" in name for name in files) else None
    try:
        network, info = cls.from_pretrained(
            str(path),
            variant=variant,
            torch_dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # whatever diffusers makes of a damaged directory
        raise ModelError(f"{path} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    if info["missing_keys"]:  # diffusers would go on with weights that were never trained
        raise ModelError(f"{path} lacks weights of its network: {', '.join(info['missing_keys'][:3])}")
    assert isinstance(network, nn.Module)
    return network
