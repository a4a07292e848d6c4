"""Networks and configs from directories that `save_pretrained` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trueup.denoiser import unwrapped
from trueup.errors import ModelError
from trueup.files import line


def diffusers_module(what: str) -> Any:
    """The library, or what needs it."""
    try:
        import diffusers
    except ImportError:
        raise ModelError(f"{what} needs diffusers: pip install 'trueup[diffusers]'") from None
    return diffusers


def config_of(obj: Any) -> dict[str, Any]:
    """The config of a diffusers object, with its class."""
    obj = unwrapped(obj)
    config = dict(getattr(obj, "config", {}) or {})
    config.setdefault("_class_name", type(obj).__name__)
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {line(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def names(index: Mapping[str, Any], component: str) -> bool:
    """Whether a model_index.json has a component."""
    entry = index.get(component)  # [library, class], or [null, null]
    return isinstance(entry, list) and any(entry)


def network_class(path: Path) -> Any:
    """The class of a directory's network."""
    config = read_json(path / "config.json")
    diffusers = diffusers_module("loading a directory")
    cls = getattr(diffusers, str(config.get("_class_name")), None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module) and hasattr(cls, "from_pretrained")):
        named = f"{path}/config.json names {config.get('_class_name')!r}"
        raise ModelError(f"{named}, which is no network of this diffusers")
    return cls


def load_pipeline(path: Path) -> Any:
    """A whole pipeline of a directory: no weights are unpickled, and no code of its own is run."""
    how = dict.fromkeys(("use_safetensors", "local_files_only"), True)
    try:
        return diffusers_module("loading a directory").DiffusionPipeline.from_pretrained(
            str(path), torch_dtype=torch.float32, trust_remote_code=False, **how
        )
    except Exception as error:  # whatever diffusers and transformers make of a damaged directory
        raise ModelError(f"{path} cannot be loaded: {line(error, 300)}") from error


def load_network(path: Path) -> nn.Module:
    """A network of diffusers, its weights complete and never unpickled."""
    cls = network_class(path)
    files = sorted(p.name for p in path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path} holds no .safetensors weights (pickled .bin weights are never loaded)")
    variant = "fp16" if all(".fp16" in name for name in files) else None
    how = dict.fromkeys(("use_safetensors", "local_files_only", "output_loading_info"), True)
    try:
        network, info = cls.from_pretrained(str(path), variant=variant, torch_dtype=torch.float32, **how)
    except Exception as error:  # whatever diffusers makes of a damaged directory
        raise ModelError(f"{path} cannot be loaded: {line(error, 300)}") from error
    if info["missing_keys"]:  # diffusers would go on with weights that were never trained
        raise ModelError(f"{path} lacks weights of its network: {', '.join(info['missing_keys'][:3])}")
    assert isinstance(network, nn.Module)
    return network
