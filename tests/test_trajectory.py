"""Samplers kept on the marginals, proved on data whose states are known in closed form."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import trueup
from by_hand import calibration_of
from trueup.analytic import GaussianMixture
from trueup.bands import Bands
from trueup.calibration import Sampler
from trueup.errors import DataError, MismatchError, TrueupError
from trueup.images import Samples
from trueup.process import EDM, DiscreteVP, Flow
from trueup.sampling import as_solver, generate
from trueup.sampling.draw import draw, network_for, sampler_of
from trueup.solvers import SCHEDULERS
from trueup.trajectory import calibrate_sampler, check_sampler
from trueup.trajectory.fitting import LARGEST_GAIN, StateMoments, Target, fit, measure
from trueup.trajectory.marginals import Marginals

SHAPE = (1, 8, 8)
STD = 0.5


@pytest.fixture(scope="module")
def gaussian():
    """One Gaussian: its exact denoiser is linear, so a sampler's states stay Gaussian, with known moments."""
    mean = torch.linspace(-0.5, 0.5, 64).reshape(1, *SHAPE)
    return GaussianMixture(mean, STD)


@pytest.fixture(scope="module")
def exact(gaussian):
    return gaussian.denoiser(DiscreteVP.linear(), "noise").with_batch_size(1000)


@pytest.fixture(scope="module")
def calibration(gaussian, exact):
    """Of the exact denoiser, so that nothing but the sampler is off."""
    return calibration_of(exact, gaussian.sample(2000))


def ddim_std(states, start: float) -> list[float]:
    """Standard deviation of DDIM's states on Gaussian data, from the formula of its step (equation 30)."""
    process, std, found = DiscreteVP.linear(), 1.0, []
    level = torch.tensor(start, dtype=torch.float64)
    alpha, sigma = float(process.alpha(level)), float(process.sigma(level))
    for alpha_next, sigma_next in zip(states.alpha.tolist(), states.sigma.tolist(), strict=True):
        slope = sigma / (alpha**2 * STD**2 + sigma**2)  # of E[eps | x] in x
        std *= alpha_next * (1 - sigma * slope) / alpha + sigma_next * slope
        found.append(std)
        alpha, sigma = alpha_next, sigma_next
    return found


# Where states lie


@pytest.mark.parametrize(
    "name", ["ddim", "dpm++2m", "unipc", "deis", "pndm", "ddpm", "dpm++2s", "dpm++2m-sde"]
)
def test_states_of_variance_preserving_schedulers_are_where_their_timesteps_say(exact, name):
    solver = as_solver(name, exact)
    states = solver.states(exact, 7)
    times = solver._set(7).timesteps
    assert states.t.tolist() == times.tolist()
    alphas = exact.process.alpha(times[1:].double())
    assert torch.allclose(states.alpha[:-1], alphas)
    assert torch.allclose(
        states.alpha[:-1] ** 2 + states.sigma[:-1] ** 2, torch.ones(len(times) - 1).double()
    )
    assert float(states.sigma[-1]) < 0.011  # the sample: clean, or at the first timestep


@pytest.mark.parametrize("name", ["euler", "heun", "kdpm2", "euler-a"])
def test_states_of_exploding_schedulers_are_in_their_own_scale(exact, name):
    states = as_solver(name, exact).states(exact, 7)
    assert torch.allclose(states.alpha, torch.ones_like(states.alpha), atol=1e-6)
    assert float(states.sigma[0]) > 5
    assert float(states.sigma[-1]) < 1e-6


@pytest.mark.parametrize(
    ("process", "kind", "name"),
    [
        (Flow(1000), "flow", "flow-euler"),
        (Flow(), "flow", "flow-euler"),
        (EDM(), trueup.Parametrization("edm", sigma_data=0.5), "edm-euler"),
    ],
    ids=["flow", "flow of another time", "edm"],
)
def test_states_of_other_processes(gaussian, process, kind, name):
    denoiser = gaussian.denoiser(process, kind)
    states = as_solver(name, denoiser).states(denoiser, 6)
    assert float(states.alpha[-1]) == pytest.approx(1.0)
    assert float(states.sigma[-1]) == pytest.approx(0.0, abs=1e-6)
    own = as_solver(name, denoiser).process  # the scheduler's, whose times these are
    snr = own.lam(states.t[1:])
    assert torch.allclose((states.alpha / states.sigma)[:-1].log(), snr, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["ddim", "euler", "dpm++2m", "unipc", "dpm-solver-3", "heun", "ddpm", "euler-a"]
)
def test_states_of_exact_networks_have_the_moments_of_noised_data(gaussian, exact, name):
    """Many steps: what `states` says of levels is what samplers do, in every scale and with noise added."""
    drift = check_sampler(
        exact, gaussian.sample(4000), solver=name, nfe=200, trajectories=512, progress=False
    )
    ratios = torch.stack([miss.ratio for miss in drift.misses])
    slack = 4 * torch.stack([miss.ratio_se for miss in drift.misses]) + 0.03  # and what 200 steps leave
    assert ((ratios - 1).abs() < slack).all()
    assert all(float(miss.mean.max()) < 0.15 for miss in drift.misses)


def test_dpm_solver_is_adjusted_at_the_end_of_its_steps(exact):
    seen = []

    def watch(i, x):
        seen.append(i)
        return x

    solver = as_solver("dpm-solver-3", exact)
    states = solver.states(exact, 10)
    network = network_for(exact)
    network.index = torch.arange(2)
    draw(solver, network, 10, watch)
    assert seen == list(range(len(states))) == [0, 1, 2, 3]
    assert float(states.t[0]) == 999
    assert float(states.sigma[-1]) == pytest.approx(float(exact.process.sigma(torch.tensor(0.0))), rel=1e-3)


# Measuring


def test_drift_of_ddim_is_that_of_its_formula(gaussian, exact):
    """Five steps on Gaussian data: the spread of every state is known, and far from the data's."""
    drift = check_sampler(
        exact, gaussian.sample(4000), solver="ddim", nfe=5, trajectories=512, progress=False
    )
    expected = torch.tensor(ddim_std(drift.states, 800.0))
    target = (drift.states.alpha**2 * STD**2 + drift.states.sigma**2).sqrt()
    for miss, ratio in zip(drift.misses, (expected / target).tolist(), strict=True):
        assert ((miss.ratio - ratio).abs() < 4 * miss.ratio_se + 2e-3).all()
    last = float(expected[-1] / target[-1])
    nats = 64 * (last**2 - 1 - 2 * math.log(last)) / 2
    value, error = drift.total(4)
    assert abs(value - nats) < 4 * error + 0.1
    assert nats > 1


def test_errors_of_the_miss_are_honest(gaussian, exact):
    """Fresh trajectories and data of the same kind: the miss scatters as it says."""
    found = [
        check_sampler(
            exact, gaussian.sample(400, seed=s), solver="ddim", nfe=5, trajectories=64, seed=s, progress=False
        ).total(4)
        for s in range(24)
    ]
    values, errors = torch.tensor(found, dtype=torch.float64).T
    assert 0.6 < float(values.std() / errors.mean()) < 1.6


def test_starting_noise_as_a_control_leaves_expectations_alone_and_takes_variance():
    bands, n = Bands((8, 8)), 64
    spreads, plain = [], []
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        z, other = torch.randn(2, n, *SHAPE, generator=generator, dtype=torch.float64)
        x = 0.9 * z + 0.3 * other + 0.25
        noise = bands.dct(z).flatten(2)
        mean = bands.dct(torch.full(SHAPE, 0.25, dtype=torch.float64)).flatten(1)
        moments = StateMoments.of(bands, x, noise, mean)
        spreads.append(
            torch.cat([moments.mean(moments.offset)[0, :1], moments.mean(moments.variance)[0, -1:]])
        )
        dct = bands.dct(x).flatten(2) - mean
        plain.append(torch.stack([dct[:, 0, 0].mean(), dct[:, 0, bands.members[-1]].var(0).mean()]))
    controlled, naive = torch.stack(spreads), torch.stack(plain)
    truth = torch.tensor([0.0, 0.9], dtype=torch.float64)
    assert (controlled.mean(0) - truth).abs().max() < 0.02
    assert controlled[:, 0].var() < naive[:, 0].var() / 5  # 0.09 of 0.9 is left
    assert controlled[:, 1].var() < naive[:, 1].var() / 2


def test_moments_of_data_are_those_of_torch(gaussian):
    x = gaussian.sample(50)
    found = Marginals.of_data(Samples(x, SHAPE, None))
    z = Bands((8, 8)).dct(x.double()).flatten(2)
    assert torch.allclose(found.mean, z.mean(0))
    assert torch.allclose(found.variance[0, 0], z[:, 0, 0].var())
    members = found.bands.members[-1]
    assert torch.allclose(found.variance[0, -1], z[:, 0, members].var(0).mean())


def test_calibrations_know_how_well_they_know_the_variance(gaussian, calibration):
    """2,000 Gaussian images: the error of a variance is v sqrt(2 / (n size)), and that is what folds say."""
    sizes = calibration.correction.bands.sizes
    expected = STD**2 * (2 / (2000 * sizes)).sqrt()
    ratio = calibration.data_variance_se[0] / expected
    assert 0.6 < float(ratio.median()) < 1.5
    direct = Marginals.of_data(Samples(gaussian.sample(2000), SHAPE, None))
    assert torch.allclose(calibration.data_variance_se, direct.variance_se, rtol=1e-3)


# Fitting


def target_of(variance: float, bands: Bands, noise: float = 0.0, last: bool = True) -> Target:
    wide = torch.full((1, bands.count), variance, dtype=torch.float64)
    return Target(torch.zeros(1, 64, dtype=torch.float64), wide, 0 * wide, 0 * wide, noise + 0 * wide, last)


def moments_of(std: float, shift: float, n: int = 512, seed: int = 0) -> StateMoments:
    bands = Bands((8, 8))
    generator = torch.Generator().manual_seed(seed)
    z, x = torch.randn(2, n, *SHAPE, generator=generator, dtype=torch.float64)
    return StateMoments.of(
        bands, std * x + shift, bands.dct(z).flatten(2), torch.zeros(1, 64, dtype=torch.float64)
    )


@pytest.mark.parametrize(("std", "gain"), [(2.0, 0.5), (0.8, 1.25), (0.2, LARGEST_GAIN)])
def test_sample_gets_its_moments_back(std, gain):
    shift, gains = fit(moments_of(std, 0.5), target_of(1.0, Bands((8, 8))))
    # The mean of an image is one number each: 512 of them leave it uncertain, and shrunk.
    assert torch.allclose(gains[:, 1:], torch.full_like(gains[:, 1:], gain), rtol=0.12)
    assert (gains[0, 0] > 1) == (gain > 1)
    assert float(shift[0, 0]) == pytest.approx(0.5 * 8, rel=0.1)  # the mean is 8 times the DCT's first
    assert float(shift[0, 1:].abs().max()) < 0.1


def test_noisy_states_are_amplified_by_the_share_of_their_noise():
    target = target_of(1.0, Bands((8, 8)), noise=0.25, last=False)
    _, gain = fit(moments_of(0.8, 0.0), target)
    assert torch.allclose(gain.mean(), torch.tensor(1.25**0.25).double(), rtol=0.02)
    _, damped = fit(moments_of(2.0, 0.0), target)
    assert torch.allclose(damped.mean(), torch.tensor(0.5).double(), rtol=0.05)


def test_states_that_are_right_are_left_alone():
    """Twenty batches: of 11 bands and two kinds of map, hardly any is kept, and none is large."""
    changed = 0
    for seed in range(20):
        shift, gain = fit(moments_of(1.0, 0.0, n=64, seed=seed), target_of(1.0, Bands((8, 8))))
        changed += int((gain != 1).sum()) + sum(bool(shift[0, m].any()) for m in Bands((8, 8)).members)
        assert float((gain - 1).abs().max()) < 0.1
    assert changed < 0.05 * 20 * 2 * Bands((8, 8)).count


def test_miss_that_data_cannot_vouch_for_is_left_alone():
    """The states are off by less than the data's own uncertainty: no number of trajectories confirms that."""
    target = target_of(1.0, Bands((8, 8)))
    target.mean_var += 0.5**2 * 64
    target.variance_var += 0.5**2
    shift, gain = fit(moments_of(1.1, 0.5), target)
    assert (gain == 1).all()
    assert not shift.any()


@pytest.mark.parametrize(
    ("name", "nfe"),
    [("ddim", 10), ("dpm++2m", 8), ("dpm-solver-2", 6), ("unipc", 8), ("euler", 10), ("ddpm", 25)],
)
def test_calibrated_samplers_end_with_the_moments_of_the_data(gaussian, exact, calibration, name, nfe):
    before = check_sampler(exact, calibration, solver=name, nfe=nfe, progress=False)
    made = calibrate_sampler(exact, calibration, solver=name, nfe=nfe, progress=False)
    after = check_sampler(exact, made, solver=name, nfe=nfe, progress=False)
    last = len(before.misses) - 1
    assert before.total(last)[0] > 5 * before.total(last)[1]
    assert after.total(last)[0] < max(0.2 * before.total(last)[0], 3 * after.total(last)[1])
    # And on what anybody can see: samples of another seed.
    x = trueup.sample(exact, 2000, solver=name, nfe=nfe, calibration=made, progress=False)
    x = x.double() - gaussian.means[0].double()
    assert float(x.std()) == pytest.approx(STD, rel=0.05)
    assert float(x.mean()) == pytest.approx(0.0, abs=0.02)


def test_a_sampler_that_is_right_gets_no_correction_to_speak_of(gaussian, exact, calibration):
    made = calibrate_sampler(exact, calibration, solver="dpm-solver-3", nfe=60, progress=False)
    assert made.trajectories[0].empty
    assert "nats, nothing is corrected" in made.trajectories[0].summary()
    x, y = (
        trueup.sample(exact, 4, solver="dpm-solver-3", nfe=60, calibration=c, progress=False)
        for c in (calibration, made)
    )
    assert torch.equal(x, y)


def test_states_that_need_nothing_are_returned_as_they_are(calibration, exact):
    made = calibrate_sampler(exact, calibration, solver="ddim", nfe=3, progress=False).trajectories[0]
    gain, shift = made.gain.clone(), made.shift.clone()
    gain[0], shift[0] = 1.0, 0.0
    made = replace(made, gain=gain, shift=shift)
    x = torch.randn(2, *SHAPE)
    assert made(0, x) is x
    assert made(2, x).dtype == torch.float32
    assert made(2, x.half()).dtype == torch.float16


def test_map_is_the_formula(calibration, exact):
    """mu + g (z - mu - delta) coefficient by coefficient, equation 35, against the fused one."""
    made = calibrate_sampler(exact, calibration, solver="ddim", nfe=3, progress=False).trajectories[0]
    made = replace(made, shift=torch.randn(3, 1, 64, dtype=torch.float64))
    x = torch.randn(3, *SHAPE, dtype=torch.float64)
    z = made.bands.dct(x).flatten(2)
    mu = made.states.alpha[1] * made.mean
    expected = mu + made.bands.spread(made.gain[1]) * (z - mu - made.shift[1])
    restored = made.bands.idct(expected.reshape(x.shape))
    assert torch.allclose(made(1, x), restored, rtol=0, atol=1e-12 * float(restored.abs().max()))


# Keeping and choosing


def test_several_samplers_in_one_calibration(tmp_path, exact, calibration):
    made = calibrate_sampler(exact, calibration, solver="ddim", nfe=[3, 4], progress=False)
    made = calibrate_sampler(exact, made, solver="dpm-solver-2", nfe=4, progress=False)
    made = calibrate_sampler(exact, made, solver="ddim", nfe=3, seed=5, progress=False)  # replaces
    names = ["ddim at 4 evaluations", "dpm-solver-2 (logsnr) at 4 evaluations", "ddim at 3 evaluations"]
    assert [str(t.sampler) for t in made.trajectories] == names
    assert made.identity == calibration.identity
    made.save(tmp_path / "a.safetensors")
    for solver, nfe in (("ddim", 3), ("ddim", 4), ("dpm-solver-2", 4)):
        settings = {"solver": solver, "nfe": nfe, "trajectory": True, "progress": False}
        x, y = (
            trueup.sample(exact, 4, calibration=c, **settings) for c in (made, tmp_path / "a.safetensors")
        )
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-5 * float(x.abs().max()))


@pytest.mark.parametrize("name", [n for n in SCHEDULERS if not n.startswith(("edm", "flow"))])
def test_every_scheduler_can_be_kept_and_found_again(tmp_path, exact, calibration, name):
    """Some have infinity among their settings, which JSON has not."""
    made = calibrate_sampler(exact, calibration, solver=name, nfe=6, trajectories=16, progress=False)
    made.save(tmp_path / "a")
    trueup.sample(exact, 2, solver=name, nfe=6, calibration=tmp_path / "a", trajectory=True, progress=False)


def test_asking_for_what_is_not_there_says_what_is(exact, calibration):
    made = calibrate_sampler(exact, calibration, solver="ddim", nfe=[3, 4], progress=False)
    with pytest.raises(
        MismatchError, match=r"no trajectory for ddim at 5 evaluations: .* ddim at 3 evaluations; ddim at 4"
    ):
        trueup.sample(exact, 1, solver="ddim", nfe=5, calibration=made, trajectory=True)
    with pytest.raises(MismatchError, match="this calibration has none"):
        trueup.sample(exact, 1, solver="ddim", nfe=5, calibration=calibration, trajectory=True)
    with pytest.raises(TrueupError, match="part of a calibration"):
        trueup.sample(exact, 1, solver="ddim", nfe=5, trajectory=True)
    with pytest.warns(UserWarning, match="no trajectory for this sampler, only for ddim at 3"):
        plain = trueup.sample(exact, 2, solver="ddim", nfe=5, calibration=made)  # nothing insists on one
    assert torch.equal(plain, trueup.sample(exact, 2, solver="ddim", nfe=5, calibration=calibration))


def test_trajectory_is_applied_where_there_is_one_and_left_out_on_demand(exact, calibration):
    made = calibrate_sampler(exact, calibration, solver="ddim", nfe=3, progress=False)
    with_it, by_default, without = (
        trueup.sample(exact, 2, solver="ddim", nfe=3, calibration=made, trajectory=wanted)
        for wanted in (True, None, False)
    )
    assert torch.equal(with_it, by_default)
    assert not torch.allclose(with_it, without, atol=1e-2)
    assert torch.equal(without, trueup.sample(exact, 2, solver="ddim", nfe=3, calibration=calibration))


def test_other_settings_of_a_scheduler_are_another_sampler(exact, calibration):
    from diffusers import DDIMScheduler

    made = calibrate_sampler(exact, calibration, solver="ddim", nfe=3, progress=False)
    config = as_solver("ddim", exact).scheduler.config
    other = DDIMScheduler.from_config(config, timestep_spacing="trailing")
    with pytest.raises(MismatchError, match="made with another timestep_spacing"):
        trueup.sample(exact, 1, solver=other, nfe=3, calibration=made, trajectory=True)
    same = DDIMScheduler.from_config(config)
    trueup.sample(exact, 1, solver=same, nfe=3, calibration=made, trajectory=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trajectories": 8}, "moments need 16 trajectories or more, not 8"),
        ({"solver": "dpm-solver-3-adaptive"}, "chooses its own steps"),
        ({"guidance": 2.0}, "cannot be guided"),
        ({"nfe": 0}, "nfe is a whole number"),
        ({"nfe": "20"}, "nfe is a whole number"),
        ({"nfe": []}, "say how many evaluations"),
    ],
)
def test_bad_requests(exact, calibration, changes, words):
    with pytest.raises(TrueupError, match=words):
        calibrate_sampler(exact, calibration, **{"solver": "ddim", "nfe": 3, **changes})


def test_drift_by_the_file_of_a_calibration(tmp_path, exact, calibration):
    calibration.save(tmp_path / "a.safetensors")
    settings = {"solver": "ddim", "nfe": 3, "trajectories": 32, "progress": False}
    found, expected = (check_sampler(exact, c, **settings) for c in (tmp_path / "a.safetensors", calibration))
    assert found.total(2)[0] == pytest.approx(expected.total(2)[0], rel=1e-4)


def test_few_images_do_not_know_the_moments_of_the_data(gaussian, exact):
    few = replace(calibration_of(exact, gaussian.sample(20)), data_images=10)
    with pytest.raises(DataError, match="10 images are not those of the data: use 20"):
        calibrate_sampler(exact, few, solver="ddim", nfe=3)
    with pytest.raises(DataError, match="10 images"):
        check_sampler(exact, gaussian.sample(10), solver="ddim", nfe=3)


def test_empty_calibration_corrects_the_sampler_alone(gaussian):
    off = gaussian.denoiser(DiscreteVP.linear(), "noise", lambda eps, u, lam: 0.1 + 0 * eps)
    off = off.with_batch_size(500)
    made = calibrate_sampler(
        off, calibration_of(off, gaussian.sample(100)), solver="ddim", nfe=10, progress=False
    )
    x = trueup.sample(off, 500, solver="ddim", nfe=10, calibration=made, progress=False)
    y = trueup.sample(off, 500, solver="ddim", nfe=10, progress=False)
    miss = [(v.double() - gaussian.means[0].double()).mean().abs() for v in (x, y)]
    assert miss[0] < 0.2 * miss[1]


def test_generated_images_are_said_to_be_behind_the_moments(exact):
    generated = generate(exact, 40, nfe=6, solver="ddim", progress=False)
    made = calibration_of(exact, generated, generated=generated.origin)
    made = calibrate_sampler(exact, made, solver="ddim", nfe=3, progress=False)
    assert "moments of the model's own samples, not of data" in made.summary()
    drift = check_sampler(exact, made, solver="ddim", nfe=3, progress=False)
    assert drift.generated
    assert "what these have wrong counts as right" in drift.summary()


def test_sampler_is_the_same_after_a_trip_through_json(exact):
    import json

    solver = as_solver("dpm++2m", exact)
    sampler = sampler_of(solver, 8)
    again = Sampler(sampler.name, 8, json.loads(json.dumps(sampler.settings)))
    assert sampler.differences(again) == []
    assert again.differences(sampler_of(solver, 9, 2.0)) == ["number of evaluations", "guidance"]


def test_summary_of_a_drift_is_read_in_a_terminal(gaussian, exact):
    drift = check_sampler(exact, gaussian.sample(100), solver="ddim", nfe=3, progress=False)
    lines = drift.summary(plain=True).splitlines()
    assert lines[0].startswith("drift of ddim at 3 evaluations, 128 trajectories, moments of 100 images")
    assert all(line.isascii() and len(line) <= 110 for line in lines[:-1])
    assert sum(line.strip().startswith(("1 ", "2 ", "3 ")) for line in lines) == 3
    assert len(drift.as_json()["states"]) == 3
    assert "miss the data's moments by" in drift.verdict()


def test_measuring_nothing_off_says_so(gaussian, exact):
    drift = check_sampler(
        exact, gaussian.sample(500), solver="dpm-solver-3", nfe=90, trajectories=64, progress=False
    )
    assert drift.verdict() == "its states have the data's moments, within noise"


def test_measure_is_unbiased_where_nothing_is_off():
    values = [
        float(measure(moments_of(1.0, 0.0, n=64, seed=s), target_of(1.0, Bands((8, 8)))).nats.sum())
        for s in range(60)
    ]
    mean, error = torch.tensor(values).mean(), torch.tensor(values).std() / 60**0.5
    assert abs(float(mean)) < 3 * float(error)


@pytest.mark.parametrize(
    ("process", "kind", "name", "nfe"),
    [
        (Flow(1000), "flow", "flow-euler", 6),
        (Flow(1000), "flow", "dpm-solver-2", 6),
        (EDM(), trueup.Parametrization("edm", sigma_data=0.5), "edm-euler", 10),
        (EDM(), trueup.Parametrization("edm", sigma_data=0.5), "dpm-solver-2", 8),
        (DiscreteVP.linear(), "velocity", "heun", 9),
    ],
    ids=lambda value: value if isinstance(value, (str, int)) else type(value).__name__,
)
def test_other_processes_and_scales(gaussian, process, kind, name, nfe):
    denoiser = gaussian.denoiser(process, kind).with_batch_size(1000)
    cal = calibration_of(denoiser, gaussian.sample(1000))
    made = calibrate_sampler(denoiser, cal, solver=name, nfe=nfe, progress=False)
    trajectory = made.trajectories[0]
    assert not trajectory.empty
    x, y = (
        trueup.sample(denoiser, 1000, solver=name, nfe=nfe, calibration=made, trajectory=wanted).double()
        - gaussian.means[0].double()
        for wanted in (True, False)
    )
    assert float(x.std()) == pytest.approx(STD, rel=0.05)
    assert abs(math.log(float(x.std()) / STD)) < 0.5 * abs(math.log(float(y.std()) / STD))


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("ddim", []),
        ("dpm++2m", []),
        ("heun", [0, 2, 4]),
        ("kdpm2", [0, 2, 4]),
        ("dpm++2s", [0, 2, 4]),
    ],
)
def test_states_within_a_step_are_known_and_left_alone(exact, calibration, name, inner):
    """Heun's predictor and the like: the solver does not go on from there."""
    states = as_solver(name, exact).states(exact, 7)
    assert states.inner.nonzero().flatten().tolist() == inner
    made = calibrate_sampler(exact, calibration, solver=name, nfe=7, progress=False).trajectories[0]
    assert all((made.gain[i] == 1).all() and not made.shift[i].any() for i in inner)


class Classes:
    """Exact denoiser of classes, each a narrow Gaussian around its own grey."""

    def __init__(self, count: int):
        self.greys = torch.linspace(-1, 1, count)
        self.process = DiscreteVP.linear()

    def __call__(self, x_t, t, y):
        alpha, sigma = (
            f(t.double()).reshape(-1, 1, 1, 1).to(x_t) for f in (self.process.alpha, self.process.sigma)
        )
        mean = alpha * self.greys[y].reshape(-1, 1, 1, 1)
        return sigma * (x_t - mean) / (alpha**2 * 0.1**2 + sigma**2)


@pytest.mark.parametrize("count", [2, 16, 1000])
def test_labels_of_all_kinds_are_drawn_and_no_fold_is_a_label(tmp_path, count):
    """With the first 128 of 1,000 labels alone, all classes would be pulled away from where they belong."""
    net = Classes(count)
    denoiser = trueup.Denoiser(
        net, net.process, "noise", SHAPE, conditional=True, data_range=None, batch_size=128
    )
    labels = torch.arange(2000) % count
    images = net.greys[labels].reshape(-1, 1, 1, 1) + 0.1 * torch.randn(
        2000, *SHAPE, generator=torch.Generator().manual_seed(0)
    )
    cal = calibration_of(denoiser, trueup.Images(images, labels=labels.tolist()), y=labels)
    settings = {"solver": "ddim", "nfe": 6, "progress": False}
    made = calibrate_sampler(denoiser, cal, labels=range(count), **settings)
    assert not made.trajectories[0].empty
    made.save(tmp_path / "a")  # labels and all
    for label in (0, count // 2, count - 1):
        x = trueup.sample(denoiser, 64, labels=label, calibration=made, **settings)
        assert float(x.mean()) == pytest.approx(float(net.greys[label]), abs=0.15)


def test_small_miss_is_left_alone_though_it_could_be_corrected(exact, calibration, monkeypatch):
    """Sure, confirmed, and below 0.02 nats per dimension: not worth what a gain does besides."""
    settings = {"solver": "ddim", "nfe": 25, "progress": False}
    made = calibrate_sampler(exact, calibration, **settings).trajectories[0]
    miss = float(made.evidence["before"][-1].sum())
    assert 3 * float(made.evidence["before_total_se"][-1]) < miss < 0.02 * 64
    assert made.empty
    monkeypatch.setattr("trueup.trajectory.calibrating.MATERIAL", 0.0)
    assert not calibrate_sampler(exact, calibration, **settings).trajectories[0].empty


def test_no_fold_is_a_label():
    """16 labels in turn, 16 folds: were they the same, leaving out a fold would leave out a label."""
    bands, kept = Bands((8, 8)), 0
    greys = torch.linspace(-1, 1, 16, dtype=torch.float64)[torch.arange(128) % 16].reshape(-1, 1, 1, 1)
    target = target_of(1.0, bands)
    target.variance = torch.full((1, bands.count), 0.1**2, dtype=torch.float64)
    target.variance[0, 0] = 64 * float(greys.var()) + 0.1**2
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        z, other = torch.randn(2, 128, *SHAPE, generator=generator, dtype=torch.float64)
        x = 0.75 * (greys + 0.1 * other)  # all spreads a quarter short
        moments = StateMoments.of(bands, x, bands.dct(z).flatten(2), target.mean)
        kept += bool(fit(moments, target)[1][0, 0] > 1)
    assert kept >= 7


def test_autocast_does_not_coarsen_the_map(exact, calibration):
    made = calibrate_sampler(exact, calibration, solver="ddim", nfe=5, progress=False).trajectories[0]
    x = torch.randn(4, *SHAPE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = made(4, x)
    assert torch.equal(inside, made(4, x))


def test_another_shape_is_refused(calibration):
    small = GaussianMixture(torch.zeros(1, 1, 4, 4), STD).denoiser(DiscreteVP.linear(), "noise")
    for call in (calibrate_sampler, check_sampler):
        with pytest.raises(MismatchError, match=r"shape \(1, 8, 8\), the model's are \(1, 4, 4\)"):
            call(small, calibration, solver="ddim", nfe=3)


def test_miss_of_corrected_states_counts_the_error_of_the_data(gaussian):
    """Few images: states are brought to moments that are themselves off, and the miss must not hide it."""
    pattern = 0.25 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    off = gaussian.denoiser(DiscreteVP.linear(), "noise", lambda eps, u, lam: pattern + 0 * eps)
    off = off.with_batch_size(1000)
    bands, reported, true = Bands((8, 8)), [], []
    for seed in range(6):
        images = gaussian.sample(30, seed=seed)
        cal = calibration_of(off, images)
        made = calibrate_sampler(off, cal, solver="ddim", nfe=12, seed=seed, progress=False)
        reported.append(float(made.trajectories[0].evidence["after"][-1].sum()))
        x = trueup.sample(off, 1000, solver="ddim", nfe=12, calibration=made, progress=False)
        z = bands.dct(x.double() - gaussian.means[0].double()).flatten(2)
        r = bands.sum(z.var(0)) / bands.sizes / STD**2
        true.append(
            float((z.mean(0).square() - z.var(0) / 1000).sum() / (2 * STD**2))
            + float((bands.sizes * (r - 1 - r.log()) / 2).sum())
        )
    assert sum(reported) / 6 == pytest.approx(sum(true) / 6, abs=0.7)
