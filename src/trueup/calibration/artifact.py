"""What is in a calibration file: one .safetensors, JSON metadata, no pickle. docs/format.md describes it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trueup import __version__, fitted, stored
from trueup.bands import Bands, kept_frequencies
from trueup.calibration import conditions as embeddings
from trueup.calibration import pictures
from trueup.calibration.classes import OfClass
from trueup.calibration.conditions import OfConditions
from trueup.calibration.correction import CHANGED, GAINS, Correction, Innovation
from trueup.calibration.drawn import pack_drawn, pack_maps, unpack_drawn, unpack_maps
from trueup.calibration.evidence import Evidence, SampleEvidence
from trueup.calibration.pictures import OfPictures
from trueup.calibration.shares import Shares
from trueup.denoiser import Binding
from trueup.denoiser.layout import LAYOUTS
from trueup.errors import ArtifactError, TrueupError
from trueup.files import is_bare_name, is_hub_name
from trueup.noise import checked_seed
from trueup.parametrization import Parametrization
from trueup.process import NoiseProcess, from_settings
from trueup.statistics import Number
from trueup.stored import LARGEST, LARGEST_LABEL, Bounds, check_tensors, digest_of, numbers, part, whole, word

KIND = "a calibration"
_PARTS = ("value", "error", "low", "high")
_BY_LEVEL = ("loss", "eta2", "gain")
_TOTALS = ("bound_gain", "shift_bound_gain")
_MOST_SOLVERS = 100
_LARGEST_MAPS = 2**30  # bytes
_MOST_CLASSES = 100_000
_OF_CORRECTION = ("b", "a", "d", "support", "rho", "innovation", "changed_support")
_GROUPS = ("solver", "class", "condition", "drawn")
_DATA = ("data_mean", "data_variance", "data_variance_se")


def pack_calibration(calibration: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A calibration as metadata and tensors."""
    correction, evidence = calibration.correction, calibration.evidence
    of_correction, single = _pack_correction(correction)
    single |= {"scale": evidence.scale, **{name: getattr(calibration, name) for name in _DATA}}
    of_classes = []
    for i, of in enumerate(calibration.classes):
        entry = {"label": of.label, "images": of.images, "gain": of.gain.plain()}
        if of.correction is not None:
            kept, more = _pack_correction(of.correction)
            single |= {f"class.{i}.{name}": tensor for name, tensor in more.items()}
            entry |= kept
        of_classes.append(entry)
    of_conditions = None
    if calibration.conditions is not None:
        by_picture = isinstance(calibration.conditions, OfPictures)
        pack: Any = pictures.pack_pictures if by_picture else embeddings.pack_conditions
        of_conditions, more = pack(calibration.conditions, correction.bands)
        single |= more
    tensors: dict[str, Tensor] = {
        "t": calibration.t,
        "lam": correction.lam,
        "shift_se": evidence.shift_se,
        "data_digests": calibration.data_digests,
        **{name: tensor.float() for name, tensor in single.items()},
        **{f"{n}.{part}": getattr(getattr(evidence, n), part) for n in _BY_LEVEL for part in _PARTS},
    }
    of_drawn, more = pack_drawn(calibration.drawn)
    tensors |= {**more, **pack_maps(evidence.expected)}
    entries = []
    for i, solver in enumerate(calibration.solvers):
        entry, more = fitted.pack(solver, f"solver.{i}")
        entries.append(entry)
        tensors |= more
    meta: dict[str, Any] = {
        "trueup": __version__,
        **{name: getattr(calibration, name) for name in ("family", "estimator", "gains")},
        **{name: getattr(calibration, name) for name in ("data_images", "provenance")},
        "shape": list(calibration.shape),
        "band_edges": list(correction.bands.edges),
        **of_correction,
        "images": evidence.images,
        "folds": evidence.folds,
        **{n: getattr(evidence, n).plain() for n in _TOTALS},
        "classes": of_classes,
        "condition": of_conditions,
        "solvers": entries,
        "drawn": of_drawn,
        "identity": calibration.identity,
    }
    return meta, tensors


def _pack_correction(correction: Correction) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A correction as metadata, which bands its maps are kept in, and tensors."""
    kept, b = stored.packed(correction.b, correction.bands)
    tensors = {"b": b, "a": correction.a, "d": correction.d, "support": correction.filled()[0]}
    of_innovation: list[int] = []
    innovation = _innovation(correction)
    if innovation is not None:
        of_innovation, mean = stored.packed(innovation.mean, correction.bands)
        tensors |= {
            "rho": innovation.rho,
            "innovation": mean,
            "changed_support": correction.filled()[1],
        }
    return {"kept_bands": kept, "innovation_bands": of_innovation}, tensors


def _unpack_correction(
    meta: Mapping[str, Any], tensors: Mapping[str, Tensor], lam: Tensor, channels: int, bands: Bands
) -> Correction:
    """A correction at levels lam, of all of `tensors`."""
    # Gains beyond a hundred and shifts beyond a million are no corrections.
    levels, size, single = lam.numel(), bands.length, torch.float32
    coefficients, of_map = stored.kept_coefficients(meta, bands), Bounds((), -1e6, 1e6, single)
    bounds = dict.fromkeys(("a", "d"), Bounds((levels, channels, bands.count), -100.0, 100.0, single))
    bounds["b"] = of_map._replace(shape=(levels, channels, len(coefficients)))
    bounds["support"] = Bounds((levels - 1, bands.count), 0.0, 1.0, single)
    of_innovation = None
    if part(tensors, "a", Tensor).any():
        of_innovation = stored.kept_coefficients(meta, bands, "innovation_bands")
        bounds["rho"] = Bounds((levels, channels, bands.count), -1e4, 1e4, single)
        bounds["changed_support"] = Bounds((len(CHANGED), levels - 1, bands.count), 0.0, 1.0, single)
        bounds["innovation"] = Bounds((levels, channels, len(of_innovation)), -1e9, 1e9, single)
    check_tensors(tensors, bounds)
    b = torch.zeros(levels, channels, size, dtype=torch.float64)
    b[..., coefficients] = tensors["b"].double()
    a, d, support = (tensors[name].double() for name in ("a", "d", "support"))
    innovation = None
    if of_innovation is not None:
        mean = torch.zeros_like(b)
        mean[..., of_innovation] = tensors["innovation"].double()
        innovation = Innovation(tensors["rho"].double(), mean, tensors["changed_support"].double())
    return Correction(lam, b, a, d, bands, support, innovation)


def identity_of(
    correction: Correction,
    classes: Sequence[OfClass],
    conditions: OfConditions | OfPictures | None,
    gains: str,
    provenance: dict[str, Any],
) -> str:
    """A short hash of what a calibration does, the same for one and for what was loaded from its file."""
    names = ("process", "parametrization", "binding")
    settings = [*(provenance.get(name) for name in names), correction.bands.edges, correction.bands.spatial]
    own = [of for of in classes if of.correction is not None]
    settings += [gains, *([[of.label for of in own], provenance.get("null_label")] if own else [])]
    tensors = [
        part.float()
        for one in (correction, *(of.correction for of in own))
        for part in _parts(one)  # type: ignore[arg-type]
    ]
    if conditions is not None:
        tensors += [part.float() for part in conditions.tensors]
    return digest_of(settings, tensors)


def _parts(correction: Correction) -> list[Tensor]:
    support, changed, _ = correction.filled()
    parts = [correction.lam, correction.b, correction.a, correction.d, support]
    innovation = _innovation(correction)
    return parts + ([] if innovation is None else [innovation.rho, innovation.mean, changed])


def _innovation(correction: Correction) -> Innovation | None:
    """What the gains on output multiply, where there are any in single precision."""
    return correction.innovation if correction.a.float().any() else None


def unpack_calibration(meta: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The fields of a calibration; what is inconsistent or unknown raises ArtifactError with the reason."""
    shape, provenance = stored.sample_shape(meta), part(meta, "provenance", dict)
    t, data_mean, digests = (part(tensors, name, Tensor) for name in ("t", "data_mean", "data_digests"))
    levels, channels, frequencies = t.numel(), shape[0], kept_frequencies(shape)
    size = math.prod(shape[1:] if frequencies is None else map(len, frequencies))
    # Before anything is built: a map that is in the file, times levels that are, bounds what we allocate.
    of_map = Bounds((channels, size), -1e9, 1e9, torch.float32)
    check_tensors({"data_mean": data_mean}, {"data_mean": of_map})
    if not 1 <= levels <= 10_000 or levels * channels * size * 8 > _LARGEST_MAPS:
        raise ArtifactError(f"{levels} levels of samples of shape {shape} make no sense")
    bands = Bands.of(shape, numbers(meta.get("band_edges"), "band_edges", 0.0, 1e9, most=1000))
    groups: dict[str, dict[str, Tensor]] = {name: {} for name in ("correction", "expected", *_GROUPS, "")}
    for name, tensor in tensors.items():
        kind = next((group for group in _GROUPS if name.startswith(f"{group}.")), "")
        kind = "expected" if name in ("expected", "expected_largest") else kind
        groups["correction" if name in _OF_CORRECTION else kind][name] = tensor
    check_tensors(
        groups[""], {**_bounds(levels, channels, bands.count, digests.numel()), "data_mean": of_map}
    )
    for name in _BY_LEVEL:
        if (tensors[f"{name}.low"] > tensors[f"{name}.high"]).any():
            raise ArtifactError(f"{name} has intervals that end below where they begin")
    check_provenance(provenance)
    process, lam = from_settings(part(provenance, "process", dict)), tensors["lam"]
    if process.integer_times and not process.t_max - process.t_min <= 1e5:
        raise ArtifactError(f"its noise process has {process.t_max:g} timesteps")
    if not ((t.diff() > 0).all() and (lam.diff() < 0).all()):
        raise ArtifactError("its noise levels are out of order")
    if not torch.allclose(process.lam(t), lam, rtol=1e-6, atol=1e-6):
        raise ArtifactError("its noise levels do not belong to its noise process")
    data = {name: tensors[name].double() for name in _DATA}
    solvers = _solvers(part(meta, "solvers", list), groups["solver"], shape, process)
    correction = _unpack_correction(meta, groups["correction"], lam, channels, bands)
    classes = _classes(part(meta, "classes", list), groups["class"], correction, channels)
    conditions: OfConditions | OfPictures | None = None
    if groups["condition"]:
        about = part(meta, "condition", dict)
        kinds: dict[Any, Any] = {
            embeddings.KIND: embeddings.unpack_conditions,
            pictures.KIND: pictures.unpack_pictures,
        }
        if about.get("kind") not in (embeddings.KIND, pictures.KIND):
            raise ArtifactError("its conditions are of no known kind")
        conditions = kinds[about["kind"]](about, groups["condition"], correction, channels)
        if isinstance(conditions, OfPictures) and any(of.correction is not None for of in classes):
            raise ArtifactError("it depends on pictures and on classes")
    gains = word(meta, "gains")
    if gains not in GAINS:
        raise ArtifactError(f"its gains are {gains!r}, expected one of {', '.join(GAINS)}")
    if identity_of(correction, classes, conditions, gains, provenance) != meta.get("identity"):
        raise ArtifactError("its correction is not the one that was saved")
    images, data_images = (whole(meta, name, 0, 2**40) for name in ("images", "data_images"))
    family = word(meta, "family")
    if not (images and data_images) and (images or data_images or family != "none" or not correction.empty):
        raise ArtifactError("it corrects what was measured on no images")
    return {
        "correction": correction,
        "t": t,
        "shape": shape,
        "evidence": Evidence(
            images=images,
            folds=whole(meta, "folds", 1, 1024),
            dimensions=math.prod(shape),
            scale=tensors["scale"].double(),
            shift_se=tensors["shift_se"],
            expected=unpack_maps(groups["expected"], levels, channels),
            **{n: Number(*(tensors[f"{n}.{part}"] for part in _PARTS)) for n in _BY_LEVEL},
            **{n: stored.total(meta, n) for n in _TOTALS},
        ),
        "family": family,
        "estimator": word(meta, "estimator"),
        "gains": gains,
        **data,
        "data_images": data_images,
        "data_digests": digests,
        "provenance": provenance,
        "solvers": solvers,
        "classes": classes,
        "conditions": conditions,
        "drawn": unpack_drawn(meta.get("drawn", []), groups["drawn"], channels, bands.count),
    }


def _classes(
    entries: list[Any], tensors: Mapping[str, Tensor], pooled: Correction, channels: int
) -> tuple[OfClass, ...]:
    """The classes of a file, each with a correction of its own where there are tensors of it."""
    if len(entries) > _MOST_CLASSES or not all(isinstance(entry, dict) for entry in entries):
        raise ArtifactError("its list of classes makes no sense")
    own: dict[str, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        _, number, *name = full.split(".", 2)
        own.setdefault(number, {})["".join(name)] = tensor
    if 2 * (1 + len(own)) * pooled.b.numel() * 8 > LARGEST or not own.keys() <= {
        str(i) for i in range(len(entries))
    }:
        raise ArtifactError("its classes are not those it lists")
    found = []
    for i, entry in enumerate(entries):
        correction = None
        if str(i) in own:
            correction = _unpack_correction(entry, own[str(i)], pooled.lam, channels, pooled.bands)
        label, images = (
            whole(entry, "label", -LARGEST_LABEL, LARGEST_LABEL),
            whole(entry, "images", 0, 2**40),
        )
        found.append(OfClass(label, images, stored.total(entry, "gain"), correction))
    if len({of.label for of in found}) != len(found):
        raise ArtifactError("it lists a class twice")
    return tuple(found)


def _solvers(
    entries: list[Any], tensors: Mapping[str, Tensor], shape: tuple[int, ...], process: NoiseProcess
) -> tuple[fitted.FittedSolver, ...]:
    """The solvers of a file, all of samples of one shape and of one process."""
    if len(entries) > _MOST_SOLVERS or not all(isinstance(entry, dict) for entry in entries):
        raise ArtifactError("its list of solvers makes no sense")
    if {name.split(".")[1] for name in tensors} != {str(i) for i in range(len(entries))}:
        raise ArtifactError("its solvers are not those it lists")
    solvers: list[fitted.FittedSolver] = []
    slack = 0.1 * (process.t_max - process.t_min)
    for i, entry in enumerate(entries):
        name = f"solver.{i}"
        own = {full: tensor for full, tensor in tensors.items() if full.startswith(f"{name}.")}
        made = fitted.unpack(entry, own, name, shape)
        if made.gains not in GAINS:
            raise ArtifactError(f"gains of {name} are {made.gains!r}, expected one of {', '.join(GAINS)}")
        if not process.t_min - slack <= float(made.t[-1]) <= float(made.t[0]) <= process.t_max + slack:
            raise ArtifactError(f"{name} asks at times that its noise process does not have")
        if any(made.is_for(other.nfe, other.guidance) for other in solvers):
            raise ArtifactError(f"two of its solvers are for {made.purpose}")
        solvers.append(made)
    return tuple(solvers)


def _bounds(levels: int, channels: int, bands: int, digests: int) -> dict[str, Bounds]:
    """Of every tensor that is no correction's."""
    single = torch.float32
    parts = {f"{n}.{part}": -1e12 for n in _BY_LEVEL for part in _PARTS}
    lowest = {**parts, "shift_se": 0.0, **{f"{n}.error": 0.0 for n in _BY_LEVEL}}
    return {
        "t": Bounds((levels,), -1e9, 1e9),
        "lam": Bounds((levels,), -100.0, 100.0),
        "scale": Bounds((levels, bands), 0.0, 1.0, single),
        **dict.fromkeys(("data_variance", "data_variance_se"), Bounds((channels, bands), 0.0, 1e12, single)),
        "data_digests": Bounds((digests,), dtype=torch.int64),
        **{name: Bounds((levels,), low, 1e12, unknown=True) for name, low in lowest.items()},
        "loss.value": Bounds((levels,), 0.0, 1e12),
    }


def check_provenance(provenance: Mapping[str, Any]) -> None:
    """Raise for what attaching, inspecting or measuring again could not use."""
    Parametrization(**part(provenance, "parametrization", dict))
    given = {name: value for name, value in provenance.items() if value is not None}
    for name in {"generated", "transform", "weights"} & given.keys():
        part(given, name, dict)
    for name, found in given.get("weights", {}).items():
        if not isinstance(found, str) or not re.fullmatch("[0-9a-f]{1,64}", found):
            raise ArtifactError(f"the fingerprint {name[:40]} of its weights makes no sense")
    if not isinstance(given.get("model", ""), str):
        raise ArtifactError("the model's name makes no sense")
    if not isinstance(given.get("chosen", ""), str):
        raise ArtifactError("which images were chosen makes no sense")
    if "base_model" in given and not is_hub_name(given["base_model"]):
        raise ArtifactError("the model's name on the Hub makes no sense")
    if "name" in given and not is_bare_name(given["name"]):
        raise ArtifactError("the name of the model's directory makes no sense")
    if "data_range" in given:
        low, high = numbers(given["data_range"], "data_range", -1e9, 1e9, least=2, most=2)
        if not low < high:
            raise ArtifactError("data_range makes no sense")
    if "size" in given:
        numbers(given["size"], "size", 1, 1e6, least=2, most=2)
    if "seed" in given:
        try:
            checked_seed(given["seed"])
        except TrueupError as error:
            raise ArtifactError(str(error)) from None
    if given.get("generated", {}).get("nfe") is not None:
        whole(given["generated"], "nfe", 1, 10**6)
    if "null_label" in given:
        whole(given, "null_label", -LARGEST_LABEL, LARGEST_LABEL)
    if "recorded" in given:
        recorded = part(given, "recorded", dict)
        for name in ("steps", "rows"):
            whole(recorded, name, 0, 2**53)
        if recorded.get("half_life") is not None:
            numbers([recorded["half_life"]], "half_life", 0.0, 1e15)
    SampleEvidence.of(given)
    Shares.noted(given)
    if "binding" in given:
        _check_binding(part(given, "binding", dict))


def _check_binding(binding: dict[str, Any]) -> None:
    for name in ("scale", "offset"):
        numbers([binding.get(name)], name, -1e9, 1e9)
    if not binding["scale"]:
        raise ArtifactError("the scale of the network's time is 0")
    for name in ("x", "t", *(["y"] if binding.get("y") is not None else [])):
        place = part(binding, name, dict)
        position, called = place.get("position"), place.get("name")
        if position is called is None:
            raise ArtifactError(f"the place of {name} in the network's call is missing")
        if position is not None:
            whole(place, "position", 0, 1000)
        if called is not None and not (isinstance(called, str) and called.isidentifier()):
            raise ArtifactError(f"the place of {name} in the network's call makes no sense")
    if binding.get("layout") not in (None, *LAYOUTS) or not isinstance(binding.get("turned", False), bool):
        raise ArtifactError("how the network wants a sample arranged makes no sense")
    Binding.from_settings(binding)
