"""Calibrations made by hand, of random numbers: what files, hooks and kernels are tried on."""

from __future__ import annotations

import math

import torch

from trueup import process
from trueup.bands import Bands
from trueup.calibration import Calibration, Correction, Evidence, FittedSolver, Innovation
from trueup.denoiser import Binding, fingerprint
from trueup.denoiser.binding import Place
from trueup.parametrization import Parametrization
from trueup.statistics import Number

PLAIN = Binding(Place(0, "x"), Place(1, "t"))


def make(
    shape=(1, 4, 4),
    noise=None,
    levels=3,
    kind="noise",
    keep=(0, 2),
    seed=0,
    edges=None,
    family="spectral",
    binding=PLAIN,
    network=None,
    solvers=False,
    gain=0.3,
    **changes,
) -> Calibration:
    """A calibration whose map lives in the bands `keep`; levels: a number, or the times themselves."""
    noise = noise or process.ContinuousVP()
    bands = Bands.of(shape, edges)
    generator = torch.Generator().manual_seed(seed)

    def normal(*dims):
        return torch.randn(*dims, generator=generator, dtype=torch.float64)

    if isinstance(levels, int):
        levels = torch.linspace(noise.t_min, noise.t_max, levels, dtype=torch.float64)
    t = noise.snap(torch.as_tensor(levels, dtype=torch.float64))
    count, size = len(t), bands.length
    kept = torch.tensor([float(k in keep) for k in range(bands.count)], dtype=torch.float64)
    b = normal(count, shape[0], size) * bands.spread(kept)
    a, d = (gain * normal(count, shape[0], bands.count) for _ in range(2))
    if family == "shift":
        a, d = torch.zeros_like(a), torch.zeros_like(d)

    support = torch.rand(count - 1, bands.count, generator=generator, dtype=torch.float64)

    def numbers():
        value, error = normal(count).abs(), normal(count).abs()
        error[0] = math.nan  # as of too few images
        return Number.of(value, error, folds=16)

    parametrization = Parametrization(kind, 0.5 if kind.startswith("edm") else None)
    mean = normal(shape[0], size)
    made = Calibration(
        correction=Correction(noise.lam(t), b, a, d, bands, support),
        t=t,
        shape=shape,
        evidence=Evidence(
            images=40,
            folds=16,
            dimensions=math.prod(shape),
            loss=numbers(),
            eta2=numbers(),
            gain=numbers(),
            shift_se=normal(count).abs(),
            scale=torch.rand(count, bands.count, generator=generator, dtype=torch.float64),
            bound_gain=Number.of(float(normal(1)), 0.25, 16),
            shift_bound_gain=Number(float(normal(1))),
        ),
        family=family,
        estimator="shrunk",
        data_mean=mean,
        data_variance=normal(shape[0], bands.count).abs(),
        data_variance_se=normal(shape[0], bands.count).abs(),
        data_images=50,
        data_digests=torch.arange(5) - 2,
        provenance={
            "model": "Réseau",
            "weights": {"float32": "ab" * 16} if network is None else fingerprint(network),
            "process": noise.settings(),
            "parametrization": parametrization.settings(),
            "binding": None if binding is None else binding.settings(),
            "data_range": [-1.0, 1.0],
            "seed": 0,
        },
    )
    if solvers:
        made.solvers = (fitted_solver(shape, noise, kept, generator, edges),)
    if family != "shift":
        rho = normal(count, shape[0], bands.count)
        changed = torch.rand(2, count - 1, bands.count, generator=generator, dtype=torch.float64)
        mean = normal(count, shape[0], size) * bands.spread(kept)
        made.correction.innovation = Innovation(rho, mean, changed)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def fitted_solver(shape, noise, kept, generator, edges=None, nfe=2, guidance=1.5, **changes) -> FittedSolver:
    """A solver of random weights, tables and maps, the latter in the bands where kept (bands,) is 1."""
    bands = Bands.of(shape, edges)

    def normal(*dims):
        return torch.randn(*dims, generator=generator, dtype=torch.float64)

    share = torch.linspace(1, 0.3, nfe, dtype=torch.float64)
    t = noise.snap(noise.t_min + share * (noise.t_max - noise.t_min))
    end = torch.tensor([1.0, 0.0], dtype=torch.float64)
    how = {
        "nfe": nfe,
        "t": t,
        "alpha": torch.cat([noise.alpha(t), end[:1]]),
        "sigma": torch.cat([noise.sigma(t), end[1:]]),
        "history": "x0",
        "weights": normal(nfe, 4),
        "bands": bands,
        "tables": normal(nfe, 4, shape[0], bands.count),
        "offset": normal(nfe, shape[0], bands.length) * bands.spread(kept),
        "guidance": guidance,
        "gains": "sqrt",
        "evidence": {"error_base": 0.21, "error": 0.08, "unknown": math.nan},
        "provenance": {"base": "x0-3, even in log-SNR", "seed": 3, "labels": [0, 1]},
    }
    return FittedSolver(**{**how, **changes})


def emptied(calibration: Calibration) -> Calibration:
    """The same, with nothing to correct."""
    for part in (calibration.correction.b, calibration.correction.a, calibration.correction.d):
        part.zero_()
    return calibration


def by_definition(calibration, output, x_t, t, gains=None):
    """Convert to eps, apply the correction as it is defined, convert back: all in float64."""
    correction = calibration.for_samples if gains is None else calibration.correction.with_gains(gains)
    noise, kind = calibration.process, calibration.parametrization
    t = torch.as_tensor(t, dtype=torch.float64).reshape(-1).expand(len(x_t))
    output, x_t = output.double(), x_t.double()
    alpha, sigma = noise.scales(t, x_t)
    eps = correction.apply(kind.to_eps(output, x_t, alpha, sigma), x_t / sigma, noise.lam(t))
    return kind.from_eps(eps, x_t, alpha, sigma)
