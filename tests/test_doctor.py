"""A network broken on purpose in each way is told so, that way first; an ideal one is healthy."""

import json
import math

import pytest
import torch

import trueup
from trueup import estimate
from trueup.analytic import GaussianMixture
from trueup.doctor import KINDS, check
from trueup.errors import ModelError, TrueupError
from trueup.estimate.diagnose import Diagnosis
from trueup.hf import as_denoiser
from trueup.images import Images
from trueup.process import VE, ContinuousVP, DiscreteVP, Flow

from broken import Exponential, Filter, around, smooth_mixture
from commandline import trueup_command
from measuring import measure

VP = ContinuousVP()
FINE = Diagnosis(0.5)  # used as it was trained


def examined(denoiser, x0, use=FINE, **settings):
    moments = measure(denoiser, x0, **settings)
    return check(denoiser, Images(x0), moments=moments, use=use)


def kinds(found):
    return [finding.kind for finding in found.findings]


def distorted(distortion, count=96, process=VP, mixture=None, seed=0):
    mixture = mixture or smooth_mixture()
    denoiser = mixture.denoiser(process, distortion=distortion)
    return examined(denoiser, mixture.sample(count, seed))


# --- nothing


def gaussian():
    return GaussianMixture(torch.full((1, 2, 8, 8), 0.3, dtype=torch.float64), std=0.7)


WHOLE = {
    "gaussian": gaussian,
    "mixture": lambda: smooth_mixture(8, 2),
    "skewed": Exponential,
}
USED = [
    (VP, "noise"),
    (DiscreteVP.cosine(), "velocity"),
    (VE(0.01, 80), "score"),
    (VE(0.01, 80), "data"),
    (Flow(), "flow"),
    (VP, "data"),
]


@pytest.mark.parametrize("data", WHOLE)
def test_ideal_networks_are_healthy(data):
    ideal = WHOLE[data]()
    for seed in range(20):
        process, prediction = USED[seed % len(USED)]
        found = examined(ideal.denoiser(process, prediction), ideal.sample(40, seed), seed=seed)
        assert found.healthy, (seed, str(found))
        assert found.as_json()["healthy"]


def test_healthy_says_what_would_have_been_seen():
    found = distorted(None)
    assert str(found).startswith("healthy: nothing above noise in 96 images (would have been seen:")
    assert set(found.limits) == {"constant-map", "drift", "excess-noise", "contrast", "patch-grid"}
    assert all(1e-4 <= limit < 0.1 for limit in found.limits.values())


@pytest.mark.parametrize("kind", ["constant-map", "drift", "excess-noise"])
def test_what_would_have_been_seen_is_seen(kind):
    """A miss of the size that a healthy network is said not to have, in five sets of images."""
    mixture = smooth_mixture()
    healthy = distorted(None)
    moments = measure(mixture.denoiser(VP), mixture.sample(96))
    loss = moments.second[0, :, :, 0].sum((0, 2, 3)) / moments.rows[0].sum(0)  # (L,)
    white = torch.randn(16, 16, generator=torch.Generator().manual_seed(5))
    white -= white.mean()
    size = (healthy.limits[kind] * loss / 256).sqrt()  # a pixel, at each level

    def miss(eps, u, lam):
        level = (lam.flatten()[:, None] - moments.lam.to(lam)).abs().argmin(1)
        shapes = {"drift": torch.ones_like(u), "constant-map": white.expand_as(u) / white.std()}
        shapes["excess-noise"] = 2**0.5 * rough(eps, u)
        return size[level].reshape(-1, 1, 1, 1).to(u) * shapes[kind]

    for seed in range(5):
        # Noise of its own at all levels has a cause.
        expected = "unconverged" if kind == "excess-noise" else kind
        assert expected in kinds(distorted(miss, seed=seed)), seed


def test_one_group_of_most_images_is_no_proof_of_health():
    """Of sixteen folds one holds three quarters of the images: what is off cannot be told from luck."""
    mixture = smooth_mixture()
    denoiser = mixture.denoiser(VP, distortion=lambda eps, u, lam: eps + 0.3)
    data = Images(mixture.sample(120, 0), groups=[0] * 90 + list(range(1, 31)))
    moments = estimate.measure(denoiser, data, trust=True, progress=False)
    found = check(denoiser, data, moments=moments, use=FINE)
    assert not found.healthy
    assert not found.limits
    cal = estimate.fit(moments)
    assert "in too few groups, or most of them in one" in cal.verdict()
    assert math.isnan(cal.uncalibration.value)


def test_few_images_are_no_proof_of_health():
    found = distorted(None, count=3)
    assert not found.findings
    assert "not enough images (3) to say that it is healthy: use 20 or more" in str(found)
    assert not found.as_json()["healthy"]


# --- each way


def test_a_constant_map():
    bump = torch.zeros(16, 16)
    bump[4:9, 3:10] = 0.15
    found = distorted(lambda eps, u, lam: (bump - bump.mean()).to(eps))
    assert kinds(found) == ["constant-map"]


@pytest.mark.parametrize("period", [2, 4])
def test_a_patch_grid_and_its_period(period):
    pattern = torch.randn(period, period, generator=torch.Generator().manual_seed(1))
    pattern = 0.06 * (pattern - pattern.mean()).repeat(16 // period, 16 // period)
    found = distorted(lambda eps, u, lam: pattern.to(eps))
    assert kinds(found)[0] == "patch-grid"
    assert "constant-map" not in kinds(found)
    assert f"every {period} pixels" in found.findings[0].sentence
    # The share of the loss that it is, level by level
    moments = measure(smooth_mixture().denoiser(VP), smooth_mixture().sample(96))
    loss = moments.second[0, :, :, 0].sum((0, 2, 3)) / moments.rows[0].sum(0)
    energy = float(pattern.double().square().sum())
    truth = float((energy / (loss + energy)).mean())
    assert found.findings[0].share.low <= truth * 1.1
    assert found.findings[0].share.high >= truth * 0.9


def test_a_smooth_map_is_no_grid():
    ramp = 0.2 * torch.linspace(-1, 1, 16).expand(16, 16)  # which is a sawtooth, patch by patch
    assert kinds(distorted(lambda eps, u, lam: ramp.to(eps))) == ["constant-map"]


def test_brightness_drift_ends_where_it_says():
    """The mean of Gaussian data, sampled with a network that is off by a constant."""
    data = GaussianMixture(torch.zeros(1, 1, 8, 8, dtype=torch.float64), std=0.5)
    off = data.denoiser(VP, distortion=lambda eps, u, lam: torch.full_like(eps, 0.1))
    found = examined(off, data.sample(96))
    assert kinds(found) == ["drift"]
    number = found.findings[0].measurement
    samples = trueup.sample(off, 256, solver="dpm-solver-2", nfe=200, progress=False)
    ends = samples.double().mean((1, 2, 3))
    assert abs(float(ends.mean()) - number.value) < 4 * float(ends.std()) / 16 + number.reach
    assert number.value < -0.03
    assert found.findings[0].unit == "units of the data"


def test_brightness_spread_ends_where_it_says():
    data = GaussianMixture(torch.zeros(1, 1, 8, 8, dtype=torch.float64), std=0.5)

    def gain(eps, u, lam):
        return -0.05 * (u.mean((2, 3), keepdim=True)).expand_as(u)

    off = data.denoiser(VP, distortion=gain)
    found = examined(off, data.sample(96))
    assert kinds(found) == ["drift"]
    number = found.findings[0].measurement
    samples = trueup.sample(off, 512, solver="dpm-solver-2", nfe=200, progress=False)
    grown = float(samples.double().mean((1, 2, 3)).std()) / (0.5 / 8)
    assert number.value == pytest.approx(grown, rel=0.15)  # three standard errors of 512 samples' spread
    assert number.low > 1.1


def rough(eps, u):
    """Noise that is a function of what is seen, and uncorrelated with it."""
    return torch.sin(40 * u.flip(-1) + 25 * u.roll(3, -2))


def test_excess_noise_at_high_noise_levels():
    found = distorted(lambda eps, u, lam: 0.03 * rough(eps, u) * (lam < -1))
    assert kinds(found) == ["excess-noise"]
    assert "EMA" in found.findings[0].advice


def test_excess_noise_at_all_levels_is_of_weights_that_have_not_arrived():
    found = distorted(lambda eps, u, lam: 0.2 * rough(eps, u))
    assert kinds(found) == ["unconverged"]
    assert "average weights" in found.findings[0].advice


def test_contrast_that_is_off():
    def flat(eps, u, lam):
        return 0.05 * (u - u.mean((2, 3), keepdim=True)) * torch.sigmoid(-lam)

    assert kinds(distorted(flat))[0] == "contrast"


def test_terminal_snr_that_is_not_zero():
    bright = smooth_mixture(mean=0.6)
    found = distorted(None, process=DiscreteVP.scaled_linear(), mixture=bright)
    assert kinds(found) == ["terminal-snr"]
    assert "SNR 0.0047" in found.findings[0].sentence
    assert distorted(None, process=DiscreteVP.cosine(), mixture=bright).healthy
    assert distorted(None, process=DiscreteVP.linear()).healthy  # alpha 0.006: nothing that matters


@pytest.mark.parametrize("prediction", ["noise", "velocity", "data"])
def test_medians_for_means(prediction):
    off = Exponential(median=True)
    found = examined(off.denoiser(VP, prediction), off.sample(64))
    assert kinds(found) == ["l1"]


def test_a_bias_is_no_median():
    skewed = Exponential()
    found = examined(
        skewed.denoiser(VP, distortion=lambda eps, u, lam: torch.full_like(eps, 0.2)), skewed.sample(64)
    )
    assert kinds(found)[0] == "drift"


@pytest.mark.parametrize("tracked", [True, False])
def test_batch_norm_in_training_mode(tracked):
    mixture = smooth_mixture(8)
    norm = torch.nn.BatchNorm2d(1, affine=False, track_running_stats=tracked)
    off = around(mixture.denoiser(VP), norm)
    off.network.train()
    before = {name: value.clone() for name, value in off.network.state_dict().items()}
    found = examined(off, mixture.sample(64))
    assert kinds(found)[0] == "batch-norm"
    assert "look at the batch: 1" in found.findings[0].sentence
    assert ("evaluation mode" in found.findings[0].sentence) == tracked
    assert off.network.training
    assert all(torch.equal(value, before[name]) for name, value in off.network.state_dict().items())
    if tracked:
        off.network.eval()
        assert examined(off, mixture.sample(64)).healthy


def test_dropout_that_was_left_on():
    mixture = smooth_mixture(8)
    off = around(mixture.denoiser(VP), torch.nn.Dropout(0.1))
    state = torch.get_rng_state()
    found = examined(off, mixture.sample(64))
    assert torch.equal(torch.get_rng_state(), state)
    assert kinds(found) == ["dropout"]  # measured in evaluation mode, it is fine otherwise
    assert "network.eval()" in found.findings[0].advice
    expected = math.sqrt(0.1 / 0.9) * math.sqrt(2)  # of two draws
    assert found.findings[0].measurement.value == pytest.approx(expected, rel=0.3)
    off.network.eval()
    assert examined(off, mixture.sample(64)).healthy


def test_dropout_that_no_mode_turns_off_explains_everything():
    mixture = smooth_mixture(8)
    net = mixture.denoiser(VP)

    def dropping(x_t, t):
        return torch.nn.functional.dropout(net.network(x_t, t), 0.2)

    off = trueup.Denoiser(dropping, VP, "noise", net.shape, data_range=None)
    assert kinds(examined(off, mixture.sample(64))) == ["dropout"]


@pytest.mark.parametrize("bits", [4, 5])
def test_weights_that_were_rounded(bits):
    network = Filter(VP)
    x0 = network.sample(96)
    fine = trueup.Denoiser(network, VP, "noise", (1, 8, 8), data_range=None)
    assert examined(fine, x0).healthy
    scale = network.axes.detach().abs().amax() / (2 ** (bits - 1) - 1)
    network.axes.data = (network.axes.detach() / scale).round() * scale
    found = examined(fine, x0)
    assert kinds(found) == ["quantised"]
    assert "rounded to 256 values or fewer" in found.findings[0].sentence


def test_half_precision_is_not_rounding_to_few_values():
    from trueup.denoiser.weights import few_values

    assert few_values(Filter(VP).to(torch.bfloat16)) is None
    assert few_values(torch.nn.Linear(64, 64).to(torch.float16)) is None
    assert "float8" in few_values(torch.nn.ParameterList([torch.randn(64, 64).to(torch.float8_e4m3fn)]))


def test_misuse_comes_first_and_alone_and_nothing_is_measured(monkeypatch):
    monkeypatch.setattr("trueup.doctor.checkup.measure", None)
    mixture = smooth_mixture(8)
    wrong = trueup.Denoiser(mixture.denoiser(VP).network, VP, "velocity", (1, 8, 8), data_range=None)
    found = check(wrong, Images(mixture.sample(64)))
    assert kinds(found) == ["misuse"]
    assert "noise prediction" in found.findings[0].sentence
    assert '"noise"' in found.findings[0].advice
    monkeypatch.undo()
    trusted = check(wrong, Images(mixture.sample(64)), trust=True, progress=False)
    assert trusted.images == 64
    assert "misuse" not in kinds(trusted)


# --- what it is told, and tells


def test_findings_are_plain_values():
    found = distorted(lambda eps, u, lam: torch.full_like(eps, 0.1))
    said = json.loads(json.dumps(found.as_json(), allow_nan=False))
    (one,) = said["findings"]
    assert one["kind"] in KINDS
    assert one["measurement"]["low"] < one["measurement"]["value"] < one["measurement"]["high"]
    assert one["share_of_loss"]["low"] > 0
    assert said["images"] == 96


def test_it_measures_for_itself():
    mixture = smooth_mixture(8)
    found = check(mixture.denoiser(VP), Images(mixture.sample(48)), progress=False)
    assert found.healthy
    assert found.images == 48


def test_moments_of_another_shape_are_refused():
    mixture = smooth_mixture(8)
    moments = measure(smooth_mixture(16).denoiser(VP), smooth_mixture(16).sample(20))
    with pytest.raises(TrueupError, match=r"of samples of \(1, 16, 16\), the network's are \(1, 8, 8\)"):
        check(mixture.denoiser(VP), Images(mixture.sample(20)), moments=moments, use=FINE)


def test_a_calibrated_network_is_refused():
    mixture = smooth_mixture(8)
    net, x0 = mixture.denoiser(VP), mixture.sample(40)
    cal = trueup.estimate.fit(measure(net, x0), family="shift")
    with trueup.attach(net, cal), pytest.raises(ModelError, match="remove it first"):
        check(net, Images(x0))


@pytest.mark.parametrize(
    ("weights", "kind", "count", "levels"),
    [("raw", "unconverged", 40, None), ("ema", "excess-noise", 72, [0, 10, 60, 200, 400, 600, 800, 999])],
)
def test_weights_that_were_trained(weights, kind, count, levels):
    """The last ones of a training, and their average, which only lacks training at high noise."""
    net, data = as_denoiser(f"bundled:{weights}"), Images("bundled:images", count=count)
    moments = estimate.measure(net, data, levels=levels, trust=True, progress=False)
    found = check(net, data, moments=moments, use=FINE)
    assert kinds(found)[0] == kind
    assert "EMA" in found.findings[0].advice


def test_the_command_ends_in_a_diagnosis(model, images):
    base = ("check", model, "--data", images, "--no-samples", "--prediction", "data")
    done = trueup_command(*base)
    assert done.returncode == 2
    head, *lines = done.stdout.split("\ndiagnosis ")[1].splitlines()
    assert head == "(shares of the loss are averages over noise levels):"
    assert lines[0].startswith("  misuse: ")
    said = json.loads(trueup_command(*base, "--json").stdout)
    assert said["diagnosis"]["findings"][0]["kind"] == "misuse"
    assert said["problem"].startswith(said["diagnosis"]["findings"][0]["sentence"])
    assert not said["diagnosis"]["healthy"]
    assert said["verdict"] == "the model seems not to be used as it was trained: nothing was measured."
    verdict, brief = trueup_command(*base, "--quiet").stdout.splitlines()
    assert verdict.startswith("verdict: the model seems not to be used as it was trained")
    assert brief.startswith("diagnosis: misuse: ")
    trusted = trueup_command(*base, "--trust", "--json")
    assert trusted.returncode == 0
    assert len(json.loads(trusted.stdout)["levels"]) > 1
    assert "used as it was trained" not in trusted.stderr
