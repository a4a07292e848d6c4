"""Where a calibration came from, and the commands that make it again; no paths of anybody's are known."""

from __future__ import annotations

import shlex
from typing import Any

from trueup.calibration import Calibration
from trueup.calibration.words import made_from
from trueup.files import is_hub_name

FILE, IMAGES = "FILE.trueup.safetensors", "IMAGES"
_COMES_WITH_IT = ("bundled:raw", "bundled:ema")


def model_name(calibration: Calibration) -> str:
    """What people call it: its name on the Hub, or its directory's, or its class."""
    origin = calibration.provenance
    named = origin.get("base_model") if is_hub_name(origin.get("base_model")) else origin.get("name")
    return str(named or origin.get("model") or "a network")


def in_commands(calibration: Calibration) -> tuple[str, str]:
    """The model and its images as a command has them, where anybody could type that, or what to put there."""
    name = model_name(calibration)
    if name in _COMES_WITH_IT:
        return name, "bundled:images"
    return (name if is_hub_name(name) else "MODEL"), IMAGES


def commands(calibration: Calibration) -> list[str]:
    """What makes it again."""
    made, origin = calibration.evidence, calibration.provenance
    model, images = in_commands(calibration)
    words: list[Any] = ["trueup", "calibrate", model]
    if calibration.generated:
        words += ["--generated", calibration.data_images]
        if nfe := calibration.generated.get("nfe"):
            words += ["--generate-nfe", nfe]
    elif calibration.measured:
        words += ["--data", images, "--images", made.images]
    if calibration.measured and (calibration.family, calibration.estimator) != ("spectral", "shrunk"):
        words += ["--family", calibration.family, "--estimator", calibration.estimator]
    words += ["--per-class"] if calibration.classes else []
    words += ["--per-embedding"] if origin.get("per_embedding") else []
    words += ["--seed", origin["seed"]] if origin.get("seed") else []
    plain = [solver for solver in calibration.solvers if solver.guidance == 1.0]
    if plain:
        words += ["--nfe", ",".join(str(solver.nfe) for solver in plain)]
        many = {solver.provenance.get("trajectories") for solver in plain} - {None, 128}
        words += ["--trajectories", *many] if len(many) == 1 else []
    found = [_typed([*words, "-o", FILE])]
    after = [solver for solver in calibration.solvers if solver.guidance != 1.0]
    if origin.get("recorded"):  # in somebody's training loop
        found, after = [f'recorder.calibration(network).save("{FILE}")'], list(calibration.solvers)
    for solver in after:
        how = ["--calibration", FILE, "--nfe", solver.nfe, "--guidance", f"{solver.guidance:g}"]
        found.append(_typed(["trueup", "calibrate", model, *how, "--force", "-o", FILE]))
    return found


def _typed(words: list[Any]) -> str:
    """A command that a shell takes as these words, whatever a file put into them."""
    return shlex.join(map(str, words))


def provenance(calibration: Calibration) -> list[tuple[str, str]]:
    """What is known of its making, as names and texts."""
    origin = calibration.provenance
    weights = {name: found for name, found in (origin.get("weights") or {}).items() if " " not in name}
    rows: list[tuple[str, Any]] = [
        ("model", model_name(calibration)),
        ("network", origin.get("model") or "unknown"),
        ("weights", ", ".join(f"{found[:16]} ({name})" for name, found in sorted(weights.items())) or "none"),
        ("samples", f"shape {' × '.join(map(str, calibration.shape))}"),
        ("predicts", calibration.parametrization.name),
        ("noise", calibration.process.kind),
        ("images", made_from(calibration)),
        (
            "range of the data",
            origin.get("data_range") and " to ".join(f"{v:g}" for v in origin["data_range"]),
        ),
        ("read as", _settings(origin.get("transform"))),
        ("seed", origin.get("seed")),
        ("correction", f"{calibration.family}, {calibration.estimator}; drawn with {calibration.gains}"),
        ("classes", _classes(calibration)),
        ("identity", calibration.identity),
    ]
    return [(name, str(value)) for name, value in rows if value not in (None, "")]


def _settings(said: Any) -> str | None:
    """Plain settings in a line."""
    if not isinstance(said, dict):
        return None
    return ", ".join(f"{key}: {value}" for key, value in said.items() if value not in (None, False)) or None


def _classes(calibration: Calibration) -> str | None:
    if not calibration.classes:
        return None
    own = [of for of in calibration.classes if of.correction is not None]
    return f"{len(calibration.classes):,}, {len(own):,} of them with a correction of their own"
