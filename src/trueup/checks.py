"""What can be seen to be wrong with a command at once: said before torch, diffusers or a model are loaded."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from trueup import typed
from trueup.errors import Argument, DataError, ModelError, TrueupError
from trueup.files import bundled, is_hub_name
from trueup.patterns import is_shards, shard_files
from trueup.solvers import FITTED, check_evaluations

# Options of `likelihood` that only one of its methods has.
BELONGS = dict.fromkeys(("steps", "variance", "draws", "uniform"), "bound")
BELONGS |= dict.fromkeys(("tolerance", "trace", "probes", "start"), "ode")


# Where launchers that know nothing of torch.distributed say how many processes they started.
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_ALONE = ("inspect", "merge", "report", "demo")  # what is over soon


def check(options: argparse.Namespace) -> None:
    """Raise for a command that cannot be carried out, whatever its model and images hold."""
    _CHECKS.get(options.command, lambda _: None)(options)
    names, counts = (_listed(getattr(options, name, None)) for name in ("solver", "nfe"))
    if options.command == "sample" and not names and options.calibration is None:
        names = ["dpm-solver-3"]
    if FITTED in names and getattr(options, "calibration", None) is None:
        raise TrueupError("a fitted solver is part of a calibration: name it with --calibration")
    for name in names:
        check_evaluations(name, min(counts, default=20))
    if getattr(options, "grid", None) is not None:
        other = next((name for name in names if not name.startswith("dpm-solver")), None)
        if other is not None:
            raise TrueupError(f"--grid belongs to DPM-Solver: {other} has its own")
    for name in ("output", "save_reference", "figure"):
        path = getattr(options, name, None)
        if path is not None and options.command == "sample" and path.suffix.lower() not in (".png", ".npz"):
            _check_folder(path if path.is_dir() else path.parent)  # `Output` looks at what is in it
        elif path is not None:
            _check_output(path, name == "figure" or options.force)
    for name in ("calibration", "reference", "scheduler", "vae", "weights", "file", "captions"):
        path, named = getattr(options, name, None), name in ("calibration", "file")
        if path is not None and not Path(path).exists() and not (named and is_hub_name(path)):
            raise TrueupError(f"{path} does not exist")
    for path in getattr(options, "measured", ()):
        if not path.is_file():
            raise TrueupError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
    for path in getattr(options, "files", ()):
        if not path.is_file():
            raise TrueupError(f"{path} is not a file that `trueup calibrate --shard` wrote")
    if getattr(options, "data", None) is not None:
        _check_data(options.data)
    if hasattr(options, "model") and (code := typed.code(options.model)) is not None:
        if not code[0].is_file():
            raise ModelError(f"{code[0]} is not there: {options.model} names code to run")
    elif hasattr(options, "model") and not (bundled(options.model).is_dir() or is_hub_name(options.model)):
        wanted = "a directory that save_pretrained wrote, nor a name on the Hub (owner/name)"
        raise ModelError(f"{options.model} is not {wanted}")


def started_by_launcher(options: argparse.Namespace) -> bool:
    """Whether this is one of many processes; raises where they would not know of each other."""
    shard = getattr(options, "shard", None)
    if "WORLD_SIZE" not in os.environ:
        started = next((n for n in _TASKS if os.environ.get(n, "1") not in ("", "0", "1")), None)
        if started is not None and shard is None and options.command not in _ALONE:
            many = f"{os.environ[started]} processes were started ({started}) that do not know each other"
            how = "start torchrun in each, " + "give each its --shard K/N, " * hasattr(options, "shard")
            raise TrueupError(f"{many}: {how}or set WORLD_SIZE=1 if each has work of its own")
        return False
    size, rank = (os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK"))
    if size in ("", "1"):
        return False
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(n)]
    if missing:
        say = f"WORLD_SIZE says that this is one of {size} processes, and {missing[0]} is not set"
        raise TrueupError(f"{say}: start them with torchrun")
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size)):
        raise TrueupError(f"RANK {rank} of WORLD_SIZE {size} makes no sense: start processes with torchrun")
    if options.command in _ALONE:
        alone = f"`{options.command}` runs in one process, not in {size}"
        raise TrueupError(f"{alone}: start it without a launcher")
    if shard is not None:
        raise TrueupError("--shard is for processes without a launcher, which splits the images itself")
    return True


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _check_data(data: str) -> None:
    if is_shards(data):
        shard_files(data)
        return
    path, what = bundled(data), "a folder of images, tar shards, a .npy or an .npz file"
    if not path.exists():
        raise DataError(f"{data} is not there: name {what}")
    if not path.is_dir() and path.suffix not in (".npy", ".npz"):
        raise DataError(f"{data} holds no images: name {what}")
    if path.is_dir() and os.access(path, os.R_OK) and next(path.iterdir(), None) is None:
        raise DataError(f"{data} is empty: name {what}")


def _check_output(output: Path, force: bool) -> None:
    if output.is_dir():
        raise TrueupError(f"{output} is a directory: name the file to write")
    if output.exists() and not output.is_file():
        raise TrueupError(f"{output} is not a file that can be replaced: name another")
    if output.exists() and not force:
        advice = "pass {} to replace it, or name another file"
        raise TrueupError(f"{output} exists", advice, Argument("force", True))
    _check_folder(output.parent)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise TrueupError(f"{folder} is not a directory: make it first")
    if not os.access(folder, os.W_OK):
        raise TrueupError(f"cannot write in {folder}")


def _calibrate(options: argparse.Namespace) -> None:
    given = [name for name in ("data", "generated", "calibration") if getattr(options, name) is not None]
    if len(given) > 1:
        raise DataError(f"--{given[0]} and --{given[1]} are two sources: leave one out")
    if not given and options.nfe is None:
        others = "--generated N (samples of the model itself)"
        raise DataError(f"say what to measure on, one of --data and {others}, or --nfe to fit solvers alone")
    if given == ["calibration"] and options.nfe is None:
        raise TrueupError("--calibration is there to add solvers to: say for how many evaluations with --nfe")
    if options.shard is not None and given != ["data"]:
        raise DataError("--shard is a share of the images of --data: name them")
    if options.shard is not None and options.nfe is not None:
        raise TrueupError("--shard measures and fits nothing: leave out --nfe")
    _check_numbers(options, "a solver is fitted to")
    if options.trajectories < 32:
        raise TrueupError(f"a solver is fitted to 32 trajectories or more, not {options.trajectories}")
    if options.generated is not None:
        check_evaluations("dpm-solver-3", options.generate_nfe)


def _check_numbers(options: argparse.Namespace, what: str) -> None:
    for number in options.nfe or ():
        if not 2 <= number <= 500:
            raise TrueupError(f"{what} 2 to 500 evaluations, not {number}")


def _samplers(options: argparse.Namespace) -> None:
    _check_numbers(options, "samplers are compared with")
    if options.trajectories < 8:
        raise TrueupError(f"samplers are compared on 8 trajectories or more, not {options.trajectories}")


def _check(options: argparse.Namespace) -> None:
    if options.data is None:
        raise DataError("say what to measure on: --data")


def _evaluate(options: argparse.Namespace) -> None:
    if (options.data is None) == (options.reference is None):
        raise DataError("say what to compare with: --data, or a --reference saved before")
    if options.save_reference is not None and options.data is None:
        raise TrueupError("--save-reference keeps the statistics of --data: leave out --reference")
    if options.weights is not None and options.features != "inception":
        raise TrueupError(f"--weights are those of inception, not of {options.features}")


def _likelihood(options: argparse.Namespace) -> None:
    for name, method in BELONGS.items():
        if getattr(options, name) not in (None, False) and method != options.method:
            raise TrueupError(f"--{name} belongs to --{method}")
    if options.variance is not None and options.steps is None:
        raise TrueupError("--variance is that of a chain's steps: pass --steps T")
    if options.trace == "exact" and options.probes is not None:
        raise TrueupError("--trace exact needs no probes: leave out --probes")
    if options.run is not None and options.method == "dsm":
        raise TrueupError("--dsm keeps nothing: leave out --run")
    if options.data is None:
        raise DataError("say whose likelihood to measure: --data")


def _merge(options: argparse.Namespace) -> None:
    if options.output.exists() and any(p.exists() and p.samefile(options.output) for p in options.files):
        raise TrueupError(f"{options.output} is one of the files to merge: name another to write")


def _report(options: argparse.Namespace) -> None:
    if options.output.suffix.lower() not in (".html", ".htm"):
        raise TrueupError(f"{options.output}: a report is a page, name a file that ends in .html")


_CHECKS = {
    "calibrate": _calibrate,
    "check": _check,
    "samplers": _samplers,
    "report": _report,
    "merge": _merge,
}
_CHECKS |= {"evaluate": _evaluate, "likelihood": _likelihood}
