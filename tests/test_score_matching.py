"""Score matching objectives, their identities, the uncalibration score and figure 1."""

import math

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr

import trueup
from trueup import Images
from trueup.analytic import GaussianMixture
from trueup.calibration.correction import Correction
from trueup.calibration.hook import CorrectOutput
from trueup.density import objectives
from trueup.density.score_matching import weights
from trueup.estimate import default_levels
from trueup.figure import curves, draw
from trueup.images import Samples
from trueup.noise import level_key, normal
from trueup.process import VE, ContinuousVP, DiscreteVP, Flow

SHAPE = (1, 6, 6)
PATTERN = 0.2 * torch.linspace(-1, 1, 36).reshape(SHAPE)


def off(eps, u, lam):
    """Off by a map that fades with the noise."""
    return PATTERN.to(eps) * torch.sigmoid(lam)


@pytest.fixture(scope="module")
def data():
    means = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(3))
    return GaussianMixture(means, 0.5)


@pytest.fixture(scope="module")
def shifted(data):
    """A network off by a map, its shift calibration, and what remains to be measured on."""
    net = data.denoiser(ContinuousVP(), distortion=off).with_batch_size(200)
    x0 = data.sample(1200)
    return net, x0, trueup.calibrate(net, Images(x0[:800]), family="shift", progress=False)


def bias2(net, t):
    return (torch.sigmoid(net.process.lam(t)) ** 2) * float(PATTERN.double().square().sum())


def test_with_the_truth_known_the_score_matching_loss_is_the_bias_alone(data, shifted):
    net, x0, _ = shifted
    truth = data.denoiser(ContinuousVP())
    found = objectives(net, Images(x0, count=60), truth=truth, progress=False)
    assert torch.allclose(
        found.sm_before, bias2(net, found.t).expand_as(found.sm_before), rtol=1e-3, atol=1e-6
    )
    # in the paper's units: half the squared error of the score
    level = found.level("sm_before")[3]
    expected = 0.5 * float(bias2(net, found.t)[3] / net.process.sigma(found.t[3]) ** 2)
    assert level.value == pytest.approx(expected, rel=1e-3)


def test_denoising_and_score_matching_differ_by_a_constant_that_calibration_leaves(data, shifted):
    net, x0, calibration = shifted
    truth = data.denoiser(ContinuousVP())
    found = objectives(net, Images(x0), calibration, truth=truth, progress=False)
    gaps = [getattr(found, side) - getattr(found, f"sm_{side}") for side in ("before", "after")]
    error = (gaps[0] - gaps[1]).std(0) / math.sqrt(400)
    assert bool(((gaps[0] - gaps[1]).mean(0).abs() < 4 * error + 1e-6).all())
    ideal = objectives(truth.with_batch_size(200), Images(x0[800:]), progress=False)
    scatter = (ideal.before.std(0) + gaps[0].std(0)) / math.sqrt(400)
    assert bool(((ideal.before.mean(0) - gaps[0].mean(0)).abs() < 4 * scatter).all())


def test_the_drop_of_a_shift_is_the_paper_s_equation_9(shifted):
    net, x0, calibration = shifted
    found = objectives(net, Images(x0), calibration, progress=False)
    assert len(found.before) == 400
    assert found.notes == ["800 images made the calibration and are passed over"]
    missed = found.total("g2", "missed")
    assert missed.low < 0 < missed.high
    assert "equation 9" in found.check()
    assert found.check().endswith("they agree")
    expected = float(weights("g2", net.process, found.t) @ bias2(net, found.t))
    drop = found.total("g2", "drop")
    assert drop.low < expected < drop.high or drop.value == pytest.approx(expected, rel=0.03)


def test_a_shift_that_is_too_large_still_obeys_equation_9(shifted):
    net, x0, calibration = shifted
    from dataclasses import replace

    three = torch.full_like(calibration.evidence.scale, 3.0)
    thrice = replace(calibration, correction=calibration.correction.scaled(three))
    found = objectives(net, Images(x0), thrice, progress=False)
    assert found.total("g2", "drop").high < 0  # three times too much is worse than nothing
    assert found.check().endswith("they agree")
    said = next(line for line in found.table().splitlines() if line.startswith("change of the total"))
    assert said.endswith("WORSE")


def test_a_spectral_correction_removes_the_variance_it_explains(data):
    net = data.denoiser(
        ContinuousVP(), distortion=lambda eps, u, lam: 0.3 * eps.mean((2, 3), keepdim=True) + off(eps, u, lam)
    ).with_batch_size(200)
    x0 = data.sample(1400)
    calibration = trueup.calibrate(net, Images(x0[:1000]), estimator="regressed", progress=False)
    found = objectives(net, Images(x0), calibration, progress=False)
    drop, predicted = (found.total("g2", name) for name in ("drop", "predicted"))
    assert drop.low > 0
    assert drop.value == pytest.approx(predicted.value, rel=0.05)
    assert "explained variance" in found.check()


def test_snr_weightings_are_those_of_diffusers():
    scheduler = DDPMScheduler()
    process = DiscreteVP(scheduler.alphas_cumprod.double())
    t = torch.arange(1000).double()
    snr = compute_snr(scheduler, t.long()).double()
    even = weights("uniform", process, t)
    assert float(even.sum()) == pytest.approx(0.5)  # half the mean over time
    assert torch.allclose(weights("snr", process, t) / even, snr, rtol=1e-3)
    assert torch.allclose(weights("min-snr", process, t) / even, snr.clamp(max=5) / snr, rtol=1e-3)
    with pytest.raises(trueup.TrueupError, match="weighting is"):
        weights("guess", process, t)


@pytest.mark.parametrize("process", [DiscreteVP.linear(), ContinuousVP(), VE(), Flow()])
def test_totals_of_the_default_levels_are_those_of_all(process):
    """Of a loss like a network's, against a sum over every timestep or a fine integral over time."""

    def loss(t):
        return torch.sigmoid(process.lam(t))

    few = default_levels(process)
    if process.integer_times:
        every = torch.arange(1000).double()
        width = torch.full_like(every, 1 / 1000)
    else:
        every = torch.linspace(process.t_min, process.t_max, 2_000_001, dtype=torch.float64)
        width = torch.full_like(every, 1 / len(every))
    snr = (2 * process.lam(every)).exp()
    for name, density in (("uniform", 1.0), ("snr", snr), ("min-snr", snr.clamp(max=5) / snr)):
        exact = float((0.5 * width * density * loss(every)).sum())
        assert float(weights(name, process, few) @ loss(few)) == pytest.approx(exact, rel=0.03), name


def test_levels_and_truths_that_make_no_sense_are_refused(data, shifted):
    net, x0, _ = shifted
    ordered, mixed = (
        objectives(net, x0[:4], levels=levels, progress=False)
        for levels in ([0.1, 0.3, 0.6], [0.6, 0.1, 0.3])
    )
    assert torch.equal(ordered.before, mixed.before)
    for levels, words in ((0.5, "levels are times"), ([2.0], "between"), ([], "at least one")):
        with pytest.raises(trueup.TrueupError, match=words):
            objectives(net, x0[:4], levels=levels, progress=False)
    with pytest.raises(trueup.TrueupError, match="another noise process"):
        objectives(net, x0[:4], truth=data.denoiser(VE()), progress=False)


def test_a_correction_that_is_not_the_calibration_s_is_noticed(shifted, monkeypatch):
    """Equation 9 is about the shift in the file; what is applied comes from the hook's tables."""
    net, x0, calibration = shifted
    correct = CorrectOutput.correct

    def too_much(self, output, x_t, t, y=None):
        return 1.5 * correct(self, output, x_t, t, y) - 0.5 * output

    monkeypatch.setattr(CorrectOutput, "correct", too_much)
    found = objectives(net, Images(x0), calibration, progress=False)
    assert "DIFFER" in found.check()


@pytest.mark.parametrize("process", [DiscreteVP.linear(), ContinuousVP(), VE(), Flow()])
def test_the_likelihood_weighting_is_g_squared_over_the_score(process):
    top, bottom = float(process.lam(process.t_min)), float(process.lam(process.t_max))
    t = process.t_of_lam(torch.linspace(top, bottom, 4001, dtype=torch.float64))
    t = t.clamp(process.t_min, process.t_max)
    loss = torch.sin(process.lam(t)).square() + 1  # of eps, any function
    ours = float(weights("g2", process, t) @ loss)
    by_hand = float(weights(process.g2, process, t) @ loss)  # the integral over t, as the paper has it
    assert ours == pytest.approx(by_hand, rel=2e-3)


def test_totals_and_levels_reach_json_and_the_table(shifted):
    net, x0, calibration = shifted
    found = objectives(net, Images(x0, count=8), calibration, levels=[0.1, 0.5], progress=False)
    said = found.as_json()
    assert said["totals"]["g2"]["before"]["value"] == pytest.approx(found.total("g2").value)
    assert [level["t"] for level in said["levels"]] == [0.1, 0.5]
    assert len([line for line in found.table().splitlines() if "total, " in line]) == 4
    with pytest.raises(trueup.TrueupError, match="needs a calibration"):
        found.total("g2", "sm_before")


def test_the_uncalibration_score_is_the_bound_s_gain_and_covers_it(data):
    process = ContinuousVP()
    net = data.denoiser(process, distortion=off).with_batch_size(300)
    covered = 0
    for repeat in range(10):
        calibration = trueup.calibrate(
            net, Images(data.sample(300, seed=repeat)), family="shift", seed=repeat, progress=False
        )
        expected = float(weights("g2", process, calibration.t) @ bias2(net, calibration.t)) / (
            36 * math.log(2)
        )
        score = calibration.uncalibration
        covered += score.low < expected < score.high
        share = calibration.uncalibration_share
        assert share.low < share.value < share.high
        assert share.value == pytest.approx(calibration.explained(), rel=1e-9)
    assert covered >= 8


@pytest.mark.parametrize("parametrization", ["noise", "data", "velocity", "flow"])
def test_figure_1_s_curves_are_the_bias_whatever_is_predicted(data, parametrization):
    process = Flow() if parametrization == "flow" else ContinuousVP()
    net = data.denoiser(process, parametrization, distortion=off).with_batch_size(300)
    calibration = trueup.calibrate(net, Images(data.sample(1500)), family="shift", progress=False)
    found = curves(calibration)
    expected = bias2(net, found.t)
    for values, factor in (
        (found.size, torch.full_like(expected, 0.5)),
        (found.rate, process.g2(found.t) / (2 * process.sigma(found.t) ** 2)),
    ):
        inside = (values[1] <= factor * expected) & (factor * expected <= values[2])
        assert float(inside.double().mean()) > 0.8
    area = float(weights("g2", process, found.t) @ expected)
    assert found.area.low < area < found.area.high
    assert found.area.value == pytest.approx(area, rel=0.15)


def test_the_figure_is_drawn_and_bad_names_are_refused(shifted, tmp_path):
    _, _, calibration = shifted
    for name in ("a.png", "b.svg", "c.pdf"):
        draw({"one": calibration, "two": calibration}, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    with pytest.raises(trueup.TrueupError, match=r"\.png, \.svg or \.pdf"):
        draw(calibration, tmp_path / "d.jpg")


def test_each_side_is_the_network_really_run():
    """Bare and attached, through a module whose call is its own and whose time is another."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.5))
            self.calls = []

        def forward(self, time, x):
            self.calls.append(len(x))
            return self.scale * x + 0.3

    net = Net()
    denoiser = trueup.Denoiser(
        net, ContinuousVP(), "noise", SHAPE, call=lambda x, t: net(1000 * t, x), data_range=None
    ).with_batch_size(50)
    x0 = torch.randn(100, *SHAPE, generator=torch.Generator().manual_seed(0))
    calibration = trueup.calibrate(denoiser, Images(x0), levels=[0.3, 0.6], trust=True, progress=False)
    net.calls.clear()
    how = {"levels": [0.3, 0.6], "trust": True, "progress": False}
    found = objectives(denoiser, Images(x0 + 1e-3), calibration, **how)
    assert len(net.calls) == 2 * 2 * 2  # sides, levels, batches
    assert found.evaluations == sum(net.calls) == 400
    assert found.total("uniform", "drop").low > 0
    assert not denoiser.corrected
    with trueup.attach(net, calibration):
        attached = objectives_by_hand(denoiser, x0 + 1e-3, 0.6)
    assert torch.allclose(found.after[:, 1], attached, rtol=1e-5)


def objectives_by_hand(denoiser, x0, t):
    eps = normal(1, torch.arange(len(x0)), level_key(t), SHAPE, torch.device("cpu"))
    eps_hat = denoiser.eps(denoiser.process.noised(x0, eps, t), t)
    return (eps_hat.double() - eps.double()).square().flatten(1).sum(1).detach()


def test_a_level_of_the_calibration_is_worked_out_once(shifted, monkeypatch):
    net, x0, calibration = shifted
    calls, refined = [], Correction.refined
    monkeypatch.setattr(Correction, "refined", lambda self: calls.append(1) or refined(self))
    levels = [0.1, 0.3, 0.5, 0.7]
    found = objectives(net.with_batch_size(50), Images(x0), calibration, levels=levels, progress=False)
    assert len(calls) <= 3  # here, and where it is attached
    batch = next(Samples(Images(x0[800:]), SHAPE, None).batches(400))
    # As it is written, one lam per row.
    for i, t in enumerate(levels):
        eps = normal(1, batch.index + 800, level_key(t), SHAPE, torch.device("cpu"))
        x_t = net.process.noised(batch.x0, eps, t)
        before, lam = net.eps(x_t, t).double(), net.process.lam(torch.full((400,), t))
        c = before - calibration.correction.apply(before, x_t.double() / net.process.sigma(t), lam)
        expected = (2 * before * c - c.square()).flatten(1).sum(1)
        assert torch.allclose(found.predicted[:, i], expected, rtol=1e-4, atol=1e-4)
