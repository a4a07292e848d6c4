"""LoRA and other adapters that PEFT has put on a network: which are at work, and how strongly."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Container, Iterable, Iterator
from typing import Any

from torch import nn

_BASE = re.compile(r"\b(base_layer|original_module)\.")  # where PEFT keeps the layer that it adapts
_SWITCHES = ("_disable_adapters", "_active_adapter", "scaling", "merged_adapters")  # as PEFT keeps them
_OUTER = "base_model.model."  # of a PeftModel


def adapted_layers(network: Any) -> list[tuple[str, Any]]:
    """The layers of a network that PEFT wrapped, with their names."""
    if not isinstance(network, nn.Module):
        return []
    return [(n, m) for n, m in network.named_modules() if hasattr(m, "active_adapters") and _inner(m)]


def at_work(layer: Any) -> Iterator[tuple[str, float]]:
    """Names and scales of a layer's adapters that change what it returns; fused ones are in its weights."""
    if layer.disable_adapters or getattr(layer, "merged_adapters", ()):
        return
    scales = getattr(layer, "scaling", {})
    for name in layer.active_adapters:
        scale = scales.get(name, 1.0) if isinstance(scales, dict) else 1.0
        if scale and _holds(layer, name):
            yield name, float(scale)


def adapters(network: Any) -> dict[str, list[tuple[str, float]]]:
    """The adapters at work on a network: the layers of each, with its scale there."""
    found: dict[str, list[tuple[str, float]]] = {}
    for place, layer in adapted_layers(network):
        for name, scale in at_work(layer):
            found.setdefault(name, []).append((place.removeprefix(_OUTER), scale))
    return found


def fused(network: Any) -> list[str]:
    """Names of the adapters that are added to a network's weights."""
    layers = (layer for _, layer in adapted_layers(network))
    return sorted({name for layer in layers for name in getattr(layer, "merged_adapters", ())})


def base_name(name: str, layers: Container[str]) -> tuple[str, bool]:
    """What a parameter was called before PEFT wrapped these layers, and whether it is an adapter's."""
    own = any(
        name[: dot.start()] in layers and not _BASE.match(name, dot.end()) for dot in re.finditer(r"\.", name)
    )
    return (name if own else _BASE.sub("", name)).removeprefix(_OUTER), own


class Watch:
    """Warns once if a network's adapters are no longer those it had, at the price of a few attributes.

    No weight is looked at, and where there are no adapters not even a layer.
    """

    _config: Any = None
    _names: tuple[str, ...] = ()
    _layers: tuple[Any, ...] = ()
    _switches: Any = None
    _found: tuple[Any, ...] = ()

    def __init__(self, network: nn.Module):
        self._warned, self._had = False, self._state(network)

    def look(self, network: nn.Module) -> None:
        """Compare with what was there."""
        if not self._warned and (now := self._state(network)) != self._had:
            self._warned, self._config, self._layers = True, None, ()  # layers may go: nothing holds them
            warnings.warn(
                f"{_words(now)}, unlike when its calibration was attached, which corrects another network "
                "than this: set them as they were, or calibrate the network as it is",
                stacklevel=2,
            )

    def _state(self, network: nn.Module) -> tuple[Any, ...]:
        """Each layer's adapters at work, and those fused into it; again only where a switch has moved."""
        config = network.__dict__.get("peft_config")  # PEFT's, by name of adapter; hasattr would cost more
        if not config:
            self._config, self._layers = None, ()
            return ()
        if config is not self._config or tuple(config) != self._names:
            self._config, self._names = config, tuple(config)
            self._layers = tuple(layer for _, layer in adapted_layers(network))
            self._switches = None
        switches = [tuple(map(layer.__dict__.get, _SWITCHES)) for layer in self._layers]
        if switches != self._switches:
            self._switches = copy.deepcopy(switches)
            working = ([*at_work(layer), *getattr(layer, "merged_adapters", ())] for layer in self._layers)
            self._found = tuple(found for found in working if found)
        return self._found

    def __getstate__(self) -> dict[str, Any]:
        # A copy's layers are found again: those of the original are not its own.
        return {**self.__dict__, "_config": None, "_layers": (), "_switches": None}


def _words(state: Iterable[Any]) -> str:
    on = sorted({found[0] for layer in state for found in layer if isinstance(found, tuple)})
    merged = sorted({found for layer in state for found in layer if isinstance(found, str)})
    if merged:
        return f"LoRA adapters ({', '.join(merged)}) are fused into this network's weights"
    which = f"LoRA adapters ({', '.join(on)})" if on else "no LoRA adapters"
    return f"this network has {which} on"


def _inner(layer: Any) -> bool:
    return hasattr(layer, "base_layer") or hasattr(layer, "original_module")


def _holds(layer: Any, name: str) -> bool:
    """Whether a layer has weights of an adapter: others may be at work elsewhere only."""
    parts = (part for key, part in layer._modules.items() if key not in ("base_layer", "original_module"))
    return any(name in part for part in parts if isinstance(part, (nn.ModuleDict, nn.ParameterDict)))
