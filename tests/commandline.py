"""Running the command: in this process, which is quick, or in one of its own, which is the real thing."""

import contextlib
import gc
import io
import os
import subprocess
import sys
from pathlib import Path

import torch

from trueup import cli


def trueup_command(*arguments, real=False, **kwargs):
    """What the command does with these arguments, as `subprocess.run` reports it.

    real: in a process of its own. Starting one takes seconds, so that is for tests of what a process does.
    """
    if real or set(kwargs) - {"cwd"}:
        env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONIOENCODING": "utf-8"}
        return subprocess.run(
            [sys.executable, "-m", "trueup.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            env=env,
            timeout=300,
            **kwargs,
        )
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    here = Path.cwd()
    os.chdir(kwargs.get("cwd", here))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(list(map(str, arguments)))
        except SystemExit as stop:
            code = stop.code
        finally:
            os.chdir(here)
    gc.collect()  # a process that ends lets go of its locks
    said = []
    for stream in (out, err):
        stream.flush()
        said.append(stream.buffer.getvalue().decode())
    return subprocess.CompletedProcess(arguments, code, *said)


def in_process(capsys, *arguments):
    """Refused without starting a process: exit code 2, nothing on standard output; the one line it said."""
    try:
        code = cli.main(list(map(str, arguments)))
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1
    return said.err


def refused(done, *words):
    """One clear line on standard error, nothing on standard output, exit code 2."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("trueup")
    for word in words:
        assert word in lines[0], lines[0]
