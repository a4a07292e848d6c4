"""What every rank of a job does for tests/test_ranks.py: with the library, in a process group of its own."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

import trueup
from trueup.density import objectives
from trueup.distributed import together
from trueup.estimate import measure
from trueup.hf import as_denoiser
from trueup.images.reading import Reader


def main(model, other_model, images, other_images, out):
    """Measure together, and in ways that cannot work; note what came of it."""
    rank, said = dist.get_rank(), {}
    quiet = {"trust": True, "progress": False}

    def opened(path=model):
        return as_denoiser(path, device="cpu", batch_size=4)

    def images_of(path=images, **settings):
        return trueup.Images(path, **{"count": 100, "skip_bad": True, **settings})

    def attempt(name, *given, **settings):
        try:
            with together():
                measure(*given, **settings, **quiet)
            said[name] = "nothing was said"
        except trueup.TrueupError as error:
            said[name] = str(error)

    with together():
        measure(opened(), images_of(), mean_images=0, **quiet).save(out / f"all.{rank}")
        measure(opened(), images_of(count=9), mean_images=7, run=out / "run", **quiet).save(
            out / f"few.{rank}"
        )
        measure(opened(), images_of(count=2), **quiet).save(out / f"fewer.{rank}")
    if rank == 0:
        measure(opened(), images_of(), run=out / "run-alone", **quiet).save(out / "alone")
    for count in (8, 16):  # each for itself, and on from its own
        own = measure(opened(), images_of(count=count), run=out / f"run-of-{rank}", **quiet)
    own.save(out / f"own.{rank}")

    attempt("seed", opened(), images_of(), seed=rank)
    attempt("weights", opened(other_model if rank == 1 else model), images_of())
    attempt("images", opened(), images_of(other_images if rank == 2 else images))
    count = len(list(Path(images).iterdir()))
    attempt("labels", opened(), images_of(labels=[rank == 1 and k == 20 for k in range(count)]))
    attempt("broken", opened(), images_of(skip_bad=rank == 0))
    attempt("count", opened(), images_of(count=30 + rank))
    failing = opened()
    if rank == 1:
        failing.network.forward = None  # TypeError, in the midst of it
    attempt("died", failing, images_of())

    torch.manual_seed(rank)
    with together():
        cal = trueup.calibrate(opened(), images_of(count=20), seed=3, **quiet)
    cal.save(out / f"calibration.{rank}")

    reads, read = [], Reader.read
    Reader.read = lambda self, *given: reads.append(given[0]) or read(self, *given)
    with together():
        found = [objectives(opened(), images_of(), levels=[300, 700], **quiet)]
        said["reads"] = len(reads)
        found.append(objectives(opened(), images_of(), cal, levels=[300, 700], **quiet))
    Reader.read = read
    said["losses"] = [(one.before.tolist(), one.notes) for one in found]
    (out / f"said.{rank}").write_text(json.dumps(said))
