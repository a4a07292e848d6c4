"""The command line: options, help and errors. What the commands do is in `trueup.commands`, imported late."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from trueup import __version__

_OVERVIEW = """examples:
  trueup demo                                          see the point, on a model that comes with trueup
  trueup calibrate bundled:raw --data bundled:images -o raw.trueup.safetensors

Trues up trained diffusion models: measures how a network misses at every noise level, and writes the
correction as one small file that trueup.attach puts on the model. `trueup COMMAND --help` says more.
"""
_CALIBRATE = """examples:
  trueup calibrate bundled:raw --data bundled:images --images 100 -o raw.trueup.safetensors
  trueup calibrate bundled:ema --data bundled:images --family shift --json -o ema.trueup.safetensors

Measures MODEL on images and writes its calibration. Work is kept in a run directory after every batch:
interrupted, the same command goes on from there, and with a larger --images it adds to what it has.
"""
_CHECK = """examples:
  trueup check bundled:raw --data bundled:images
  trueup check bundled:ema --data bundled:images --images 50 --fail-above 0.01 --quiet

Says how miscalibrated MODEL is, and whether it is being used as it was trained: wrong range, BGR, another
prediction type or schedule are named, with exit code 2. Writes nothing. Exits with 1 if --fail-above is
surely exceeded.
"""
_INSPECT = """examples:
  trueup inspect raw.trueup.safetensors
  trueup inspect raw.trueup.safetensors --json
"""
_DEMO = """examples:
  trueup demo
  trueup demo --out /tmp/trueup-demo --seed 1

Calibrates the raw last weights of a small Fashion-MNIST model, samples before and after with the same seeds,
and writes the calibration and one picture: uncalibrated, shift, spectral, and the EMA weights beside them.
"""


class _Parser(argparse.ArgumentParser):
    """Help that opens with examples, and errors of one line."""

    def __init__(self, *args: Any, opening: str = "", **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.opening = opening

    def format_help(self) -> str:
        return f"{self.opening}\n{super().format_help()}"

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0, 1 for a failed check, 2 for bad input, 130 after Ctrl-C."""
    options, unknown = _parser().parse_known_args(_joined(sys.argv[1:] if arguments is None else arguments))
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    from trueup.errors import TrueupError

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to fail
    code = 141
    try:
        from trueup import commands

        code = getattr(commands, options.command)(options)
        sys.stdout.flush()
        return code
    except TrueupError as error:
        print(f"trueup: {_as_options(str(error), options)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        run = getattr(options, "run", None)
        print(f"\ntrueup: interrupted{_kept(run) if run else ''}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except Exception as error:
        if os.environ.get("TRUEUP_DEBUG"):
            raise
        reason = " ".join(str(error).split())[:300]
        print(
            f"trueup: {type(error).__name__}: {reason} (TRUEUP_DEBUG=1 shows where)",
            file=sys.stderr,
        )
        return 2


def _kept(run: Path) -> str:
    """How to go on after an interruption."""
    if any(run.glob("**/checkpoint.safetensors")):
        return f"; what was measured is in {run}: run the same command again to go on"
    return ", before anything was measured"


def _joined(arguments: Sequence[str]) -> list[str]:
    """`--data-range -1,1` as `--data-range=-1,1`, or argparse takes the range for an option."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in ("--data-range", "--model-range"):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _as_options(message: str, options: argparse.Namespace) -> str:
    """What the library says of its arguments, said of the command line's options."""
    message = re.sub(r"data_range=\((-?[\d.]+), (-?[\d.]+)\)", r"--data-range \1,\2", message)
    message = message.replace("data_range=(low, high)", "--data-range LOW,HIGH")
    message = re.sub(r"\b(resize|crop)='(\w+)'", r"--\1 \2", message)
    one_image = ("cannot be read as an image", "is a colour image", "has transparency")
    if any(words in message for words in one_image) and not getattr(options, "skip_bad", False):
        message += " (--skip-bad leaves such images out)"
    return message


def _parser() -> _Parser:
    parser = _Parser(prog="trueup", opening=_OVERVIEW)
    parser.add_argument("--version", action="version", version=f"trueup {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    calibrate = commands.add_parser(
        "calibrate", help="measure a model and write its calibration", opening=_CALIBRATE
    )
    _add_model(calibrate, images=500)
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
    _add_model(check, images=100)
    check.add_argument(
        "--fail-above",
        type=_positive_float,
        metavar="X",
        help="exit with 1 if calibrating would surely gain more than X bits/dim of the likelihood bound",
    )
    check.set_defaults(command="check", parser=check)

    inspect = commands.add_parser("inspect", help="print what a calibration file says", opening=_INSPECT)
    inspect.add_argument("file", metavar="FILE", help="a .trueup.safetensors file")
    inspect.add_argument("--json", action="store_true", help="JSON on standard output")
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
    return parser


def _add_model(parser: _Parser, images: int) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a directory written by save_pretrained, or bundled:raw, bundled:ema"
    )
    data = parser.add_argument_group("images")
    data.add_argument(
        "--data",
        required=True,
        metavar="DATA",
        help="a folder of images, a .npy or .npz file, or bundled:images",
    )
    data.add_argument(
        "--images", type=_positive, default=images, metavar="N", help="use the first N (default: %(default)s)"
    )
    data.add_argument(
        "--resize", choices=("shorter", "exact"), help="make images the model's size; else they must be"
    )
    data.add_argument("--crop", choices=("center",), help="cut out the middle, after resizing")
    data.add_argument("--flip", action="store_true", help="mirror every second image, for models trained so")
    data.add_argument("--data-range", type=_range, metavar="LOW,HIGH", help="range of floating point arrays")
    data.add_argument(
        "--skip-bad", action="store_true", help="leave out images that cannot be used, and count them"
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--scheduler", type=Path, metavar="PATH", help="scheduler_config.json or its directory"
    )
    model.add_argument(
        "--prediction",
        choices=("noise", "data", "velocity", "score", "flow"),
        help="what it predicts (default: what the scheduler says)",
    )
    model.add_argument(
        "--model-range", type=_range, metavar="LOW,HIGH", help="what it was trained on (default: -1,1)"
    )
    model.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    model.add_argument(
        "--batch-size", type=_positive, metavar="N", help="found, and halved when memory runs out"
    )
    fit = parser.add_argument_group("calibration")
    fit.add_argument("--family", choices=("spectral", "shift"), default="spectral")
    fit.add_argument("--estimator", choices=("shrunk", "regressed", "paired", "plain"), default="shrunk")
    fit.add_argument(
        "--antithetic", action="store_true", help="run every image with its noise and its negative"
    )
    fit.add_argument("--seed", type=int, default=0)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="JSON on standard output, all else on standard error"
    )
    output.add_argument("--quiet", action="store_true", help="no progress, and only the verdict")


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _range(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW,HIGH, for instance 0,1") from None
    if not -float("inf") < low < high < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: LOW must be below HIGH")
    return low, high


if __name__ == "__main__":
    raise SystemExit(main())
