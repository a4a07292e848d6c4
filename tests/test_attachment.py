"""Putting a calibration on a model: per row, in any dtype, and off again without a trace."""

import copy
import io
import pickle

import pytest
import torch
from diffusers import DDIMPipeline, DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler, UNet2DModel
from torch import nn

import trueup
from trueup.errors import AttachError, MismatchError
from trueup.hook import CorrectOutput
from trueup.process import EDM, VE, ContinuousVP, DiscreteVP, Flow


def tiny_unet(seed=0, **changes):
    torch.manual_seed(seed)
    settings = {
        "sample_size": 8,
        "in_channels": 3,
        "out_channels": 3,
        "block_out_channels": (16, 16),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "down_block_types": ("DownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D"),
    }
    return UNet2DModel(**{**settings, **changes}).eval()


@pytest.fixture(scope="module")
def unet():
    return tiny_unet()


def images(count=24, shape=(3, 8, 8)):
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.fixture(scope="module")
def cal(unet):
    """Unshrunk, so that every coefficient of every level is at work."""
    return trueup.calibrate(
        unet, images(), scheduler=DDPMScheduler(), estimator="regressed", levels=[0, 50, 300, 700, 999]
    )


def by_definition(cal, output, x_t, t):
    """Convert to eps, apply the correction as it is defined, convert back: all in float64."""
    process, kind = cal.process, cal.parametrization
    t = torch.as_tensor(t, dtype=torch.float64).expand(len(x_t))
    wide = (-1, *[1] * (x_t.dim() - 1))
    alpha, sigma = process.alpha(t).reshape(wide), process.sigma(t).reshape(wide)
    eps_hat = kind.to_eps(output.double(), x_t.double(), alpha, sigma)
    u = x_t.double() / sigma
    return kind.from_eps(cal.correction.apply(eps_hat, u, process.lam(t)), x_t.double(), alpha, sigma)


@torch.inference_mode()
def test_each_row_is_corrected_at_its_own_time(unet, cal):
    x_t, t = torch.randn(5, 3, 8, 8), torch.tensor([0, 37, 300, 811, 999])
    before = unet(x_t, t).sample
    with trueup.attach(unet, cal):
        after = unet(x_t, t).sample
        rows = torch.cat([unet(x_t[i : i + 1], t[i : i + 1]).sample for i in range(5)])
    expected = by_definition(cal, before, x_t, t)
    # float32 against float64, on corrections of order one
    assert torch.allclose(after.double(), expected, atol=2e-4)
    assert torch.allclose(after, rows, atol=1e-5)
    assert (after - before).abs().max() > 0.05


@torch.inference_mode()
def test_fractional_times_fall_between_their_neighbours(unet, cal):
    x_t = torch.randn(3, 3, 8, 8)
    t = torch.tensor([0.35, 512.25, 998.5])
    before = unet(x_t, t).sample
    with trueup.attach(unet, cal):
        after = unet(x_t, t).sample
    expected = by_definition(cal, before, x_t, t)
    # times are tabulated, 8,192 over 9.7 of lam: sigma, and with it x_t/sigma, is off by 0.06% at most
    size = (expected - before).abs().flatten(1).max(1).values
    assert ((after - expected).abs().flatten(1).max(1).values < 3e-3 * size).all()


@torch.inference_mode()
@pytest.mark.parametrize("t", [300, 300.0, torch.tensor(300), torch.tensor([300]), torch.tensor([300] * 4)])
def test_a_time_may_come_as_number_scalar_or_row(unet, cal, t):
    x_t = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    before = unet(x_t, 300).sample
    with trueup.attach(unet, cal):
        after = unet(x_t, t).sample
    assert torch.allclose(after.double(), by_definition(cal, before, x_t, 300), atol=2e-4)


@pytest.mark.parametrize(
    ("process", "kind"),
    [
        (ContinuousVP(), "data"),
        (ContinuousVP(), "velocity"),
        (ContinuousVP(), "score"),
        (DiscreteVP.cosine(), "velocity"),
        (VE(0.05, 10.0), "data"),
        (EDM(0.5, 0.05, 10.0), trueup.Parametrization("edm", 0.5)),
        (Flow(1000.0, 0.02, 0.98), "flow"),
    ],
)
@pytest.mark.parametrize("family", ["shift", "spectral"])
def test_every_parametrization_is_corrected_in_its_own_space(mixture, process, kind, family):
    denoiser = mixture.denoiser(process, kind, lambda eps, u, lam: 0.2 + 0.1 * eps * eps)
    cal = trueup.calibrate(denoiser, mixture.sample(40), family=family, estimator="paired", batch_size=40)
    t = process.snap(
        process.t_of_lam(torch.linspace(float(cal.correction.lam[-1]), float(cal.correction.lam[0]), 7))
    )
    x_t = torch.randn(7, *mixture.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = denoiser(x_t, t)
    with trueup.attach(denoiser, cal):
        after = denoiser(x_t, t)
    expected = by_definition(cal, before, x_t, t)
    scale = float((expected - before).abs().max())
    assert scale > 0.01
    assert torch.allclose(after.double(), expected, atol=5e-3 * scale)  # tabulated times, as above
    assert torch.equal(denoiser(x_t, t), before)


@torch.inference_mode()
def test_leaving_restores_the_model_bit_for_bit(unet, cal):
    x_t = torch.randn(2, 3, 8, 8)
    before = unet(x_t, 10).sample
    handle = trueup.attach(unet, cal)
    assert not torch.equal(unet(x_t, 10).sample, before)
    assert handle.active
    handle.remove()
    handle.remove()
    assert not handle.active
    assert torch.equal(unet(x_t, 10).sample, before)
    with pytest.raises(RuntimeError, match="midway"), trueup.attach(unet, cal):
        raise RuntimeError("midway")
    assert torch.equal(unet(x_t, 10).sample, before)


def test_a_second_attach_is_refused(unet, cal):
    with trueup.attach(unet, cal), pytest.raises(AttachError, match="already attached"):
        trueup.attach(unet, cal)
    trueup.attach(unet, cal).remove()


def test_an_empty_calibration_leaves_outputs_alone(unet, cal):
    empty = copy.deepcopy(cal)
    for part in (empty.correction.b, empty.correction.a, empty.correction.d):
        part.zero_()
    x_t = torch.randn(2, 3, 8, 8)
    before = unet(x_t, 10).sample
    with trueup.attach(unet, empty):
        assert torch.equal(unet(x_t, 10).sample, before)


@torch.inference_mode()
def test_a_tuple_comes_back_as_a_tuple(unet, cal):
    x_t = torch.randn(2, 3, 8, 8)
    with trueup.attach(unet, cal):
        (plain,) = unet(x_t, 10, return_dict=False)
        assert torch.equal(plain, unet(sample=x_t, timestep=10).sample)


@torch.inference_mode()
def test_a_learned_variance_is_left_alone():
    net = tiny_unet(out_channels=6)
    cal = trueup.calibrate(net, images(), scheduler=DDPMScheduler(), estimator="paired", levels=[10, 500])
    assert cal.shape == (3, 8, 8)
    x_t = torch.randn(2, 3, 8, 8)
    before = net(x_t, 10).sample
    with trueup.attach(net, cal):
        after = net(x_t, 10).sample
    assert torch.equal(after[:, 3:], before[:, 3:])
    assert not torch.equal(after[:, :3], before[:, :3])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_corrected_in_theirs(cal, dtype):
    net = tiny_unet().to(dtype)
    x_t = torch.randn(2, 3, 8, 8, dtype=dtype)
    before = net(x_t, 300).sample
    with trueup.attach(net, cal):
        after = net(x_t, 300).sample
    assert after.dtype == dtype
    tolerance = 5e-3 if dtype == torch.float16 else 1e-6
    assert torch.allclose(after.double(), by_definition(cal, before, x_t, 300), atol=tolerance)


@torch.inference_mode()
def test_a_model_may_change_dtype_while_attached(cal):
    net = tiny_unet()
    x_t = torch.randn(2, 3, 8, 8)
    with trueup.attach(net, cal):
        single = net(x_t, 300).sample
        double = net.double()(x_t.double(), 300).sample
    assert torch.allclose(single.double(), double, atol=1e-4)


@torch.inference_mode()
def test_a_deep_copy_is_calibrated_on_its_own(cal):
    net = tiny_unet()
    x_t = torch.randn(2, 3, 8, 8)
    before = net(x_t, 10).sample
    with trueup.attach(net, cal):
        after = net(x_t, 10).sample
        twin = copy.deepcopy(net)
    assert torch.equal(net(x_t, 10).sample, before)
    assert torch.equal(twin(x_t, 10).sample, after)
    assert trueup.detach(twin)
    assert torch.equal(twin(x_t, 10).sample, before)
    assert not trueup.detach(twin)


@torch.inference_mode()
def test_a_pickled_model_stays_calibrated(cal):
    torch.manual_seed(0)
    net = Tiny()
    own = trueup.Denoiser(net, DiscreteVP.linear(), "noise", (3, 8, 8))
    fitted = trueup.calibrate(own, images(), estimator="paired", levels=[10, 500])
    x_t, t = torch.randn(2, 3, 8, 8), torch.tensor([10, 10])
    with trueup.attach(net, fitted):
        after = net(x_t, t)
        content = io.BytesIO(pickle.dumps(net))
    assert torch.equal(pickle.load(content)(x_t, t), after)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x, t):
        return self.conv(x) * (1 + t.reshape(-1, 1, 1, 1) / 1000)


@torch.inference_mode()
@pytest.mark.parametrize("order", ["attach first", "compile first", "attach to the compiled"])
def test_compiled_models_are_corrected_and_restored(order):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Tiny()
    own = trueup.Denoiser(net, DiscreteVP.linear(), "noise", (3, 8, 8))
    fitted = trueup.calibrate(own, images(), estimator="paired", levels=[10, 500])
    x_t, t = torch.randn(2, 3, 8, 8), torch.tensor([10, 400])
    before = net(x_t, t)
    with trueup.attach(net, fitted):
        after = net(x_t, t)
    fast = None
    if order != "attach first":
        fast = torch.compile(net, backend="eager")
        assert torch.equal(fast(x_t, t), before)
    with trueup.attach(fast if order == "attach to the compiled" else net, fitted):
        if fast is None:
            fast = torch.compile(net, backend="eager", fullgraph=True)
        assert torch.allclose(fast(x_t, t), after, atol=1e-6)
        with pytest.raises(AttachError, match="already attached"):
            trueup.attach(fast, fitted)
    assert torch.equal(fast(x_t, t), before)


@torch.inference_mode()
def test_cpu_offload_hooks_do_not_disturb_it(cal):
    from accelerate import cpu_offload

    net = tiny_unet()
    x_t = torch.randn(2, 3, 8, 8)
    with trueup.attach(net, cal):
        after = net(x_t, 10).sample
        offloaded = cpu_offload(net, execution_device=torch.device("cpu"))
        assert torch.allclose(offloaded(x_t, 10).sample, after, atol=1e-6)


def test_other_weights_are_refused_unless_forced(cal):
    other = tiny_unet(seed=1)
    with pytest.raises(MismatchError, match=r"other weights \(fingerprint \w{8}, model \w{8}\).*force=True"):
        trueup.attach(other, cal)
    trueup.attach(other, cal, force=True).remove()


def test_a_pipeline_is_checked_against_its_scheduler(unet, cal):
    trueup.attach(DDIMPipeline(unet, DDIMScheduler()), cal).remove()
    with pytest.raises(MismatchError, match="another noise process"):
        trueup.attach(DDIMPipeline(unet, DDIMScheduler(beta_schedule="scaled_linear")), cal)
    with pytest.raises(MismatchError, match="noise prediction, the scheduler says velocity"):
        trueup.attach(DDIMPipeline(unet, DDIMScheduler(prediction_type="v_prediction")), cal)


@torch.inference_mode()
def test_a_pipeline_samples_as_a_hand_corrected_network_does(unet, cal):
    """DDIM with the calibration attached equals DDIM with each output corrected by definition."""
    pipe = DDIMPipeline(unet, DDIMScheduler(clip_sample=False))
    pipe.set_progress_bar_config(disable=True)
    with trueup.attach(pipe, cal):
        ours = pipe(
            batch_size=2, num_inference_steps=5, generator=torch.Generator().manual_seed(4), output_type="np"
        ).images
    scheduler = DDIMScheduler(clip_sample=False)
    scheduler.set_timesteps(5)
    x_t = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4))
    for t in scheduler.timesteps:
        output = by_definition(cal, unet(x_t, t).sample, x_t, t).float()
        x_t = scheduler.step(output, t, x_t).prev_sample
    theirs = (x_t / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    assert abs(ours - theirs).max() < 1e-3


@torch.inference_mode()
def test_one_calibration_serves_other_schedulers_of_the_same_process(unet, cal):
    trueup.attach(DDIMPipeline(unet, DPMSolverMultistepScheduler()), cal).remove()


def test_another_size_is_refused_at_the_call(unet, cal):
    with trueup.attach(unet, cal), pytest.raises(MismatchError, match=r"shape \(3, 8, 8\)"):
        unet(torch.randn(1, 3, 16, 16), 10)


def test_wrong_targets_are_refused_in_one_line(cal):
    for target in ("some/path", 3, lambda x, t: x):
        with pytest.raises(AttachError) as caught:
            trueup.attach(target, cal)
        assert "\n" not in str(caught.value)


def test_a_calibration_may_be_given_as_its_file(unet, cal, tmp_path):
    path = tmp_path / "x.trueup.safetensors"
    cal.save(path)
    x_t = torch.randn(2, 3, 8, 8)
    with trueup.attach(unet, cal):
        one = unet(x_t, 10).sample
    with trueup.attach(unet, path):
        assert torch.allclose(unet(x_t, 10).sample, one, atol=1e-5)  # stored as float32


def test_beyond_the_calibrated_range_the_correction_stays_what_it_is_at_the_end(mixture):
    process = ContinuousVP()
    denoiser = mixture.denoiser(process, "data", lambda eps, u, lam: 0.3 + 0 * eps)
    cal = trueup.calibrate(
        denoiser, mixture.sample(20), estimator="paired", family="shift", levels=[0.3, 0.6]
    )
    hook = CorrectOutput(cal)
    output = torch.zeros(3, *mixture.shape)
    inside, at_end, beyond = hook.correct(output, output, torch.tensor([0.5, 0.6, 0.95]))
    assert torch.equal(at_end, beyond)
    assert not torch.equal(inside, at_end)


def test_gradients_flow_through_a_model_first_used_for_inference(cal):
    """Guided sampling differentiates the network; sampling before it must not get in the way."""
    net = tiny_unet()
    x_t = torch.randn(2, 3, 8, 8, requires_grad=True)
    with torch.inference_mode():
        handle = trueup.attach(net, cal)
        net(x_t.detach(), 300)
    net(x_t, 300).sample.square().sum().backward()
    assert torch.isfinite(x_t.grad).all()
    handle.remove()


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x, t, sigma=None):
        return self.conv(x)


def wrapped_denoiser(call=None):
    torch.manual_seed(0)
    net = Wrapper()
    return net, trueup.Denoiser(net, DiscreteVP.linear(), "noise", (3, 8, 8), call=call and call(net))


@torch.inference_mode()
def test_wrappers_are_seen_through(cal):
    net, denoiser = wrapped_denoiser()
    fitted = trueup.calibrate(denoiser, images(), estimator="paired", levels=[10, 500])
    parallel = nn.DataParallel(net)
    with trueup.attach(net, fitted):
        for wrapper in (parallel, torch.compile(net, backend="eager")):
            with pytest.raises(AttachError, match="already attached"):
                trueup.attach(wrapper, fitted)
    trueup.attach(parallel, fitted)
    assert trueup.detach(net)


@torch.inference_mode()
def test_a_call_that_changes_what_the_network_sees_is_corrected_around_the_call():
    """Measured through 2 net(x/2) - x, the correction belongs to that, not to the bare network."""
    net, denoiser = wrapped_denoiser(lambda net: lambda x_t, t: 2 * net(0.5 * x_t, t) - x_t)
    cal = trueup.calibrate(denoiser, images(), estimator="paired", levels=[10, 500])
    x_t, t = torch.randn(2, 3, 8, 8), torch.tensor([10, 500])
    before = denoiser(x_t, t)
    with trueup.attach(denoiser, cal):
        assert torch.allclose(denoiser(x_t, t).double(), by_definition(cal, before, x_t, t), atol=1e-3)
        assert not net._forward_hooks
    with pytest.raises(MismatchError, match="attach to that Denoiser"):
        trueup.attach(net, cal)
    plain, through = wrapped_denoiser(lambda net: lambda x_t, t: net(x_t, t, sigma=3.0))
    cal = trueup.calibrate(through, images(), estimator="paired", levels=[10, 500])
    before = through(x_t, t)
    with trueup.attach(plain, cal):  # its `call` only adds an argument
        assert torch.allclose(through(x_t, t).double(), by_definition(cal, before, x_t, t), atol=1e-3)


@torch.inference_mode()
def test_autocast_does_not_blunt_the_correction(cal):
    hook = CorrectOutput(cal)
    output, x_t = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    sharp = hook.correct(output, x_t, 300)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(hook.correct(output, x_t, 300), sharp)


def test_a_calibrated_model_is_not_calibrated_again(unet, cal):
    with trueup.attach(unet, cal), pytest.raises(trueup.TrueupError, match="remove it first"):
        trueup.calibrate(unet, images(), scheduler=DDPMScheduler())


def test_an_old_handle_leaves_a_new_calibration_alone(unet, cal):
    old = trueup.attach(unet, cal)
    assert trueup.detach(unet)
    new = trueup.attach(unet, cal)
    old.remove()
    assert not old.active
    assert new.active
    new.remove()


@torch.inference_mode()
@pytest.mark.parametrize("t", [300, torch.tensor(300)])
def test_a_compiled_model_takes_scalar_times(t):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Wrapper()
    own = trueup.Denoiser(net, DiscreteVP.linear(), "noise", (3, 8, 8))
    fitted = trueup.calibrate(own, images(), estimator="paired", levels=[10, 500])
    x_t = torch.randn(2, 3, 8, 8)
    with trueup.attach(net, fitted):
        eager = net(x_t, t)
        fast = torch.compile(net, backend="eager", fullgraph=True)
        assert torch.allclose(fast(x_t, t), eager, atol=1e-6)
