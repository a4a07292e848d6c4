"""What can be typed: commands, options, and help that opens with examples. Imports nothing heavy."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from trueup import __version__
from trueup.files import printable
from trueup.solvers import NAMES
from trueup.typed import (
    counts,
    did_you_mean,
    labels,
    picture,
    positive,
    positive_float,
    share,
    solver,
    solvers,
    value_range,
)

_OVERVIEW = """examples:
  trueup demo                                          see the point, on a model that comes with trueup
  trueup calibrate bundled:raw --data bundled:images -o raw.trueup.safetensors

Trues up trained diffusion models: measures how a network misses at every noise level, and writes the
correction as one small file that trueup.attach puts on the model. `trueup COMMAND --help` says more.
"""
_CALIBRATE = """examples:
  trueup calibrate bundled:raw --data bundled:images --images 100 -o raw.trueup.safetensors
  trueup calibrate bundled:ema --data bundled:images --family shift --json -o ema.trueup.safetensors
  trueup calibrate bundled:raw --data bundled:images --solver ddim --nfe 5,10 -o raw.trueup.safetensors
  trueup calibrate bundled:raw --calibration raw.trueup.safetensors --solver unipc --nfe 8 -o two.safetensors

Measures MODEL on images and writes its calibration; with --solver also what keeps the states of that sampler
where they belong, which few steps need. Work is kept in a run directory after every batch: interrupted, the
same command goes on from there, and with a larger --images it adds to what it has.
"""
_CHECK = """examples:
  trueup check bundled:raw --data bundled:images
  trueup check bundled:ema --data bundled:images --images 50 --fail-above 0.01 --quiet
  trueup check bundled:raw --data bundled:images --solver dpm-solver-3 --nfe 10

Says how miscalibrated MODEL is, and whether it is being used as it was trained: wrong range, BGR, another
prediction type or schedule are named, with exit code 2. Writes nothing. Exits with 1 if --fail-above is
surely exceeded. With --solver: how far the states of that sampler drift from those of noised data, step by
step and band by band.
"""
_SAMPLE = """examples:
  trueup sample bundled:raw -n 16 --solver dpm-solver-3 --nfe 20 -o before.png
  trueup sample bundled:raw --calibration raw.trueup.safetensors -n 16 --solver unipc --nfe 10 -o after/

Draws samples: a folder of PNGs, a grid if the name ends in .png, arrays if it ends in .npz. Image i of a seed
starts from the same noise whatever else is asked for, so that samples with and without a calibration compare.
Interrupted, the same command goes on where it was.
"""
_EVALUATE = """examples:
  trueup evaluate bundled:raw --calibration raw.trueup.safetensors --data bundled:images --features pixels
  trueup evaluate bundled:ema --calibration ema.trueup.safetensors --data bundled:images --nfe 10,20 -o c.json

Samples MODEL with and without the calibration from the same seeds and compares both with the data: Fréchet
distance and its relatives, precision and recall, colour drift, denoising loss on images the calibration has
not seen; each with an interval, and plain words where the difference is within noise. Most of the time goes
into sampling, twice --samples times --nfe evaluations; --no-loss saves what the denoising loss takes.
"""
_LIKELIHOOD = """examples:
  trueup likelihood bundled:raw --data bundled:images --calibration raw.trueup.safetensors
  trueup likelihood bundled:ema --data bundled:images --ode --images 8
  trueup likelihood bundled:ema --data bundled:images --steps 1000 --json -o ema.likelihood.json

Says how likely images are under MODEL, in bits per dimension, less is better; with a calibration also under
the calibrated model, and the difference image by image. --bound: the variational bound, in continuous time or
of a chain of --steps. --ode: by the probability flow. --dsm: the score matching objectives behind the bound.
Images that made the calibration are passed over. With -o, interrupted work goes on where it was (but for
--dsm).
"""
_INSPECT = """examples:
  trueup inspect raw.trueup.safetensors
  trueup inspect raw.trueup.safetensors --json
  trueup inspect raw.trueup.safetensors --figure raw.png
"""
_DEMO = """examples:
  trueup demo
  trueup demo --out /tmp/trueup-demo --seed 1

Calibrates the raw last weights of a small Fashion-MNIST model, samples before and after with the same seeds,
and writes the calibration and one picture: uncalibrated, shift, spectral, and the EMA weights beside them.
"""


class _Formatter(argparse.HelpFormatter):
    """Help whose names stay whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """Help that opens with examples, errors of one line, and guesses at what was meant."""

    def __init__(self, *, opening: str, prog: str, **kwargs: Any):
        super().__init__(prog, allow_abbrev=False, formatter_class=_Formatter, **kwargs)
        self.opening = opening

    def format_help(self) -> str:
        return f"{self.opening}\n{super().format_help()}"

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """What was typed; an unknown option is the command's error, and its help is pointed to."""
        options, unknown = self.parse_known_args(arguments)
        if unknown:
            named = next((word for word in unknown if word.startswith("--")), "")
            hint = did_you_mean(named.partition("=")[0], options.parser._option_string_actions)
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Commands and choices pass here."""
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            hint = did_you_mean(str(value), known) or f" (choose from {', '.join(known)})"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, printable(f"{self.prog}: {message} (see {self.prog} --help)") + "\n")


def parser() -> _Parser:
    """The whole command line."""
    top = _Parser(prog="trueup", opening=_OVERVIEW)
    top.add_argument("--version", action="version", version=f"trueup {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    calibrate = commands.add_parser(
        "calibrate", help="measure a model and write its calibration", opening=_CALIBRATE
    )
    data = _add_data(calibrate, images=500)
    data.add_argument(
        "--generated", type=positive, metavar="N", help="instead of --data: N samples of the model itself"
    )
    data.add_argument(
        "--generate-nfe", type=positive, default=50, metavar="N", help="evaluations for each (default: 50)"
    )
    _add_sampler(calibrate, "a calibration made before, instead of --data: to add samplers to it")
    _add_model(calibrate)
    _add_fit(calibrate)
    calibrate.add_argument(
        "-o", "--output", required=True, type=Path, metavar="FILE", help="the calibration to write"
    )
    calibrate.add_argument("--force", action="store_true", help="replace FILE if it exists")
    calibrate.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: FILE.run)")
    calibrate.add_argument(
        "--trust", action="store_true", help="calibrate even if the model seems to be used wrongly"
    )
    calibrate.set_defaults(command="calibrate", parser=calibrate)

    check = commands.add_parser(
        "check", help="say how miscalibrated a model is; write nothing", opening=_CHECK
    )
    _add_data(check, images=100)
    _add_sampler(check, "with --solver: the drift with this calibration, instead of --data")
    _add_model(check)
    _add_fit(check)
    check.add_argument(
        "--fail-above",
        type=positive_float,
        metavar="X",
        help="exit with 1 if calibrating would surely gain more than X bits/dim of the likelihood bound",
    )
    check.add_argument("--figure", type=picture, metavar="FILE", help=_FIGURE)
    check.set_defaults(command="check", parser=check)

    sample = commands.add_parser("sample", help="draw samples, calibrated or not", opening=_SAMPLE)
    sample.add_argument("-n", "--samples", type=positive, default=64, metavar="N", help="default: 64")
    sample.add_argument("--calibration", type=Path, metavar="FILE", help="what `calibrate` wrote")
    sample.add_argument("--solver", type=solver, default="dpm-solver-3", metavar="NAME", help=_DEFAULT)
    sample.add_argument("--nfe", type=positive, default=20, metavar="N", help=_NFE)
    _add_sampling(sample)
    _add_model(sample)
    sample.add_argument(
        "-o", "--output", required=True, type=Path, metavar="PATH", help="a folder, or a .png or .npz file"
    )
    sample.add_argument("--force", action="store_true", help="replace a file, or other samples in the folder")
    sample.set_defaults(command="sample", parser=sample)

    evaluate = commands.add_parser(
        "evaluate", help="compare samples with and without a calibration", opening=_EVALUATE
    )
    evaluate.add_argument(
        "--calibration", type=Path, required=True, metavar="FILE", help="what `calibrate` wrote"
    )
    evaluate.add_argument("--solver", type=solvers, default=["dpm-solver-3"], metavar="A,B,..", help=_DEFAULT)
    evaluate.add_argument("--nfe", type=counts, default=[20], metavar="N,M,..", help=_NFE)
    evaluate.add_argument("-n", "--samples", type=positive, default=1000, metavar="N", help="default: 1000")
    _add_data(evaluate, images=10000)
    measures = evaluate.add_argument_group("measures")
    measures.add_argument(
        "--features",
        default="efficientnet",
        metavar="NAME",
        help="efficientnet (default), inception, pixels, or package.module:name",
    )
    measures.add_argument(
        "--weights", type=Path, metavar="FILE", help="of inception, where it cannot be downloaded"
    )
    measures.add_argument("--reference", type=Path, metavar="FILE", help="instead of --data, saved before")
    measures.add_argument("--save-reference", type=Path, metavar="FILE", help="keep the data's statistics")
    measures.add_argument(
        "--no-loss", dest="loss", action="store_false", help="leave the denoising loss out, and save its time"
    )
    _add_sampling(evaluate)
    _add_model(evaluate)
    evaluate.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a comparison.json")
    evaluate.add_argument("--force", action="store_true", help="replace FILE if it exists")
    evaluate.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: FILE.run)")
    evaluate.set_defaults(command="evaluate", parser=evaluate)

    likelihood = commands.add_parser(
        "likelihood", help="how likely images are, calibrated or not", opening=_LIKELIHOOD
    )
    likelihood.add_argument("--calibration", type=Path, metavar="FILE", help="what `calibrate` wrote")
    which = likelihood.add_mutually_exclusive_group()
    for name, text in (
        ("bound", "the variational bound (default)"),
        ("ode", "by the probability flow: tighter, and slower"),
        ("dsm", "denoising score matching per level, and in total under four weightings"),
    ):
        which.add_argument(f"--{name}", action="store_const", dest="method", const=name, help=text)
    bound = likelihood.add_argument_group("bound")
    bound.add_argument(
        "--steps", type=positive, metavar="T", help="of a chain of T steps (default: continuous)"
    )
    bound.add_argument("--variance", choices=("small", "large", "learned_range"), help="of its reverse steps")
    bound.add_argument("--draws", type=positive, metavar="N", help="noise levels per image (default: 8)")
    bound.add_argument(
        "--uniform", action="store_true", help="draw levels evenly in time, not where the loss is"
    )
    ode = likelihood.add_argument_group("ode")
    ode.add_argument("--tolerance", type=share, metavar="X", help="of its steps (default: 1e-4)")
    ode.add_argument(
        "--trace",
        choices=("rademacher", "gaussian", "exact"),
        help="of the Jacobian; exact: a pass per pixel",
    )
    ode.add_argument("--probes", type=positive, metavar="N", help="of Hutchinson's estimator (default: 1)")
    ode.add_argument(
        "--start",
        choices=("noise", "data"),
        help="with the least noise (default), or at the image itself, dequantized uniformly",
    )
    _add_data(likelihood, images=None)
    _add_model(likelihood)
    likelihood.add_argument("--trust", action="store_true", help="even if the model seems to be used wrongly")
    likelihood.add_argument("-o", "--output", type=Path, metavar="FILE", help="write JSON, with every image")
    likelihood.add_argument("--force", action="store_true", help="replace FILE if it exists")
    likelihood.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: FILE.run)")
    likelihood.set_defaults(command="likelihood", parser=likelihood, method="bound")

    inspect = commands.add_parser("inspect", help="print what a calibration file says", opening=_INSPECT)
    inspect.add_argument("file", metavar="FILE", help="a .trueup.safetensors file")
    inspect.add_argument("--json", action="store_true", help="JSON on standard output")
    inspect.add_argument("--figure", type=picture, metavar="FILE", help=_FIGURE)
    inspect.set_defaults(command="inspect", parser=inspect, quiet=False)

    demo = commands.add_parser(
        "demo", help="calibrate the bundled model and draw what it does", opening=_DEMO
    )
    demo.add_argument(
        "--out", type=Path, default=Path("trueup-demo"), metavar="DIR", help="where everything goes"
    )
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    demo.add_argument("--quiet", action="store_true", help="no progress")
    demo.set_defaults(command="demo", parser=demo, json=False)
    return top


_SOLVERS = f"{', '.join(NAMES)}, or the class of a diffusers scheduler"
_DEFAULT = f"{_SOLVERS} (default: dpm-solver-3)"
_FIGURE = "draw the size of the mean residual over time, the paper's figure 1 (.png, .svg or .pdf)"
_NFE = "evaluations of the network per sample, at most (default: 20); adaptive solvers decide themselves"


def _add_data(parser: _Parser, images: int | None) -> Any:
    data = parser.add_argument_group("images")
    data.add_argument(
        "--data", metavar="DATA", help="a folder of images, a .npy or .npz file, or bundled:images"
    )
    data.add_argument(
        "--images",
        type=positive,
        default=images,
        metavar="N",
        help=f"use N, picked at random with --seed (default: {images or '200, or 32 with --ode'})",
    )
    data.add_argument(
        "--resize", choices=("shorter", "exact"), help="make images the model's size; else they must be"
    )
    data.add_argument("--crop", choices=("center",), help="cut out the middle, after resizing")
    data.add_argument("--flip", action="store_true", help="mirror every second image, for models trained so")
    data.add_argument(
        "--data-range", type=value_range, metavar="LOW,HIGH", help="range of floating point arrays"
    )
    data.add_argument(
        "--skip-bad", action="store_true", help="leave out images that cannot be used, and count them"
    )
    return data


def _add_model(parser: _Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a directory written by save_pretrained, or bundled:raw, bundled:ema"
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--scheduler", type=Path, metavar="PATH", help="scheduler_config.json or its directory"
    )
    model.add_argument(
        "--prediction",
        choices=("noise", "data", "velocity", "score", "flow", "reversed_flow"),
        help="what it predicts (default: what the scheduler says)",
    )
    model.add_argument(
        "--model-range", type=value_range, metavar="LOW,HIGH", help="what it was trained on (default: -1,1)"
    )
    model.add_argument(
        "--vae", type=Path, metavar="DIR", help="a latent model's autoencoder (default: the one beside it)"
    )
    model.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    model.add_argument(
        "--batch-size", type=positive, metavar="N", help="found, and halved when memory runs out"
    )
    parser.add_argument("--seed", type=int, default=0)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="JSON on standard output, all else on standard error"
    )
    output.add_argument("--quiet", action="store_true", help="no progress, and only what matters most")


def _add_fit(parser: _Parser) -> None:
    fit = parser.add_argument_group("calibration")
    fit.add_argument("--family", choices=("spectral", "shift", "none"), default="spectral")
    fit.add_argument("--estimator", choices=("shrunk", "regressed", "paired", "plain"), default="shrunk")


def _add_sampler(parser: _Parser, calibration: str) -> None:
    sampler = parser.add_argument_group("sampler")
    sampler.add_argument("--solver", type=solvers, metavar="A,B,..", help=_SOLVERS)
    sampler.add_argument("--nfe", type=counts, metavar="N,M,..", help="evaluations per sample (default: 20)")
    sampler.add_argument(
        "--trajectories", type=positive, metavar="N", help="samples to measure the sampler on (default: 128)"
    )
    sampler.add_argument("--calibration", type=Path, metavar="FILE", help=calibration)
    _add_conditions(sampler)


def _add_conditions(group: Any) -> None:
    group.add_argument(
        "--grid", choices=("logsnr", "uniform", "quadratic"), help="where DPM-Solver puts its levels"
    )
    group.add_argument(
        "--labels", type=labels, metavar="A,B,..", help="sample these labels in turn; 0-9 is a range"
    )
    group.add_argument("--guidance", type=float, default=1.0, metavar="W", help="classifier-free guidance")
    group.add_argument("--null-label", type=int, metavar="N", help="the label that stands for none")


def _add_sampling(parser: _Parser) -> None:
    sampling = parser.add_argument_group("sampling")
    _add_conditions(sampling)
    sampling.add_argument(
        "--trajectory",
        action=argparse.BooleanOptionalAction,
        help="insist on the calibration's trajectory, or leave it out (default: where it has one)",
    )
