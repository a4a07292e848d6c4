"""What an attached calibration and a fitted scheduler cost networks of the usual size, as ratios of one run.

    python benchmarks/overhead_large.py --out overhead.json            # a GPU, half precision
    python benchmarks/overhead_large.py --tiny --rounds 2 --backend eager  # a dry run on a CPU

Random weights in the real classes: Stable Diffusion 1.5's UNet2DConditionModel (4x64x64 latents) and a
DiT-B/2 (DiTTransformer2DModel, 12 layers of 12 x 64, 4x32x32, learned variance). The correction is made up,
of full size: a constant in the low bands, gains in every channel, band and level; the solver is
DPM-Solver++(3M) in 8 evaluations with tables and offsets as if fitted. Timed is a guided pipeline's loop,
with half as many images as rows: the bare network with diffusers' DPMSolverMultistepScheduler, the same with
the calibration attached, the same with the fitted scheduler, and both. A network and its twin share their
weights, and the four loops go on in step, in turns: what is compared are steps a few milliseconds apart,
waited for one by one. Ratios are medians over all steps, with the 95% interval of a median. Memory is the
peak of the bare loop and of both, tables included.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from diffusers import DiTTransformer2DModel, DPMSolverMultistepScheduler, UNet2DConditionModel
from torch import Tensor, nn

import trueup
from trueup.calibration import Calibration, Correction
from trueup.denoiser import Denoiser
from trueup.process import DiscreteVP
from trueup.sampling.fitted import plan
from trueup.sampling.rules import RULES, Grid

from common import finish, median, table

NFE, GUIDANCE, LEVELS = 8, 7.5, 28


def networks(tiny: bool) -> dict[str, tuple[nn.Module, tuple[int, ...], Tensor]]:
    """Each network with its sample's shape and one condition."""
    torch.manual_seed(0)
    small = {
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
    }
    size = 16 if tiny else 64
    unet = UNet2DConditionModel(sample_size=size, cross_attention_dim=768, **(small if tiny else {}))
    dit = DiTTransformer2DModel(
        num_attention_heads=2 if tiny else 12,
        attention_head_dim=16 if tiny else 64,
        num_layers=2 if tiny else 12,
        sample_size=16 if tiny else 32,
        patch_size=2,
        in_channels=4,
        out_channels=8,
        num_embeds_ada_norm=1000,
    )
    return {
        "SD-1.5 U-Net": (unet, (4, size, size), torch.randn(1, 77, 768)),
        "DiT-B/2": (dit, (4, dit.config.sample_size, dit.config.sample_size), torch.tensor([7])),
    }


def made_up(denoiser: Denoiser, y: Tensor) -> Calibration:
    """A correction of full size, small enough not to matter, and a solver as if fitted."""
    cal = Calibration.without_data(denoiser, y)
    process, bands, channels = denoiser.process, cal.correction.bands, denoiser.shape[0]
    generator = torch.Generator().manual_seed(0)

    def normal(*dims: int) -> Tensor:
        return 1e-3 * torch.randn(*dims, generator=generator, dtype=torch.float64)

    t = process.snap(torch.linspace(process.t_max, process.t_min, LEVELS, dtype=torch.float64)).flip(0)
    low = bands.spread((torch.arange(bands.count) < bands.count // 2).double())
    b = normal(LEVELS, channels, bands.index.numel()) * low
    a, d = (normal(LEVELS, channels, bands.count) for _ in range(2))
    cal = replace(cal, correction=Correction(process.lam(t), b, a, d, bands), t=t, gains="least-squares")
    rule = next(rule for rule in RULES if rule.name == "dpm++-3")
    solver = plan(denoiser, rule, Grid(), NFE, y, GUIDANCE)
    assert solver is not None
    offset = solver.offset + normal(*solver.offset.shape) * low
    fitted = replace(solver, tables=solver.tables + normal(*solver.tables.shape), offset=offset)
    return replace(cal, solvers=(replace(fitted, gains="least-squares"),))


def steps(network: Any, scheduler: Any, noise: Tensor, y: Tensor) -> Iterator[Tensor]:
    """As a pipeline with guidance does it, a network call and a step for each timestep."""
    scheduler.set_timesteps(NFE, device=noise.device)
    x = noise * scheduler.init_noise_sigma
    for t in scheduler.timesteps:
        rows = scheduler.scale_model_input(torch.cat([x, x]), t)
        # DiT wants a time for each row.
        found = network(rows, t.expand(len(rows)), y, return_dict=False)[0][:, : x.shape[1]]
        without, told = found.chunk(2)
        x = scheduler.step(without + GUIDANCE * (told - without), t, x, return_dict=False)[0]
        yield x


def seconds(one: Iterator[Tensor], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    next(one)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def timed(loops: dict[str, Any], device: torch.device, rounds: int) -> dict[str, Any]:
    """Median seconds of a bare step, and of each loop's steps over the bare ones beside them."""
    for begin in loops.values():
        for _ in range(2):
            list(begin())
    taken: dict[str, list[float]] = {name: [] for name in loops}
    order = list(loops)
    for _ in range(rounds):
        running = {name: begin() for name, begin in loops.items()}
        for _ in range(NFE):
            order = order[1:] + order[:1]
            for name in order:
                taken[name].append(seconds(running[name], device))
    bare = taken.pop("bare")
    ratios = {name: [a / b for a, b in zip(own, bare, strict=True)] for name, own in taken.items()}
    found = {name: median(of) for name, of in ratios.items()}
    return {"bare seconds a step": statistics.median(bare), **found}


def peak(work: Any) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@torch.inference_mode()
def measured(name: str, options: argparse.Namespace, results: dict, rows: list[list[str]]) -> None:
    device = torch.device(options.device)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    network, shape, y = networks(options.tiny)[name]
    network = network.eval().requires_grad_(False).to(device, dtype)
    y = y.to(device, dtype) if y.is_floating_point() else y.to(device)
    shared = {id(p): p for p in (*network.parameters(), *network.buffers())}
    twin = copy.deepcopy(network, shared)
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square()
    process = DiscreteVP.from_betas(betas)
    denoiser = Denoiser(twin, process, "noise", shape, conditional=True, data_range=None)
    cal = made_up(denoiser, y)
    usual = DPMSolverMultistepScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, solver_order=3
    )
    own = cal.scheduler(NFE, GUIDANCE)
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    attached = trueup.attach(twin, cal)
    tables = torch.cuda.memory_allocated() - held if device.type == "cuda" else 0
    once = torch.randn(1, *shape, device=device, dtype=dtype), torch.tensor([500], device=device), y
    assert not torch.equal(network(*once).sample, twin(*once).sample), "nothing was corrected"
    entry = results.setdefault(name, {"parameters": sum(p.numel() for p in network.parameters())})
    for compiled in (False, True):
        pair = [torch.compile(one, dynamic=False, backend=options.backend) for one in (network, twin)]
        bare, corrected = pair if compiled else (network, twin)
        for batch in options.rows[:1] if compiled else options.rows:
            started = time.monotonic()
            noise = torch.randn(batch // 2, *shape, device=device, dtype=dtype)
            told = y.expand(batch, *y.shape[1:]).contiguous()
            loops = {
                "bare": lambda n=noise, y=told, f=bare: steps(f, copy.copy(usual), n, y),
                "attached": lambda n=noise, y=told, f=corrected: steps(f, copy.copy(usual), n, y),
                "scheduler": lambda n=noise, y=told, f=bare: steps(f, copy.copy(own), n, y),
                "both": lambda n=noise, y=told, f=corrected: steps(f, copy.copy(own), n, y),
            }
            how = f"{'compiled' if compiled else 'eager'}, {batch} rows"
            found = entry[how] = timed(loops, device, options.rounds)
            memory = "-"
            if device.type == "cuda":
                peaks = [peak(lambda begin=loops[kind]: list(begin())) for kind in ("bare", "both")]
                found["memory"] = peaks[1] / (peaks[0] - tables)
                memory = f"{100 * (found['memory'] - 1):+.2f}%"
            cells = [
                "{:+.2f}% ({:+.2f} to {:+.2f})".format(*(100 * (ratio - 1) for ratio in found[kind]))
                for kind in ("attached", "scheduler", "both")
            ]
            rows.append([name, how, f"{1e3 * found['bare seconds a step']:.2f} ms", *cells, memory])
            print(" | ".join(rows[-1]), f"({time.monotonic() - started:.0f} s)", flush=True)
            finish(options, results)
    attached.remove()


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--rows", type=int, nargs="+", default=[2, 8], help="the first of them compiled, too")
    p.add_argument("--rounds", type=int, default=40)
    p.add_argument("--network", nargs="+", help="only these: SD-1.5 U-Net, DiT-B/2")
    p.add_argument("--backend", default="inductor", help="of torch.compile")
    p.add_argument("--tiny", action="store_true", help="networks of a few thousand weights: a dry run")
    p.add_argument("--out", metavar="FILE", help="also write the numbers as JSON")
    options = p.parse_args()
    results: dict = {}
    rows = [["network", "how", "a bare step", "attached", "fitted scheduler", "both", "memory, both"]]
    for name in options.network or ("SD-1.5 U-Net", "DiT-B/2"):
        measured(name, options, results, rows)
    print(f"\n{options.device}, {options.rounds} rounds of {NFE} steps\n\n{table(rows)}")


if __name__ == "__main__":
    main()
