"""What the network predicts, against the formulas of the paper's appendix B and against diffusers."""

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    FlowMatchEulerDiscreteScheduler,
)

from trueup.errors import ModelError
from trueup.parametrization import NAMES, Parametrization
from trueup.process import EDM, ContinuousVP, DiscreteVP, Flow

# alpha and sigma of a few noise levels with alpha^2 + sigma^2 = 1, where the paper's velocity lives
T = torch.tensor([0.001, 0.1, 0.4, 0.8, 1.0], dtype=torch.float64)
ALPHA, SIGMA = ContinuousVP().alpha(T)[:, None], ContinuousVP().sigma(T)[:, None]  # (5, 1)


def make(name: str) -> Parametrization:
    return Parametrization(name, 0.5 if name.startswith("edm") else None)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X0, EPS, OUTPUT = draw(5, 12, seed=1), draw(5, 12, seed=2), draw(5, 12, seed=3)
X_T = ALPHA * X0 + SIGMA * EPS

# Appendix B, one line per prediction: target, weight w of the DSM loss w/2 |output - target|^2, best shift.
APPENDIX_B = {
    "score": (lambda: -EPS / SIGMA, lambda: torch.ones_like(SIGMA), lambda o, m: o),
    "data": (lambda: X0, lambda: ALPHA**2 / SIGMA**4, lambda o, m: o - m),
    "noise": (lambda: EPS, lambda: 1 / SIGMA**2, lambda o, m: o),
    "velocity": (lambda: ALPHA * EPS - SIGMA * X0, lambda: ALPHA**2 / SIGMA**2, lambda o, m: o + SIGMA * m),
}


@pytest.mark.parametrize("name", APPENDIX_B)
def test_targets_weights_and_shifts_are_appendix_b(name):
    target, weight, shift = APPENDIX_B[name]
    parametrization = make(name)
    torch.testing.assert_close(parametrization.target(X0, EPS, ALPHA, SIGMA), target())
    torch.testing.assert_close(parametrization.dsm_weight(ALPHA, SIGMA), weight())
    mean_output, mean_x0 = draw(5, 12, seed=4), draw(5, 12, seed=5)
    torch.testing.assert_close(
        parametrization.optimal_shift(mean_output, mean_x0, ALPHA, SIGMA), shift(mean_output, mean_x0)
    )


@pytest.mark.parametrize("name", APPENDIX_B)
def test_gap_is_appendix_b(name):
    _, weight, _ = APPENDIX_B[name]
    for level in range(len(T)):
        eta = draw(3, 4, seed=level)
        expected = 0.5 * weight()[level, 0] * (eta**2).sum()
        gap = make(name).dsm_gap(eta, ALPHA[level, 0], SIGMA[level, 0])
        torch.testing.assert_close(gap, expected)


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_is_the_score_loss(name):
    """w/2 |output - target|^2 is 1/2 |score + eps/sigma|^2 of the score the output claims, whatever it is."""
    parametrization = make(name)
    # The edm weight is exact for its own process only, where alpha^2 sigma_data^2 + sigma^2 = 1.
    process = EDM(0.5) if name.startswith("edm") else ContinuousVP()
    t = torch.linspace(process.t_min, process.t_max, 5, dtype=torch.float64)
    alpha, sigma = process.alpha(t)[:, None], process.sigma(t)[:, None]
    x_t = alpha * X0 + sigma * EPS
    score = -parametrization.to_eps(OUTPUT, x_t, alpha, sigma) / sigma
    expected = 0.5 * ((score + EPS / sigma) ** 2).sum(1)
    residual = OUTPUT - parametrization.target(X0, EPS, alpha, sigma)
    weight = parametrization.dsm_weight(alpha, sigma)[:, 0]
    torch.testing.assert_close(0.5 * weight * (residual**2).sum(1), expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_optimal_shift_takes_exactly_the_gap_off_the_loss(name):
    """Over draws whose mean noise is zero, eta lowers the loss by the gap, and nothing lowers it more."""
    parametrization, alpha, sigma = make(name), ALPHA[2], SIGMA[2]
    x0, eps = draw(64, 12, seed=6), draw(32, 12, seed=7)
    eps = torch.cat([eps, -eps])  # mean exactly zero, as the expectation has it
    output = draw(64, 12, seed=8) + 0.3
    eta = parametrization.optimal_shift(output.mean(0), x0.mean(0), alpha, sigma)

    def loss(shift):
        residual = output - shift - parametrization.target(x0, eps, alpha, sigma)
        return 0.5 * parametrization.dsm_weight(alpha, sigma) * (residual**2).sum(1).mean()

    torch.testing.assert_close(loss(0) - loss(eta), parametrization.dsm_gap(eta, alpha, sigma))
    assert loss(eta) < loss(1.01 * eta)
    assert loss(eta) < loss(0.99 * eta)


@pytest.mark.parametrize("name", NAMES)
def test_an_ideal_output_gives_back_data_and_noise(name):
    parametrization = make(name)
    output = parametrization.target(X0, EPS, ALPHA, SIGMA)
    # Reading x0 at alpha = 0.007 out of float64 costs a few digits.
    torch.testing.assert_close(parametrization.to_x0(output, X_T, ALPHA, SIGMA), X0, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(parametrization.to_eps(output, X_T, ALPHA, SIGMA), EPS, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_conversions_round_trip(name):
    parametrization, levels = make(name), (ALPHA, SIGMA)
    eps, x0 = (read(OUTPUT, X_T, *levels) for read in (parametrization.to_eps, parametrization.to_x0))
    exact = {"rtol": 1e-8, "atol": 1e-8}  # float64 with a few digits lost at alpha = 0.007
    torch.testing.assert_close(parametrization.from_eps(eps, X_T, *levels), OUTPUT, **exact)
    torch.testing.assert_close(parametrization.from_x0(x0, X_T, *levels), OUTPUT, **exact)
    torch.testing.assert_close(ALPHA * x0 + SIGMA * eps, X_T, **exact)


@pytest.mark.parametrize("name", NAMES)
def test_eps_moves_by_its_slope(name):
    parametrization = make(name)
    moved = parametrization.to_eps(OUTPUT + 1.0, X_T, ALPHA, SIGMA)
    still = parametrization.to_eps(OUTPUT, X_T, ALPHA, SIGMA)
    expected = parametrization.deps_doutput(ALPHA, SIGMA).expand_as(moved)
    torch.testing.assert_close(
        moved - still, expected, rtol=1e-9, atol=1e-9
    )  # a difference of float64 values


@pytest.mark.parametrize(
    ("kind", "name"), [("epsilon", "noise"), ("sample", "data"), ("v_prediction", "velocity")]
)
@pytest.mark.parametrize("scheduler_class", [DDPMScheduler, DDIMScheduler])
def test_x0_is_the_pred_original_sample_of_diffusers(scheduler_class, kind, name):
    scheduler = scheduler_class(prediction_type=kind, clip_sample=False)
    scheduler.set_timesteps(1000)
    process = DiscreteVP.linear()
    x_t, output = draw(1, 3, 4, 4, seed=1), draw(1, 3, 4, 4, seed=2)
    for t in (0, 1, 250, 700, 999):
        alpha, sigma = process.alpha(t), process.sigma(t)
        theirs = scheduler.step(output, t, x_t).pred_original_sample
        ours = Parametrization(name).to_x0(output, x_t, alpha, sigma)
        # alphas_cumprod is float32 there: 1e-7 in alpha^2 is 1e-3 of sigma at t = 0, in a value near 1/alpha.
        torch.testing.assert_close(ours, theirs.double(), rtol=1e-4, atol=1e-4)


def test_velocity_target_is_get_velocity():
    t = torch.tensor([0, 10, 300, 999])
    x0, eps = draw(4, 3, 2, 2, seed=1), draw(4, 3, 2, 2, seed=2)
    process = DiscreteVP.linear()
    alpha, sigma = process.alpha(t).reshape(4, 1, 1, 1), process.sigma(t).reshape(4, 1, 1, 1)
    theirs = DDPMScheduler().get_velocity(x0, eps, t)
    ours = Parametrization("velocity").target(x0, eps, alpha, sigma)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)  # alphas_cumprod is float32 there


@pytest.mark.parametrize(("kind", "name"), [("epsilon", "edm"), ("v_prediction", "edm_velocity")])
@pytest.mark.parametrize("scheduler_class", [EDMEulerScheduler, EDMDPMSolverMultistepScheduler])
@pytest.mark.parametrize("sigma_data", [0.5, 1.2])
def test_edm_reads_what_diffusers_preconditions(scheduler_class, kind, name, sigma_data):
    scheduler = scheduler_class(prediction_type=kind, sigma_data=sigma_data)
    process, parametrization = EDM(sigma_data), Parametrization(name, sigma_data)
    for noise in torch.tensor([0.002, 0.05, 0.5, 3.0, 80.0], dtype=torch.float64):
        sample, output = draw(1, 3, 4, 4, seed=1) * noise, draw(1, 3, 4, 4, seed=2)
        denoised = scheduler.precondition_outputs(sample, output, noise)
        x_t, t = scheduler.precondition_inputs(sample, noise), scheduler.precondition_noise(noise)
        alpha, sigma = process.alpha(t), process.sigma(t)
        torch.testing.assert_close(parametrization.to_x0(output, x_t, alpha, sigma), denoised)
        torch.testing.assert_close(parametrization.from_x0(denoised, x_t, alpha, sigma), output)


@pytest.mark.parametrize(("kind", "name"), [("epsilon", "edm"), ("v_prediction", "edm_velocity")])
def test_the_edm_target_denoises_to_the_data(kind, name):
    scheduler = EDMEulerScheduler(prediction_type=kind)
    noise = torch.tensor(0.7, dtype=torch.float64)
    process = EDM(0.5)
    t = scheduler.precondition_noise(noise)
    target = Parametrization(name, 0.5).target(X0, EPS, process.alpha(t), process.sigma(t))
    torch.testing.assert_close(scheduler.precondition_outputs(X0 + noise * EPS, target, noise), X0)


def test_flow_target_carries_diffusers_from_noise_to_data():
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(5)
    x0, eps = draw(1, 3, 4, 4, seed=1).float(), draw(1, 3, 4, 4, seed=2).float()
    process = Flow(1000.0)
    for index, t in enumerate(scheduler.timesteps):
        x_t = scheduler.scale_noise(x0, t[None], eps)
        alpha, sigma = process.alpha(t), process.sigma(t)
        output = Parametrization("flow").target(x0, eps, alpha, sigma)
        stepped = scheduler.step(output, t, x_t).prev_sample
        following = scheduler.sigmas[index + 1]
        # Rectified flow is straight: one Euler step lands exactly on the next x_t, in float32.
        torch.testing.assert_close(stepped, (1 - following) * x0 + following * eps, rtol=0, atol=1e-5)
        if index:  # at the first time x_t is the noise and holds no x0 to divide out
            torch.testing.assert_close(
                Parametrization("flow").to_x0(output, x_t, alpha, sigma).float(), x0, rtol=0, atol=1e-5
            )


def test_settings_name_everything():
    assert Parametrization("noise").settings() == {"name": "noise"}
    for name in NAMES:
        assert Parametrization(**make(name).settings()) == make(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("epsilon",), "unknown prediction 'epsilon'; choose from noise, data"),
        (("edm",), "they need it"),
        (("noise", 0.5), "sigma_data belongs to the edm"),
        (("edm", 0.0), "must be positive"),
        (("edm_velocity", float("nan")), "must be positive"),
    ],
)
def test_nonsense_is_refused_with_a_reason(arguments, message):
    with pytest.raises(ModelError, match=message):
        Parametrization(*arguments)
