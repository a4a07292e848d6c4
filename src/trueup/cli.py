"""The command line: errors and exit codes. Options are in `trueup.options`; what commands do, in
`trueup.commands`, which is imported late."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from trueup.options import parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0, 1 for a failed check, 2 for bad input, 130 after Ctrl-C."""
    options, unknown = parser().parse_known_args(_joined(sys.argv[1:] if arguments is None else arguments))
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
    if any(any(run.glob(f"**/{name}")) for name in ("checkpoint.safetensors", "samples.json", "samplers.*")):
        return f"; what was done is kept in {run}: run the same command again to go on"
    return ", before anything was done"


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
    for words, option in (
        ("weights=PATH", "--weights FILE"),
        ("pass null_label", "pass --null-label N"),
        ("variance='small' or 'large'", "--variance small or large"),
        ("a bound of T steps: pass steps", "a bound of T steps: pass --steps T"),
        (", or pass force=True if you know they agree", ""),
        ("pass force=True to replace", "pass --force to replace"),
    ):
        message = message.replace(words, option)
    one_image = (
        "cannot be read as an image",
        "is a colour image",
        "has transparency",
        "its values were quantized",
        "8 bits first",
    )
    if any(words in message for words in one_image) and not getattr(options, "skip_bad", False):
        message += " (--skip-bad leaves such images out)"
    return message


if __name__ == "__main__":
    raise SystemExit(main())
