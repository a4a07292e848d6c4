"""Running the real command."""

import os
import subprocess
import sys

from trueup import cli


def trueup_command(*arguments, **kwargs):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, "-m", "trueup.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
        **kwargs,
    )


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
        assert word in lines[0]
