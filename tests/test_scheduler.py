"""A fitted solver as a scheduler of diffusers: the same steps, in pipelines that know nothing of us."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import subprocess
import sys
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trueup
from trueup.calibration import Calibration
from trueup.errors import ArtifactError, MismatchError, TrueupError
from trueup.hf import as_denoiser, schedule
from trueup.hf.fitted import FittedScheduler
from trueup.parametrization import Parametrization
from trueup.process import EDM, VE, ContinuousVP, DiscreteVP, Flow
from trueup.sampling.rules import RULES
from trueup.sampling.steps import Levels

from calibrations import fitted_solver
from tiny import tiny_unet

SHAPE = (1, 8, 8)
VP = DiscreteVP.linear()
NOISE = Parametrization("noise")


def random_solver(shape=SHAPE, noise=VP, nfe=5, guidance=1.0, **changes):
    """Near a rule, with tables and maps small enough to stay finite."""
    kept = torch.ones(20, dtype=torch.float64)[: trueup.bands.Bands(shape[1:]).count]
    how = {"nfe": nfe, "guidance": guidance}
    made = fitted_solver(shape, noise, kept, torch.Generator().manual_seed(0), **how, **changes)
    scale = {"weights": 0.3, "tables": 0.1, "offset": 0.1}
    return replace(
        made, **{name: by * getattr(made, name) for name, by in scale.items() if name not in changes}
    )


def start(count=2, shape=SHAPE, seed=0):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def by_hand(solver, network, x, parametrization=NOISE):
    """The loop of this project: ask, remember, step."""
    history = []
    with torch.no_grad():
        for i, t in enumerate(solver.t.tolist()):
            history = [solver.remembered(i, network(x, t), x, parametrization), *history][:3]
            x = solver.step(i, x, history)
    return x


def loop(scheduler, network, x, steps=None, **given):
    """The loop of diffusers' pipelines."""
    scheduler.set_timesteps(steps or scheduler.solver.nfe, device=x.device)
    with torch.no_grad():
        for t in scheduler.timesteps:
            x = scheduler.step(network(scheduler.scale_model_input(x, t), t), t, x, **given).prev_sample
    return x


@pytest.fixture(scope="module")
def unet():
    return tiny_unet()


@pytest.fixture
def scheduler():
    return FittedScheduler.of(random_solver(), VP, NOISE)


# The same steps


@pytest.mark.parametrize(
    ("noise", "kind"),
    [
        (VP, "noise"),
        (VP, "velocity"),
        (DiscreteVP.cosine(), "data"),
        (ContinuousVP(), "score"),
        (Flow(1000.0), "flow"),
        (EDM(), "edm"),
        (VE(), "noise"),
    ],
    ids=lambda v: getattr(v, "kind", v),
)
def test_it_steps_as_the_solver_does(noise, kind):
    """Whatever the noise and the prediction: state for state, from what is in its config."""
    parametrization = Parametrization(kind, 0.5 if kind == "edm" else None)
    solver = random_solver(noise=noise)
    made = FittedScheduler.of(solver, noise, parametrization)
    assert made.init_noise_sigma == pytest.approx(noise.prior_std)
    assert made.process.agrees_with(noise)
    assert made.parametrization == parametrization
    x = start().double() * noise.prior_std

    def network(x, t):
        return torch.tanh(x) + 0.01 * float(t)

    loaded = FittedScheduler.from_config(json.loads(json.dumps(dict(made.config))))
    expected = by_hand(loaded.solver, network, x, parametrization)
    told = made.timesteps.double() - solver.t  # rounded to float32
    assert torch.allclose(told, torch.zeros_like(told), atol=1e-4)
    for one in (made, loaded):
        assert torch.allclose(
            loop(one, network, x), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max())
        )
    size = float(expected.abs().max())
    original = by_hand(solver, network, x, parametrization)
    assert torch.allclose(original, expected, rtol=0, atol=1e-5 * size)  # tables are kept as float32


def ddim_on(times, noise=VP, shape=SHAPE):
    """DDIM's rule on given timesteps, nothing fitted."""
    levels = Levels.at(noise, torch.as_tensor(times, dtype=torch.float64))
    end = torch.ones(1, dtype=torch.float64)
    how = {"t": levels.t, "history": "eps", "weights": RULES[0].weights(levels)}
    how |= {"alpha": torch.cat([levels.log_alpha.exp(), end]), "sigma": torch.cat([levels.sigma, 0 * end])}
    solver = random_solver(shape, noise, len(levels.t), **how)
    return replace(solver, tables=0 * solver.tables, offset=0 * solver.offset)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_ddim_of_ours_is_ddim_of_theirs(unet, kind, spacing):
    """No tables, its own timesteps, and a last step to alpha 1: an oracle that knows nothing of us."""
    theirs = diffusers.DDIMScheduler(
        clip_sample=False, set_alpha_to_one=True, prediction_type=kind, timestep_spacing=spacing
    )
    theirs.set_timesteps(10)
    noise, parametrization = schedule(dict(theirs.config) | {"_class_name": "DDIMScheduler"})
    ours = FittedScheduler.of(ddim_on(theirs.timesteps, noise), noise, parametrization)
    assert torch.equal(ours.timesteps, theirs.timesteps)
    assert ours.timesteps.dtype == theirs.timesteps.dtype
    x = y = start()
    ours.set_timesteps(10)
    with torch.no_grad():
        for t in theirs.timesteps:
            x, y = (s.step(unet(v, t).sample, t, v).prev_sample for s, v in ((ours, x), (theirs, y)))
            # Their levels are float32, products of up to a thousand factors.
            assert torch.allclose(x, y, rtol=0, atol=2e-4 * float(y.abs().max()))


@pytest.mark.parametrize("kind", ["DDPMPipeline", "DDIMPipeline"])
def test_a_pipeline_makes_what_the_loop_makes(unet, kind):
    solver = random_solver()
    cal = Calibration.without_data(trueup.Denoiser(unet, VP, "noise", SHAPE))
    cal.solvers = (solver,)
    pipe = getattr(diffusers, kind)(unet, diffusers.DDPMScheduler())
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = cal.scheduler(nfe=5)
    with trueup.attach(pipe, cal):  # knows the process and the prediction of its own scheduler
        made = pipe(2, torch.Generator().manual_seed(0), num_inference_steps=5, output_type="np").images
    expected = by_hand(solver, lambda x, t: unet(x, torch.tensor(t)).sample, start())
    expected = (expected / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
    assert torch.allclose(torch.as_tensor(made), expected, atol=1e-5)


def test_our_own_loop_takes_it_too(unet, scheduler):
    denoiser = trueup.Denoiser(unet, VP, "noise", SHAPE)
    x = trueup.sample(denoiser, 2, solver=scheduler, nfe=5)
    assert scheduler.solver.identity in repr(
        trueup.sampling.as_solver(scheduler, denoiser)
    )  # what samples are of
    noise = trueup.noise.normal(
        0, torch.arange(2), trueup.sampling.draw.STARTING_NOISE, SHAPE, torch.device("cpu")
    )
    expected = by_hand(scheduler.solver, lambda x, t: denoiser.predict(x, t), noise * VP.prior_std)
    assert torch.allclose(x, expected, atol=1e-5)


# What a step costs


class Operations(TorchDispatchMode):
    """Counts what is computed: of states, each a launch on a GPU, and of single numbers; views are free."""

    def __init__(self):
        super().__init__()
        self.of_states = self.of_numbers = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        if not operation.is_view and operation is not torch.ops.aten._unsafe_view.default:
            of_state = isinstance(made, torch.Tensor) and made.ndim > 0
            self.of_states, self.of_numbers = self.of_states + of_state, self.of_numbers + (not of_state)
        return made


def counted(scheduler, dtype, step=3):
    """Of a step in the middle, in the second run."""
    for _ in range(2):
        scheduler.set_timesteps(5)
        x, output = start().to(dtype), start(seed=1).to(dtype)
        for t in scheduler.timesteps[:step]:
            x = scheduler.step(output, t, x, return_dict=False)[0]
        with torch.no_grad(), Operations() as found:
            scheduler.step(output, scheduler.timesteps[step], x, return_dict=False)
    return found.of_states, found.of_numbers


@pytest.mark.parametrize(("dtype", "casts"), [(torch.float32, 0), (torch.float16, 2)])
def test_a_step_is_ten_operations_and_two_casts_half_of_what_diffusers_takes(scheduler, dtype, casts):
    """Two for what is remembered, one puts the parts together, four are the DCT's, three all the rest."""
    assert not scheduler.solver.empty
    assert scheduler.solver.memory(3) == 3
    assert counted(scheduler, dtype) == (10 + casts, 0)
    theirs = diffusers.DPMSolverMultistepScheduler(solver_order=3, lower_order_final=False)
    of_states, of_numbers = counted(theirs, dtype)
    assert 10 + casts < 0.6 * of_states
    assert of_numbers > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_is_its_definition_in_double_precision_but_for_rounding(dtype):
    """Whatever the precision of what it is given, it is computed in single precision."""
    made = FittedScheduler.of(random_solver(), VP, NOISE)
    exact = FittedScheduler.of(random_solver(), VP, NOISE)
    x = start().to(dtype)
    for one in (made, exact):
        one.set_timesteps(5)
    for t in made.timesteps:
        output = x.tanh()
        wanted = exact.step(output.double(), t, x.double()).prev_sample
        x = made.step(output, t, x).prev_sample
        assert x.dtype == dtype
        # Half a unit of what comes back, and a few single ones of the largest that is remembered.
        largest = float(max(h.abs().max() for h in exact._history))
        slack = torch.finfo(dtype).eps * wanted.abs() / 2 + 2.0**-20 * largest
        assert ((x - wanted).abs() <= slack).all()


def test_autocast_leaves_a_step_alone(scheduler):
    x, outputs = start(), [start(seed=seed) for seed in range(5)]

    def run():
        scheduler.set_timesteps(5)
        made = x
        for t, output in zip(scheduler.timesteps, outputs, strict=True):
            made = scheduler.step(output, t, made).prev_sample
        return made

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run(), expected)


# What pipelines ask of it


def test_other_numbers_of_steps_are_refused_by_the_one_it_has(scheduler):
    for given in ({"num_inference_steps": 20}, {"sigmas": [1.0, 0.5]}):
        with pytest.raises(MismatchError, match=r"fitted for 5 steps, not .*: pass num_inference_steps=5"):
            scheduler.set_timesteps(**given)
    with pytest.raises(MismatchError, match="timesteps of this scheduler are its own"):
        scheduler.set_timesteps(timesteps=[900, 500, 300, 100, 1])
    scheduler.set_timesteps(np.int64(5))
    scheduler.set_timesteps(device="cpu", mu=1.0)
    scheduler.set_timesteps(sigmas=[0.0] * 5)
    assert scheduler.num_inference_steps == len(scheduler.timesteps) == 5


def test_starting_again_forgets(scheduler, unet):
    x = start()
    first = loop(scheduler, lambda x, t: unet(x, t).sample, x)
    assert torch.equal(loop(scheduler, lambda x, t: unet(x, t).sample, x), first)
    with pytest.raises(TrueupError, match="all 5 steps are done: call set_timesteps"):
        scheduler.step(x, 0, x)
    scheduler.set_timesteps(5)
    assert (scheduler.step_index, scheduler.begin_index) == (None, None)


def test_what_is_not_asked_for_does_not_matter(scheduler, unet):
    def network(x, t):
        return unet(x, t).sample

    x = start()
    given = {"eta": 0.0, "use_clipped_model_output": True, "generator": torch.Generator()}
    assert torch.equal(loop(scheduler, network, x, **given), loop(scheduler, network, x))
    with pytest.warns(UserWarning, match="adds no noise: eta is ignored"):
        noisy = loop(scheduler, network, x, eta=0.7)
    assert torch.equal(noisy, loop(scheduler, network, x))
    scheduler.set_timesteps(5)
    (one,) = scheduler.step(x, scheduler.timesteps[0], x, return_dict=False)
    assert {"generator", "return_dict"} <= inspect.signature(scheduler.step).parameters.keys()
    assert one.shape == x.shape
    assert len(scheduler) == scheduler.config.num_train_timesteps == 1000
    assert scheduler.scale_model_input(x, 3) is x
    assert len(repr(scheduler)) < 200


def test_learned_variances_are_left_out(scheduler):
    x = start()
    plain = loop(scheduler, lambda x, t: x.tanh(), x)
    assert torch.equal(loop(scheduler, lambda x, t: torch.cat([x.tanh(), x.exp()], 1), x), plain)


def test_samples_of_another_shape_are_refused(scheduler):
    odd = [(start(shape=shape),) * 2 for shape in ((2, 8, 8), (1, 8), (1, 8, 8, 8))]
    odd += [(start(), start(shape=shape)) for shape in ((3, 8, 8), (1, 8, 16))]
    for sample, output in odd:
        scheduler.set_timesteps(5)
        with pytest.raises(
            MismatchError, match=r"samples of shape \(1, 8, 8\), or with as many channels and axes, not"
        ):
            scheduler.step(output, scheduler.timesteps[0], sample)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_come_back_as_they_came(scheduler, dtype):
    """Steps are in float32 or finer, whatever the network's are."""
    x = start()
    expected = loop(scheduler, lambda x, t: x.tanh(), x)
    made = loop(scheduler, lambda x, t: x.float().tanh().to(dtype), x.to(dtype))
    assert made.dtype == dtype
    slack = {torch.float16: 5e-3, torch.bfloat16: 5e-2, torch.float64: 1e-5}[dtype]
    assert torch.allclose(made.float(), expected, rtol=0, atol=slack * float(expected.abs().max()))
    noised = scheduler.add_noise(x.to(dtype), x.to(dtype), scheduler.timesteps[[1, 2]])
    assert noised.dtype == dtype


def test_timesteps_are_whole_where_networks_count_in_whole_ones():
    assert FittedScheduler.of(random_solver(), VP, NOISE).timesteps.dtype == torch.int64
    between = random_solver(t=torch.tensor([999.0, 700.5, 300.0, 20.0, 1.0], dtype=torch.float64))
    assert FittedScheduler.of(between, VP, NOISE).timesteps.dtype == torch.float32
    flow = FittedScheduler.of(random_solver(noise=Flow()), Flow(), Parametrization("flow"))
    assert flow.timesteps.dtype == torch.float32


# From an image


@pytest.mark.parametrize("begin", range(5))
def test_a_start_in_the_middle_goes_on_with_what_there_is(scheduler, begin):
    """Of data that are a point every network knows everything, and every first-order step is exact."""
    solver = replace(scheduler.solver, weights=ddim_on(scheduler.timesteps).weights, history="eps")
    solver = replace(solver, tables=0 * solver.tables, offset=0 * solver.offset)
    solver.weights[3, 2:] = torch.tensor([0.3, -0.3])  # a step that needs three
    made = FittedScheduler.of(solver, VP, NOISE)
    x0, eps = start().double(), start(seed=1).double()
    made.set_timesteps(5)
    made.set_begin_index(begin)
    timesteps = made.timesteps[begin:]
    x = made.add_noise(x0, eps, timesteps[:1].repeat(2))
    assert torch.allclose(x, solver.alpha[begin] * x0 + solver.sigma[begin] * eps, atol=1e-12)
    for t in timesteps:
        x = made.step(eps, t, x).prev_sample
    assert made.step_index == 5
    assert torch.allclose(x, x0, atol=1e-6)


def test_the_first_step_says_where_it_begins(scheduler):
    x = start()
    for begin in range(5):
        scheduler.set_timesteps(5)
        scheduler.step(x, scheduler.timesteps[begin], x)
        assert scheduler.step_index == begin + 1
        assert scheduler.index_for_timestep(float(scheduler.timesteps[begin].bfloat16())) == begin
    scheduler.set_timesteps(5)
    with pytest.raises(MismatchError, match="no step at t = 500: its timesteps are 999, 824"):
        scheduler.step(x, 500, x)


def test_noise_is_that_of_the_process_between_its_timesteps(scheduler):
    x0, eps, t = start(), start(seed=1), torch.tensor([3, 555])
    assert torch.allclose(scheduler.add_noise(x0, eps, t), VP.noised(x0, eps, t), atol=1e-6)
    assert torch.equal(scheduler.scale_noise(x0, t, eps), scheduler.add_noise(x0, eps, t))
    theirs = diffusers.DDPMScheduler()
    assert torch.allclose(scheduler.add_noise(x0, eps, t), theirs.add_noise(x0, eps, t), atol=1e-5)


# Kept


def test_it_is_saved_and_loaded_by_itself(scheduler, tmp_path):
    scheduler.save_pretrained(tmp_path)
    loaded = FittedScheduler.from_pretrained(tmp_path)
    assert loaded.solver.identity == scheduler.solver.identity
    assert loaded.solver.summary() == scheduler.solver.summary()
    x = start()
    assert torch.equal(*(loop(s, lambda x, t: x.tanh(), x) for s in (scheduler, loaded)))
    again = FittedScheduler.from_config(loaded.config)
    assert again.solver.identity == scheduler.solver.identity
    assert copy.deepcopy(loaded).solver.identity == scheduler.solver.identity


def test_a_pipeline_is_saved_and_loaded_with_it(unet, scheduler, tmp_path):
    pipe = diffusers.DDPMPipeline(unet, scheduler)
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["scheduler"] == ["trueup", "FittedScheduler"]
    loaded = diffusers.DDPMPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    pipe.set_progress_bar_config(disable=True)
    assert loaded.scheduler.solver.identity == scheduler.solver.identity
    how = {"num_inference_steps": 5, "output_type": "np"}
    one, other = (p(1, torch.Generator().manual_seed(0), **how).images for p in (pipe, loaded))
    assert (one == other).all()
    # What we read of a model that was saved with it.
    for model in (tmp_path, loaded):
        denoiser = as_denoiser(model)
        assert denoiser.process.agrees_with(VP)
        assert denoiser.parametrization == NOISE


def test_a_saved_pipeline_is_loaded_in_a_fresh_process(unet, scheduler, tmp_path):
    """diffusers imports nothing that a directory names: `import trueup` has to be enough."""
    diffusers.DDPMPipeline(unet, scheduler).save_pretrained(tmp_path)
    load = "import sys, trueup; assert 'diffusers' not in sys.modules; from diffusers import DDPMPipeline; "
    load += f"print(DDPMPipeline.from_pretrained({str(tmp_path)!r}).scheduler.identity)"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == scheduler.identity


def test_it_is_pickled_and_copied_in_the_middle_of_a_run(scheduler):
    x, other = start(), start(seed=1)
    scheduler.set_timesteps(5)
    first, second, *_ = scheduler.timesteps
    x = scheduler.step(other, first, x).prev_sample
    copies = [pickle.loads(pickle.dumps(scheduler)), copy.deepcopy(scheduler)]
    expected = scheduler.step(x, second, x).prev_sample
    for made in copies:
        assert made.identity == scheduler.identity
        assert torch.equal(made.step(x, second, x).prev_sample, expected)


@pytest.mark.parametrize(
    "own",
    [
        diffusers.DDPMScheduler(clip_sample_range=0.7, beta_schedule="squaredcos_cap_v2"),
        diffusers.DDIMScheduler(timestep_spacing="trailing", prediction_type="v_prediction"),
    ],
    ids=["ddpm", "ddim"],
)
def test_it_keeps_the_config_of_the_scheduler_it_replaces(unet, own, tmp_path, monkeypatch):
    """Whoever changes back, or draws with another solver, finds the model's own clipping and spacing."""
    warned = []
    logger = diffusers.utils.logging.get_logger("diffusers.configuration_utils")
    monkeypatch.setattr(logger, "warning", lambda *words: warned.append(words))
    process, parametrization = schedule(dict(own.config) | {"_class_name": type(own).__name__})
    pipe = diffusers.DDPMPipeline(unet, own)
    before = trueup.sample(pipe, 2, solver="ddim", nfe=4)
    then = diffusers.DDIMScheduler.from_config(own.config)
    made = FittedScheduler.of(random_solver(noise=process), process, parametrization)
    pipe.scheduler = made.replacing(pipe.scheduler)
    pipe.save_pretrained(tmp_path)
    saved = diffusers.DDPMPipeline.from_pretrained(tmp_path)
    for one in (pipe, saved):
        assert one.scheduler.identity == made.identity
        assert torch.equal(trueup.sample(one, 2, solver="ddim", nfe=4), before)
    now = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
    assert {name: now.config[name] for name in inspect.signature(type(now)).parameters} == {
        name: then.config[name] for name in inspect.signature(type(now)).parameters
    }
    assert FittedScheduler.from_config(now.config).identity == made.identity
    pipe.scheduler = made.replacing(pipe.scheduler)  # again, for another number of steps say
    assert torch.equal(trueup.sample(pipe, 2, solver="ddim", nfe=4), before)
    diffusers.DDIMScheduler.from_config(made.config)
    assert warned == []
    with pytest.raises(MismatchError, match="DDIMScheduler is of another noise or prediction"):
        made.replacing(diffusers.DDIMScheduler(beta_end=0.5))


def test_other_schedulers_are_made_of_its_config(scheduler, caplog):
    """The usual way to change back."""
    for kind in ("DDIMScheduler", "DPMSolverMultistepScheduler", "EulerDiscreteScheduler"):
        other = getattr(diffusers, kind).from_config(scheduler.config)
        noise, parametrization = schedule({**other.config, "_class_name": kind})
        assert noise.agrees_with(VP)
        assert parametrization == NOISE
    ddim = diffusers.DDIMScheduler.from_config(scheduler.config)
    assert not ddim.config.clip_sample
    back = FittedScheduler.from_config(ddim.config)
    assert back.solver.identity == scheduler.solver.identity
    assert all(len(record.getMessage()) < 300 for record in caplog.records)  # no tensors in warnings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_solver": None}, "made by Calibration.scheduler"),
        ({"_parametrization": None}, "made by Calibration.scheduler"),
        ({"_tensors": ""}, "tensors of this scheduler cannot be read"),
        ({"_tensors": "not base64!"}, "tensors of this scheduler cannot be read"),
        ({"_tensors": "AAAA"}, "tensors of this scheduler cannot be read"),
        ({"_tensors": 3}, "tensors of this scheduler cannot be read"),
        ({"_solver.nfe": 3}, "this scheduler: solver.t is torch.float64"),
        ({"_solver.shape": [1, 2**19, 2**19]}, "this scheduler: its sample shape makes no sense"),
        ({"_solver.shape": 3}, "this scheduler"),
        ({"_solver.guidance": 3.0}, "this scheduler: solver is not the one that was saved"),
        ({"_solver.history": "score"}, "remembers eps or x0"),
        ({"_parametrization": {"name": "dreams"}}, "unknown prediction"),
        ({"trained_betas": [2.0, 0.1]}, "must fall"),
    ],
)
def test_a_config_that_was_changed_is_refused_in_a_line(scheduler, change, words):
    config = json.loads(json.dumps(dict(scheduler.config)))
    for name, value in change.items():
        place, _, key = name.rpartition(".")
        (config[place] if place else config)[key] = value
    with pytest.raises(TrueupError, match=words) as caught:
        FittedScheduler.from_config(config)
    assert "\n" not in str(caught.value)
    if "_tensors" in change:
        assert isinstance(caught.value, ArtifactError)


def test_a_flow_keeps_its_own_process(tmp_path):
    flow = FittedScheduler.of(random_solver(noise=Flow(1000.0)), Flow(1000.0), Parametrization("flow"))
    flow.save_pretrained(tmp_path)
    loaded = FittedScheduler.from_pretrained(tmp_path)
    assert loaded.process.agrees_with(Flow(1000.0))
    assert loaded.config.prediction_type == "flow_prediction"
    assert loaded.config.num_train_timesteps == 1000
