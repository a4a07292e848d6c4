"""Is the network being asked the right question? The usual mistakes, told apart by the denoising loss.

A network fed data in another range, in BGR, with another schedule or another prediction type than it was
trained with has a large residual that a calibration would dutifully shrink. So before calibrating, a few
images are denoised as given and as each usual mistake would have it. Losses are divided by that of the best
linear filter for the same data (the Wiener filter per channel and frequency band), which makes them
comparable between hypotheses: a trained network beats the filter clearly, a misused one hardly or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from trueup.bands import Bands, band_variance
from trueup.denoiser import Denoiser
from trueup.errors import Argument, DataError, ModelError
from trueup.images import Batch, Samples
from trueup.noise import level_key, normal
from trueup.parametrization import Parametrization
from trueup.process import DiscreteVP, Flow, NoiseProcess

Change = Callable[[Tensor], Tensor]
_LAM = (1.5, 0.5, -0.5, -1.5)  # where networks are far better than filters
_SURE = 4.0  # standard errors of the paired difference before a mistake is named
_LEAST = 0.985  # and the share of the loss it must come down to
_EXPLAINED, _NEARLY = 0.9, 0.2  # of a score beyond 1 that a mistake must explain, and what may be left
_LATENT_SCALES = {0.18215: "Stable Diffusion 1 and 2", 0.13025: "Stable Diffusion XL"}
FEWEST = 8  # with fewer nothing is sure
IMAGES = 32  # enough to tell mistakes apart


def _same(x: Tensor) -> Tensor:
    return x


@dataclass
class Diagnosis:
    """What denoising a few images says. `score`: loss as given over the best linear filter's."""

    score: float
    problem: ModelError | None = None  # the likeliest mistake, and what to do
    hints: list[str] = field(default_factory=list)


@dataclass
class _Hypothesis:
    mistake: ModelError  # with the remedy
    process: NoiseProcess
    parametrization: Parametrization
    transform: Change = _same  # of the data
    time: Change = _same  # of what the network is told


def check_use(denoiser: Denoiser, samples: Samples) -> Diagnosis:
    """Raise ModelError if a network seems to be used wrongly, tried on the first of the images."""
    found = look(denoiser, samples)
    if found.problem is not None:
        raise unless_trusted(found.problem)
    return found


def unless_trusted(problem: ModelError) -> ModelError:
    """The same, with the way round it."""
    advice = f"{problem.advice} (or pass {{}} to go on as it is)"
    return ModelError(problem.problem, advice, *problem.arguments, Argument("trust", True))


def look(denoiser: Denoiser, samples: Samples) -> Diagnosis:
    """A diagnosis from the first of the images."""
    batch = samples.first(IMAGES)
    return Diagnosis(math.nan) if batch is None else diagnose(denoiser, batch, flip=samples.images.flip)


@torch.inference_mode()
def diagnose(denoiser: Denoiser, batch: Batch, *, flip: bool = False) -> Diagnosis:
    """Try the usual mistakes on a few images, of which 16 to 32 say enough; flip: some are mirrored."""
    if denoiser.conditional and batch.y is None:
        raise DataError("the network is conditional: the data must come with labels")
    if len(batch) < FEWEST:
        return Diagnosis(math.nan, hints=[f"fewer than {FEWEST} images: not looked for usual mistakes"])
    process, parametrization = denoiser.process, denoiser.parametrization
    with denoiser.evaluating():
        as_given = _evaluate(denoiser, batch, process)
        given = as_given.scores(parametrization)
        best, problem = given, None
        most = _bound(given)
        for guess in _hypotheses(denoiser, batch.x0):
            answers = as_given  # perhaps only read differently
            if guess.transform is not _same or guess.time is not _same or guess.process is not process:
                answers = _evaluate(denoiser, batch, guess.process, guess.transform, guess.time)
            tried = answers.scores(guess.parametrization)
            if not (tried.mean() < min(most, float(best.mean())) and _surely_better(tried, given)):
                continue
            if tried.mean() >= 1.0:  # who says nothing, or the right thing softly, may seem mistaken
                nothing = answers.scores(guess.parametrization, 0.0)
                louder = as_given.scores(parametrization, as_given.scale(parametrization))
                if not tried.mean() < min(_bound(nothing), _bound(louder)):
                    continue
            best, problem = tried, guess.mistake
        mirrored = None
        if denoiser.data_range is not None and batch.x0.ndim == 4 and not flip:
            mirrored = _evaluate(denoiser, batch, process, lambda x: x.flip(-1)).scores(parametrization)
    result = Diagnosis(float(given.mean()), problem)
    if problem is None and mirrored is not None:
        if _surely_better(mirrored, given):
            result.problem = ModelError("the network denoises these images better mirrored", "mirror them")
        elif not _surely_better(given, mirrored) and abs(mirrored.mean() / given.mean() - 1) < 0.03:
            result.hints.append("mirrored images are denoised as well: flip them, if it was trained so")
    if result.problem is None and _surely_worse_than_linear(given):
        advice = "are they what it was trained on, and are these its weights and its scheduler?"
        result.problem = ModelError(
            "the network denoises these images surely worse than a linear filter made from them",
            f"{advice} One that is young or merely far off gains the most",
        )
    return result


def _surely_worse_than_linear(given: Tensor) -> bool:
    return float(given.mean() - _SURE * given.std() / len(given) ** 0.5) > 1.0


def _bound(given: Tensor) -> float:
    """What a mistake's score must be below: 1, that of a linear filter.

    A weak network, or one of data that nothing but a linear filter can denoise, comes no lower when used
    rightly. Where it is refused as given, it is enough that a mistake explains nine tenths of why; and of why
    the same reading of no answers would be, and of its answers as given if they were louder.
    """
    if not _surely_worse_than_linear(given):
        return 1.0
    return 1.0 + min(_NEARLY, (1 - _EXPLAINED) * (float(given.mean()) - 1))


def _surely_better(tried: Tensor, given: Tensor) -> bool:
    difference = given - tried
    error = difference.std() / len(difference) ** 0.5
    return bool(difference.mean() > _SURE * error and tried.mean() < _LEAST * given.mean())


@dataclass(eq=False)
class _Answers:
    """What a network says of noised data, at a few levels."""

    output: Tensor  # (L, B, *shape), as x_t and eps
    x_t: Tensor
    eps: Tensor
    alpha: Tensor  # (L, 1, ...), as sigma
    sigma: Tensor
    reference: Tensor  # (L, 1): the Wiener filter's loss

    def scores(self, read: Parametrization, scale: Tensor | float = 1.0) -> Tensor:
        """Loss over the Wiener filter's, averaged over levels, for every image (B,), read and scaled so."""
        eps_hat = read.to_eps(scale * self.output, self.x_t, self.alpha, self.sigma)
        loss = (eps_hat - self.eps).square().flatten(2).sum(2).cpu().double()
        return (loss / self.reference).mean(0)

    def scale(self, read: Parametrization) -> Tensor:
        """By how much, at each level, answers would have to be louder to be best, (L, 1, ...)."""
        silent = read.to_eps(0 * self.output, self.x_t, self.alpha, self.sigma)
        added = read.to_eps(self.output, self.x_t, self.alpha, self.sigma) - silent
        over = tuple(range(1, added.ndim))
        wanted = ((self.eps - silent) * added).sum(over, keepdim=True)
        return (wanted / added.square().sum(over, keepdim=True).clamp_min(1e-12)).clamp_min(0.0)


def _evaluate(
    denoiser: Denoiser, batch: Batch, process: NoiseProcess, transform: Change = _same, time: Change = _same
) -> _Answers:
    """Ask the network about noised data."""
    device = denoiser.device
    lam = torch.tensor(_LAM, dtype=torch.float64)
    lowest, highest = float(process.lam(process.t_max)), float(process.lam(process.t_min))
    t = process.snap(process.t_of_lam(lam.clamp(lowest, highest)))
    there = batch.to(device)
    x0 = transform(there.x0)
    wide = (-1, *[1] * x0.ndim)
    alpha, sigma = (v.to(device, torch.float32).reshape(wide) for v in (process.alpha(t), process.sigma(t)))
    # The same for every hypothesis.
    eps = torch.stack([normal(0, batch.index, level_key(v), denoiser.shape, device) for v in _LAM])
    x_t = alpha * x0 + sigma * eps
    calls = zip(x_t, time(t), strict=True)
    output = torch.stack([denoiser.predict(x, told, there.y).float() for x, told in calls])
    refuse_nonsense(output, t)
    reference = _wiener_loss(x0, process.alpha(t), process.sigma(t)).clamp_min(1e-12)[:, None]
    return _Answers(output, x_t, eps, alpha, sigma, reference)


def refuse_nonsense(values: Tensor, t: Tensor) -> None:
    """Raise if what a network returned at times t (L,), or sums of it, (L, ...), holds nonsense."""
    finite = torch.isfinite(values).flatten(1).all(1).cpu()
    if not finite.all():
        raise ModelError(f"the network returned values that are not finite at t = {float(t[~finite][0]):g}")


def _wiener_loss(x0: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """Loss of the best filter per channel and band, equation 29, (L,)."""
    bands = Bands(x0.shape[2:])
    z = bands.dct(x0.float()).flatten(2).cpu().double()  # (B, C, K)
    variance, _ = band_variance(bands, z, bands.sum(z.square()), torch.ones(len(z), dtype=torch.float64))
    signal = alpha.reshape(-1, 1, 1) ** 2 * variance
    return (bands.sizes * signal / (signal + sigma.reshape(-1, 1, 1) ** 2)).sum((1, 2))


def _hypotheses(denoiser: Denoiser, x0: Tensor) -> Iterator[_Hypothesis]:
    process, parametrization = denoiser.process, denoiser.parametrization
    yield from _of_the_data(denoiser, x0)
    flow = ("flow", "reversed_flow") if isinstance(process, Flow) else ()
    for name in ("noise", "data", "velocity", *flow):
        if name != parametrization.name and parametrization.sigma_data is None:
            text = f"the network's outputs fit a {name} prediction, not {parametrization.name}"
            made = Argument("prediction", name, f'Denoiser(..., "{name}", ...)')
            mistake = ModelError(text, "pass {}", made)
            yield _Hypothesis(mistake, process, Parametrization(name))
    # Times counted backwards, from noise to data, with either sign of a flow.
    opposite = {"flow": "reversed_flow", "reversed_flow": "flow"}.get(parametrization.name)
    advice = "tell it the time that is left: Denoiser(..., call=lambda x_t, t: net(x_t, end - t))"
    way = "from noise to data"
    if isinstance(process, Flow):
        way = "from data to noise" if process.reversed else way
        advice = f"say so: Denoiser(net, process.Flow(reversed={not process.reversed}), ...)"
    for read in (parametrization, *([Parametrization(opposite)] if opposite else [])):
        told = "" if read == parametrization else f", and predicts a {read.name}"
        mistake = ModelError(f"the network counts time {way}{told}", advice)
        yield _Hypothesis(mistake, process, read, time=lambda t: process.t_min + process.t_max - t)
    if isinstance(process, DiscreteVP):
        steps = round(process.t_max) + 1
        for name, other in (
            ("linear", DiscreteVP.linear(steps=steps)),
            ("scaled-linear", DiscreteVP.scaled_linear(steps=steps)),
            ("cosine", DiscreteVP.cosine(steps)),
        ):
            if not process.agrees_with(other):
                text = f"the network fits {name} betas, not those of its scheduler"
                advice = "pass the scheduler it was trained with as {}"
                mistake = ModelError(text, advice, Argument("scheduler"))
                yield _Hypothesis(mistake, other, parametrization)


def _of_the_data(denoiser: Denoiser, x0: Tensor) -> Iterator[_Hypothesis]:
    """Other ranges, BGR, unscaled latents."""

    def guess(mistake: ModelError, change: Change) -> _Hypothesis:
        return _Hypothesis(mistake, denoiser.process, denoiser.parametrization, change)

    unit = Argument("model_range", (0, 1), "Denoiser(..., data_range=(0, 1))")
    signed = Argument("model_range", (-1, 1), "Denoiser(..., data_range=(-1, 1))")
    if denoiser.data_range == (-1.0, 1.0):
        text = "the network fits data in 0..1, not in -1..1"
        yield guess(ModelError(text, "pass {}", unit), lambda x: (x + 1) / 2)
        if float(x0.min()) >= -1e-3:
            text = "the network fits these images stretched to -1..1: they are in 0..1"
            yield guess(ModelError(text, "pass {}", Argument("data_range", (0, 1))), lambda x: 2 * x - 1)
    if denoiser.data_range == (0.0, 1.0):
        text = "the network fits data in -1..1, not in 0..1"
        yield guess(ModelError(text, "pass {}", signed), lambda x: 2 * x - 1)
    if denoiser.data_range is None:
        for scale, models in _LATENT_SCALES.items():
            text, advice = f"the network fits these latents times {scale}", f"scale them as {models} does"
            yield guess(ModelError(text, advice), partial(torch.mul, scale))
    elif denoiser.shape[0] == 3:
        text = "the network fits these images with their channels reversed: they are BGR"
        yield guess(ModelError(text, "convert them to RGB"), lambda x: x.flip(1))
