"""The gain on the innovation: what each form leaves as it is, what it changes, and where each is used."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from torch import nn

import trueup
from trueup.analytic import GaussianMixture
from trueup.bands import Bands
from trueup.calibration import GAINS, Attachment, Correction, Innovation
from trueup.calibration.hook import CorrectOutput
from trueup.density import objectives
from trueup.errors import ArtifactError, TrueupError
from trueup.estimate import fit
from trueup.estimate.confirm import score
from trueup.estimate.moments import U
from trueup.estimate.regress import Centred, divide
from trueup.process import ContinuousVP

from calibrations import by_definition, emptied, make
from measuring import measure

PROCESS = ContinuousVP()
LEVELS = [0.1, 0.2, 0.3, 0.45, 0.6]
FORMS = GAINS[:3]
NOISE = 0.3  # standard deviation of the error that nothing predicts


def noisy(mixture, size=NOISE):
    """The ideal denoiser with an error that is independent of everything, and one that is not."""
    generator = torch.Generator().manual_seed(3)

    def distortion(eps, u, lam):
        own = torch.randn(eps.shape, generator=generator, dtype=torch.float64).to(eps)
        return size * (own + 0.2 * u + 0.1)

    return mixture.denoiser(PROCESS, distortion=distortion)


@pytest.fixture(scope="module")
def measured(mixture):
    """Moments of the ideal denoiser and of the noisy one, on the same images."""
    x0 = mixture.sample(500, 4)
    return {size: measure(noisy(mixture, size), x0, levels=LEVELS) for size in (0.0, NOISE)}


def described(moments, correction):
    """The corrected output's mean, slope on u and variance of innovation, and what it takes off the loss."""
    moments = moments.used().of_equal_weight()
    centred = Centred(moments)
    u = centred.unit(U)
    output = (1 - correction.a) * centred.eps_hat() - correction.d * u
    slope = divide(centred.dot(output, u), centred.dot(u, u))
    rest = output - slope * u
    gain = score(moments, correction).gain().sum(0) / centred.n[:, :, 0]  # (L, bands)
    return centred.mean_of(output) - correction.b, slope, centred.dot(rest, rest) / centred.n, gain


def nothing_of(correction):
    return correction.with_gains("none")


@pytest.mark.parametrize("estimator", ["paired", "regressed", "shrunk"])
@pytest.mark.parametrize("form", ["sqrt", "response"])
def test_mean_and_response_stay_and_the_innovation_is_scaled(measured, estimator, form):
    moments = measured[NOISE]
    cal = fit(moments, estimator=estimator)
    mean, slope, variance, _ = described(moments, cal.correction)
    changed = cal.correction.with_gains(form)
    new_mean, new_slope, new_variance, _ = described(moments, changed)
    # Sums of 500 in float64, of products of float32.
    assert torch.allclose(new_mean, mean, atol=1e-9)
    assert torch.allclose(new_slope, slope, atol=1e-9)
    factor = ((1 - changed.a) / (1 - cal.correction.a)).square()
    assert factor.max() > 1.2
    assert torch.allclose(new_variance, factor * variance, rtol=1e-6, atol=1e-12)


def test_the_square_root_gives_the_innovation_the_variance_of_its_signal(measured):
    """s = signal/(signal + noise), both known: least squares leaves s signal, the root signal, 1 - a = s."""
    cal = fit(measured[NOISE], estimator="regressed")
    ideal = nothing_of(cal.correction)
    # By level, channel and band, of all its coefficients. At the last level next to nothing is signal.
    signal = described(measured[0.0], ideal)[2][:-1]
    sizes = cal.correction.bands.sizes
    share = signal / (signal + NOISE**2 * sizes)
    weight = sizes / sizes.sum()  # a slope is known from 500 x size values: to 0.04 in the smallest band
    found = {form: described(measured[NOISE], cal.correction.with_gains(form))[2][:-1] for form in FORMS}
    assert float((weight * (1 - cal.correction.a[:-1] - share).abs()).sum(2).max()) < 0.03
    for form, expected in (
        ("least-squares", share * signal),
        ("sqrt", signal),
        ("response", signal + NOISE**2 * sizes),
    ):
        assert torch.allclose(found[form].sum(2), expected.sum(2), rtol=0.06), form
    # and the three are far enough apart for that to mean something
    assert (found["least-squares"].sum(2) < 0.8 * signal.sum(2)).any()
    assert (found["response"].sum(2) > 1.2 * signal.sum(2)).all()


def test_the_loss_lies_between_those_of_least_squares_and_of_nothing(measured):
    """Exactly, on the moments it was fitted to: what another gain costs is its distance squared."""
    moments = measured[NOISE]
    correction = fit(moments, estimator="paired").correction
    variance = described(moments, nothing_of(correction))[2]  # of the network's own innovation
    gains = {}
    for form in FORMS:
        changed = correction.with_gains(form)
        gains[form] = described(moments, changed)[3]
        cost = ((correction.a - changed.a).square() * variance).sum(1)
        assert torch.allclose(gains["least-squares"] - gains[form], cost, rtol=1e-6, atol=1e-7)
    assert (gains["response"] > 0).all()
    assert (gains["sqrt"] - gains["response"] > 0).all()
    assert not described(moments, nothing_of(correction))[3].any()


def test_a_shrunk_fit_is_ordered_likewise(measured):
    correction = fit(measured[NOISE]).correction
    least, root, response = (described(measured[NOISE], correction.with_gains(f))[3].sum(1) for f in FORMS)
    assert (least > root).all()
    assert (root > response).all()
    assert (response > 0).all()


def test_what_is_not_confirmed_is_zero_in_every_form(measured):
    cal = fit(measured[0.0])
    correction = fit(measured[NOISE]).correction
    half = torch.ones(len(LEVELS), correction.bands.count, dtype=torch.float64)
    half[:, ::2] = 0
    for form in FORMS:
        assert cal.correction.with_gains(form).empty
        made = correction.scaled(half).with_gains(form)
        assert not made.a[..., ::2].any()
        assert not made.d[..., ::2].any()
        assert not made.b[..., correction.bands.coefficients(range(0, correction.bands.count, 2))].any()


def by_hand(a):
    """A correction of one number, with an innovation of rho = 2 and mean 3."""
    bands = Bands((1,), [0.5])
    a = torch.as_tensor(a, dtype=torch.float64).reshape(-1, 1, 1)
    lam, of = -torch.arange(len(a), dtype=torch.float64), torch.ones_like(a)
    return Correction(lam, 0.5 * of, a, -0.25 * of, bands, None, Innovation(2 * of, 3 * of))


def test_gains_by_hand():
    gains = torch.tensor([0.0, 0.75, -0.44, 1.0, 1.5, 0.99, 0.999], dtype=torch.float64)
    root = by_hand(gains).with_gains("sqrt")
    # Below a signal of a hundredth the root is a line through 0, so that it has no infinite slope; an
    # innovation that is too small has no noise to leave out, and gets what least squares say.
    kept = torch.tensor([1.0, 0.5, 1.44, 0.0, 0.0, 0.1, 0.01], dtype=torch.float64)
    assert torch.allclose(1 - root.a.flatten(), kept, rtol=1e-12)
    change = gains - (1 - kept)
    assert torch.allclose(root.d.flatten(), -0.25 + 2 * change)
    assert torch.allclose(root.b.flatten(), 0.5 + 3 * change)
    assert (root.a[0], root.b[0], root.d[0]) == (0.0, 0.5, -0.25)
    response = by_hand(gains).with_gains("response")
    assert not response.a.any()
    assert torch.allclose(response.d.flatten(), -0.25 + 2 * gains)
    assert torch.allclose(response.b.flatten(), 0.5 + 3 * gains)
    assert by_hand(gains).with_gains("none").empty
    same = by_hand(gains)
    assert same.with_gains("least-squares") is same


def test_a_shift_has_one_form(measured, tmp_path):
    cal = fit(measured[NOISE], family="shift")
    assert cal.correction.innovation is None
    assert all(cal.correction.with_gains(form) is cal.correction for form in FORMS)
    cal.save(tmp_path / "a")
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert not {"rho", "innovation", "changed_support"} & {*file.keys()}
    assert trueup.load(tmp_path / "a").identity == cal.identity


@pytest.mark.parametrize("form", GAINS)
def test_every_form_comes_back_from_the_file(measured, tmp_path, form):
    cal = replace(fit(measured[NOISE]), gains=form)
    cal.save(tmp_path / "a")
    loaded = trueup.load(tmp_path / "a")
    assert loaded.gains == form
    assert loaded.identity == cal.identity
    for name in ("b", "a", "d"):
        mine, theirs = (getattr(c.for_samples, name) for c in (cal, loaded))
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-6)  # float32
    assert torch.allclose(loaded.for_samples.support, cal.for_samples.support, atol=1e-7)


def test_only_bands_with_a_gain_keep_their_innovation(measured, tmp_path):
    cal = fit(measured[NOISE])
    cal.correction.a[..., 1:] = 0
    cal.correction.innovation.mean[..., 1:] = 0
    cal.save(tmp_path / "a")
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert file.get_tensor("innovation").shape == (len(LEVELS), 2, 1)


def test_a_word_that_is_no_form_is_refused_in_a_line(tmp_path):
    cal, known = make(), "gains are one of least-squares, sqrt, response, none, not 'root'"
    for work in (
        lambda: replace(cal, gains="root"),
        lambda: cal.correction.with_gains("root"),
        lambda: trueup.attach(nn.Identity(), cal, gains="root", force=True),
        lambda: CorrectOutput(cal, gains="root"),
    ):
        with pytest.raises(TrueupError, match=known):
            work()
    cal.gains = "root"
    with pytest.raises(ArtifactError, match="its gains are 'root', expected one of least-squares, sqrt"):
        cal.save(tmp_path / "a")


def test_a_correction_that_does_not_know_its_innovation_says_so(tmp_path):
    cal = make()
    cal.correction.innovation = None
    assert cal.correction.with_gains("none").empty
    for form in ("sqrt", "response"):
        with pytest.raises(TrueupError, match=f"what the innovation is, which {form} gains need"):
            cal.correction.with_gains(form)
    with pytest.raises(ArtifactError, match="it lacks rho"):
        cal.save(tmp_path / "a")


class Net(nn.Module):
    """A network with weights of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7))

    def forward(self, x, t):
        return self.weight * x + 0.1 * x.roll(1, -1) ** 2


@pytest.mark.parametrize("form", [None, *GAINS])
@pytest.mark.parametrize("kind", ["noise", "velocity"])
def test_attaching_a_form_is_applying_it_by_hand(form, kind):
    net = Net()
    cal = make((2, 6, 6), levels=5, kind=kind, network=net, gains="response" if form is None else "none")
    x_t, t = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(0)), cal.t
    before = net(x_t, t)
    with trueup.attach(net, cal, gains=form):
        after = net(x_t, t)
    expected = by_definition(cal, before, x_t, t, gains="response" if form is None else form)
    assert torch.allclose(
        after.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().max())
    )
    assert torch.equal(after, before) == (form == "none")
    assert torch.equal(net(x_t, t), before)


@pytest.mark.parametrize("form", GAINS)
def test_an_empty_correction_attaches_in_every_form(form):
    net, x_t = Net(), torch.randn(3, 1, 4, 4)
    cal = emptied(make(network=net))
    with trueup.attach(net, cal, gains=form):
        assert torch.equal(net(x_t, cal.t), 0.7 * x_t + 0.1 * x_t.roll(1, -1) ** 2)


@pytest.fixture(scope="module")
def drawn():
    """A network with errors of each kind, a calibration of it, and images that it has not seen."""
    generator = torch.Generator().manual_seed(1)
    data = GaussianMixture(torch.randn(3, 1, 4, 4, generator=generator, dtype=torch.float64), std=0.4)
    where = torch.randn(1, 4, 4, generator=generator)

    def distortion(eps, u, lam):  # what no linear filter predicts, the same at every call
        return 0.4 * torch.sin(5 * u + where.to(u)) + 0.2 * u + 0.1

    net = data.denoiser(PROCESS, distortion=distortion).with_batch_size(400)
    x0 = data.sample(700).float()
    cal = fit(measure(net, x0[:400], levels=LEVELS))
    assert (cal.correction.a > 0.1).any()
    return net, cal, x0[400:]


def test_likelihoods_are_of_least_squares_whatever_samples_are_drawn_with(drawn):
    net, cal, x0 = drawn
    how = {"trust": True, "progress": False}
    found = [trueup.likelihood(net, x0[:40], replace(cal, gains=form), **how) for form in ("sqrt", "none")]
    terms = [result.terms["diffusion"] for result in found]
    assert torch.equal(terms[0][1], terms[1][1])
    assert terms[0][1].mean() < terms[0][0].mean()
    assert torch.equal(
        objectives(net, x0, cal, levels=LEVELS, **how).after,
        objectives(net, x0, cal, levels=LEVELS, gains="least-squares", **how).after,
    )


def test_samples_are_drawn_in_the_form_that_the_calibration_says(drawn):
    net, cal, _ = drawn
    assert cal.gains == "sqrt"
    how = {"nfe": 4, "progress": False}
    bare, made = trueup.sample(net, 8, **how), {}
    for form in GAINS:
        made[form] = trueup.sample(net, 8, calibration=replace(cal, gains=form), **how)
        with Attachment(net, cal, gains=form):
            assert torch.equal(trueup.sample(net, 8, **how), made[form])
    assert torch.equal(trueup.sample(net, 8, calibration=cal, **how), made["sqrt"])
    assert torch.equal(bare, made["none"])
    assert len({float(x.sum()) for x in made.values()}) == 4


def test_evaluate_measures_the_loss_of_the_form_that_is_attached(drawn):
    net, cal, x0 = drawn
    how = {"samples": 8, "nfe": 3, "features": "pixels", "progress": False}
    drops = {}
    for form in GAINS:
        found = trueup.evaluate(net, replace(cal, gains=form), x0[:200], **how)
        alone = objectives(net, x0[:200], cal, levels=cal.t, gains=form, trust=True, progress=False)
        assert torch.equal(found.loss.after, alone.after)
        assert found.calibration["gains"] == form
        drops[form] = float(found.loss.losses("drop").mean())
    assert drops["least-squares"] > drops["sqrt"] > drops["response"] > drops["none"] == 0


@pytest.mark.parametrize("form", FORMS)
def test_the_drop_of_every_form_is_what_theory_says(drawn, form):
    """2 E[c c'] - E|c'|^2, with c the best and c' what runs: the rest of the residual is noise to both."""
    net, _, x0 = drawn
    made = net.with_batch_size(300)
    calibration = fit(
        measure(made, x0, levels=LEVELS, seed=5), estimator="paired"
    )  # on these very images, with other noise
    found = objectives(made, x0, calibration, levels=LEVELS, gains=form, trust=True, progress=False)
    drop, predicted = (found.total("g2", name).value for name in ("drop", "predicted"))
    assert drop > 0
    assert predicted == pytest.approx(drop, rel=0.1)


def test_the_hook_takes_the_calibration_s_form():
    cal = make(gains="response")
    assert torch.equal(CorrectOutput(cal).correction.d, cal.for_samples.d)
    assert not CorrectOutput(cal).correction.a.any()
    assert CorrectOutput(cal, gains="none").empty
