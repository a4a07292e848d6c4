"""A model out of somebody's own code, named as `my_code.py:make_denoiser`. The file is run."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from torch import nn

from trueup.denoiser import Denoiser
from trueup.errors import ModelError
from trueup.files import line, printable
from trueup.hf.models import is_pipeline
from trueup.solvers import did_you_mean


def run_code(file: Path, name: str) -> Any:
    """Run a file and return what it calls `name`, or what that returns if it is a function or a class."""
    where = printable(f"{file}:{name}")
    if not name.isidentifier():
        raise ModelError(f"{where} names nothing in that file: write {file}:make_denoiser, say")
    with _told_where(file):
        module = _imported(file)
    if not hasattr(module, name):
        own = [known for known in vars(module) if not known.startswith("_")]
        raise ModelError(f"{file} has nothing called {name}{did_you_mean(name, own)}")
    made = getattr(module, name)
    if isinstance(made, type) or inspect.isroutine(made) or isinstance(made, functools.partial):
        _check_takes_nothing(made, where)
        with _told_where(file):
            made = made()
    if isinstance(made, (Denoiser, nn.Module)) or is_pipeline(made):
        return made
    expected = "expected a trueup.Denoiser, a pipeline or a network"
    raise ModelError(f"{where} gave {_a(made)}: {expected}")


def _imported(file: Path) -> Any:
    folder = str(file.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as for a script: what lies beside it can be imported
    taken = file.stem in sys.modules or file.stem in sys.stdlib_module_names
    name = f"_code_of_{file.stem}" if taken else file.stem
    spec = importlib.util.spec_from_file_location(name, file.absolute())
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_takes_nothing(made: Any, where: str) -> None:
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):  # written in C
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    if needed:
        raise ModelError(f"{where} is called without arguments, and takes {', '.join(needed)}")


@contextlib.contextmanager
def _told_where(file: Path) -> Any:
    """What the file prints goes to standard error; what goes wrong in it is said with its line."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        if os.environ.get("TRUEUP_DEBUG"):
            raise
        number = _line_in(file.absolute(), error)
        place = f"{file}, line {number}" if number else str(file)
        words = f": {line(error, 300)}" if str(error) else ""
        raise ModelError(f"{place}: {type(error).__name__}{words} (TRUEUP_DEBUG=1 shows more)") from error


def _line_in(file: Path, error: BaseException) -> int | None:
    """The last line of the file that was being run."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == str(file)), None)


def _a(made: Any) -> str:
    return "None" if made is None else f"a {type(made).__name__}"
