"""Is the network being asked the right question? The usual mistakes, told apart by the denoising loss.

A network fed data in another range, in BGR, with another schedule or another prediction type than it was
trained with has a large residual that a calibration would dutifully shrink. So before calibrating, a few
images are denoised as given and as each usual mistake would have it. Losses are divided by that of the best
linear filter for the same data (the Wiener filter per channel and frequency band), which makes them
comparable between hypotheses: a trained network beats the filter clearly, a misused one hardly or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.data import Batch
from trueup.denoiser import Denoiser
from trueup.errors import DataError, ModelError
from trueup.estimate.evaluate import default_batch_size, out_of_memory
from trueup.noise import level_key, normal
from trueup.parametrization import Parametrization
from trueup.process import DiscreteVP, NoiseProcess

_LAM = (1.5, 0.5, -0.5, -1.5)  # where networks are far better than filters
_SURE = 4.0  # standard errors of the paired difference before a mistake is named
_LEAST = 0.985  # and the share of the loss it must come down to
_LATENT_SCALES = {0.18215: "Stable Diffusion 1 and 2", 0.13025: "Stable Diffusion XL"}
FEWEST = 8  # with fewer nothing is sure
IMAGES = 32  # enough to tell mistakes apart


@dataclass
class Diagnosis:
    """What denoising a few images says. `score`: loss as given over the best linear filter's."""

    score: float
    problem: str | None = None  # the likeliest mistake, and what to do
    hints: list[str] = field(default_factory=list)


@dataclass
class _Hypothesis:
    mistake: str  # a sentence, with the remedy
    transform: Callable[[Tensor], Tensor] | None
    process: NoiseProcess
    parametrization: Parametrization


@torch.inference_mode()
def diagnose(
    denoiser: Denoiser, batch: Batch, *, flip: bool = False, batch_size: int | None = None
) -> Diagnosis:
    """Try the usual mistakes on a few images, of which 16 to 32 say enough; flip: some are mirrored."""
    if denoiser.conditional and batch.y is None:
        raise DataError("the network is conditional: the data must come with labels")
    if len(batch.index) < FEWEST:
        words = f"fewer than {FEWEST} images: not looked for the usual mistakes"
        return Diagnosis(float("nan"), hints=[words])
    process, parametrization = denoiser.process, denoiser.parametrization
    size = batch_size or default_batch_size(denoiser)
    with denoiser.evaluating():
        as_given = _evaluate(denoiser, batch, process, batch.x0, size)
        given = as_given.scores(parametrization)
        best, problem = given, None
        for guess in _hypotheses(denoiser, batch.x0):
            if guess.transform is None and guess.process is process:
                evaluated = as_given  # only read differently
            else:
                x0 = guess.transform(batch.x0) if guess.transform else batch.x0
                evaluated = _evaluate(denoiser, batch, guess.process, x0, size)
            tried = evaluated.scores(guess.parametrization)
            if tried.mean() < min(1.0, float(best.mean())) and _surely_better(tried, given):
                best, problem = tried, guess.mistake
        mirrored = None
        if denoiser.data_range is not None and batch.x0.ndim == 4 and not flip:
            flipped = _evaluate(denoiser, batch, process, batch.x0.flip(-1), size)
            mirrored = flipped.scores(parametrization)
    result = Diagnosis(float(given.mean()), problem)
    if problem is None and mirrored is not None:
        if _surely_better(mirrored, given):
            result.problem = "the network denoises these images better when they are mirrored: mirror them"
        elif not _surely_better(given, mirrored) and abs(mirrored.mean() / given.mean() - 1) < 0.03:
            result.hints.append(
                "mirrored images are denoised as well: if it was trained with random flips, pass --flip"
            )
    if result.problem is None and result.score > 1.0:
        result.problem = (
            "the network denoises these images worse than a linear filter made from them: are they what it "
            "was trained on, and are these its weights and its scheduler?"
        )
    return result


def _surely_better(tried: Tensor, given: Tensor) -> bool:
    difference = given - tried
    error = difference.std() / len(difference) ** 0.5
    return bool(difference.mean() > _SURE * error and tried.mean() < _LEAST * given.mean())


@dataclass
class _Evaluated:
    """A network's outputs on noised data, level by level."""

    alpha: Tensor  # (L, 1, ...)
    sigma: Tensor
    x_t: Tensor  # (L, B, C, *spatial)
    eps: Tensor
    output: Tensor
    reference: Tensor  # (L,) the Wiener filter's loss

    def scores(self, parametrization: Parametrization) -> Tensor:
        """Loss over the Wiener filter's, averaged over levels, for every image, (B,)."""
        eps_hat = parametrization.to_eps(self.output, self.x_t, self.alpha, self.sigma)
        loss = (eps_hat - self.eps).square().flatten(2).sum(2).cpu().double()
        return (loss / self.reference.clamp_min(1e-12)[:, None]).mean(0)


def _in_parts(denoiser: Denoiser, x_t: Tensor, t: Tensor, y: Tensor | None, size: int) -> Tensor:
    """The network's outputs, so many samples at a time, fewer if they do not fit."""
    try:
        parts = [
            denoiser(part, t.expand(len(part)), None if y is None else y[start : start + size]).float()
            for start, part in zip(range(0, len(x_t), size), x_t.split(size), strict=True)
        ]
        return torch.cat(parts)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error) or size == 1:
            raise
    return _in_parts(denoiser, x_t, t, y, (size + 1) // 2)


def _evaluate(
    denoiser: Denoiser, batch: Batch, process: NoiseProcess, x0: Tensor, batch_size: int
) -> _Evaluated:
    device = denoiser.device
    lam = torch.tensor(_LAM, dtype=torch.float64)
    lowest, highest = float(process.lam(process.t_max)), float(process.lam(process.t_min))
    t = process.snap(process.t_of_lam(lam.clamp(lowest, highest)))
    axes = (-1, *[1] * x0.ndim)
    alpha, sigma = (v.to(device, torch.float32).reshape(axes) for v in (process.alpha(t), process.sigma(t)))
    eps = torch.stack(
        [normal(0, batch.index, level_key(level), denoiser.shape, device) for level in _LAM]
    )  # the same for every hypothesis
    x_t = alpha * x0.to(device) + sigma * eps
    times = t.to(device, torch.int64 if denoiser.process.integer_times else torch.float32)
    y = batch.y.to(device) if batch.y is not None else None
    output = torch.stack(
        [_in_parts(denoiser, x, time, y, batch_size) for x, time in zip(x_t, times, strict=True)]
    )
    if not torch.isfinite(output).all():
        bad = float(t[~torch.isfinite(output).flatten(1).all(1).cpu()][0])
        raise ModelError(f"the network returned values that are not finite at t = {bad:g}")
    return _Evaluated(alpha, sigma, x_t, eps, output, _wiener_loss(x0, process.alpha(t), process.sigma(t)))


def _wiener_loss(x0: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """Loss of the best filter per channel and band, equation 29, (L,)."""
    bands = Bands(x0.shape[2:])
    z = bands.dct(x0.float()).flatten(2).double()  # (B, C, K)
    variance = bands.sum((z - z.mean(0)).square()).sum(0) / (len(z) - 1) / bands.sizes  # (C, bands)
    signal = alpha.reshape(-1, 1, 1) ** 2 * variance
    return (bands.sizes * signal / (signal + sigma.reshape(-1, 1, 1) ** 2)).sum((1, 2))


def _hypotheses(denoiser: Denoiser, x0: Tensor) -> Iterator[_Hypothesis]:
    process, parametrization = denoiser.process, denoiser.parametrization
    if denoiser.data_range == (-1.0, 1.0):
        yield _Hypothesis(
            "the network fits data in 0..1, not in -1..1: pass --model-range 0,1",
            lambda x: (x + 1) / 2,
            process,
            parametrization,
        )
        if float(x0.min()) >= -1e-3:
            yield _Hypothesis(
                "the network fits these images stretched to -1..1: they are in 0..1, pass --data-range 0,1",
                lambda x: 2 * x - 1,
                process,
                parametrization,
            )
    if denoiser.data_range == (0.0, 1.0):
        yield _Hypothesis(
            "the network fits data in -1..1, not in 0..1: pass --model-range -1,1",
            lambda x: 2 * x - 1,
            process,
            parametrization,
        )
    if denoiser.data_range is None:
        for scale, models in _LATENT_SCALES.items():
            yield _Hypothesis(
                f"the network fits these latents times {scale}: scale them as {models} does",
                lambda x, scale=scale: scale * x,  # type: ignore[misc]
                process,
                parametrization,
            )
    elif denoiser.shape[0] == 3:
        yield _Hypothesis(
            "the network fits these images with their channels reversed: they are BGR, convert them to RGB",
            lambda x: x.flip(1),
            process,
            parametrization,
        )
    for name in ("noise", "data", "velocity"):
        if name != parametrization.name and parametrization.sigma_data is None:
            yield _Hypothesis(
                f"the network's outputs fit a {name} prediction, not {parametrization.name}: pass "
                f"--prediction {name}",
                None,
                process,
                Parametrization(name),
            )
    if isinstance(process, DiscreteVP):
        steps = round(process.t_max) + 1
        for name, other in (
            ("linear", DiscreteVP.linear(steps=steps)),
            ("scaled-linear", DiscreteVP.scaled_linear(steps=steps)),
            ("cosine", DiscreteVP.cosine(steps)),
        ):
            if not process.agrees_with(other):
                yield _Hypothesis(
                    f"the network fits {name} betas, not those of its scheduler: pass the scheduler it was "
                    "trained with as --scheduler",
                    None,
                    other,
                    parametrization,
                )
