"""The command line: parse, call, print. Heavy imports happen inside the commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from trueup import __version__

_EXAMPLES = """examples:
  trueup inspect model.trueup.safetensors      what a calibration says
  trueup --version
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="trueup",
        description="Trues up trained diffusion models: measures their systematic error and removes it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"trueup {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    inspect = commands.add_parser("inspect", help="print what a calibration file says")
    inspect.add_argument("file", metavar="FILE", help="a .trueup.safetensors file")
    options = parser.parse_args(arguments)

    from trueup.artifact import load
    from trueup.errors import TrueupError

    try:
        cal = load(options.file)
        print(cal.summary())
        weights = next(iter((cal.provenance.get("weights") or {}).values()), "none")
        print(
            f"made for: samples of shape {cal.shape}, {cal.parametrization.name} prediction, "
            f"{cal.process.kind} noise, weights {weights[:8]}; seed {cal.provenance.get('seed')}, "
            f"data {cal.data_fingerprint}"
        )
    except TrueupError as error:
        print(f"trueup: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
