"""What sampling costs beside the network evaluations it makes, as ratios taken in one run.

    python benchmarks/sampling.py --model DIR [--device cuda]

A sampler's own work is timed with a network that answers at once, what it comes on top of with the bare
network, in turn: the difference of two whole trajectories drowns in noise. The least times are compared,
because whatever else the machine does only ever adds. A scheduler's steps are diffusers' own.
"""

from __future__ import annotations

import time

import torch

import trueup
from trueup.sampling import as_solver, sample_batches

from common import load_model, parser, table


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.inference_mode()
def evaluate(network, x: torch.Tensor, t: torch.Tensor, evaluations: int) -> None:
    for _ in range(evaluations):
        network(x, t)


def main() -> None:
    p = parser(__doc__, data=False)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--nfe", type=int, default=20)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument(
        "--solvers", nargs="+", default=["dpm-solver-1", "dpm-solver-2", "dpm-solver-3", "ddim", "unipc"]
    )
    options = p.parse_args()
    denoiser = load_model(options.model[0], options)
    device = denoiser.device
    x = torch.randn(options.batch, *denoiser.shape, device=device)
    t = torch.full((options.batch,), 500.0, device=device)
    instant = trueup.Denoiser(
        lambda x_t, t: x[: len(x_t)] * t[0],  # times are told apart, as by the network
        denoiser.process,
        denoiser.parametrization,
        denoiser.shape,
        device=device,
        batch_size=options.batch,
    )
    rows = [["solver", "evaluations", "sampling / its evaluations"]]
    for solver in options.solvers:
        evaluations = as_solver(solver, denoiser).evaluations(options.nfe, denoiser)
        bare, own = [], []
        settings = {"solver": solver, "nfe": options.nfe, "progress": False}
        for _ in range(options.repeats + 1):
            begun = clock(device)
            evaluate(denoiser.network, x, t, evaluations)
            middle = clock(device)
            for _ in sample_batches(instant, options.batch, **settings):
                pass
            own.append(clock(device) - middle)
            bare.append(middle - begun)
        ratio = 1 + min(own[1:]) / min(bare[1:])  # the first warms up
        rows.append([solver, f"{evaluations}", f"{ratio:.4f}"])
    print(f"\nbatch {options.batch}, {tuple(denoiser.shape)}, {device}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
