"""diffusers models, schedulers, pipelines and saved directories as denoisers.

The only module that imports diffusers, and only when it must load something from disk; everything
else works on the objects it is handed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trueup import process as processes
from trueup.denoiser import Denoiser
from trueup.errors import ModelError
from trueup.parametrization import Parametrization

_PREDICTIONS = {
    "epsilon": "noise",
    "sample": "data",
    "v_prediction": "velocity",
    "flow_prediction": "flow",
}
_DISTILLED = {
    "CMStochasticIterativeScheduler": "a consistency model",
    "LCMScheduler": "a latent consistency model",
    "TCDScheduler": "a trajectory consistency model",
}
_NETWORKS = ("unet", "transformer")


def schedule(config: Mapping[str, Any]) -> tuple[processes.NoiseProcess, Parametrization]:
    """Read a scheduler's config: the noise the network was trained on, and what it predicts."""
    name = str(config.get("_class_name", ""))
    if name in _DISTILLED:
        raise ModelError(
            f"{name} belongs to {_DISTILLED[name]}: its outputs are not conditional expectations, so their "
            "average error need not be zero and there is nothing to calibrate"
        )
    kind = str(config.get("prediction_type", "epsilon"))
    if name.startswith("FlowMatch"):
        if config.get("invert_sigmas"):
            raise ModelError(f"{name} with invert_sigmas counts time backwards; describe it with a Denoiser")
        return processes.Flow(time_scale=float(config.get("num_train_timesteps", 1000))), Parametrization(
            "flow"
        )
    if name.startswith("EDM"):
        sigma_data = float(config.get("sigma_data", 0.5))
        edm = processes.EDM(
            sigma_data, float(config.get("sigma_min", 0.002)), float(config.get("sigma_max", 80))
        )
        names = {"epsilon": "edm", "v_prediction": "edm_velocity"}
        if kind not in names:
            raise ModelError(f"{name} knows no prediction type {kind!r}; expected epsilon or v_prediction")
        return edm, Parametrization(names[kind], sigma_data)
    if kind not in _PREDICTIONS:
        known = ", ".join(_PREDICTIONS)
        raise ModelError(f"unknown prediction type {kind!r} in the scheduler; known: {known}")
    if config.get("use_flow_sigmas") or kind == "flow_prediction":
        return processes.Flow(time_scale=float(config.get("num_train_timesteps", 1000))), Parametrization(
            "flow"
        )
    return processes.DiscreteVP(_alphas_cumprod(config)), Parametrization(_PREDICTIONS[kind])


def _alphas_cumprod(config: Mapping[str, Any]) -> torch.Tensor:
    steps = int(config.get("num_train_timesteps", 1000))
    trained = config.get("trained_betas")
    if trained is not None:
        betas = torch.as_tensor(trained, dtype=torch.float64)
    else:
        name = str(config.get("beta_schedule", "linear"))
        start, end = float(config.get("beta_start", 1e-4)), float(config.get("beta_end", 0.02))
        if name == "linear":
            return _rescale(processes.DiscreteVP.linear(start, end, steps).alphas_cumprod, config)
        if name == "scaled_linear":
            return _rescale(processes.DiscreteVP.scaled_linear(start, end, steps).alphas_cumprod, config)
        if name == "squaredcos_cap_v2":
            return _rescale(processes.DiscreteVP.cosine(steps).alphas_cumprod, config)
        if name == "sigmoid":
            betas = torch.sigmoid(torch.linspace(-6, 6, steps, dtype=torch.float64)) * (end - start) + start
        else:
            raise ModelError(
                f"unknown beta schedule {name!r}; pass process=trueup.process.DiscreteVP(alphas_cumprod)"
            )
    return _rescale(torch.cumprod(1.0 - betas, 0), config)


def _rescale(alphas_cumprod: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    if not config.get("rescale_betas_zero_snr"):
        return alphas_cumprod
    root = alphas_cumprod.sqrt()  # shifted to end at zero, scaled to keep its start
    root = (root - root[-1]) * root[0] / (root[0] - root[-1])
    return root**2


def _config(obj: Any) -> dict[str, Any]:
    config = dict(getattr(obj, "config", {}) or {})
    config.setdefault("_class_name", type(obj).__name__)
    return config


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
    device: torch.device | str | None = None,
) -> Denoiser:
    """A denoiser from a denoiser, a pipeline, a diffusers model with its scheduler, or a saved directory.

    `scheduler` may be a diffusers scheduler, its config, or a directory holding scheduler_config.json;
    `process` and `parametrization` say the same by hand and win over it.
    """
    if isinstance(model, Denoiser):
        if scheduler is not None or process is not None or parametrization is not None:
            raise ModelError("a Denoiser already carries its process and parametrization")
        return model.to(device) if device is not None else model
    network, found = _open(model)
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
    if settings.get("cross_attention_dim") and hasattr(network, "encoder_hid_proj"):
        raise ModelError(
            f"{settings['_class_name']} is conditioned on text: wrap it in a trueup.Denoiser whose `call` "
            "passes the embeddings"
        )
    conditional = bool(settings.get("num_class_embeds") or settings.get("num_embeds_ada_norm"))
    if device is not None:
        network.to(device)
    network.eval()
    return Denoiser(
        network,
        process,
        parametrization,
        _sample_shape(settings),
        conditional=conditional,
        call=_with_labels(network) if conditional else None,
        description=str(settings["_class_name"]),
    )


def _with_labels(network: nn.Module) -> Any:
    return lambda x_t, t, y: network(x_t, t, class_labels=y)


def _sample_shape(config: Mapping[str, Any]) -> tuple[int, ...]:
    size, channels = config.get("sample_size"), config.get("in_channels")
    if size is None or channels is None:
        raise ModelError(
            f"{config.get('_class_name')} does not state its sample size: "
            "wrap it in a trueup.Denoiser with shape="
        )
    spatial = (size, size) if isinstance(size, int) else tuple(size)
    if config.get("_class_name") == "UNet1DModel" and isinstance(size, int):
        spatial = (size,)
    return (int(channels), *spatial)


def _name(model: Any) -> str:
    return str(model) if isinstance(model, (str, Path)) else type(model).__name__


def _open(model: Any) -> tuple[nn.Module, dict[str, Any] | None]:
    if isinstance(model, (str, Path)):
        return _load(Path(model))
    if is_pipeline(model):
        return network_of(model), _config(model.scheduler)
    if is_diffusers_model(model):
        return model, None
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


def _load(path: Path) -> tuple[nn.Module, dict[str, Any] | None]:
    if not path.is_dir():
        raise ModelError(f"{path} is not a directory: expected what save_pretrained writes")
    if (path / "model_index.json").exists():
        index = _read_json(path / "model_index.json")
        component = next((n for n in _NETWORKS if index.get(n) and index[n][0] is not None), None)
        if component is None:
            raise ModelError(f"{path}/model_index.json names neither a unet nor a transformer")
        network = _load_network(path / component)
        found = path / "scheduler" / "scheduler_config.json"
        return network, _read_json(found) if found.exists() else None
    if not (path / "config.json").exists():
        raise ModelError(f"{path} has neither model_index.json nor config.json: not a diffusers directory")
    network = _load_network(path)
    for found in (path / "scheduler_config.json", path.parent / "scheduler" / "scheduler_config.json"):
        if found.exists():
            return network, _read_json(found)
    return network, None


def _load_network(path: Path) -> nn.Module:
    config = _read_json(path / "config.json")
    try:
        import diffusers
    except ImportError:
        raise ModelError("loading a directory needs diffusers: pip install 'trueup[diffusers]'") from None
    cls = getattr(diffusers, str(config.get("_class_name")), None)
    if cls is None:
        raise ModelError(
            f"{path}/config.json names {config.get('_class_name')!r}, which this diffusers does not have"
        )
    files = sorted(p.name for p in path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path} holds no .safetensors weights (pickled .bin weights are never loaded)")
    variant = "fp16" if all(".fp16" in name for name in files) else None
    try:
        network = cls.from_pretrained(
            str(path), variant=variant, torch_dtype=torch.float32, use_safetensors=True, local_files_only=True
        )
    except Exception as error:  # whatever diffusers makes of a damaged directory
        raise ModelError(f"{path} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    assert isinstance(network, nn.Module)
    return network
