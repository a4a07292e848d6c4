"""The model card of a calibration: what it is for, what it does, how to use it, where it came from.

A card is shown as a page, and what a file or a model calls itself is not to be believed: such texts stand in
code, where nothing is marked up, and names are those that the Hub allows or are left out.
"""

from __future__ import annotations

import json
import re
from typing import Any

from trueup import __version__
from trueup.calibration.words import made_from
from trueup.files import is_hub_name, printable
from trueup.hf.shared import folder_of

# Where it is gone, somebody has made the card theirs.
MARK = "<!-- Written by trueup, anew whenever this is saved: delete this line to keep your changes. -->"
_LONGEST = 200
_LIMITS = (
    "It is for these weights alone: `trueup.attach` refuses others, in half precision it knows them too.",
    "It corrects what is constant or linear per channel and frequency band; what depends on content stays.",
    "What it lowers is the denoising loss, and a lower loss is not yet a better sample: `trueup evaluate` "
    "says what became of yours.",
    "The files hold numbers and text. Nothing here is code, and nothing is run when it is loaded.",
)
_SOLVERS = (
    "A fitted solver is for one number of evaluations and one guidance scale, and goes with the correction "
    "that it was fitted with."
)


def card(calibration: Any, where: str | None = None, base_model: str | None = None) -> str:
    """The text of README.md. where: its name on the Hub, if it has one; base_model: that of the model."""
    base_model = base_model or calibration.provenance.get("base_model")
    base_model = base_model if is_hub_name(base_model) else None
    model = code(calibration.provenance.get("model") or "a network")
    of = f"{model} of [{base_model}](https://huggingface.co/{base_model})" if base_model else model
    parts = [
        _front_matter(base_model),
        MARK,
        f"# A calibration of {model}",
        _about(of) if calibration.measured else f"Solvers for few steps, fitted by trueup to {of}.",
        "## Use",
        _use(calibration, where or "this-directory", base_model or "my-model"),
        "## Measured",
        f"In short: {calibration.verdict()}",
        _fenced(calibration.summary().rsplit("\nverdict:", 1)[0]),
        *_solvers(calibration),
        "## Limits",
        _listed([*_LIMITS, *([_SOLVERS] if calibration.solvers else []), *_of_generated(calibration)]),
        "## Provenance",
        _listed(_provenance(calibration, base_model)),
    ]
    return "\n\n".join(parts) + "\n"


def _about(model: str) -> str:
    measured = f"What trueup measured of {model}: how the network misses at every noise level."
    return (
        f"{measured} Put on the model, it is subtracted at inference, with any sampler. No weight is changed."
    )


def code(value: Any) -> str:
    """A text as code in Markdown, in which nothing means anything, on one line.

    >>> print(code("a `b` <script>"))
    ``a `b` <script>``
    """
    text = printable(str(value))[:_LONGEST] or " "
    fence = "`" * (_longest_run(text) + 1)
    pad = " " if text[0] in "` " or text[-1] in "` " else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _fenced(text: str, language: str = "") -> str:
    lines = [printable(line) for line in text.split("\n")]
    fence = "`" * max(3, _longest_run(text) + 1)
    return "\n".join([f"{fence}{language}", *lines, fence])


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def _front_matter(base_model: str | None) -> str:
    # Every JSON text is one of YAML, too, and these are of plain letters.
    lines = ["library_name: trueup", 'tags: ["trueup", "diffusion", "calibration", "diffusers"]']
    lines += [f"base_model: {json.dumps(base_model)}"] if base_model else []
    return "\n".join(["---", *lines, "---"])


def _use(calibration: Any, where: str, model: str) -> str:
    where, model = json.dumps(where), json.dumps(model)
    solver = min(calibration.solvers, key=lambda solver: solver.guidance != 1.0, default=None)
    lines = [
        "import trueup",
        "from diffusers import DiffusionPipeline",
        "",
        f"pipe = DiffusionPipeline.from_pretrained({model})  # the model it was made for",
    ]
    if calibration.measured:
        lines.append(f"trueup.attach(pipe, {where})")
    if solver is not None:
        guided = f", guidance={solver.guidance:g}" if solver.guidance != 1.0 else ""
        lines.append(f"pipe.scheduler = trueup.Scheduler.from_pretrained({where}, nfe={solver.nfe}{guided})")
    asked = f"num_inference_steps={20 if solver is None else solver.nfe}"
    if "told" in calibration.provenance:
        asked = f'"a prompt", {asked}'
    if solver is not None and solver.guidance != 1.0:
        asked += f", guidance_scale={solver.guidance:g}"
    return _fenced("\n".join([*lines, f"images = pipe({asked}).images"]), "python")


def _solvers(calibration: Any) -> list[str]:
    if not calibration.solvers:
        return []
    about = "Fitted to the model's own many-step limit, for few evaluations; each a scheduler of diffusers:"
    said = (f"`{folder_of(solver)}`: {code(solver.summary())}" for solver in calibration.solvers)
    return ["## Solvers", about, _listed(said)]


def _of_generated(calibration: Any) -> list[str]:
    said = "It was measured on the model's own samples: errors that these share with the model do not show."
    return [said] if calibration.generated else []


def _provenance(calibration: Any, base_model: str | None) -> list[str]:
    origin, process = calibration.provenance, calibration.process.kind
    fit = f"{code(calibration.family)}, {code(calibration.estimator)}"
    weights = [
        f"{code(found)} ({code(name)})" for name, found in sorted((origin.get("weights") or {}).items())
    ]
    lines = [
        f"model: {code(origin.get('model') or 'unknown')}" + (f", {code(base_model)}" if base_model else ""),
        f"weights: {', '.join(weights) or 'none'}",
        f"samples: shape {code(calibration.shape)}, {code(calibration.parametrization.name)} prediction, "
        f"{code(process)} noise",
        f"images: {code(made_from(calibration))}",
        f"seed: {code(origin.get('seed'))}" if origin.get("seed") is not None else "",
        f"fit: {fit}; drawn with: {code(calibration.gains)}",
        f"identity: {code(calibration.identity)}",
        f"written by trueup {__version__}",
    ]
    return [line for line in lines if line]


def _listed(lines: Any) -> str:
    return "\n".join(f"- {line}" for line in lines)
