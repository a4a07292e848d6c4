"""Where a calibration came from, and the commands that make it again; no paths of anybody's are known."""

from __future__ import annotations

from typing import Any

from trueup.calibration import Calibration
from trueup.calibration.words import made_from
from trueup.files import is_hub_name

FILE, IMAGES = "FILE.trueup.safetensors", "IMAGES"


def model_name(calibration: Calibration, otherwise: str | None = None) -> str:
    """What people call it: its name on the Hub, or its directory's, or its class.

    In a command only the first will do, and what comes with trueup; `otherwise` is what else to write there.
    """
    origin = calibration.provenance
    if is_hub_name(origin.get("base_model")):
        return str(origin["base_model"])
    if str(origin.get("name")).startswith("bundled:"):
        return str(origin["name"])
    return otherwise or str(origin.get("name") or origin.get("model") or "a network")


def commands(calibration: Calibration) -> list[str]:
    """What makes it again."""
    made, origin = calibration.evidence, calibration.provenance
    words = ["trueup calibrate", model_name(calibration, "MODEL")]
    seed = origin.get("seed")
    if calibration.generated:
        words.append(f"--generated {calibration.data_images}")
        if isinstance(nfe := calibration.generated.get("nfe"), int):
            words.append(f"--generate-nfe {nfe}")
    elif calibration.measured:
        words.append(f"--data {IMAGES} --images {made.images}")
    if calibration.measured and (calibration.family, calibration.estimator) != ("spectral", "shrunk"):
        words.append(f"--family {calibration.family} --estimator {calibration.estimator}")
    words += ["--per-class"] if calibration.classes else []
    words += ["--per-embedding"] if origin.get("per_embedding") else []
    words += [f"--seed {seed}"] if isinstance(seed, int) and seed else []
    plain = [solver for solver in calibration.solvers if solver.guidance == 1.0]
    if plain:
        words.append(f"--nfe {','.join(str(solver.nfe) for solver in plain)}")
        many = {solver.provenance.get("trajectories") for solver in plain} - {None, 128}
        words += [f"--trajectories {next(iter(many))}"] if len(many) == 1 else []
    found = [" ".join([*words, f"-o {FILE}"])]
    after = [solver for solver in calibration.solvers if solver.guidance != 1.0]
    if origin.get("recorded"):  # in somebody's training loop
        found, after = [f'recorder.calibration(network).save("{FILE}")'], list(calibration.solvers)
    for solver in after:
        how = f"--calibration {FILE} --nfe {solver.nfe} --guidance {solver.guidance:g} --force -o {FILE}"
        found.append(f"trueup calibrate {model_name(calibration, 'MODEL')} {how}")
    return found


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
