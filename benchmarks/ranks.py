"""Do ranks pay, what do they cost, and do they end in the same file?

    python benchmarks/ranks.py --model DIR --data FILE.npy [--images 2000] [--kills 20]

All in one run, on the CPU, every rank with one thread: images per second of two ranks over those of one; how
much of the wall time goes into what one process without a run directory would not do (speaking to other
ranks, reducing, checkpoints); whether eight ranks write the file of one. Then --kills: the bundled model is
calibrated under torchrun --max-restarts, ranks are killed with SIGKILL at random moments, a run that ends
goes on with another number of ranks, and every file that comes out is compared with the undisturbed one, byte
by byte.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import table

# What a rank does beside measuring is timed from inside: its ways to the disk and to other ranks.
_TIMED = """
import json, os, sys, time
from trueup import distributed
from trueup.estimate import measuring, run

spent = {"_measure": 0.0, "save": 0.0, "agree": 0.0, "resume": 0.0, "of_all_ranks": 0.0}


def timed(owner, name):
    whole = getattr(owner, name)

    def measured(*args, **kwargs):
        start = time.perf_counter()
        try:
            return whole(*args, **kwargs)
        finally:
            spent[name] += time.perf_counter() - start

    setattr(owner, name, measured)


for owner, name in ((measuring, "_measure"), (distributed, "agree"), (measuring, "of_all_ranks")):
    timed(owner, name)
for name in ("save", "resume"):
    timed(run.Run, name)
from trueup.cli import main

code = main(sys.argv[2:])
rank = os.environ.get("RANK", "0")
with open(f"{sys.argv[1]}.{rank}.json", "w") as file:
    json.dump(spent, file)
raise SystemExit(code)
"""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, metavar="DIR", help="diffusers model directory")
    p.add_argument("--scheduler", metavar="FILE", help="its schedule, where it has none beside it")
    p.add_argument("--data", required=True, metavar="FILE", help=".npy of uint8 images (examples/cifar10.py)")
    p.add_argument("--images", type=int, default=2000)
    p.add_argument("--batch-size", type=int, default=50)
    p.add_argument("--eight", type=int, default=200, help="images of the run with eight ranks; 0: none")
    p.add_argument("--kills", type=int, default=0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", metavar="FILE", help="also write the numbers as JSON")
    options = p.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        found = speed(options, folder)
        if options.kills:
            found |= kills(options, folder)
    finally:
        shutil.rmtree(folder)
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1))
    if found.get("different", 0) or not found.get("eight_equal", True) or not found["two_equal"]:
        raise SystemExit(1)


def calibrating(output: Path, model: str, data: str, images: int, batch_size: int) -> list[str]:
    words = ["calibrate", model, "--data", data, "--images", images, "--batch-size", batch_size, "-o", output]
    return [*map(str, words), "--device", "cpu", "--trust", "--no-samples", "--quiet"]


def launcher(ranks: int, restarts: int = 0) -> list[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*words, f"--max-restarts={restarts}"] if ranks > 1 else [sys.executable]


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def speed(options: argparse.Namespace, folder: Path) -> dict:
    """Ratios of one run: what two ranks gain, what bookkeeping takes; and what eight of them write."""
    code = folder / "timed.py"
    code.write_text(_TIMED)
    rows, found, files = [["ranks", "images", "images/s", "bookkeeping of wall time"]], {}, {}
    plan = [
        (1, options.images),
        (2, options.images),
        *([(1, options.eight), (8, options.eight)] * (options.eight > 0)),
    ]
    for ranks, images in plan:
        out = folder / f"{ranks}-{images}"
        words = calibrating(out, options.model, options.data, images, options.batch_size)
        words += [] if options.scheduler is None else ["--scheduler", options.scheduler]
        times = folder / f"times-{ranks}-{images}"
        command = [*launcher(ranks), str(code), str(times), *words]
        subprocess.run(command, check=True, env=one_thread(), stdout=subprocess.DEVNULL)
        spent = [json.loads(Path(f"{times}.{rank}.json").read_text()) for rank in range(ranks)]
        wall = max(sum(one.values()) - one["save"] for one in spent)  # checkpoints are part of measuring
        # Who comes last waits for nobody: the others' time includes waiting for that rank.
        share = min(sum(one.values()) - one["_measure"] for one in spent) / wall
        files[ranks, images] = out.read_bytes()
        found |= {f"rate_{ranks}_{images}": images / wall, f"bookkeeping_{ranks}_{images}": share}
        rows.append([str(ranks), f"{images:,}", f"{images / wall:.2f}", f"{share:.2%}"])
    first = options.images
    found["two_over_one"] = found[f"rate_2_{first}"] / found[f"rate_1_{first}"]
    found["two_equal"] = files[2, first] == files[1, first]
    print(table(rows))
    print(f"two ranks over one: {found['two_over_one']:.3f}x; the same file: {found['two_equal']}")
    if options.eight:
        found["eight_equal"] = files[8, options.eight] == files[1, options.eight]
        print(f"eight ranks write the file of one: {found['eight_equal']}")
    return found


def kills(options: argparse.Namespace, folder: Path) -> dict:
    """Random ranks killed at random moments of runs that each go on with another number of ranks."""
    dice = random.Random(options.seed)
    arguments = ("bundled:raw", "bundled:images", 64, 4)
    whole = folder / "whole"
    start = time.monotonic()
    command = [*launcher(2), "-m", "trueup", *calibrating(whole, *arguments)]
    subprocess.run(command, check=True, env=one_thread(), stdout=subprocess.DEVNULL)
    length, expected = time.monotonic() - start, whole.read_bytes()
    out, killed, ended, different, numbers = folder / "x", 0, 0, 0, []
    while killed < options.kills or not ended:
        ranks = dice.choice((2, 3))
        command = [*launcher(ranks, restarts=3), "-m", "trueup", *calibrating(out, *arguments)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        job = subprocess.Popen(command, env=one_thread(), **quiet)
        # Up to three kills that torchrun mends, and sometimes one of torchrun itself: the next job goes on.
        for _ in range(dice.randrange(1, 4) if killed < options.kills else 0):
            if _ended(job, dice.uniform(0.2, 1.0) * length):
                break
            victims = _workers(job.pid)
            if victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(dice.choice(victims), signal.SIGKILL)
                killed, numbers = killed + 1, [*numbers, ranks]
                print(f"{killed} kills, {ended} runs ended", file=sys.stderr)
        if killed < options.kills and dice.random() < 0.3 and not _ended(job, 0.5 * length):
            for worker in [*_workers(job.pid), job.pid]:  # all at once, as when a node is lost
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
            killed += 1
        job.wait()
        if not out.exists():
            continue  # it was killed as a whole, or more often than it may start again
        ended += 1
        different += out.read_bytes() != expected
        out.unlink()
        shutil.rmtree(f"{out}.run")
    print(
        table([["kills", "runs that ended", "of them different"], [str(killed), str(ended), str(different)]])
    )
    return {"kills": killed, "runs": ended, "different": different, "ranks": numbers}


def _ended(job: subprocess.Popen, seconds: float) -> bool:
    try:
        job.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _workers(parent: int) -> list[int]:
    """The ranks that torchrun has started: its children that run us."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and b"trueup" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


if __name__ == "__main__":
    main()
