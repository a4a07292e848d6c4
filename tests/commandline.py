"""Running the real command."""

import os
import subprocess
import sys


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


def refused(done, *words):
    """One clear line on standard error, nothing on standard output, exit code 2."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("trueup")
    for word in words:
        assert word in lines[0]
