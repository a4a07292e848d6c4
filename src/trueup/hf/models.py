"""diffusers models, pipelines and saved directories as denoisers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trueup.denoiser import Denoiser, is_preconditioned, preconditioned, signature, unwrapped
from trueup.errors import Argument, ModelError
from trueup.files import line
from trueup.hf.autoencoder import Autoencoder
from trueup.hf.hub import fetched
from trueup.hf.listening import Pipeline
from trueup.hf.loading import config_of, load_network, load_pipeline, names, network_class, read_json
from trueup.hf.prompts import Vocabulary
from trueup.hf.schedules import schedule
from trueup.parametrization import Parametrization
from trueup.process import NoiseProcess

_NETWORKS = ("unet", "transformer")
_TIME_NAMES = ("timestep", "timesteps", "t", "time", "sigma", "noise_labels")
_AUTOENCODERS = ("vae", "vqvae")


def is_pipeline(obj: Any) -> bool:
    """Something with a denoising network and a scheduler inside."""
    return hasattr(obj, "scheduler") and network_of(obj) is not None


def network_of(pipeline: Any) -> Any:
    """The denoising network of a pipeline, or None."""
    found = (getattr(pipeline, name, None) for name in _NETWORKS)
    return next((module for module in found if isinstance(module, nn.Module)), None)


def as_denoiser(
    model: Any,
    *,
    scheduler: Any = None,
    process: NoiseProcess | None = None,
    prediction: Parametrization | str | None = None,
    model_range: tuple[float, float] | None = None,
    vae: Any = None,
    arguments: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    batch_size: int | None = None,
) -> Denoiser:
    """A denoiser from a denoiser, a pipeline, a diffusers model with its scheduler, or a saved directory.

    A pipeline whose network is told more than a label (prompts, sizes, a control image) is listened to: the
    denoiser's labels are then prompts, or mappings of the pipeline's arguments, see `trueup.hf.prompts`.
    arguments: more that the pipeline is called with: {"height": 512, "width": 768}, say.

    scheduler: a diffusers scheduler, its config, or a directory holding scheduler_config.json; `process` and
    `prediction` say the same by hand and win over it. model_range: what the network was trained on; without
    it -1..1 (0..1 for ScoreSdeVeScheduler), and latents are taken as they are. vae: the autoencoder of a
    latent model, where it does not lie beside it. batch_size: see `Denoiser`. A preconditioned network of
    EDM's code bases needs no scheduler.
    """
    if isinstance(model, Denoiser):
        if any(value is not None for value in (scheduler, process, prediction, model_range, vae, arguments)):
            raise ModelError("a Denoiser already carries its process, what it predicts and its autoencoder")
        model = model.to(device) if device is not None else model
        return model.with_batch_size(batch_size)
    if is_preconditioned(model) and scheduler is None and process is None and prediction is None:
        vae = vae if vae is None or isinstance(vae, Autoencoder) else Autoencoder(vae, device)
        return preconditioned(model, model_range, vae, device=device, batch_size=batch_size)
    pipe, network, config, autoencoder = _open(model)
    config = _scheduler_config(scheduler) if scheduler is not None else config
    if process is None or prediction is None:
        if config is None:
            name = model if isinstance(model, (str, Path)) else type(model).__name__
            problem = f"{name} has no scheduler, and alone a network does not say what noise it knows"
            raise ModelError(problem, "pass the one it was trained with as {}", Argument("scheduler"))
        read_process, read_prediction = schedule(config)
        process, prediction = process or read_process, prediction or read_prediction
    settings = config_of(network)
    for name in ("guidance_embeds", "time_cond_proj_dim"):
        if settings.get(name):
            distilled = f"{settings['_class_name']} is distilled from guided outputs ({name})"
            so = "they are not conditional expectations, so there is nothing to calibrate"
            raise ModelError(f"{distilled}: {so}")
    if isinstance(prediction, str):
        prediction = Parametrization(prediction, getattr(process, "sigma_data", None))
    heard = None
    if needs := _needs(network):
        if pipe is None:
            told = (
                f"{settings['_class_name']} takes more than a sample, a time and a label ({', '.join(needs)})"
            )
            raise ModelError(f"{told}: pass its pipeline, or a trueup.Denoiser whose `call` passes them")
        heard = _listened(pipe, network, arguments, device)
        if heard.interface.binding.turned:
            prediction = prediction.turned()
    elif arguments:
        problem = f"{settings['_class_name']} has one size, and is told no prompts by a pipeline"
        raise ModelError(problem, "leave out {}", Argument("size", said="arguments"))
    labelled = ("num_class_embeds", "num_embeds_ada_norm", "class_embed_type")
    conditional = any(settings.get(key) for key in labelled)
    autoencoder = vae if vae is not None else autoencoder
    latent = autoencoder is not None and model_range is None
    if latent and not isinstance(autoencoder, Autoencoder):
        autoencoder = Autoencoder(autoencoder, device)
    denoiser = Denoiser(
        network,
        process,
        prediction,
        _sample_shape(settings) if heard is None else heard.interface.shape,
        call=heard or (_WithLabels(network) if conditional else None),
        binding=None if heard is None else heard.interface.binding,
        data_range=None if latent else model_range or _range(config),
        conditional=conditional or heard is not None,
        # DiT's has a row more than there are classes
        null_label=settings.get("num_embeds_ada_norm") if heard is None else heard.null,
        vocabulary=heard,
        autoencoder=autoencoder if latent else None,
        batch_size=batch_size,
        scheduler_config=config,
        description=str(settings["_class_name"]),
    )
    return denoiser.to(device) if device is not None else denoiser


def _range(config: Mapping[str, Any] | None) -> tuple[float, float]:
    """What pictures were scaled to; those of the score SDE's networks to 0..1."""
    return (0.0, 1.0) if config and config.get("_class_name") == "ScoreSdeVeScheduler" else (-1.0, 1.0)


class _WithLabels:
    """A diffusers network called with labels; an object, so that copies call the copied network."""

    def __init__(self, network: nn.Module):
        self.network = network

    def __call__(self, x_t: Tensor, t: Tensor, y: Tensor) -> Any:
        return self.network(x_t, t, class_labels=y)


def _needs(network: nn.Module | type[nn.Module]) -> list[str]:
    """What a network is told besides a sample, a time and a label, which only its pipeline can supply."""
    found = signature(network).parameters.values()
    more = [p for p in found if p.name != "self"][1:]
    needed = {p.name for p in more if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    needed |= {"encoder_hidden_states", *(p.name for p in more[:1])}  # text is optional in name only
    return [p.name for p in more if p.name in needed - {"class_labels", *_TIME_NAMES}]


def _listened(pipe: Any, network: nn.Module, arguments: Mapping[str, Any] | None, device: Any) -> Vocabulary:
    """The conditions of a pipeline, and how its network is told of them."""
    if getattr(pipe, "transformer_2", None) is not None:
        raise ModelError(f"{type(pipe).__name__} has two networks: calibrate each as a trueup.Denoiser")
    parts = (part for part in pipe.components.values() if isinstance(part, nn.Module))
    if device is not None and not any(hasattr(part, "_hf_hook") for part in parts):  # else hooks move them
        try:
            pipe.to(device)
        except (RuntimeError, AssertionError, ValueError) as error:
            raise ModelError(f"device {device!s} cannot be used: {line(error)}") from None
    pipeline = Pipeline(pipe, network, arguments)
    return Vocabulary(pipeline, pipeline.interface())


def _sample_shape(config: Mapping[str, Any]) -> tuple[int, ...]:
    name, size, channels = (config.get(key) for key in ("_class_name", "sample_size", "in_channels"))
    if size is None or channels is None:
        raise ModelError(f"{name} does not state its sample size: wrap it in a trueup.Denoiser with shape=")
    if config.get("out_channels") not in (None, channels, 2 * channels):
        problem = f"{name} takes {channels} channels and returns {config['out_channels']}"
        advice = "Wrap it in a trueup.Denoiser whose `call` passes them"
        raise ModelError(f"{problem}: the others are a condition. {advice}")
    axes = 1 if name == "UNet1DModel" else 2
    return (int(channels), *((size,) * axes if isinstance(size, int) else size))


def _open(model: Any) -> tuple[Any, nn.Module, dict[str, Any] | None, Any]:
    """A pipeline, its network, its scheduler's config, and what its autoencoder is made from; or None."""
    if isinstance(model, (str, Path)):
        return _load(fetched(model))
    if is_pipeline(model):
        found = config_of(model.scheduler) if model.scheduler is not None else None
        autoencoder = next((v for n in _AUTOENCODERS if (v := getattr(model, n, None)) is not None), None)
        return model, network_of(model), found, autoencoder
    config = getattr(unwrapped(model), "config", None)
    if isinstance(model, nn.Module) and isinstance(config, Mapping):
        return None, model, None, None
    raise ModelError(
        f"cannot read {type(model).__name__} as a diffusion model: pass a diffusers pipeline, model or "
        "directory, or wrap your network as trueup.Denoiser(network, process, prediction, shape)"
    )


def _scheduler_config(scheduler: Any) -> dict[str, Any]:
    if isinstance(scheduler, Mapping):
        return dict(scheduler)
    if isinstance(scheduler, (str, Path)):
        path = Path(scheduler)
        return read_json(path / "scheduler_config.json" if path.is_dir() else path)
    if hasattr(scheduler, "config"):
        return config_of(scheduler)
    raise ModelError(f"cannot read a noise schedule from {type(scheduler).__name__}")


def _load(path: Path) -> tuple[Any, nn.Module, dict[str, Any] | None, Any]:
    if not path.is_dir():
        expected = "what save_pretrained writes, or a name on the Hub (owner/name)"
        raise ModelError(f"{path} is not a directory: expected {expected}")
    if (path / "model_index.json").exists():
        index = read_json(path / "model_index.json")
        component = next((n for n in _NETWORKS if names(index, n)), None)
        if component is None:
            raise ModelError(f"{path}/model_index.json names neither a unet nor a transformer")
        # Some pipelines, the original DDPM ones among them, keep every file in one directory.
        place = path / component if (path / component).is_dir() else path
        if _needs_pipeline(place):
            return _open(load_pipeline(path))
        network = load_network(place)
        places = (path / "scheduler", path)
        home, wanted = path, [n for n in _AUTOENCODERS if names(index, n)]
    elif (path / "config.json").exists():
        network = load_network(path)
        places = (path, path.parent / "scheduler")
        home, wanted = path.parent, [n for n in _AUTOENCODERS if (path.parent / n / "config.json").exists()]
    else:
        raise ModelError(f"{path} has neither model_index.json nor config.json: not a diffusers directory")
    found = next((p for place in places if (p := place / "scheduler_config.json").exists()), None)
    autoencoder = home / wanted[0] if wanted else None
    return None, network, read_json(found) if found is not None else None, autoencoder


def _needs_pipeline(path: Path) -> bool:
    """Whether the network of a directory is told more than a label."""
    return bool(_needs(network_class(path)))
