"""Jobs of many ranks for tests/test_ranks.py, one after the other.

What takes long to import is imported once, before processes are forked: each rank is a real process, in a
real process group, and eight of them cost no more than one.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path

import diffusers.models.unets.unet_2d
import diffusers.pipelines.ddpm.pipeline_ddpm
import diffusers.schedulers  # noqa: F401
import torch.distributed as dist

import ranks_library
import trueup.commands
import trueup.hf.models  # noqa: F401
from trueup.cli import main
from trueup.denoiser import Denoiser


def job(ranks, out, commands=(), library=None, dies=None):
    """Fork so many ranks, each of which does all of it; what each said and returned is noted in `out`.

    dies: [rank, number], the rank kills itself at its so many-th evaluation of a batch.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            if ranks > 1:
                names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
                os.environ.update(
                    {name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1"
                )
            if dies is not None and dies[0] == rank:
                die_after(dies[1])
            try:
                work(rank, ranks, Path(out), commands, library)
            except BaseException as error:
                print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]


def work(rank, ranks, out, commands, library):
    """What one rank does."""
    if ranks > 1:
        dist.init_process_group("gloo")
    if library is not None:
        ranks_library.main(*library, out)
    for name, arguments in commands:
        words = [str(rank) if word == "RANK" else word for word in arguments]
        with contextlib.ExitStack() as stack:
            for part, redirect in (("out", contextlib.redirect_stdout), ("err", contextlib.redirect_stderr)):
                said = stack.enter_context((out / f"{name}.{part}.{rank}").open("w", encoding="utf-8"))
                stack.enter_context(redirect(said))
            code = main(words)
        (out / f"{name}.code.{rank}").write_text(str(code))
        gc.collect()  # a process that ends lets go of its locks


def die_after(number):
    """Be killed at an evaluation."""
    whole, left = Denoiser._rows, [number]

    def dying(self, *given):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, *given)

    Denoiser._rows = dying


if __name__ == "__main__":
    print(json.dumps([job(**each) for each in json.load(sys.stdin)]))
