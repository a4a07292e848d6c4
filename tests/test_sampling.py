"""Sampling: every scheduler on data whose distribution is known, seeds per image, guidance, files."""

import json

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import trueup
from trueup import process as processes
from trueup.analytic import GaussianMixture
from trueup.errors import MismatchError, TrueupError
from trueup.hf import as_decoder, as_denoiser, find_decoder
from trueup.noise import normal
from trueup.parametrization import Parametrization
from trueup.sampling import DPMSolver, as_solver, pictures, sample_batches
from trueup.sampling.schedulers import NAMES, SchedulerSolver
from trueup.sampling.store import Kept, Output, grid

from tiny import tiny_unet

MEAN = torch.tensor([[[[0.5, -0.3], [0.1, 0.9]]]])
STD = 0.4
GAUSSIAN = GaussianMixture(MEAN, STD)
VP = processes.DiscreteVP.linear()
CPU = torch.device("cpu")


def exact_for(name):
    """The ideal network for data N(MEAN, STD^2) under the noise a scheduler steps through."""
    if name.startswith("edm"):
        return GAUSSIAN.denoiser(processes.EDM(), Parametrization("edm", 0.5))
    if name.startswith("flow"):
        return GAUSSIAN.denoiser(processes.Flow(time_scale=1000.0), "flow")
    return GAUSSIAN.denoiser(VP)


@pytest.mark.parametrize("name", [*NAMES, "dpm-solver-1", "dpm-solver-2", "dpm-solver-3-adaptive"])
def test_an_ideal_network_gives_the_data_under_every_sampler(name):
    """Wrong input scaling, starting noise or times would show in the mean or the spread."""
    x = trueup.sample(exact_for(name), 2000, solver=name, nfe=100, batch_size=2000)
    mean, std = x.mean(0), x.std(0)
    assert float((mean - MEAN[0]).abs().max()) < 0.05
    # 100 evaluations leave each sampler an error of its own in the spread, Euler's the largest.
    assert torch.allclose(std, torch.full_like(std, STD), rtol=0.12)


@pytest.mark.parametrize("name", ["dpm++2m", "unipc", "deis"])
def test_a_flow_network_runs_under_schedulers_that_know_flows(name):
    x = trueup.sample(exact_for("flow"), 2000, solver=name, nfe=60, batch_size=2000)
    assert float((x.mean(0) - MEAN[0]).abs().max()) < 0.05
    assert torch.allclose(x.std(0), torch.full_like(x[0], STD), rtol=0.12)


@pytest.mark.parametrize("kind", ["data", "velocity"])
@pytest.mark.parametrize("name", ["ddim", "dpm++2m", "euler"])
def test_schedulers_are_told_what_the_network_predicts(kind, name):
    x = trueup.sample(GAUSSIAN.denoiser(VP, kind), 8, solver=name, nfe=20)
    same = trueup.sample(GAUSSIAN.denoiser(VP), 8, solver=name, nfe=20)
    assert torch.allclose(x, same, atol=2e-3)


@pytest.mark.parametrize("name", ["ddim", "dpm++2m", "unipc", "euler", "heun", "kdpm2", "pndm", "deis"])
def test_the_loop_is_the_one_diffusers_documents(name):
    net = tiny_unet()
    kind, settings = NAMES[name]
    scheduler = getattr(diffusers, kind)(**settings)
    denoiser = as_denoiser(net, scheduler=scheduler)
    found = trueup.sample(denoiser, 2, solver=scheduler, nfe=9)
    steps = next(n for n in range(9, 0, -1) if evaluations(scheduler, n) <= 9)
    scheduler.set_timesteps(steps)
    x = normal(0, torch.arange(2), -1, (1, 8, 8), CPU) * scheduler.init_noise_sigma
    with torch.no_grad():
        for t in scheduler.timesteps:
            x = scheduler.step(net(scheduler.scale_model_input(x, t), t).sample, t, x).prev_sample
    assert torch.allclose(found, x, rtol=1e-4, atol=1e-4)


def evaluations(scheduler, steps):
    scheduler.set_timesteps(steps)
    return len(scheduler.timesteps)


@pytest.mark.parametrize(
    "name", ["dpm-solver-3", "dpm-solver-2-adaptive", "ddpm", "ddim", "euler-a", "dpm++2m-sde"]
)
def test_an_image_does_not_depend_on_its_batch(name):
    denoiser = exact_for(name)
    together = trueup.sample(denoiser, 10, solver=name, nfe=12, seed=3, batch_size=10)
    apart = trueup.sample(denoiser, 10, solver=name, nfe=12, seed=3, batch_size=3)
    fewer = trueup.sample(denoiser, 4, solver=name, nfe=12, seed=3, batch_size=4)
    assert torch.allclose(together, apart, atol=1e-5)
    assert torch.allclose(together[:4], fewer, atol=1e-5)
    other = trueup.sample(denoiser, 4, solver=name, nfe=12, seed=4, batch_size=4)
    assert not torch.allclose(fewer, other, atol=0.1)


def test_noise_a_scheduler_draws_is_new_at_every_step_and_for_every_image():
    drawn = []
    scheduler = diffusers.DDPMScheduler(clip_sample=False)
    solver = as_solver(scheduler, GAUSSIAN.denoiser(VP))
    step = type(scheduler).step
    try:
        type(scheduler).step = lambda self, *a, **k: (
            drawn.append(torch.randn(3, 1, 2, 2)),
            step(self, *a, **k),
        )[1]
        trueup.sample(GAUSSIAN.denoiser(VP), 3, solver=solver, nfe=5)
    finally:
        type(scheduler).step = step
    flat = torch.cat(drawn).flatten(1)
    assert len({tuple(row.tolist()) for row in flat}) == len(flat) == 15


def test_calibrated_samples_start_from_the_same_noise(mixture):
    def off(eps, u, lam):
        return 0 * eps + 0.3

    denoiser = mixture.denoiser(VP, distortion=off)
    cal = trueup.calibrate(denoiser, mixture.sample(200), images=200, levels=[0, 100, 300, 600, 900, 999])
    before = trueup.sample(denoiser, 64, nfe=20)
    after = trueup.sample(denoiser, 64, nfe=20, calibration=cal)
    ideal = trueup.sample(mixture.denoiser(VP), 64, nfe=20)
    assert (after - ideal).abs().mean() < 0.25 * (before - ideal).abs().mean()
    assert torch.equal(trueup.sample(denoiser, 64, nfe=20), before)  # and it is off again


def conditional(scale=1.0):
    """Labels 0, 1, 2 have means -1, 0, 1; label 3 stands for none and means 0 with a wider spread."""
    kinds = [
        GaussianMixture(torch.full((1, 1, 2, 2), m), s)
        for m, s in ((-1.0, 0.1), (0.0, 0.1), (1.0, 0.1), (0.0, 0.9))
    ]

    def network(x, t, y):
        alpha, sigma = VP.alpha(t), VP.sigma(t)
        outputs = torch.stack([kind.eps_given(x, alpha, sigma) for kind in kinds])
        return outputs[y, torch.arange(len(x))]

    return trueup.Denoiser(
        network, VP, "noise", (1, 2, 2), conditional=True, null_label=3, data_range=None, dtype=torch.float32
    ), kinds


def test_labels_go_round_whatever_the_batch():
    denoiser, _ = conditional()
    for size in (3, 4, 7):
        x = trueup.sample(denoiser, 7, labels=[0, 2], nfe=12, batch_size=size)
        assert [round(float(v)) for v in x.mean((1, 2, 3))] == [-1, 1, -1, 1, -1, 1, -1]


@pytest.mark.parametrize("solver", ["dpm-solver-2", "ddim"])
def test_guidance_is_null_plus_scale_times_the_difference(solver):
    denoiser, kinds = conditional()

    def guided(x, t):
        alpha, sigma = VP.alpha(t), VP.sigma(t)
        label, null = (kinds[i].eps_given(x, alpha, sigma) for i in (2, 3))
        return null + 1.5 * (label - null)

    by_hand = trueup.Denoiser(guided, VP, "noise", (1, 2, 2), data_range=None)
    expected = trueup.sample(by_hand, 6, nfe=10, solver=solver)
    found = trueup.sample(denoiser, 6, nfe=10, solver=solver, labels=2, guidance=1.5)
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_learned_variance_reaches_the_scheduler_that_wants_it():
    torch.manual_seed(0)
    net = tiny_unet(out_channels=2)
    scheduler = diffusers.DDPMScheduler(variance_type="learned_range", clip_sample=False)
    denoiser = as_denoiser(net, scheduler=scheduler)
    found = trueup.sample(denoiser, 2, solver=scheduler, nfe=4)
    scheduler.set_timesteps(4)
    x = normal(0, torch.arange(2), -1, (1, 8, 8), CPU)
    with torch.no_grad():
        for draw, t in enumerate(scheduler.timesteps):
            noise = normal(0, torch.arange(2), -2 - draw, (1, 8, 8), CPU)
            output = net(x, t).sample
            drift = scheduler.step(output, t, x, generator=torch.Generator().manual_seed(0)).prev_sample
            if t > 0:  # its own noise, replaced by ours
                theirs = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
                spread = scheduler._get_variance(t, predicted_variance=output[:, 1:])
                drift = drift + torch.exp(0.5 * spread) * (noise - theirs)
            x = drift
    assert torch.allclose(found, x, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(
    "name", ["ddim", "euler", "unipc", "pndm", "dpm++2m", "dpm++2s", "deis", "dpm-solver-2"]
)
def test_other_samplers_leave_a_learned_variance_out(name, channels):
    torch.manual_seed(0)
    net = tiny_unet(in_channels=channels, out_channels=2 * channels)
    scheduler = diffusers.DDPMScheduler(variance_type="learned_range", clip_sample=False)
    denoiser = as_denoiser(net, scheduler=scheduler)
    x = trueup.sample(denoiser, 2, solver=name, nfe=4)
    mean = trueup.Denoiser(lambda x, t: net(x, t).sample[:, :channels], VP, "noise", (channels, 8, 8))
    mean.scheduler_config = diffusers.DDPMScheduler(clip_sample=False).config
    assert torch.allclose(x, trueup.sample(mean, 2, solver=name, nfe=4), rtol=1e-4, atol=1e-4)


def test_networks_in_half_precision_keep_float32_states():
    net = tiny_unet().half()
    x = trueup.sample(as_denoiser(net, scheduler=diffusers.DDIMScheduler()), 2, solver="ddim", nfe=3)
    assert x.dtype == torch.float32


def test_running_out_of_memory_halves_what_is_evaluated_at_once():
    sizes = []

    def network(x, t):
        sizes.append(len(x))
        if len(x) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return GAUSSIAN.eps_given(x, VP.alpha(t), VP.sigma(t))

    denoiser = trueup.Denoiser(network, VP, "noise", GAUSSIAN.shape, data_range=None)
    x = trueup.sample(denoiser, 8, nfe=6, batch_size=8)
    assert torch.allclose(x, trueup.sample(GAUSSIAN.denoiser(VP), 8, nfe=6), atol=1e-5)
    assert max(sizes[-4:]) <= 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"solver": "dpm-solver-4"}, "unknown solver"),
        ({"solver": "AutoencoderKL"}, "unknown solver"),
        ({"solver": "nonsense"}, "unknown solver"),
        ({"solver": "flow-euler"}, "predict flow"),
        ({"solver": "edm-euler"}, "predict edm"),
        ({"solver": object()}, "no diffusers scheduler"),
        ({"solver": "ddim", "grid": "logsnr"}, "a scheduler has its own"),
        ({"nfe": 2}, "at least 3"),
        ({"nfe": 0}, "whole number"),
        ({"nfe": 2.5}, "whole number"),
        ({"nfe": None}, "whole number"),
        ({"solver": "ddim", "nfe": 2000}, "cannot sample in 2000|num_inference_steps|sample"),
        ({"labels": 3}, "takes no labels"),
        ({"guidance": 2.0}, "takes no labels"),
        ({"count": 0}, "at least 1"),
        ({"batch_size": -1}, "at least 1"),
    ],
)
def test_bad_requests_say_what_to_do(settings, words):
    arguments = {"count": 1, **settings}
    if settings == {"solver": "ddim", "nfe": 2000}:
        assert SchedulerSolver.named("ddim", GAUSSIAN.denoiser(VP)).evaluations(2000) == 1000
        return
    with pytest.raises(TrueupError, match=words):
        trueup.sample(GAUSSIAN.denoiser(VP), **arguments)


def test_labels_that_are_none():
    denoiser, _ = conditional()
    with pytest.raises(TrueupError, match="fewer classes"):
        trueup.sample(denoiser, 1, labels=99)
    with pytest.raises(TrueupError, match="labels are numbers"):
        trueup.sample(denoiser, 1, labels=["cat"])
    with pytest.raises(TrueupError, match="guidance is a number"):
        trueup.sample(denoiser, 1, labels=0, guidance="much")


def test_conditional_networks_need_labels_and_guidance_needs_a_null():
    denoiser, _ = conditional()
    with pytest.raises(TrueupError, match="say which labels"):
        trueup.sample(denoiser, 1)
    denoiser.null_label = None
    with pytest.raises(TrueupError, match="stands for none"):
        trueup.sample(denoiser, 1, labels=0, guidance=2.0)


def test_a_scheduler_with_another_schedule_is_refused():
    with pytest.raises(MismatchError, match="not what the network was trained on"):
        trueup.sample(
            GAUSSIAN.denoiser(VP), 1, solver=diffusers.DDIMScheduler(beta_schedule="squaredcos_cap_v2")
        )
    with pytest.raises(MismatchError, match="predict velocity"):
        trueup.sample(
            GAUSSIAN.denoiser(VP), 1, solver=diffusers.DDIMScheduler(prediction_type="v_prediction")
        )


@pytest.mark.parametrize("name", ["UnCLIPScheduler", "DDIMInverseScheduler", "DDPMWuerstchenScheduler"])
def test_schedulers_of_other_noise_are_refused_though_they_take_any_config(name):
    denoiser = as_denoiser(tiny_unet(), scheduler=diffusers.DDPMScheduler())
    with pytest.raises(TrueupError):
        trueup.sample(denoiser, 1, solver=name, nfe=5)


def test_a_prediction_type_given_by_hand_reaches_the_scheduler():
    denoiser = as_denoiser(tiny_unet(), scheduler=diffusers.DDPMScheduler(), parametrization="velocity")
    assert as_solver("ddim", denoiser).scheduler.config.prediction_type == "v_prediction"


def test_a_flow_models_shift_is_kept():
    denoiser = exact_for("flow")
    denoiser.scheduler_config = {"num_train_timesteps": 1000, "shift": 3.0, "use_dynamic_shifting": True}
    assert as_solver("flow-euler", denoiser).scheduler.config.shift == 3.0
    unipc = as_solver("unipc", denoiser)
    assert unipc.scheduler.config.flow_shift == 3.0
    trueup.sample(denoiser, 1, solver=unipc, nfe=4)


def test_a_scheduler_takes_over_the_models_own_config():
    own = diffusers.DDPMScheduler(
        clip_sample=True, timestep_spacing="trailing", beta_schedule="squaredcos_cap_v2"
    )
    denoiser = as_denoiser(tiny_unet(), scheduler=own)
    config = as_solver("ddim", denoiser).scheduler.config
    assert (config.clip_sample, config.timestep_spacing, config.beta_schedule) == (
        True,
        "trailing",
        "squaredcos_cap_v2",
    )


@pytest.mark.parametrize("name", NAMES)
def test_schedulers_agree_with_a_pipeline_made_in_memory(name):
    """Whose config lists its defaults, which diffusers would replace by another scheduler's defaults."""
    if name.startswith(("edm", "flow")):
        return
    denoiser = as_denoiser(tiny_unet(), scheduler=diffusers.DDPMScheduler(num_train_timesteps=1000))
    solver = as_solver(name, denoiser)  # which checks it
    assert as_solver(type(solver.scheduler), denoiser).scheduler.config.beta_start == 1e-4


def test_the_scheduler_given_is_left_as_it_was():
    scheduler = diffusers.DPMSolverMultistepScheduler()
    before = dict(scheduler.__dict__)
    trueup.sample(GAUSSIAN.denoiser(VP), 1, solver=scheduler, nfe=4)
    assert scheduler.num_inference_steps == before["num_inference_steps"]


def test_a_divergence_is_reported_and_not_written():
    broken = trueup.Denoiser(lambda x, t: x * torch.inf, VP, "noise", (1, 2, 2), data_range=None)
    with pytest.raises(TrueupError, match="not finite"):
        trueup.sample(broken, 1, nfe=6)


def test_pictures_are_rounded_and_clipped():
    x = torch.tensor([-2.0, -1.0, 0.0, 0.999, 1.0, 3.0]).reshape(1, 1, 2, 3)
    assert pictures(x, (-1.0, 1.0)).flatten().tolist() == [0, 0, 128, 255, 255, 255]
    assert pictures(torch.tensor([[[[0.0, 0.5]]]]), (0.0, 1.0)).flatten().tolist() == [0, 128]


def test_a_grid_has_every_picture_in_reading_order():
    images = torch.arange(1, 6, dtype=torch.uint8).reshape(5, 1, 1, 1).expand(5, 1, 2, 2)
    sheet = grid(images, columns=3, gap=1)
    assert sheet.shape == (1, 5, 8)
    assert sheet[0, 0].tolist() == [1, 1, 255, 2, 2, 255, 3, 3]
    assert sheet[0, 3].tolist() == [4, 4, 255, 5, 5, 255, 255, 255]


def fill(output, images, size=2):
    for start in range(output.kept.done, len(images), size):
        index = torch.arange(start, min(start + size, len(images)))
        output.add(index, images[index])
    output.finish()


def test_what_is_written_can_be_read_back(tmp_path):
    images = (torch.arange(5 * 3 * 4 * 4) % 251).to(torch.uint8).reshape(5, 3, 4, 4)
    fill(Output(tmp_path / "x.npz", 5, {"seed": 0}), images)
    with np.load(tmp_path / "x.npz", allow_pickle=False) as archive:
        assert np.array_equal(archive["images"], images.permute(0, 2, 3, 1).numpy())
        assert json.loads(str(archive["settings"])) == {"seed": 0}
    fill(Output(tmp_path / "folder", 5, {}), images)
    read = np.stack([np.asarray(Image.open(tmp_path / "folder" / f"{i:06d}.png")) for i in range(5)])
    assert np.array_equal(read, images.permute(0, 2, 3, 1).numpy())
    fill(Output(tmp_path / "x.png", 5, {}), images)
    assert np.asarray(Image.open(tmp_path / "x.png")).shape == (10, 16, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "x.npz", "x.png"]  # nothing left over


def test_a_picture_that_was_taken_away_is_drawn_again(tmp_path):
    images = (torch.arange(5 * 4 * 4) % 251).to(torch.uint8).reshape(5, 1, 4, 4)
    fill(Output(tmp_path / "folder", 5, {}), images)
    (tmp_path / "folder" / "000003.png").unlink()
    fill(Output(tmp_path / "folder", 5, {}), images)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "folder" / "000003.png")), images[3, 0].numpy())


def test_interrupted_sampling_goes_on_and_ends_the_same(tmp_path):
    denoiser = GAUSSIAN.denoiser(VP)
    settings = {"solver": "ddim", "nfe": 4, "batch_size": 3, "progress": False}

    def draw(path, stop=None):
        output = Output(path, 8, {"seed": 0})
        for number, (index, x) in enumerate(sample_batches(denoiser, 8, start=output.kept.done, **settings)):
            if number == stop:
                return
            output.add(index, x)
        output.finish()

    draw(tmp_path / "once.npz")
    draw(tmp_path / "twice.npz", stop=1)
    assert not (tmp_path / "twice.npz").exists()
    draw(tmp_path / "twice.npz")
    once, twice = (np.load(tmp_path / name)["images"] for name in ("once.npz", "twice.npz"))
    assert np.allclose(once, twice, atol=1e-6)


@pytest.mark.parametrize(
    ("prepare", "path", "words"),
    [
        (lambda p: (p / "full").mkdir() or (p / "full" / "a.txt").write_text("mine"), "full", "not empty"),
        (lambda p: (p / "x.npz").write_text("mine"), "x.npz", "exists"),
        (lambda p: (p / "x").write_text("mine"), "x", "is a file"),
        (lambda p: (p / "x.png").mkdir(), "x.png", "is a directory"),
        (lambda p: None, "nowhere/x.npz", "not a directory"),
        (
            lambda p: Kept(p / "old", {"seed": 1}).add(torch.arange(1), rows=torch.zeros(1)),
            "old",
            "another seed",
        ),
        (lambda p: None, "x.jpg", "folder of PNGs"),
    ],
)
def test_nothing_of_the_users_is_overwritten(tmp_path, prepare, path, words):
    prepare(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(TrueupError, match=words):
        Output(tmp_path / path, 4, {"seed": 0})
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_parts_of_other_sizes_fit_together(tmp_path):
    kept = Kept(tmp_path / "k", {})
    rows = torch.arange(10)
    kept.add(torch.arange(4), rows=rows[:4])
    kept.add(torch.arange(2, 7), rows=rows[2:7])  # written again in larger batches
    kept.add(torch.arange(7, 10), rows=rows[7:])
    assert kept.tensors(9)["rows"].tolist() == list(range(9))
    del kept
    assert Kept(tmp_path / "k", {}).done == 10


def test_a_missing_part_is_noticed(tmp_path):
    kept = Kept(tmp_path / "k", {})
    kept.add(torch.arange(4), rows=torch.arange(4))
    kept.add(torch.arange(6, 9), rows=torch.arange(6, 9))
    with pytest.raises(TrueupError, match="lacks sample 4"):
        kept.tensors(9)


def test_samples_being_replaced_are_never_taken_for_new_ones(tmp_path, monkeypatch):
    old = Kept(tmp_path / "k", {"seed": 0})
    old.add(torch.arange(4), rows=torch.zeros(4))
    del old

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", killed)  # while the old ones go
        with pytest.raises(KeyboardInterrupt):
            Kept(tmp_path / "k", {"seed": 1}, force=True)
    new = Kept(tmp_path / "k", {"seed": 1})
    assert new.done == 0
    assert not list((tmp_path / "k").glob("*.safetensors"))


def test_settings_that_came_to_nothing_do_not_stand_in_the_way(tmp_path):
    Kept(tmp_path / "k", {"seed": 0})
    assert Kept(tmp_path / "k", {"seed": 1}).done == 0


def test_two_at_once_are_refused(tmp_path):
    first = Kept(tmp_path / "k", {})
    with pytest.raises(TrueupError, match="another process"):
        Kept(tmp_path / "k", {})
    del first
    Kept(tmp_path / "k", {})


def test_generated_images_stand_in_for_data_and_the_calibration_says_so(tmp_path):
    def off(eps, u, lam):
        return 0 * eps + 0.4

    mixture = GaussianMixture(torch.zeros(1, 1, 8, 8), 0.3)
    denoiser = mixture.denoiser(VP, distortion=off)
    denoiser.data_range = (-1.0, 1.0)
    data = trueup.generate(denoiser, 60, nfe=12, folder=tmp_path / "g")
    assert data.images.dtype == torch.uint8
    assert data.images.shape == (60, 1, 8, 8)
    again = trueup.generate(denoiser, 60, nfe=12, folder=tmp_path / "g")
    assert torch.equal(again.images, data.images)
    cal = trueup.calibrate(denoiser, data, images=None, levels=[100, 500, 900])
    assert cal.generated["nfe"] == 12
    assert cal.generated["solver"] == repr(DPMSolver(3))
    assert "60 generated images" in cal.summary()
    assert "model's own samples" in cal.summary()
    cal.save(tmp_path / "c.trueup.safetensors")
    assert trueup.load(tmp_path / "c.trueup.safetensors").generated == cal.generated
    # At t = 900 little is left of the images, so that any will do to see that eps is off by 0.4.
    assert float(cal.correction.shift_map()[-1].mean()) == pytest.approx(0.4, abs=0.05)


def test_generated_images_are_not_those_that_are_judged_later():
    denoiser = GAUSSIAN.denoiser(VP)
    data = trueup.generate(denoiser, 8, nfe=6)
    judged = trueup.sample(denoiser, 8, nfe=6)
    assert float((data.images[:, None] - judged[None]).flatten(2).abs().amax(2).min()) > 1e-3


def test_generated_images_of_a_conditional_network_carry_their_labels():
    denoiser, _ = conditional()
    data = trueup.generate(denoiser, 4, nfe=6, labels=[0, 2])
    assert [int(data[i][1]) for i in range(4)] == [0, 2, 0, 2]
    assert float(data[1][0].mean()) == pytest.approx(1.0, abs=0.3)


def test_a_decoder_undoes_the_scaling_of_latents(tmp_path):
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4,), latent_channels=2, norm_num_groups=2, scaling_factor=0.5, shift_factor=0.25
    ).eval()
    x = torch.randn(2, 2, 4, 4)
    with torch.no_grad():
        expected = vae.decode(x / 0.5 + 0.25).sample
    assert torch.allclose(as_decoder(vae)(x), expected)
    vae.save_pretrained(tmp_path / "vae")
    assert find_decoder(tmp_path) == tmp_path / "vae"
    assert torch.allclose(as_decoder(tmp_path / "vae")(x), expected, atol=1e-6)
    with pytest.raises(TrueupError, match="no autoencoder"):
        as_decoder(torch.nn.Linear(1, 1))


def test_solvers_describe_themselves():
    assert DPMSolver(2, allocation="adaptive").name == "dpm-solver-2-adaptive"
    assert "DDIMScheduler(" in repr(as_solver("ddim", GAUSSIAN.denoiser(VP)))
