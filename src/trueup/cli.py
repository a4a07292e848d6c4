"""The command line: errors and exit codes. Options are in `trueup.options`; what commands do, in
`trueup.commands`, which is imported late."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trueup.checks import check, started_by_launcher
from trueup.errors import Argument, MismatchError, TrueupError
from trueup.files import line, printable
from trueup.options import parser

_TERMINATED = "terminated"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0, 1 for a failed check, 2 for bad input, 130 after Ctrl-C, 143 when
    terminated."""
    options = parser().parse(_joined(sys.argv[1:] if arguments is None else arguments))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to fail
    code = 141
    before = _interrupt_when_terminated()
    try:
        if started_by_launcher(options):
            from trueup import distributed

            distributed.join()
            with distributed.together():
                distributed.agree({name.replace("_", " "): repr(one) for name, one in vars(options).items()})
                code = _run(options)
        else:
            code = _run(options)
        return code
    except TrueupError as error:
        if not error.rank:  # of an error that all ranks share, the first speaks
            print(f"trueup: {_phrased(error, options)}", file=sys.stderr, flush=True)
        if error.rank is not None:  # and a launcher ends the others when one is gone
            from trueup import distributed

            distributed.wait()
        return 2
    except KeyboardInterrupt as stop:
        run = getattr(options, "run", None)
        if os.environ.get("RANK", "0") == "0":
            print(f"\ntrueup: interrupted{_kept(run) if run else ''}", file=sys.stderr)
        return 143 if str(stop) == _TERMINATED else 130
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except Exception as error:
        if os.environ.get("TRUEUP_DEBUG"):
            raise
        kind, words = type(error).__name__, line(error, 300)
        print(f"trueup: {kind}: {words} (TRUEUP_DEBUG=1 shows where)", file=sys.stderr)
        return 2
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        if "trueup.distributed" in sys.modules:
            sys.modules["trueup.distributed"].leave()


def _interrupt_when_terminated() -> Any:
    """Whoever stops a job says SIGTERM first. What was done then, to be put back; None: nothing is changed.

    Ranks of a launcher, which starts others in their place, just end.
    """
    ours = threading.current_thread() is threading.main_thread() and "RANK" not in os.environ
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return None

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # who says it twice does not want to wait
        raise KeyboardInterrupt(_TERMINATED)

    return signal.signal(signal.SIGTERM, stop)


def _run(options: argparse.Namespace) -> int:
    check(options)
    from trueup import commands

    code: int = getattr(commands, options.command)(options)
    sys.stdout.flush()
    return code


def _phrased(error: TrueupError, options: argparse.Namespace) -> str:
    """An error as the command line says it, on one line."""
    words = error.phrased(Argument.option)
    if isinstance(error, MismatchError) and any(argument.name == "force" for argument in error.arguments):
        # No command puts a calibration on a model it was not made for: --force is about files.
        words = f"{error.problem}: calibrate this model, or name its own calibration"
    if error.one_image and not getattr(options, "skip_bad", False):
        words += " (--skip-bad leaves such images out)"
    return printable(words)


def _kept(run: Path) -> str:
    """How to go on after an interruption."""
    kept = ("checkpoint*.safetensors", "samples.json", "trajectories.safetensors", "solvers.*.safetensors")
    if any(any(run.glob(f"**/{name}")) for name in kept):
        return f"; what was done is kept in {printable(str(run))}: run the same command again to go on"
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


if __name__ == "__main__":
    raise SystemExit(main())
