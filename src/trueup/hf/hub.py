"""The Hugging Face Hub: models and calibrations by name. The only module that uses huggingface_hub.

Of a repository only data are fetched: configs, texts and .safetensors, never code and never a pickle. What
lies in its cache needs no network.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from trueup.denoiser import unwrapped
from trueup.errors import ModelError, TrueupError
from trueup.files import BUNDLED, bundled, is_bare_name, is_hub_name, line, printable

# By the names that diffusers and transformers load: repositories often have whole checkpoints beside them.
_WEIGHTS = ("*diffusion_pytorch_model*.safetensors", "*/model*.safetensors")
_TEXTS = ("*.json", "*.txt", "*.model")
_UNUSED = ["*non_ema*"]


def fetched(model: str | PathLike[str], revision: str | None = None) -> Path:
    """A model's directory: the one that is named, what comes with trueup, or one fetched from the Hub.

    revision: a branch, tag or commit of a model on the Hub.
    """
    path = bundled(str(model))
    if path.exists() or not is_hub_name(model):
        return path
    name, folder = str(model), path
    for unused in ([*_UNUSED, "*.fp16*"], _UNUSED):  # half precision is for those that have no other
        folder = from_hub(name, (*_TEXTS, *_WEIGHTS), revision, ModelError, ignore_patterns=unused)
        if all(any(config.parent.glob("*.safetensors")) for config in folder.rglob("config.json")):
            break
    if not any(folder.rglob("*.safetensors")):
        raise ModelError(f"{name} on the Hub holds no .safetensors weights (pickled ones are never loaded)")
    return folder


def from_hub(
    name: str,
    patterns: Sequence[str],
    revision: str | None = None,
    error: type[TrueupError] = TrueupError,
    **how: Any,
) -> Path:
    """The folder of the Hub's cache that holds those files of a repository; what is wrong raises `error`."""
    hub = _library(name, error)
    with _explained(hub, name, revision, error):
        try:
            found = hub.snapshot_download(name, revision=revision, allow_patterns=list(patterns), **how)
        except hub.utils.LocalEntryNotFoundError as reason:
            # Without a network, other programs may have fetched all that matters and not all that matches.
            found = getattr(reason, "snapshot_path", None)
            if found is None:
                raise
    return Path(found)


def names_of(network: Any) -> dict[str, str]:
    """What a network of diffusers was loaded by: `base_model` on the Hub, or a directory's bare `name`."""
    config = getattr(unwrapped(network), "config", None)
    loaded = str(config.get("_name_or_path") or "") if isinstance(config, Mapping) else ""
    for part in Path(loaded).parts:  # of a path in the cache
        if part.startswith("models--"):
            name = "/".join(part.split("--")[1:])
            return {"base_model": name} if is_hub_name(name) else {}
    folder = Path(loaded).absolute()
    try:
        if not loaded or not folder.is_dir():
            return {"base_model": loaded} if is_hub_name(loaded) else {}
        if (folder.parent / "model_index.json").is_file():  # the network's part of a pipeline
            folder = folder.parent
    except OSError:  # somewhere that may not be looked at, or no path at all
        return {}
    name = f"bundled:{folder.name}" if folder.parent == BUNDLED else printable(folder.name)[:100]
    return {"name": name} if is_bare_name(name) else {}


def push(
    folder: Path, name: str, *, private: bool | None, token: str | None, ours: str, stale: Sequence[str]
) -> str:
    """Upload a folder, making the repository if there is none; returns its address.

    A README.md that does not say `ours` was written by somebody, and stays. stale: patterns of files that are
    deleted there unless the folder has them.
    """
    if not is_hub_name(name):
        raise TrueupError(f"a name on the Hub is owner/name, not {name!r}")
    hub = _library(name, TrueupError)
    with _explained(hub, name, None, TrueupError):
        api = hub.HfApi(token=token)
        address = api.create_repo(name, private=private, exist_ok=True)
        left_out = []
        if api.file_exists(name, "README.md"):
            readme = Path(api.hf_hub_download(name, "README.md")).read_text(
                encoding="utf-8", errors="replace"
            )
            left_out = [] if ours in readme else ["README.md"]
        if left_out:
            warnings.warn(
                f"the README.md of {name} is not one of trueup's, and is left as it is", stacklevel=4
            )
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="Upload a calibration by trueup",
            ignore_patterns=left_out,
            delete_patterns=list(stale),
        )
    return str(address)


def _library(name: str, error: type[TrueupError]) -> Any:
    try:
        import huggingface_hub.utils  # named: the package loads its parts when they are
    except ImportError:
        needs = f"{name} is not here, and to find it on the Hub takes huggingface_hub"
        raise error(f"{needs}: pip install 'trueup[diffusers]'") from None
    return huggingface_hub


@contextmanager
def _explained(hub: Any, name: str, revision: str | None, error: type[TrueupError]) -> Iterator[None]:
    """What goes wrong, in one line."""
    known = hub.utils
    try:
        yield
    except TrueupError:
        raise
    except known.GatedRepoError:
        raise error(
            f"{name} is gated: ask for access on its page on the Hub, then run hf auth login"
        ) from None
    except known.RepositoryNotFoundError:
        private = "if it is private, run hf auth login"
        raise error(f"{name} is neither here nor on the Hub, as far as you may see: {private}") from None
    except known.RevisionNotFoundError:
        raise error(f"{name} on the Hub has no revision {revision}") from None
    except known.LocalEntryNotFoundError as reason:
        offline = isinstance(reason.__cause__, known.OfflineModeIsEnabled) or reason.__cause__ is None
        why = (
            "is switched off (HF_HUB_OFFLINE)"
            if offline
            else f"cannot be reached ({line(reason.__cause__, 100)})"
        )
        of = f" at revision {revision}" if revision else ""
        raise error(f"{name}{of} is neither here nor in the cache of the Hub, which {why}") from None
    except Exception as reason:  # whatever its transport makes of a bad day
        raise error(f"{name}: the Hub says {type(reason).__name__}: {line(reason)}") from None
