"""Measured order of every DPM-Solver on data whose exact trajectories are known.

    python benchmarks/convergence.py

Gaussian data: the probability flow has a closed form. A mixture of two: the end of the flow is taken from
scipy's DOP853 at a tolerance of 1e-11. Also the evaluations made, and the distance of order 1 to diffusers'
DDIM.
"""

from __future__ import annotations

import math

import diffusers
import torch
from scipy.integrate import solve_ivp

from trueup.analytic import GaussianMixture
from trueup.files import bundled
from trueup.hf import as_denoiser
from trueup.noise import normal
from trueup.process import ContinuousVP
from trueup.sampling import DPMSolver
from trueup.sampling.network import Network

from common import table

END = 1e-2
STD = 0.4


def exact_gaussian(process, mean, x):
    spread = [
        math.hypot(float(process.alpha(t)) * STD, float(process.sigma(t))) for t in (process.t_max, END)
    ]
    x = x * process.prior_std
    return process.alpha(END) * mean + (x - process.alpha(process.t_max) * mean) * spread[1] / spread[0]


def exact_mixture(process, mixture, x):
    def flow(t, flat):
        state = torch.tensor(flat).reshape(x.shape)
        alpha, sigma = (f(torch.full((len(x),), t)).double() for f in (process.alpha, process.sigma))
        eps = mixture.eps_given(state, alpha, sigma)
        return (process.f(t) * state + process.g2(t) / (2 * process.sigma(t)) * eps).numpy().ravel()

    ends = (process.t_max, END)
    found = solve_ivp(flow, ends, x.numpy().ravel(), method="DOP853", rtol=1e-11, atol=1e-11)
    return torch.tensor(found.y[:, -1]).reshape(x.shape)


def main() -> None:
    torch.set_num_threads(1)
    process = ContinuousVP()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 1, 2, 2, generator=generator, dtype=torch.float64)
    one = torch.tensor([[[[0.5, -0.3], [0.1, 0.9]]]], dtype=torch.float64)
    gaussian = GaussianMixture(one, STD)
    mixture = GaussianMixture(torch.cat([one, -one]), STD)
    exact = {"Gaussian": exact_gaussian(process, one, x), "mixture": exact_mixture(process, mixture, x)}
    rows = [["data", "grid", "order", "error at 480", "error at 960", "measured order", "evaluations"]]
    for name, data in (("Gaussian", gaussian), ("mixture", mixture)):
        for grid in ("logsnr", "uniform", "quadratic"):
            for order in (1, 2, 3):
                solver = DPMSolver(order, grid=grid, allocation="fixed", end=END)
                errors, counts = [], []
                for nfe in (480, 960):
                    network = Network(data.denoiser(process, dtype=torch.float64))
                    y = solver.solve(network, x, nfe)
                    errors.append(float((y - exact[name]).abs().max()))
                    counts.append(network.evaluations)
                measured = math.log2(errors[0] / errors[1])
                rows.append(
                    [name, grid, f"{order}", f"{errors[0]:.2g}", f"{errors[1]:.2g}", f"{measured:.2f}"]
                    + [", ".join(map(str, counts))]
                )
    print(table(rows))

    denoiser = as_denoiser(bundled("bundled:ema"))
    denoiser.network.double()  # DDIM divides by alpha = 0.006 and multiplies again
    scheduler = diffusers.DDIMScheduler(clip_sample=False, timestep_spacing="trailing")
    scheduler.set_timesteps(10)
    x = normal(0, torch.arange(8), -1, denoiser.shape, torch.device("cpu")).double()
    with torch.inference_mode():
        ours = DPMSolver(1, grid="uniform", end=0.1).solve(Network(denoiser), x, 9)
        for t in scheduler.timesteps[:-1]:
            x = scheduler.step(denoiser.network(x, t).sample, t, x).prev_sample
    print(f"\norder 1 against diffusers' DDIM, bundled model: {float((ours - x).abs().max()):.1e} at most")


if __name__ == "__main__":
    main()
