"""What the noise does, against closed forms and against diffusers."""

import json
import math

import pytest
import torch
from diffusers import (
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)

from trueup.denoiser import Denoiser
from trueup.errors import ModelError
from trueup.hf import schedule
from trueup.process import EDM, VE, ContinuousVP, DiscreteVP, Flow, NoiseProcess, from_settings


def zero_snr(steps: int = 1000) -> DiscreteVP:
    """A schedule whose last timestep is pure noise."""
    return schedule(DDPMScheduler(steps, rescale_betas_zero_snr=True).config)[0]


PROCESSES = {
    "linear": DiscreteVP.linear(),
    "linear, 4000 steps": DiscreteVP.linear(steps=4000),
    "scaled_linear": DiscreteVP.scaled_linear(),
    "cosine": DiscreteVP.cosine(),
    "zero snr": zero_snr(),
    "two steps": DiscreteVP([0.9, 0.1]),
    "continuous": ContinuousVP(),
    "continuous, steep": ContinuousVP(0.01, 60.0, 1e-5, 1.0),
    "ve": VE(),
    "edm": EDM(),
    "edm, sigma_data 1": EDM(1.0, 0.01, 700.0),
    "flow": Flow(),
    "flow, 1000": Flow(1000.0),
}


@pytest.fixture(params=PROCESSES, ids=str)
def process(request) -> NoiseProcess:
    return PROCESSES[request.param]


def times(process: NoiseProcess, count: int = 501) -> torch.Tensor:
    """Times over the whole range, fractional ones among them."""
    return torch.linspace(process.t_min, process.t_max, count, dtype=torch.float64)


def test_fractional_times_invert_to_1e_6(process):
    t = times(process)
    torch.testing.assert_close(process.t_of_lam(process.lam(t)), t, rtol=0, atol=1e-6)


def test_single_numbers_invert_to_1e_6(process):
    t = 0.3 * process.t_min + 0.7 * process.t_max
    assert float(process.t_of_lam(float(process.lam(t)))) == pytest.approx(t, abs=1e-6)


@pytest.mark.parametrize("name", ["linear", "scaled_linear", "cosine", "zero snr", "two steps"])
def test_times_between_clean_data_and_the_first_timestep_invert(name):
    process = PROCESSES[name]
    t = torch.linspace(-0.999, 0, 50, dtype=torch.float64)
    torch.testing.assert_close(process.t_of_lam(process.lam(t)), t, rtol=0, atol=1e-6)


def test_minus_one_is_clean_data():
    process = DiscreteVP.linear()
    assert float(process.alpha(-1)) == 1.0
    assert float(process.sigma(-1)) == 0.0
    assert float(process.t_of_lam(math.inf)) == -1.0


def test_lam_falls(process):
    assert (process.lam(times(process)).diff() < 0).all()
    assert (process.dlam(times(process)) < 0).all()


def test_lam_is_the_log_of_alpha_over_sigma(process):
    t = times(process)
    lam = process.alpha(t).log() - process.sigma(t).log()
    torch.testing.assert_close(process.lam(t), lam, rtol=1e-12, atol=1e-12)  # float64 rounding


def test_answers_are_float64_in_the_shape_of_the_times(process):
    t = torch.full((2, 3), 0.5 * (process.t_min + process.t_max), dtype=torch.float32)
    for answer in (process.alpha, process.sigma, process.lam, process.dlam, process.f, process.g2):
        assert answer(t).dtype == torch.float64
        assert answer(t).shape == (2, 3)


def between_knots(process: NoiseProcess) -> torch.Tensor:
    """Times where the process is smooth: the middles of a discrete schedule's segments."""
    if isinstance(process, DiscreteVP):
        return torch.arange(0, process.t_max, max(1, process.t_max // 100), dtype=torch.float64) + 0.5
    return times(process, 103)[1:-1]


def slope(function, t: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """A derivative from five points, with an error of order step^4."""
    ends = function(t + 2 * step) - function(t - 2 * step)
    return (8 * (function(t + step) - function(t - step)) - ends) / (12 * step)


def test_f_g2_and_dlam_are_the_derivatives_that_define_them(process):
    t = between_knots(process)
    room = torch.minimum(t - process.t_min, process.t_max - t).clamp_max(1.0)
    step = 1e-3 * room  # stays inside a segment, and inside the range
    # The five-point error, of order step^4, and rounding, 1e-15/step, both stay below 1e-6 of the value.
    f = slope(process.log_alpha, t, step)
    torch.testing.assert_close(process.f(t), f, rtol=1e-6, atol=1e-9)
    sigma2 = slope(lambda t: process.sigma(t) ** 2, t, step)
    torch.testing.assert_close(process.g2(t), sigma2 - 2 * f * process.sigma(t) ** 2, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(process.dlam(t), slope(process.lam, t, step), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "name", ["linear", "scaled_linear", "cosine", "zero snr", "continuous", "continuous, steep"]
)
def test_variance_is_preserved(name):
    process = PROCESSES[name]
    t = times(process)
    torch.testing.assert_close(process.alpha(t) ** 2 + process.sigma(t) ** 2, torch.ones_like(t))


SCHEDULES = {
    "linear": {"beta_schedule": "linear"},
    "scaled_linear": {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "sigmoid": {"beta_schedule": "sigmoid"},
    "trained_betas": {"trained_betas": [0.001 * 1.1**k for k in range(50)], "num_train_timesteps": 50},
    "2000 steps": {"beta_schedule": "linear", "num_train_timesteps": 2000},
    "4000 cosine steps": {"beta_schedule": "squaredcos_cap_v2", "num_train_timesteps": 4000},
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("rescale", [False, True], ids=["as is", "zero snr"])
def test_discrete_vp_is_diffusers_alphas_cumprod(name, rescale):
    scheduler = DDPMScheduler(**SCHEDULES[name], rescale_betas_zero_snr=rescale)
    process, _ = schedule(scheduler.config)
    alpha2 = scheduler.alphas_cumprod.double()
    t = torch.arange(len(alpha2))
    assert process.t_max == len(alpha2) - 1
    # diffusers multiplies up to 4000 factors in float32, 6e-8 of rounding each.
    torch.testing.assert_close(process.sigma(t) ** 2, 1 - alpha2, rtol=0, atol=2e-6)
    kept = slice(None, -1 if rescale else None)
    torch.testing.assert_close(process.alpha(t)[kept], alpha2.sqrt()[kept], rtol=1e-4, atol=0)
    if rescale:  # pure noise has no log: a stand-in no larger than the one of diffusers' Euler
        assert alpha2[-1] == 0
        assert math.isfinite(process.log_alpha(t[-1]))
        assert process.log_alpha(t[-1]) <= -12 * math.log(2)
        assert process.alpha(t[-1]) < process.alpha(t[-2])


def test_constructors_are_diffusers_schedules():
    for process, settings in (
        (DiscreteVP.linear(), SCHEDULES["linear"]),
        (DiscreteVP.scaled_linear(), SCHEDULES["scaled_linear"]),
        (DiscreteVP.cosine(), SCHEDULES["cosine"]),
        (DiscreteVP.from_betas(SCHEDULES["trained_betas"]["trained_betas"]), SCHEDULES["trained_betas"]),
    ):
        alpha2 = DDPMScheduler(**settings).alphas_cumprod.double()
        # diffusers works in float32: 6e-8 of rounding over up to 1000 factors, and of 1 in 1 - 0.999.
        torch.testing.assert_close(process.alphas_cumprod, alpha2, rtol=1e-4, atol=0)


def test_a_schedulers_own_tensor_is_a_process():
    for scheduler in (DDPMScheduler(), DDPMScheduler(rescale_betas_zero_snr=True)):
        assert DiscreteVP(scheduler.alphas_cumprod).agrees_with(schedule(scheduler.config)[0])


def test_lam_is_dpm_solvers():
    scheduler = DPMSolverMultistepScheduler()
    lam = scheduler.lambda_t.double()
    # At t = 0, 1 - alpha^2 = 1e-4 carries the float32 rounding of alpha^2, 6e-8: 3e-4 of sigma.
    torch.testing.assert_close(DiscreteVP.linear().lam(torch.arange(1000)), lam, rtol=0, atol=5e-4)


def test_fractional_times_meet_eulers_interpolation():
    scheduler = EulerDiscreteScheduler()
    scheduler.set_timesteps(33)
    t = scheduler.timesteps[:-1].double()
    assert (t != t.round()).any()
    lam = -scheduler.sigmas[: len(t)].double().log()
    # Euler interpolates sigma where we interpolate log alpha; above t = 1 the two differ by curvature only.
    torch.testing.assert_close(DiscreteVP.linear().lam(t), lam, rtol=0, atol=1e-3)


def test_continuous_vp_is_its_closed_form():
    t = torch.linspace(0.001, 1, 50, dtype=torch.float64)
    process = ContinuousVP(0.1, 20.0)
    integral = 0.1 * t + 0.5 * 19.9 * t**2  # of beta over time
    torch.testing.assert_close(process.alpha(t), (-0.5 * integral).exp())
    torch.testing.assert_close(process.sigma(t) ** 2, 1 - (-integral).exp())
    torch.testing.assert_close(process.g2(t), 0.1 + 19.9 * t)  # the VP SDE's beta(t)


def test_discrete_vp_tends_to_the_continuous_one():
    steps = 4000
    discrete, continuous = DiscreteVP.linear(0.1 / steps, 20.0 / steps, steps), ContinuousVP(0.1, 20.0)
    t = torch.arange(0, steps, 37)
    # The product of (1 - beta/steps) and the exponential of the sum differ by beta^2/steps at most.
    torch.testing.assert_close(discrete.alpha(t), continuous.alpha((t + 1) / steps), rtol=0, atol=5e-3)


def test_ve_is_sigma_itself():
    t = torch.tensor([0.002, 0.5, 80.0], dtype=torch.float64)
    process = VE()
    torch.testing.assert_close(process.sigma(t), t)
    torch.testing.assert_close(process.alpha(t), torch.ones_like(t))
    torch.testing.assert_close(process.g2(t), 2 * t)  # d sigma^2 / d sigma


@pytest.mark.parametrize("sigma_data", [0.25, 0.5, 1.0, 1.5])
def test_edm_inputs_have_unit_variance(sigma_data):
    process = EDM(sigma_data)
    t = times(process)
    total = process.alpha(t) ** 2 * sigma_data**2 + process.sigma(t) ** 2
    torch.testing.assert_close(total, torch.ones_like(t))


def test_edm_is_diffusers_input_scaling():
    scheduler = EDMEulerScheduler(sigma_data=0.7)
    noise = torch.logspace(-2.5, 1.8, 40, dtype=torch.float64)
    process = EDM(0.7)
    t = scheduler.precondition_noise(noise)
    one = torch.ones_like(noise)
    torch.testing.assert_close(process.alpha(t), scheduler.precondition_inputs(one, noise))
    torch.testing.assert_close(process.sigma(t), scheduler.precondition_inputs(noise, noise))


def test_flow_is_diffusers_scale_noise():
    scheduler = FlowMatchEulerDiscreteScheduler()
    t = scheduler.timesteps[::100]  # the first is pure noise
    one, zero = torch.ones(len(t), 1), torch.zeros(len(t), 1)
    process = Flow(1000.0)
    for ours, theirs in (
        (process.alpha(t), scheduler.scale_noise(one, t, zero)),
        (process.sigma(t), scheduler.scale_noise(zero, t, one)),
    ):
        torch.testing.assert_close(ours, theirs[:, 0].double(), rtol=0, atol=1e-6)  # they answer in float32


def test_settings_survive_json(process):
    again = from_settings(json.loads(json.dumps(process.settings())))
    t = times(process)
    assert type(again) is type(process)
    assert (again.t_min, again.t_max) == (process.t_min, process.t_max)
    assert torch.equal(again.lam(t), process.lam(t))
    assert torch.equal(again.log_alpha(t), process.log_alpha(t))
    assert again.agrees_with(process)


def test_a_process_agrees_with_itself_alone():
    for name, one in PROCESSES.items():
        for other_name, other in PROCESSES.items():
            assert one.agrees_with(other) == (name == other_name), (name, other_name)


def test_agreement_forgives_float32_and_nothing_else():
    process = DiscreteVP.linear()
    assert process.agrees_with(DiscreteVP(process.alphas_cumprod.float()))
    assert not process.agrees_with(DiscreteVP.linear(beta_end=0.0201))
    assert not process.agrees_with(DiscreteVP.linear(steps=999))
    assert ContinuousVP().agrees_with(ContinuousVP(t_min=1e-4))  # the same noise at the times they share
    assert not VE(0.01, 1.0).agrees_with(VE(2.0, 80.0))
    assert not EDM(0.5).agrees_with(EDM(0.51))


def test_snap_rounds_where_the_network_knows_whole_timesteps_only():
    asked = torch.tensor([-3.0, 0.4, 17.6, 2000.0])
    assert DiscreteVP.linear().snap(asked).tolist() == [0.0, 0.0, 18.0, 999.0]
    assert Flow().snap(torch.tensor([0.25, 5.0])).tolist() == [0.25, 0.999]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DiscreteVP([0.5]), "at least two timesteps"),
        (lambda: DiscreteVP([0.5, 0.9]), "must fall"),
        (lambda: DiscreteVP([0.5, 0.5]), "must fall"),
        (lambda: DiscreteVP([0.5, 0.0, 0.0]), "must fall"),
        (lambda: DiscreteVP([1.0, 0.5]), r"\[0, 1\)"),
        (lambda: DiscreteVP([0.9, -0.1]), r"\[0, 1\)"),
        (lambda: DiscreteVP([0.9, math.nan]), r"\[0, 1\)"),
        (lambda: DiscreteVP("linear"), "list or tensor of numbers"),
        (lambda: DiscreteVP(None), "list or tensor of numbers"),
        (lambda: DiscreteVP.from_betas(["a", "b"]), "list or tensor of numbers"),
        (lambda: DiscreteVP.from_betas([0.1, 1.5]), r"\[0, 1\)"),
        (lambda: ContinuousVP(0.0, 20.0), "0 < beta_min < beta_max"),
        (lambda: ContinuousVP(t_min=0.0), "0 < t_min < t_max"),
        (lambda: ContinuousVP(t_max=math.inf), "0 < t_min < t_max"),
        (lambda: VE(1.0, 0.1), "0 < sigma_min < sigma_max"),
        (lambda: VE(math.nan, 1.0), "0 < sigma_min < sigma_max"),
        (lambda: EDM(0.0), "sigma_data must be positive"),
        (lambda: EDM(math.nan), "sigma_data must be positive"),
        (lambda: EDM(0.5, 0.0, 80.0), "0 < sigma_min < sigma_max"),
        (lambda: Flow(0.0), "time_scale must be positive"),
        (lambda: Flow(math.nan), "time_scale must be positive"),
        (lambda: Flow(s_max=1.0), "0 < s < 1"),
        (lambda: from_settings({}), "unknown noise process None; known: continuous_vp"),
        (lambda: from_settings({"kind": "vp"}), "unknown noise process 'vp'"),
        (lambda: from_settings({"kind": ["ve"]}), "unknown noise process"),
        (lambda: from_settings({"kind": "ve", "beta": 1}), "cannot be built from"),
        (lambda: from_settings({"kind": "ve", "sigma_min": "a"}), "cannot be built from"),
        (lambda: from_settings({"kind": "discrete_vp"}), "cannot be built from"),
        (lambda: from_settings({"kind": "discrete_vp", "alphas_cumprod": [10**400, 0.1]}), "numbers"),
        (
            lambda: from_settings({"kind": "edm", "sigma_min": 10**400, "sigma_max": 10**401}),
            "0 < sigma_min < sigma_max",
        ),
    ],
)
def test_nonsense_is_refused_with_a_reason(build, message):
    with pytest.raises(ModelError, match=message):
        build()


# What every process can do


def test_noise_is_added_as_scaled(process):
    x0, eps = torch.randn(2, 3, 1, 2, 2, dtype=torch.float64).unbind()
    t = times(process, 5)[1:4]
    alpha, sigma = process.scales(t, eps)
    assert alpha.shape == sigma.shape == (3, 1, 1, 1)
    torch.testing.assert_close(process.noised(x0, eps, t), alpha * x0 + sigma * eps)
    one = process.noised(x0, eps, float(t[1]))
    torch.testing.assert_close(one[1], process.noised(x0, eps, t)[1])
    assert process.scales(t, eps.float())[0].dtype == torch.float32


def test_unit_time_inverts(process):
    t = times(process)
    torch.testing.assert_close(process.from_unit(process.to_unit(t)), t, rtol=0, atol=1e-9)


def test_a_sample_is_what_the_data_looks_like(process):
    """At the cleanest time x_t is the data, scaled where the network sees it scaled."""
    x0 = torch.ones(2, 1, 2, 2, dtype=torch.float64)
    clean = process.to_data(process.noised(x0, torch.zeros_like(x0), process.t_min), process.t_min)
    expected = x0 if isinstance(process, EDM) else float(process.alpha(process.t_min)) * x0
    torch.testing.assert_close(clean, expected)


def test_samplers_start_from_as_much_noise_as_there_is_at_the_end(process):
    assert process.prior_std == pytest.approx(
        float(process.sigma(process.t_max)), rel=1e-2 + 0.1 * (process.t_max == 1)
    )


# Processes of others


class Cosine(NoiseProcess):
    """alpha = cos(pi t / 2), as an outsider would write it."""

    kind = "cosine of the tests"

    def __init__(self, margin: float = 0.01):
        self.margin, self.t_min, self.t_max = margin, margin, 1 - margin

    def log_alpha(self, t):
        return torch.cos(math.pi / 2 * torch.as_tensor(t, dtype=torch.float64)).log()

    def lam(self, t):
        return -torch.tan(math.pi / 2 * torch.as_tensor(t, dtype=torch.float64)).log()

    def f(self, t):
        return -math.pi / 2 * torch.tan(math.pi / 2 * torch.as_tensor(t, dtype=torch.float64))

    def dlam(self, t):
        return -math.pi / torch.sin(math.pi * torch.as_tensor(t, dtype=torch.float64))

    def t_of_lam(self, lam):
        return 2 / math.pi * torch.atan(torch.exp(-torch.as_tensor(lam, dtype=torch.float64)))

    def settings(self):
        return {"kind": self.kind, "margin": self.margin}


def test_a_process_of_somebody_else_is_known_once_it_is_defined():
    mine = Cosine(0.02)
    again = from_settings(json.loads(json.dumps(mine.settings())))
    assert type(again) is Cosine
    assert again.agrees_with(mine)
    assert not mine.agrees_with(ContinuousVP())
    t = times(mine)
    torch.testing.assert_close(mine.t_of_lam(mine.lam(t)), t, rtol=0, atol=1e-9)
    torch.testing.assert_close(mine.alpha(t) ** 2 + mine.sigma(t) ** 2, torch.ones_like(t))
    with pytest.raises(ModelError, match="cosine of the tests"):
        from_settings({"kind": "other"})


def test_a_process_of_somebody_else_makes_a_denoiser():
    denoiser = Denoiser(lambda x_t, t: x_t * t[:, None, None, None], Cosine(), "noise", (1, 2, 2))
    x_t = torch.ones(2, 1, 2, 2)
    assert torch.equal(denoiser.eps(x_t, 0.5), 0.5 * x_t)


def test_a_kind_belongs_to_one_process():
    """A subclass of Flow took over its kind: files that said "flow" became something else."""
    with pytest.raises(
        ModelError, match="Shifted needs a `kind` of its own: files that say 'flow' mean Flow"
    ):

        class Shifted(Flow):
            pass

    with pytest.raises(ModelError, match="Mine needs a `kind` of its own"):

        class Mine(Cosine):
            kind = "ve"

    assert type(from_settings(Flow().settings())) is Flow
    assert type(from_settings(VE().settings())) is VE


def test_a_process_may_be_defined_again():
    """As a notebook does whose cell is run twice."""

    def define():
        class Again(Cosine):
            kind = "again"

        return Again

    define()
    second = define()
    assert type(from_settings({"kind": "again"})) is second


def test_a_base_without_a_kind_is_no_process():
    class Base(NoiseProcess):
        pass

    class Own(Cosine):
        kind = "own"

    assert isinstance(from_settings({"kind": "own", "margin": 0.1}), Own)
    with pytest.raises(ModelError, match="unknown noise process ''"):
        from_settings({"kind": ""})
