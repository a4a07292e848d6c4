"""Does a run that is killed at random moments end as one that is not?

    python benchmarks/kill.py [--kills 50]

Calibrates the bundled model from the command line, kills it with SIGKILL at random moments, starts it again,
and so on; whenever a run gets to its end, its file is compared with that of an undisturbed run, byte by byte,
and a new run is begun.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import table


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kills", type=int, default=50)
    p.add_argument("--images", type=int, default=16)
    p.add_argument("--batch-size", type=int, default=4)
    p.add_argument("--seed", type=int, default=0)
    options = p.parse_args()
    dice = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp())
    command = [
        sys.executable,
        "-m",
        "trueup.cli",
        "calibrate",
        "bundled:raw",
        "--data",
        "bundled:images",
        "--quiet",
        "--trust",
    ]
    command += ["--images", str(options.images), "--batch-size", str(options.batch_size), "-o"]
    start = time.monotonic()
    subprocess.run([*command, folder / "whole"], check=True, stdout=subprocess.DEVNULL)
    length = time.monotonic() - start
    whole = (folder / "whole").read_bytes()
    killed = finished = different = resumed = 0
    checkpoint = folder / "x.run" / "checkpoint.safetensors"
    while killed < options.kills or finished == 0:
        if checkpoint.exists():
            resumed += 1
        process = subprocess.Popen([*command, folder / "x"], stdout=subprocess.DEVNULL)
        try:
            limit = dice.uniform(0, length) if killed < options.kills else None
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
            print(f"{killed} kills, {finished} runs ended", file=sys.stderr)
            if not (folder / "x").exists():  # or it was killed after its work was done
                continue
            code = 0
        if code:
            raise SystemExit(f"a resumed run failed with exit code {code}")
        finished += 1
        different += (folder / "x").read_bytes() != whole
        (folder / "x").unlink()
        shutil.rmtree(folder / "x.run")
    shutil.rmtree(folder)
    print(
        table(
            [
                ["kills", "starts from a checkpoint", "runs that ended", "of them different"],
                [str(killed), str(resumed), str(finished), str(different)],
            ]
        )
    )
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
