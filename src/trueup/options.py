"""What can be typed: commands, options, and help that opens with examples. Imports nothing heavy."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from trueup import __version__, typed
from trueup.files import printable
from trueup.openings import OPENINGS
from trueup.solvers import NAMES, OR_A_CLASS, did_you_mean


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
        # None: a bar if somebody is looking, else a line every half minute.
        options.progress = False if options.quiet else None
        return options

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Commands and choices pass here."""
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            hint = did_you_mean(str(value), known) or f" (choose from {', '.join(known)})"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, printable(f"{self.prog}: {message} (see {self.prog} --help)") + "\n")


_FLAG: dict[str, Any] = {"action": "store_true"}
_FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
_WHERE: dict[str, Any] = {"metavar": "FILE"}  # or a directory, or a name on the Hub
_LIST: dict[str, Any] = {"type": typed.solvers, "metavar": "A,B,.."}
_COUNT: dict[str, Any] = {"type": typed.positive, "metavar": "N"}
_CURVES = "draw the size of the mean residual over time, the paper's figure 1 (.png, .svg or .pdf)"
_FIGURE: dict[str, Any] = {"type": typed.picture, "metavar": "FILE", "help": _CURVES}
_FAMILIES = ("spectral", "shift", "none")
_ESTIMATORS = ("shrunk", "regressed", "paired", "plain")
_SHARE = "only measure the K-th of N shares of the images, and write moments for `trueup merge`"
_DEVICES = ("auto", "cpu", "cuda", "mps")
_SOLVERS = f"{', '.join(NAMES)}, {OR_A_CLASS}"
_OWN = "fitted (the calibration's own for --nfe)"
_DEFAULT = f"{_OWN}, {_SOLVERS} (default: dpm-solver-3)"
_FITTED = f"{_OWN}, {_SOLVERS} (default: fitted where there is one, else dpm-solver-3)"
_NUMBERS = "numbers of evaluations (default: 5,8,10,20)"
_NFE = "evaluations of the network per sample, at most (default: 20); adaptive solvers decide themselves"
_MADE = "what `calibrate` wrote: a file, a directory, or a name on the Hub"


def parser() -> _Parser:
    """The whole command line."""
    top = _Parser(prog="trueup", opening=OPENINGS["trueup"])
    top.add_argument("--version", action="version", version=f"trueup {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    def command(name: str, words: str, **defaults: Any) -> _Parser:
        added = commands.add_parser(name, help=words, opening=OPENINGS[name])
        added.set_defaults(command=name, parser=added, **defaults)
        return added

    calibrate = command("calibrate", "measure a model and write its calibration")
    data = _add_data(calibrate, images=500)
    data.add_argument("--generated", **_COUNT, help="instead of --data: N samples of the model itself")
    data.add_argument("--generate-nfe", **_COUNT, default=50, help="evaluations for each (default: 50)")
    _add_model(calibrate)
    _add_fit(calibrate)
    few = calibrate.add_argument_group("solvers")
    wanted = "fit solvers for so many evaluations; alone, without --data, the solvers only"
    few.add_argument("--nfe", type=typed.counts, metavar="N,M,..", help=wanted)
    few.add_argument("--calibration", **_WHERE, help="instead of --data: add solvers to what this file has")
    many = "samples that solvers are fitted to, 32 or more (default: 128)"
    few.add_argument("--trajectories", **_COUNT, default=128, help=many)
    _add_labels(few)
    _add_guidance(few)
    _add_output(calibrate, "the calibration to write", required=True)
    calibrate.add_argument("--trust", **_FLAG, help="calibrate even if the model seems to be used wrongly")

    calibrate.add_argument("--shard", type=typed.shard, metavar="K/N", help=_SHARE)

    merge = command("merge", "make a calibration of what shards measured")
    written = "what `calibrate --shard` wrote"
    merge.add_argument("files", type=Path, nargs="+", metavar="PART", help=written)
    merge.add_argument("--partial", **_FLAG, help="make do with some of the shares; the file says which")
    merge.add_argument("--family", choices=_FAMILIES, default="spectral")
    merge.add_argument("--estimator", choices=_ESTIMATORS, default="shrunk")
    merge.add_argument("-o", "--output", required=True, **_FILE, help="the calibration to write")
    merge.add_argument("--force", **_FLAG, help="replace FILE if it exists")
    merge.add_argument("--json", **_FLAG, help="JSON on standard output, all else on standard error")
    merge.add_argument("--quiet", **_FLAG, help="no progress, and only what matters most")

    check = command("check", "say how miscalibrated a model is, and why")
    _add_data(check, images=100)
    _add_model(check)
    _add_fit(check)
    surely = "exit with 1 if calibrating would surely gain more than X bits/dim of the likelihood bound"
    check.add_argument("--fail-above", type=typed.positive_float, metavar="X", help=surely)
    check.add_argument("--trust", **_FLAG, help="measure even if the model seems to be used wrongly")
    check.add_argument("--figure", **_FIGURE)
    check.add_argument("-o", "--output", **_FILE, help="write JSON, for `report --with` say")
    check.add_argument("--force", **_FLAG, help="replace FILE if it exists")

    samplers = command("samplers", "which sampler and schedule for a model")
    samplers.add_argument("--nfe", type=typed.counts, default=[5, 8, 10, 20], metavar="N,M,..", help=_NUMBERS)
    samplers.add_argument("--calibration", **_WHERE, help=f"{_MADE}; its solvers are compared as well")
    samplers.add_argument("--trajectories", **_COUNT, default=32, help="samples to compare on (default: 32)")
    plotted = "draw error against evaluations (.png, .svg or .pdf)"
    samplers.add_argument("--figure", type=typed.picture, metavar="FILE", help=plotted)
    samplers.add_argument("-o", "--output", **_FILE, help="write JSON")
    samplers.add_argument("--force", **_FLAG, help="replace FILE if it exists")
    _add_labels(samplers)
    _add_guidance(samplers)
    _add_model(samplers)

    sample = command("sample", "draw samples, calibrated or not")
    sample.add_argument("-n", "--samples", **_COUNT, default=64, help="default: 64")
    sample.add_argument("--calibration", **_WHERE, help=_MADE)
    sample.add_argument("--solver", type=typed.solver, metavar="NAME", help=_FITTED)
    sample.add_argument("--nfe", **_COUNT, default=20, help=_NFE)
    _add_sampling(sample)
    _add_model(sample)
    where = "a folder, or a .png or .npz file"
    sample.add_argument("-o", "--output", required=True, type=Path, metavar="PATH", help=where)
    sample.add_argument("--force", **_FLAG, help="replace a file, or other samples in the folder")

    evaluate = command("evaluate", "compare samples with and without a calibration")
    evaluate.add_argument("--calibration", required=True, **_WHERE, help=_MADE)
    evaluate.add_argument("--solver", **_LIST, default=["dpm-solver-3"], help=_DEFAULT)
    evaluate.add_argument("--nfe", type=typed.counts, default=[20], metavar="N,M,..", help=_NFE)
    evaluate.add_argument("-n", "--samples", **_COUNT, default=1000, help="default: 1000")
    _add_data(evaluate, images=10000)
    measures = evaluate.add_argument_group("measures")
    known = "efficientnet (default), inception, pixels, or package.module:name"
    named: dict[str, Any] = {"type": typed.features, "metavar": "NAME"}
    measures.add_argument("--features", **named, default="efficientnet", help=known)
    measures.add_argument("--weights", **_FILE, help="of inception, where it cannot be downloaded")
    measures.add_argument("--reference", **_FILE, help="instead of --data, saved before")
    measures.add_argument("--save-reference", **_FILE, help="keep the data's statistics")
    loss = "leave the denoising loss out, and save its time"
    measures.add_argument("--no-loss", dest="loss", action="store_false", help=loss)
    _add_sampling(evaluate)
    _add_model(evaluate)
    _add_output(evaluate, "write a comparison.json")

    likely = "how likely images are, calibrated or not"
    likelihood = command("likelihood", likely, method="bound")
    likelihood.add_argument("--calibration", **_WHERE, help=_MADE)
    which = likelihood.add_mutually_exclusive_group()
    for name, text in (
        ("bound", "the variational bound (default)"),
        ("ode", "by the probability flow: tighter, and slower"),
        ("dsm", "denoising score matching per level, and in total under four weightings"),
    ):
        which.add_argument(f"--{name}", action="store_const", dest="method", const=name, help=text)
    bound = likelihood.add_argument_group("bound")
    steps = "of a chain of T steps (default: continuous)"
    bound.add_argument("--steps", type=typed.positive, metavar="T", help=steps)
    bound.add_argument("--variance", choices=("small", "large", "learned_range"), help="of its reverse steps")
    bound.add_argument("--draws", **_COUNT, help="noise levels per image (default: 8)")
    bound.add_argument("--uniform", **_FLAG, help="draw levels evenly in time, not where the loss is")
    ode = likelihood.add_argument_group("ode")
    ode.add_argument("--tolerance", type=typed.share, metavar="X", help="of its steps (default: 1e-4)")
    traces = ("rademacher", "gaussian", "exact")
    ode.add_argument("--trace", choices=traces, help="of the Jacobian; exact: a pass per pixel")
    ode.add_argument("--probes", **_COUNT, help="of Hutchinson's estimator (default: 1)")
    start = "with the least noise (default), or at the image itself, dequantized uniformly"
    ode.add_argument("--start", choices=("noise", "data"), help=start)
    _add_data(likelihood, images=None)
    _add_model(likelihood)
    likelihood.add_argument("--trust", **_FLAG, help="even if the model seems to be used wrongly")
    _add_output(likelihood, "write JSON, with every image")

    inspect = command("inspect", "print what a calibration file says", quiet=False)
    inspect.add_argument(
        "file", metavar="FILE", help="a .trueup.safetensors file, its directory, or a name on the Hub"
    )
    inspect.add_argument("--json", **_FLAG, help="JSON on standard output")
    inspect.add_argument("--figure", **_FIGURE)

    report = command("report", "write a calibration as a page to look at", json=False)
    report.add_argument("file", metavar="FILE", help=_MADE)
    others = "what `check`, `samplers`, `evaluate` and `likelihood` wrote with -o, of this network"
    report.add_argument(
        "--with", dest="measured", nargs="+", action="extend", default=[], **_FILE, help=others
    )
    report.add_argument("-o", "--output", required=True, **_FILE, help="the page to write, report.html say")
    report.add_argument("--force", **_FLAG, help="replace the page if it exists")
    report.add_argument("--quiet", **_FLAG, help="say nothing")

    demo = command("demo", "calibrate the bundled model and draw what it does", json=False)
    out = Path("trueup-demo")
    demo.add_argument("--out", type=Path, default=out, metavar="DIR", help="where everything goes")
    demo.add_argument("--seed", type=typed.seed, metavar="N", default=0)
    demo.add_argument("--device", choices=_DEVICES, default="auto")
    demo.add_argument("--quiet", **_FLAG, help="no progress")
    return top


def _add_data(parser: _Parser, images: int | None) -> Any:
    data = parser.add_argument_group("images")
    add = data.add_argument
    where = "a folder of images, tar shards ('shards/{000..127}.tar', a folder of them), a .npy or .npz file"
    add("--data", help=f"{where}, or bundled:images")
    picked = f"use N, picked at random with --seed (default: {images or '200, or 32 with --ode'})"
    add("--images", **_COUNT, default=images, help=picked)
    table = "a .csv or .jsonl file with the folder's files and a text or label for each; metadata.csv, .txt "
    add("--captions", **_FILE, help=f"{table}files beside the images and folders of classes are found")
    column = "of tar shards: how the names of {} end"
    add("--image-column", metavar="NAME", help=f"{column.format('images')}, where there are several")
    add("--label-column", metavar="NAME", help=f"{column.format('labels')}, or a key of their .json")
    sizes = "make images the model's size; else they must be (a latent model's: shorter, and cropped)"
    add("--resize", choices=("shorter", "exact"), help=sizes)
    add("--crop", choices=("center",), help="cut out the middle, after resizing")
    add("--flip", **_FLAG, help="mirror every second image, for models trained so")
    add("--data-range", type=typed.value_range, metavar="LOW,HIGH", help="range of floating point arrays")
    add("--skip-bad", **_FLAG, help="leave out images that cannot be used, and count them")
    return data


def _add_model(parser: _Parser) -> None:
    where = "a directory written by save_pretrained, a name on the Hub, bundled:raw, bundled:ema, or "
    where += (
        "my_code.py:make_denoiser: runs that file, and takes the Denoiser, pipeline or network of that name, "
    )
    where += "or what it returns"
    parser.add_argument("model", metavar="MODEL", help=where)
    add = parser.add_argument_group("model").add_argument
    add("--scheduler", type=Path, metavar="PATH", help="scheduler_config.json or its directory")
    predictions = ("noise", "data", "velocity", "score", "flow", "reversed_flow")
    add("--prediction", choices=predictions, help="what it predicts (default: what the scheduler says)")
    trained_on = "what it was trained on (default: -1,1)"
    add("--model-range", type=typed.value_range, metavar="LOW,HIGH", help=trained_on)
    add("--vae", type=Path, metavar="DIR", help="a latent model's autoencoder (default: the one beside it)")
    add("--size", type=typed.size, metavar="HxW", help="of the pictures of a pipeline (default: its own)")
    add("--device", choices=_DEVICES, default="auto")
    add("--batch-size", **_COUNT, help="found, and halved when memory runs out")
    parser.add_argument("--seed", type=typed.seed, metavar="N", default=0)
    output = parser.add_argument_group("output")
    output.add_argument("--json", **_FLAG, help="JSON on standard output, all else on standard error")
    output.add_argument("--quiet", **_FLAG, help="no progress, and only what matters most")


def _add_output(parser: _Parser, words: str, required: bool = False) -> None:
    parser.add_argument("-o", "--output", required=required, **_FILE, help=words)
    parser.add_argument("--force", **_FLAG, help="replace FILE if it exists")
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: FILE.run)")


def _add_fit(parser: _Parser) -> None:
    fit = parser.add_argument_group("calibration")
    fit.add_argument("--family", choices=_FAMILIES, default="spectral")
    fit.add_argument("--estimator", choices=_ESTIMATORS, default="shrunk")
    by_class = "a correction for every class as well, of the labels that are in the data"
    fit.add_argument("--per-class", **_FLAG, help=by_class)
    by_prompt = "a part that depends on the embeddings of prompts as well"
    fit.add_argument("--per-embedding", **_FLAG, help=by_prompt)
    left_out = "draw no samples to judge the correction by, and save their time"
    fit.add_argument("--no-samples", dest="judged", action="store_false", help=left_out)


def _add_labels(group: Any) -> None:
    words = "sample these labels in turn; 0-9 is a range"
    group.add_argument("--labels", type=typed.labels, metavar="A,B,..", help=words)
    text = "the same for models of text: a file with a prompt a line"
    group.add_argument("--prompts", dest="labels", type=typed.prompts, metavar="FILE", help=text)


def _add_guidance(group: Any) -> None:
    add = group.add_argument
    add("--guidance", type=typed.number, default=1.0, metavar="W", help="classifier-free guidance")
    add("--null-label", type=int, metavar="N", help="the label that stands for none")


def _add_conditions(group: Any) -> None:
    add = group.add_argument
    add("--grid", choices=("logsnr", "uniform", "quadratic"), help="where DPM-Solver puts its levels")
    _add_labels(group)
    _add_guidance(group)


def _add_sampling(parser: _Parser) -> None:
    sampling = parser.add_argument_group("sampling")
    _add_conditions(sampling)
