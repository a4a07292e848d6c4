"""Putting a calibration on a model: per row, in any dtype, and off again without a trace."""

import copy
import io
import math
import pickle
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
from diffusers import DDIMPipeline, DDIMScheduler, DPMSolverMultistepScheduler, UNet2DModel
from torch import nn

import trueup
from trueup.calibration import Attachment, detach
from trueup.calibration.hook import CorrectOutput
from trueup.denoiser import Binding, corrections
from trueup.denoiser.binding import Place
from trueup.errors import AttachError, MismatchError
from trueup.process import EDM, VE, ContinuousVP, DiscreteVP, Flow

from calibrations import PLAIN, by_definition, emptied, make

SHAPE = (3, 8, 8)
LEVELS = [0, 50, 300, 700, 999]
OF_DIFFUSERS = Binding(Place(0, "sample"), Place(1, "timestep"))


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


class Tiny(nn.Module):
    """A network whose output depends on every pixel and on the time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x, t, sigma=None):
        t = torch.as_tensor(t, dtype=x.dtype)
        return self.conv(x) * (1 + t.reshape(-1, 1, 1, 1) / 1000)


def calibration_of(network, levels=LEVELS, noise=None, **settings):
    """Of a network called as diffusers' are, or as `Tiny` is."""
    if "binding" not in settings:
        settings["binding"] = OF_DIFFUSERS if isinstance(network, UNet2DModel) else PLAIN
    noise = noise or DiscreteVP.linear()
    return make(SHAPE, noise, levels, network=network, keep=(0, 1, 2), gain=0.1, **settings)


@pytest.fixture(scope="module")
def unet():
    return tiny_unet()


@pytest.fixture(scope="module")
def cal(unet):
    return calibration_of(unet)


@pytest.fixture
def tiny():
    return Tiny()


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(got, expected, relative):
    """Within a share of the size of what is compared."""
    got, expected = got.detach().double(), expected.detach().double()
    return torch.allclose(got, expected, rtol=0, atol=relative * float(expected.abs().max()))


# What it computes


@torch.inference_mode()
def test_each_row_is_corrected_at_its_own_time(unet, cal):
    x_t, t = randn(5, *SHAPE), torch.tensor([0, 37, 300, 811, 999])
    before = unet(x_t, t).sample
    with trueup.attach(unet, cal):
        after = unet(x_t, t).sample
        rows = torch.cat([unet(x_t[i : i + 1], t[i : i + 1]).sample for i in range(5)])
    for i in range(5):
        row = slice(i, i + 1)
        # float32 against float64
        assert close(after[row], by_definition(cal, before[row], x_t[row], t[row]), 1e-5)
    assert close(after, rows, 1e-5)
    assert (after - before).abs().max() > 0.05


@torch.inference_mode()
def test_fractional_times_fall_between_their_neighbours(unet, cal):
    x_t, t = randn(3, *SHAPE), torch.tensor([0.35, 310.25, 998.5])
    before = unet(x_t, t).sample
    with trueup.attach(unet, cal):
        after = unet(x_t, t).sample
    expected = by_definition(cal, before, x_t, t)
    # times are tabulated, 8,192 over 9.7 of lam: sigma, and with it x_t/sigma, is off by 0.06% at most
    size = (expected - before).abs().flatten(1).max(1).values
    assert ((after - expected).abs().flatten(1).max(1).values < 3e-3 * size).all()


@torch.inference_mode()
@pytest.mark.parametrize(
    "t",
    [
        *(300, 300.0, torch.tensor(300), torch.tensor([300]), torch.tensor([300] * 4)),
        *(torch.tensor([300] * 4, dtype=torch.int32), torch.tensor([300.0] * 4, dtype=torch.float64)),
    ],
)
def test_a_time_may_come_as_number_scalar_or_row(unet, cal, t):
    x_t = randn(4, *SHAPE, seed=2)
    before = unet(x_t, 300).sample
    with trueup.attach(unet, cal):
        after = unet(x_t, t).sample
    assert close(after, by_definition(cal, before, x_t, 300), 1e-5)


PROCESSES = [
    DiscreteVP.cosine(200),
    ContinuousVP(),
    VE(0.05, 10.0),
    EDM(0.5, 0.05, 10.0),
    Flow(1000.0, 0.02, 0.98),
]
KINDS = ["noise", "data", "velocity", "score", "flow", "reversed_flow", "edm", "edm_velocity"]


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.kind)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["shift", "spectral"])
def test_every_prediction_of_every_process_is_corrected_in_its_own_space(process, kind, family):
    """At the measured levels, several in one batch, the compact tables are the definition itself."""
    cal = make((2, 6, 8), process, 5, kind, keep=(0, 3), family=family, gain=0.1)
    output, x_t = randn(2, 5, 2, 6, 8, dtype=torch.float64)
    after = CorrectOutput(cal).correct(output, x_t, cal.t)
    for i, t in enumerate(cal.t):
        row = slice(i, i + 1)
        expected = by_definition(cal, output[row], x_t[row], t)
        assert close(after[row] - output[row], expected - output[row], 1e-9)
    assert not torch.equal(after, output)


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.kind)
@pytest.mark.parametrize("kind", ["noise", "data", "velocity"])
def test_between_levels_the_tables_follow_the_definition(process, kind):
    """Levels near and far from each other, so that it is interpolated, fades and is gone."""
    top, bottom = (float(process.lam(t)) for t in (process.t_min, process.t_max))
    lam = torch.tensor([top, top - 0.3, 0.5 * (top + bottom), bottom], dtype=torch.float64)
    cal = make((1, 4, 4), process, process.t_of_lam(lam), kind, gain=0.1)
    t = process.t_of_lam(torch.linspace(top, bottom, 101, dtype=torch.float64))
    output, x_t = randn(2, len(t), 1, 4, 4, dtype=torch.float64)
    (alpha, sigma), after = process.scales(t, x_t), CorrectOutput(cal).correct(output, x_t, t)
    eps, got, expected = (
        cal.parametrization.to_eps(v, x_t, alpha, sigma)
        for v in (output, after, by_definition(cal, output, x_t, t))
    )
    # A row takes the nearest of 8,192 times; fading over 0.4 of lam is the steepest there is.
    error, eps_size, u_size = (v.flatten(1).norm(dim=1) for v in (got - expected, eps, x_t / sigma))
    assert (error < 5e-3 * (1 + eps_size + u_size)).all()
    assert not torch.equal(got, eps)


@pytest.mark.parametrize("shape", [(2, 17), (1, 3, 4, 5)])
def test_samples_need_not_be_pictures(shape):
    cal = make(shape, keep=(0, 1))
    output, x_t = randn(2, 3, *shape, dtype=torch.float64)
    after = CorrectOutput(cal).correct(output, x_t, cal.t)
    assert close(after, by_definition(cal, output, x_t, cal.t), 1e-9)


@torch.inference_mode()
def test_a_learned_variance_is_left_alone():
    net = tiny_unet(out_channels=6)
    cal = calibration_of(net)
    x_t = randn(2, *SHAPE)
    before = net(x_t, 50).sample
    with trueup.attach(net, cal):
        after = net(x_t, 50).sample
    assert torch.equal(after[:, 3:], before[:, 3:])
    assert close(after[:, :3], by_definition(cal, before[:, :3], x_t, 50), 1e-5)


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float16, 2e-3), (torch.float64, 1e-9)])
def test_other_dtypes_are_corrected_in_theirs(cal, dtype, relative):
    net = tiny_unet().to(dtype)
    x_t, t = randn(2, *SHAPE, dtype=torch.float64).to(dtype), torch.tensor([300, 999])
    before = net(x_t, t).sample
    with trueup.attach(net, cal):
        after = net(x_t, t).sample
    assert after.dtype == dtype
    assert close(after, by_definition(cal, before, x_t, t), relative)  # the dtype's own rounding


@torch.inference_mode()
def test_a_model_may_change_dtype_while_attached(cal):
    net = tiny_unet()
    x_t = randn(2, *SHAPE)
    with trueup.attach(net, cal):
        single = net(x_t, 300).sample
        double = net.double()(x_t.double(), 300).sample
    assert close(single, double, 1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["shift", "spectral"])
def test_autocast_does_not_blunt_the_correction(family):
    hook = CorrectOutput(make(SHAPE, family=family))
    output, x_t = randn(2, 2, *SHAPE)
    sharp = hook.correct(output, x_t, 0.3)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(hook.correct(output, x_t, 0.3), sharp)


def test_gradients_flow_through_a_model_first_used_for_inference(cal):
    """Guided sampling differentiates the network; sampling before it must not get in the way."""
    net = tiny_unet()
    x_t = randn(2, *SHAPE).requires_grad_()
    with torch.inference_mode():
        handle = trueup.attach(net, cal)
        net(x_t.detach(), 300)
    net(x_t, 300).sample.square().sum().backward()
    assert torch.isfinite(x_t.grad).all()
    handle.remove()


def test_tables_hold_what_is_not_zero():
    """3x128x128 at 25 levels, every band in use: as images they would take 157 MB."""
    cal = make((3, 128, 128), DiscreteVP.linear(), 25, keep=range(99))
    hook = CorrectOutput(cal)
    hook.prepare(torch.device("cpu"), torch.float32)
    (tables,) = hook._ready.values()
    held = [*vars(hook).values(), *tables, *tables.forward, *tables.backward]
    assert sum(v.untyped_storage().nbytes() for v in held if isinstance(v, torch.Tensor)) < 30e6
    few = make((3, 128, 128), DiscreteVP.linear(), 25, keep=(0, 1), gain=0.0)
    few.correction.a[..., 0] = 0.1
    tables = CorrectOutput(few)._tables(torch.device("cpu"), torch.float32, (128, 128))
    assert tables.constant.shape[1] == 3 * 2 * 2  # the lowest frequencies alone


def test_times_that_do_not_fit_the_batch_are_refused(tiny):
    hook = CorrectOutput(calibration_of(tiny))
    with pytest.raises(AttachError, match="got 3 times for a batch of 2"):
        hook.correct(randn(2, *SHAPE), randn(2, *SHAPE), torch.tensor([1, 2, 3]))


# Where x_t and t are: `call=` that arranges them otherwise


class Arranged(nn.Module):
    """Calls of every arrangement on one and the same function of x and the network's time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.embed = nn.Embedding(10, 3)

    def answer(self, x, t, labels=None):
        t = t.reshape(-1, 1, 1, 1).to(x)
        out = self.conv(x) * (1 + 0.3 * torch.sin(t))
        return out if labels is None else out + self.embed(labels)[:, :, None, None]


class TimeSecond(Arranged):
    def forward(self, x, t):
        return self.answer(x, t)


class TimeFirst(Arranged):
    def forward(self, t, x):
        return self.answer(x, t)


class LabelsFirst(Arranged):
    def forward(self, labels, noise_level, image):
        return self.answer(image, noise_level, labels)


class ByName(Arranged):
    def forward(self, *, image, when):
        return self.answer(image, when)


LINEAR, CONTINUOUS, FLOW = DiscreteVP.linear(), ContinuousVP(), Flow()
CALLS = {
    "t / 1000": (TimeSecond, LINEAR, lambda net: lambda x, t: net(x, t / 1000)),
    "999 t": (TimeSecond, CONTINUOUS, lambda net: lambda x, t: net(x, 999 * t)),
    "1 - t": (TimeSecond, FLOW, lambda net: lambda x, t: net(x, 1 - t)),
    "t + 1": (TimeSecond, LINEAR, lambda net: lambda x, t: net(x, t + 1)),
    "whole t + 1": (TimeSecond, LINEAR, lambda net: lambda x, t: net(x, t.long() + 1)),
    "t[:, None]": (TimeSecond, LINEAR, lambda net: lambda x, t: net(x, t[:, None])),
    "time first": (TimeFirst, CONTINUOUS, lambda net: lambda x, t: net(t, x)),
    "time first by name": (TimeFirst, CONTINUOUS, lambda net: lambda x, t: net(x=x, t=2 * t - 1)),
    "other keywords": (ByName, CONTINUOUS, lambda net: lambda x, t: net(when=t, image=x)),
    "labels first": (LabelsFirst, CONTINUOUS, lambda net: lambda x, t, y: net(y, t, x)),
    "labels first, other time": (LabelsFirst, LINEAR, lambda net: lambda x, t, y: net(y, 1e-3 * t, image=x)),
}


def arranged(name):
    kind, process, call = CALLS[name]
    net = kind().eval()
    denoiser = trueup.Denoiser(net, process, "noise", SHAPE, call=call(net), conditional=kind is LabelsFirst)
    y = torch.tensor([1, 2, 3, 4]) if denoiser.conditional else None
    binding = denoiser.binding(y)
    assert binding is not None
    levels = process.snap(torch.linspace(process.t_min, process.t_max, 6, dtype=torch.float64)[1:-1])
    return net, denoiser, y, calibration_of(net, levels, process, binding=binding)


def loss(eps_hat, eps):
    return float((eps_hat.double() - eps).square().mean())


@torch.inference_mode()
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("through", ["module", "Denoiser"])
def test_a_call_that_rearranges_is_corrected_at_the_right_noise_level(name, through):
    net, denoiser, y, cal = arranged(name)
    eps, x0, t = randn(4, *SHAPE), randn(4, *SHAPE, seed=1), cal.t
    x_t = denoiser.process.noised(x0, eps, t).float()
    before = denoiser.eps(x_t, t, y)
    expected = by_definition(cal, before, x_t, t)  # the network predicts eps
    with trueup.attach(net if through == "module" else denoiser, cal):
        after = denoiser.eps(x_t, t, y)
        assert denoiser.corrected
        with denoiser.bare():
            assert torch.equal(denoiser.eps(x_t, t, y), before)
    assert close(after, expected, 1e-4)
    assert loss(after, eps) == pytest.approx(loss(expected, eps), rel=1e-4)
    assert not close(by_definition(cal, before, x_t, t.flip(0)), expected, 0.1)  # levels can be told apart
    assert torch.equal(denoiser.eps(x_t, t, y), before)


DOES_MORE = {
    "rescales": lambda net: lambda x, t: 2 * net(0.5 * x, t) - x,
    "adds": lambda net: lambda x, t: net(x, t) + 0.1,
    "log t": lambda net: lambda x, t: net(x, t.log()),
    "twice": lambda net: lambda x, t: 0.5 * (net(x, t) + net(x.flip(-1), t).flip(-1)),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", DOES_MORE)
def test_a_call_that_does_more_is_corrected_around_the_call(name):
    net = TimeSecond().eval()
    denoiser = trueup.Denoiser(net, CONTINUOUS, "velocity", SHAPE, call=DOES_MORE[name](net))
    assert denoiser.binding() is None
    cal = calibration_of(net, [0.2, 0.5, 0.8], CONTINUOUS, kind="velocity", binding=None)
    x_t, t = randn(3, *SHAPE), cal.t
    before, bare = denoiser(x_t, t), net(x_t, t)
    with pytest.raises(MismatchError, match="attach to that Denoiser"):
        trueup.attach(net, cal)
    attachment = trueup.attach(denoiser, cal)
    assert attachment.active
    assert denoiser.corrected
    assert close(denoiser(x_t, t), by_definition(cal, before, x_t, t), 1e-5)
    assert torch.equal(net(x_t, t), bare)
    with denoiser.bare():
        assert torch.equal(denoiser(x_t, t), before)
    with pytest.raises(AttachError, match="already attached"):
        trueup.attach(denoiser, cal)
    attachment.remove()
    assert torch.equal(denoiser(x_t, t), before)
    trueup.attach(denoiser, cal)
    assert detach(denoiser)
    assert not detach(denoiser)
    assert torch.equal(denoiser(x_t, t), before)


def test_a_denoiser_that_calls_its_network_otherwise_is_refused():
    """Calibrated through net(x, t / 1000), attached where the same network is told t: another noise level."""
    net, denoiser, _, cal = arranged("t / 1000")
    with trueup.attach(denoiser, cal):
        pass
    for call in (None, lambda x, t: net(x, t / 999), lambda x, t: 2 * net(x, t / 1000)):
        other = trueup.Denoiser(net, denoiser.process, "noise", SHAPE, call=call)
        with pytest.raises(MismatchError, match="calls its network otherwise"):
            trueup.attach(other, cal)
        trueup.attach(other, cal, force=True).remove()


@torch.inference_mode()
def test_a_call_that_only_adds_an_argument_corrects_the_network_itself(tiny):
    denoiser = trueup.Denoiser(tiny, LINEAR, "noise", SHAPE, call=lambda x_t, t: tiny(x_t, t, sigma=3.0))
    cal = calibration_of(tiny, binding=denoiser.binding())
    x_t, t = randn(2, *SHAPE), torch.tensor([50, 700])
    before = denoiser(x_t, t)
    with trueup.attach(tiny, cal):
        assert close(denoiser(x_t, t), by_definition(cal, before, x_t, t), 1e-5)


@torch.inference_mode()
def test_a_network_that_is_a_function_is_corrected_in_its_denoiser():
    denoiser = trueup.Denoiser(lambda x_t, t: 0.9 * x_t, CONTINUOUS, "data", SHAPE)
    cal = make(SHAPE, levels=[0.2, 0.6], kind="data", binding=None)
    cal.provenance["weights"] = {}
    x_t, t = randn(2, *SHAPE), torch.tensor([0.2, 0.6])
    with trueup.attach(denoiser, cal):
        assert close(denoiser(x_t, t), by_definition(cal, 0.9 * x_t, x_t, t), 1e-4)
    assert torch.equal(denoiser(x_t, t), 0.9 * x_t)


# What networks return


@torch.inference_mode()
def test_a_tuple_comes_back_as_a_tuple(unet, cal):
    x_t = randn(2, *SHAPE)
    with trueup.attach(unet, cal):
        (plain,) = unet(x_t, 50, return_dict=False)
        assert torch.equal(plain, unet(sample=x_t, timestep=50).sample)


Named = namedtuple("Named", ["extra", "sample"])


@pytest.mark.parametrize("wrap", [lambda v: [v, 3], lambda v: (v, 3), lambda v: Named(3, v)])
def test_other_outputs_keep_their_form(tiny, wrap):
    class Wrapping(Tiny):
        def forward(self, x, t):
            return wrap(super().forward(x, t))

    net, x_t = Wrapping(), randn(2, *SHAPE)
    cal = calibration_of(net)
    expected = wrap(CorrectOutput(cal).correct(tiny(x_t, 300), x_t, 300))
    with trueup.attach(net, cal):
        got = net(x_t, 300)
    assert type(got) is type(expected)
    assert all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(got, expected, strict=True)
    )


# On and off


@torch.inference_mode()
def test_leaving_restores_the_model_bit_for_bit(unet, cal):
    x_t = randn(2, *SHAPE)
    before = unet(x_t, 50).sample
    handle = trueup.attach(unet, cal)
    assert not torch.equal(unet(x_t, 50).sample, before)
    assert handle.active
    handle.remove()
    handle.remove()
    assert not handle.active
    assert torch.equal(unet(x_t, 50).sample, before)
    with pytest.raises(RuntimeError, match="midway"), trueup.attach(unet, cal):
        raise RuntimeError("midway")
    assert torch.equal(unet(x_t, 50).sample, before)
    assert not unet._forward_hooks
    assert not unet._forward_hooks_with_kwargs


@torch.inference_mode()
def test_an_attachment_made_by_itself_is_on_within_its_blocks_only(tiny):
    attachment, x_t = Attachment(tiny, calibration_of(tiny)), randn(2, *SHAPE)
    before = tiny(x_t, 300)
    for _ in range(2):
        assert not attachment.active
        assert torch.equal(tiny(x_t, 300), before)
        with attachment:
            after = tiny(x_t, 300)
            assert not torch.equal(after, before)
    for _ in range(2):
        with attachment.at_work():
            assert torch.equal(tiny(x_t, 300), after)
            with pytest.raises(AttachError, match="already attached"):
                trueup.attach(tiny, attachment.calibration)
        assert attachment.active  # and at rest
        assert not corrections(tiny)
        assert torch.equal(tiny(x_t, 300), before)
        with trueup.attach(tiny, attachment.calibration):
            assert torch.equal(tiny(x_t, 300), after)
    attachment.remove()
    assert not tiny._forward_hooks


def test_a_second_attach_is_refused(unet, cal):
    with trueup.attach(unet, cal), pytest.raises(AttachError, match="already attached"):
        trueup.attach(unet, cal)
    trueup.attach(unet, cal).remove()


def test_an_old_handle_leaves_a_new_calibration_alone(unet, cal):
    old = trueup.attach(unet, cal)
    assert detach(unet)
    new = trueup.attach(unet, cal)
    old.remove()
    assert not old.active
    assert new.active
    new.remove()


def test_an_empty_calibration_leaves_everything_alone(tiny):
    """Other keywords, other sizes, other outputs: what is not corrected is not looked at."""

    class Other(Tiny):
        def forward(self, *, picture, level):
            return {"out": self.conv(picture)}

    net = Other()
    with trueup.attach(net, emptied(calibration_of(net))):
        out = net(picture=randn(1, 3, 5, 7), level=None)["out"]
    assert torch.equal(out, net.conv(randn(1, 3, 5, 7)))
    denoiser = trueup.Denoiser(tiny, LINEAR, "noise", SHAPE, call=DOES_MORE["adds"](tiny))
    x_t = randn(2, *SHAPE)
    before = denoiser(x_t, 300)
    with trueup.attach(denoiser, emptied(calibration_of(tiny, binding=None))):
        assert torch.equal(denoiser(x_t, 300), before)


@torch.inference_mode()
def test_a_deep_copy_is_calibrated_on_its_own(cal):
    net = tiny_unet()
    x_t = randn(2, *SHAPE)
    before = net(x_t, 50).sample
    with trueup.attach(net, cal):
        after = net(x_t, 50).sample
        twin = copy.deepcopy(net)
    assert torch.equal(net(x_t, 50).sample, before)
    assert torch.equal(twin(x_t, 50).sample, after)
    assert detach(twin)
    assert torch.equal(twin(x_t, 50).sample, before)
    assert not detach(twin)


@torch.inference_mode()
def test_a_pickled_model_stays_calibrated(tiny):
    x_t, t = randn(2, *SHAPE), torch.tensor([50, 50])
    with trueup.attach(tiny, calibration_of(tiny)):
        after = tiny(x_t, t)
        content = io.BytesIO(pickle.dumps(tiny))
    assert torch.equal(pickle.load(content)(x_t, t), after)


@torch.inference_mode()
def test_cpu_offload_hooks_do_not_disturb_it(cal):
    from accelerate import cpu_offload

    net = tiny_unet()
    x_t = randn(2, *SHAPE)
    with trueup.attach(net, cal):
        after = net(x_t, 50).sample
        offloaded = cpu_offload(net, execution_device=torch.device("cpu"))
        assert close(offloaded(x_t, 50).sample, after, 1e-6)


# Wrappers and compiled code


@pytest.fixture(scope="module")
def alone():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fsdp(net, **settings):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), **settings)


def fsdp2(net):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net, mesh=init_device_mesh("cpu", (1,)))


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "DDP": nn.parallel.DistributedDataParallel,
    "FSDP": fsdp,
    "FSDP, own parameters": lambda net: fsdp(net, use_orig_params=True),
    "FSDP2": fsdp2,
    "compiled": lambda net: torch.compile(net, backend="eager"),
    "compiled in place": lambda net: net.compile(backend="eager") or net,
    "compiled DDP": lambda net: torch.compile(nn.parallel.DistributedDataParallel(net), backend="eager"),
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("name", WRAPPERS)
def test_corrections_are_seen_through_wrappers(alone, name):
    """On the wrapper or on the network: seen from both, refused twice, corrected, suspended, taken off."""
    torch.compiler.reset()
    net, x_t, t = Tiny(), randn(2, *SHAPE), torch.tensor([50, 700])
    cal = calibration_of(net)
    before = net(x_t, t)
    try:
        wrapper = WRAPPERS[name](net)
        wrapper(x_t, t)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        pytest.skip(f"{name} does not run here: {str(error)[:80]}")
    expected = by_definition(cal, before, x_t, t)
    for target, other in ((net, wrapper), (wrapper, net)):
        handle = trueup.attach(target, cal)
        denoiser = trueup.Denoiser(wrapper, LINEAR, "noise", SHAPE)
        assert denoiser.corrected
        assert len(corrections(wrapper)) == len(corrections(net)) == 1
        with pytest.raises(AttachError, match="already attached"):
            trueup.attach(other, cal)
        assert close(wrapper(x_t, t), expected, 1e-5)
        with denoiser.bare():
            assert close(denoiser(x_t, t), before, 1e-6)
        handle.remove()
        assert close(wrapper(x_t, t), before, 1e-6)
        handle = trueup.attach(target, cal)
        assert detach(other)
        assert not handle.active
        assert close(wrapper(x_t, t), before, 1e-6)


@torch.inference_mode()
def test_a_correction_on_a_part_of_a_network_is_seen(tiny):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny

        def forward(self, x, t):
            return self.inner(x, t)

    denoiser = trueup.Denoiser(Outer(), LINEAR, "noise", SHAPE)
    x_t = randn(2, *SHAPE)
    before = denoiser(x_t, 300)
    with trueup.attach(tiny, calibration_of(tiny)):
        assert denoiser.corrected
        assert not torch.equal(denoiser(x_t, 300), before)
        with denoiser.bare():
            assert torch.equal(denoiser(x_t, 300), before)
    assert not denoiser.corrected


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_network_is_corrected_and_a_scripted_one_refused():
    class Simple(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x, t):
            return self.conv(x)

    net, x_t, t = Simple(), randn(2, *SHAPE), torch.tensor([50, 700])
    cal, traced = calibration_of(net), torch.jit.trace(net, (x_t, t))
    with trueup.attach(traced, cal):
        assert close(traced(x_t, t), by_definition(cal, net(x_t, t), x_t, t), 1e-5)
    with pytest.raises(AttachError, match="takes no forward hooks"):
        trueup.attach(torch.jit.script(net), cal)


@torch.inference_mode()
@pytest.mark.parametrize("order", ["attach first", "compile first", "attach to the compiled"])
def test_compiled_models_are_corrected_and_restored(tiny, order):
    torch.compiler.reset()
    cal, x_t, t = calibration_of(tiny), randn(2, *SHAPE), torch.tensor([50, 300])
    before = tiny(x_t, t)
    with trueup.attach(tiny, cal):
        after = tiny(x_t, t)
    fast = None
    if order != "attach first":
        fast = torch.compile(tiny, backend="eager")
        assert torch.equal(fast(x_t, t), before)
    with trueup.attach(fast if order == "attach to the compiled" else tiny, cal):
        if fast is None:
            fast = torch.compile(tiny, backend="eager", fullgraph=True)
        assert close(fast(x_t, t), after, 1e-6)
        with pytest.raises(AttachError, match="already attached"):
            trueup.attach(fast, cal)
    assert torch.equal(fast(x_t, t), before)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("eager", torch.float32), ("eager", torch.float64), ("inductor", torch.float32)],
)
def test_a_network_inside_a_larger_compiled_function_is_corrected_and_restored(tiny, backend, dtype):
    """Compiled before, so that it knows of no hook; attached, at rest, taken off: each time it is noticed."""
    torch.compiler.reset()
    tiny.to(dtype)
    near = 1e-5 if dtype == torch.float32 else 1e-6  # a U-Net's rounding, in another order
    cal, x_t, t = calibration_of(tiny), randn(2, *SHAPE, dtype=dtype), torch.tensor([50, 300])

    def step(x_t, t):
        return x_t - 0.1 * tiny(x_t, t)

    fast = torch.compile(step, backend=backend, fullgraph=True)
    try:
        before = fast(x_t, t)
    except Exception as error:
        if backend == "eager":
            raise
        pytest.skip(f"inductor does not run here: {str(error)[:80]}")
    if backend == "inductor" and not close(before, step(x_t, t), near):
        pytest.skip("inductor is wrong here about the bare network")  # seen with AVX2 forced on other CPUs
    attachment = Attachment(tiny, cal)
    with attachment:
        assert close(fast(x_t, t), step(x_t, t), near)
        assert not close(step(x_t, t), before, 1e-3)
    with attachment.at_work():
        assert close(fast(x_t, t), step(x_t, t), near)
        assert not close(step(x_t, t), before, 1e-3)
    assert torch.equal(fast(x_t, t), before)  # it rests
    attachment.remove()
    assert torch.equal(fast(x_t, t), before)
    if backend == "inductor":  # which takes a C compiler's time, and notices no more than eager does
        return
    with attachment:
        assert close(fast(x_t, t), step(x_t, t), near)
        assert detach(tiny)
        assert torch.equal(fast(x_t, t), before)
    torch._dynamo.utils.counters.clear()  # as a benchmark does: compiled code is still there
    with attachment:
        assert close(fast(x_t, t), step(x_t, t), near)
    assert torch.equal(fast(x_t, t), before)


@torch.inference_mode()
@pytest.mark.parametrize("t", [300, torch.tensor(300), torch.tensor([300.5])])
def test_a_compiled_model_takes_scalar_times(tiny, t):
    torch.compiler.reset()
    x_t = randn(2, *SHAPE)
    with trueup.attach(tiny, calibration_of(tiny)):
        eager = tiny(x_t, t)
        fast = torch.compile(tiny, backend="eager", fullgraph=True)
        assert close(fast(x_t, t), eager, 1e-6)


# Whom it is for


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
    x_t = randn(2, *SHAPE, seed=4)
    for t in scheduler.timesteps:
        output = by_definition(cal, unet(x_t, t).sample, x_t, t).float()
        x_t = scheduler.step(output, t, x_t).prev_sample
    theirs = (x_t / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    assert abs(ours - theirs).max() < 1e-3


def test_one_calibration_serves_other_schedulers_of_the_same_process(unet, cal):
    trueup.attach(DDIMPipeline(unet, DPMSolverMultistepScheduler()), cal).remove()


def test_wrong_targets_are_refused_in_one_line(cal):
    for target in ("some/path", 3, lambda x, t: x):
        with pytest.raises(AttachError) as caught:
            trueup.attach(target, cal)
        assert "\n" not in str(caught.value)


def test_a_calibration_may_be_given_as_its_file(unet, cal, tmp_path):
    path = tmp_path / "x.trueup.safetensors"
    cal.save(path)
    x_t = randn(2, *SHAPE)
    with trueup.attach(unet, cal):
        one = unet(x_t, 50).sample
    with trueup.attach(unet, path):
        assert close(unet(x_t, 50).sample, one, 1e-5)  # stored as float32
    with pytest.raises(AttachError, match="expected a Calibration or its file, not int"):
        trueup.attach(unet, 3)


# Times


def test_times_a_little_beyond_are_those_of_the_end(tiny):
    hook = CorrectOutput(calibration_of(tiny))
    output, x_t = randn(1, *SHAPE), randn(1, *SHAPE)
    assert torch.equal(hook.correct(output, x_t, -5), hook.correct(output, x_t, 0))
    for t in (5000.0, math.inf, math.nan):
        with pytest.raises(AttachError, match="called at t ="):
            hook.correct(output, x_t, t)


def test_times_that_no_process_has_are_refused():
    """A network told t where it was trained on t/1000 gives nonsense, which a correction would hide."""
    network = Tiny()
    cal = make(shape=(3, 8, 8), network=network)
    x = torch.randn(4, *cal.shape)
    with trueup.attach(network, cal):
        for t in (torch.full((4,), 900.0), torch.tensor(900.0)):
            with pytest.raises(AttachError, match="called at t = 900"):
                network(x, t)
