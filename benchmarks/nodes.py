"""Do several machines end in the file of one, also when one of them is lost?

    sudo python benchmarks/nodes.py [--ranks 1] [--images 200]

Machines are stood in for by network namespaces (Linux, root): each has its own interfaces, host name and
working directory, and reaches the other through a virtual cable alone. Two of them calibrate the bundled
model under one torchrun each, as recipes/slurm.sh starts them. Then everything on the second is killed
(SIGKILL) half-way: once it comes back, with `--nnodes 2`; once it stays away, with `--nnodes 1:2`. Each
machine keeps its own run directory, so that a lost one's work is done again. Every file is compared with
that of one process, byte by byte.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import table

NODES = ("trueup-a", "trueup-b")
PORT = 29400
# Otherwise torchrun (2.5 to 2.13 at least) tells a machine that comes back nothing of where the others are.
REJOIN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
HOSTS = "127.0.0.1 localhost\n" + "".join(f"10.77.0.{k} {name}\n" for k, name in enumerate(NODES, 1))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=int, default=1, help="per machine")
    p.add_argument("--images", type=int, default=200)
    p.add_argument("--batch-size", type=int, default=8)
    options = p.parse_args()
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise SystemExit("network namespaces need root and `ip` (apt install iproute2)")
    folder = Path(tempfile.mkdtemp())
    try:
        cable()
        different = compare(options, folder)
    finally:
        for name in NODES:
            subprocess.run(["ip", "netns", "delete", name], check=False)
        shutil.rmtree(folder)
    raise SystemExit(1 if different else 0)


def cable() -> None:
    """Two machines and what joins them."""
    first, second = NODES
    for name in NODES:
        ip("netns", "add", name)
    ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
    for k, name in enumerate(NODES, 1):
        ip("-n", name, "address", "add", f"10.77.0.{k}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            ip("-n", name, "link", "set", link, "up")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def compare(options: argparse.Namespace, folder: Path) -> int:
    """How many of the files differ from that of one process."""
    words = ["calibrate", "bundled:raw", "--data", "bundled:images", "--images", options.images]
    words += ["--batch-size", options.batch_size, "--no-samples", "--device", "cpu", "-o", "cal"]
    (folder / "hosts").write_text(HOSTS)
    (folder / "one").mkdir()
    start = time.monotonic()
    alone = subprocess.Popen(command("-m", "trueup", *words), cwd=folder / "one", **quiet(folder / "one"))
    if alone.wait():
        raise SystemExit((folder / "one" / "said").read_text())
    expected, length = (folder / "one" / "cal").read_bytes(), time.monotonic() - start
    rows, different = [["machines", "the second", "seconds", "file of one process"]], 0
    for nodes, lost in (("2", False), ("2", True), ("1:2", True)):
        out = folder / f"{nodes}-{lost}"
        start = time.monotonic()
        job: list[Node] = []
        try:
            job += [Node(name, out, nodes, options.ranks, words, folder / "hosts") for name in NODES]
            if lost:
                until(lambda job=job: all(node.keeps(options.ranks) for node in job), 120, job)
                time.sleep(0.1 * length)
                job[1].kill()
                if nodes == "2":
                    time.sleep(2)
                    job[1].start()
            codes = [node.wait(120) for node in (job if nodes == "2" or not lost else job[:1])]
        finally:
            for node in job:
                node.kill()
        took = time.monotonic() - start
        made = [path.read_bytes() for path in out.glob("*/cal")]
        same = not any(codes) and made == [expected]
        if not same:
            print("\n".join(path.read_text() for path in sorted(out.glob("*/said"))), file=sys.stderr)
        different += not same
        fate = "was there" if not lost else "was killed and came back" if nodes == "2" else "was killed"
        rows.append([nodes, fate, f"{took:.0f}", "yes" if same else f"no (exit codes {codes})"])
    print(table(rows))
    return different


class Node:
    """A machine's torchrun and what it has started."""

    def __init__(self, name: str, out: Path, nodes: str, ranks: int, words: list, hosts: Path):
        self.folder = out / name
        self.folder.mkdir(parents=True)
        where = f"{NODES[0]}:{PORT}"
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "trueup", "--rdzv-endpoint", where]
        launcher = ["-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", ranks]
        self.command = command(*launcher, "--max-restarts", 3, *rendezvous, "-m", "trueup", *words)
        inside = f'hostname {name}; mount --bind {hosts} /etc/hosts; exec "$@"'
        self.inside = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "--pid", "--fork"]
        self.inside += ["--kill-child", "--mount-proc", "sh", "-c", inside, "sh"]
        self.start()

    def start(self) -> None:
        """As a machine that is switched on."""
        self.process = subprocess.Popen(
            [*self.inside, *self.command], cwd=self.folder, start_new_session=True, **quiet(self.folder)
        )

    def keeps(self, ranks: int) -> bool:
        """Whether all its ranks have measured something and put it down."""
        return len(list(self.folder.glob("cal.run/*.safetensors"))) >= ranks

    def wait(self, seconds: float) -> int:
        """How it ended, by itself or after so long."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.returncode

    def kill(self) -> None:
        """All of it at once: who is first in a namespace of processes takes the others along."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def command(*words: object) -> list[str]:
    return [sys.executable, *map(str, words)]


def quiet(folder: Path) -> dict:
    said = (folder / "said").open("a")
    return {
        "stdout": said,
        "stderr": said,
        "env": {**os.environ, **REJOIN, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    }


def until(true, seconds: float, job: list[Node]) -> None:
    last = time.monotonic() + seconds
    while not true():
        if time.monotonic() > last or any(node.process.poll() is not None for node in job):
            raise SystemExit("\n".join((node.folder / "said").read_text() for node in job))
        time.sleep(0.1)


if __name__ == "__main__":
    main()
