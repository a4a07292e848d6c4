"""Networks and configs from directories that `save_pretrained` wrote."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
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
    except (OSError, ValueError, RecursionError) as error:
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
    how: dict[str, Any] = dict.fromkeys(("use_safetensors", "local_files_only"), True)
    diffusers = diffusers_module("loading a directory")
    files = [file.name for file in path.glob("*/*.safetensors")]
    how["variant"] = "fp16" if files and all(".fp16" in name for name in files) else None
    try:
        with _quiet(diffusers) as said:
            pipe = diffusers.DiffusionPipeline.from_pretrained(str(path), trust_remote_code=False, **how)
            pipe = pipe.to(torch.float32)
        lacking = next((text for text in said if "newly initialized" in text), None)
        if lacking is not None:  # transformers goes on with weights that were never trained
            names = re.findall(r"([\w.]+) +\| MISSING", lacking) or ["see its files"]
            raise ModelError(f"{path} lacks weights of its text encoder: {', '.join(names[:3])}")
        return pipe
    except ModelError:
        raise
    except Exception as error:  # whatever diffusers and transformers make of a damaged directory
        raise ModelError(f"{path} cannot be loaded: {line(error, 300)}") from error


class _Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def _quiet(diffusers: Any) -> Iterator[list[str]]:
    """Without bars for every part that is loaded; what is logged is yielded, and not shown."""
    libraries = [diffusers.utils.logging]
    if find_spec("transformers") is not None:
        libraries.append(import_module("transformers.utils.logging"))
    before = [(one, one.get_verbosity(), one.is_progress_bar_enabled()) for one in libraries]
    loggers, said = [logging.getLogger(name) for name in ("diffusers", "transformers")], _Said()
    handlers = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    try:
        for library, _, _ in before:
            library.set_verbosity_warning()
            library.disable_progress_bar()
        for logger in loggers:
            logger.handlers, logger.propagate = [said], False
        yield said.texts
    finally:
        for logger, own, propagates in handlers:
            logger.handlers, logger.propagate = own, propagates
        for library, verbosity, bars in before:
            library.set_verbosity(verbosity)
            if bars:
                library.enable_progress_bar()


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
