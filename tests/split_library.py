"""What both ranks of a job do for tests/test_split.py: a network that neither of them holds alone."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import trueup
from trueup import distributed
from trueup.denoiser import fingerprint
from trueup.estimate import fit, measure

SHAPE = (1, 6, 6)


class Block(nn.Module):
    """Sizes that two ranks cannot share evenly, but for the hidden one."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 8), nn.Linear(8, 5)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Network(nn.Module):
    """A small network of blocks, the same for everyone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(1, 5, 3, padding=1), nn.Conv2d(5, 1, 3, padding=1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.table = nn.Embedding(9, 2000)  # more than a fingerprint looks at
        self.table.weight.data[0, 0] = -0.0

    def forward(self, x, t):
        h = self.first(x).movedim(1, -1)
        for block in self.blocks:
            h = block(h)
        shift = self.table(torch.zeros(1, dtype=torch.int64))[0, 1]
        return self.last(h.movedim(-1, 1)) + 0.7 * x + shift


def denoiser_of(network):
    process = trueup.process.DiscreteVP.linear()
    return trueup.Denoiser(network, process, "noise", SHAPE, data_range=(-1, 1), batch_size=8)


def images():
    return torch.rand(40, *SHAPE, generator=torch.Generator().manual_seed(1)) * 2 - 1


def measured(network, **more):
    return measure(denoiser_of(network), images(), levels=[100, 500, 900], progress=False, trust=True, **more)


def second_form():
    network = Network()
    for block in network.blocks:
        fully_shard(block)
    return fully_shard(network)


def first_form(**settings):
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        Network(), auto_wrap_policy=policy, device_id=torch.device("cpu"), **settings
    )


def tensor_parallel():
    network, mesh = Network(), init_device_mesh("cpu", (2,))
    for block in network.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return network


KINDS = {
    "FSDP2": second_form,
    "FSDP": first_form,
    "FSDP, own parameters": lambda: first_form(use_orig_params=True),
    "tensor parallel": tensor_parallel,
}


def main(out):
    """Measure and attach each kind, both ranks with the same images and in step; note what came of it."""
    dist.init_process_group("gloo")
    whole, found = Network(), {}
    expected = measured(whole)
    cal = fit(expected)
    x_t, t = images()[:4], torch.tensor([100, 300, 500, 900])
    with torch.no_grad(), trueup.attach(whole, cal):
        corrected = whole(x_t, t)
    for name, make in KINDS.items():
        network = make()
        said = found[name] = {"fingerprint": fingerprint(network) == fingerprint(whole)}
        moments = measured(network)
        scale = float(expected.first.abs().max())
        said["moments"] = float((moments.first - expected.first).abs().max()) / scale
        said["weights"] = moments.provenance["weights"] == expected.provenance["weights"]
        with trueup.attach(network, cal), torch.no_grad():  # or raises: of other weights
            said["attached"] = float((network(x_t, t) - corrected).abs().max())
        loss = network(x_t, t).square().mean()  # what was measured can still be trained
        loss.backward()
        try:
            with distributed.together():
                measured(network)
        except trueup.TrueupError as error:
            said["ranks"] = str(error)
        other = make()
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1.5)
        try:
            trueup.attach(other, cal)
        except trueup.TrueupError as error:
            said["others"] = str(error)
    (out / f"said.{dist.get_rank()}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
