"""Where a network's own call holds x_t, t and the condition, and what lies around a network."""

import math

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

import trueup
from trueup.denoiser import Binding, Denoiser, corrections, fingerprint, unwrapped
from trueup.denoiser.binding import Place
from trueup.errors import AttachError
from trueup.process import EDM, VE, ContinuousVP, DiscreteVP, Flow

from calibrations import make

pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching")  # to one process, as there is
SHAPE = (2, 4, 4)
PROCESSES = {
    "discrete": DiscreteVP.linear(),
    "two steps": DiscreteVP([0.9, 0.1]),
    "continuous": ContinuousVP(),
    "ve": VE(),
    "edm": EDM(),
    "flow": Flow(),
    "flow, 1000": Flow(1000.0),
}


class Net(nn.Module):
    """Sees everything it is given."""

    def __init__(self, channels: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(channels, 2, 1)

    def forward(self, x, t, y=None, **more):
        seen = torch.sin(t.float()).flatten() + (0 if y is None else 0.1 * y)
        return self.conv(x) + seen[:, None, None, None]


class TimeFirst(Net):
    def forward(self, t, x):
        return super().forward(x, t)


class LabelFirst(Net):
    def forward(self, x, cls, t):
        return super().forward(x, t, cls)


class OtherNames(Net):
    def forward(self, *, noisy, noise_level, kind=None):
        return super().forward(noisy, noise_level, kind)


class Dictionary(Net):
    def forward(self, x, t):
        return {"eps": super().forward(x, t)}


def binding(net, call=None, process="continuous", y=None):
    conditional = y is not None
    denoiser = Denoiser(net, PROCESSES[process], "noise", SHAPE, call=call, conditional=conditional)
    return denoiser.binding(y)


def line(found: Binding) -> tuple[float, float]:
    return found.scale, found.offset


NET = Net()


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x, t: NET(x, t), (1.0, 0.0)),
        (lambda x, t: NET(x, t / 1000), (0.001, 0.0)),
        (lambda x, t: NET(x, 999 * t), (999.0, 0.0)),
        (lambda x, t: NET(x, 1000.0 * t), (1000.0, 0.0)),
        (lambda x, t: NET(x, 1 - t), (-1.0, 1.0)),
        (lambda x, t: NET(x, 1000 - t), (-1.0, 1000.0)),
        (lambda x, t: NET(x, t + 1), (1.0, 1.0)),
        (lambda x, t: NET(x, t[:, None]), (1.0, 0.0)),
        (lambda x, t: NET(x, t.double()), (1.0, 0.0)),
        (lambda x, t: NET(x, t[:, None, None, None] * 0.25), (0.25, 0.0)),
        (lambda x, t: NET(x, t * 0.37 + 0.11), (0.37, 0.11)),
    ],
    ids=["t", "t/1000", "999t", "1000t", "1-t", "1000-t", "t+1", "t[:,None]", "double", "t/4", "0.37t+0.11"],
)
def test_the_time_is_read_back_from_any_line(process, call, expected):
    """It was never looked at: a correction found at t was applied at t / 1000."""
    found = binding(NET, call, process)
    assert (found.x, found.t) == (Place(0, "x"), Place(1, "t"))
    # Fitted through float32 times where the numbers are not round: a few of its last places of the largest.
    largest = abs(expected[0]) * max(map(abs, (PROCESSES[process].t_min, PROCESSES[process].t_max)))
    assert found.scale == pytest.approx(expected[0], rel=1e-5)
    assert found.offset == pytest.approx(expected[1], abs=1e-6 * (largest + abs(expected[1])))
    if expected != (0.37, 0.11):
        assert found.scale == expected[0]
    if expected[0] in (1.0, -1.0):
        assert found.offset == expected[1]


@pytest.mark.parametrize("process", [name for name in PROCESSES if name != "two steps"])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: torch.log(t.float().abs() + 1),
        lambda t: torch.exp(t.float() / t.max().clamp_min(1)),
        lambda t: t.float() ** 2,
        lambda t: t.float().clamp(max=float(t.max()) - 1e-2),
        lambda t: torch.zeros_like(t),
        lambda t: t[:1],
        lambda t: t.flip(0),
        lambda t: t[0].item(),
        lambda t: t * math.nan,
    ],
    ids=["log", "exp", "square", "clamp", "constant", "the first", "other rows", "a number", "nan"],
)
def test_a_time_that_is_no_line_is_left_to_the_denoiser(process, change):
    class Any(Net):
        def forward(self, x, t):
            return self.conv(x)

    net = Any()
    assert binding(net, lambda x, t: net(x, change(t)), process) is None


def test_a_time_clamped_at_one_end_only_is_noticed():
    for name, process in PROCESSES.items():
        if name != "two steps":
            middle = 0.5 * (process.t_min + process.t_max)
            assert binding(NET, lambda x, t, m=middle: NET(x, t.float().clamp(min=m)), name) is None
            assert binding(NET, lambda x, t, m=middle: NET(x, t.float().clamp(max=m)), name) is None


def test_arguments_are_found_in_any_order_and_under_any_name():
    net = TimeFirst()
    found = binding(net, lambda x, t: net(t, x))
    assert (found.x, found.t, found.y) == (Place(1, "x"), Place(0, "t"), None)
    y = torch.tensor([3, 4])
    net = LabelFirst()
    found = binding(net, lambda x, t, y: net(x, y, t * 10), y=y)
    assert (found.x, found.y, found.t) == (Place(0, "x"), Place(1, "cls"), Place(2, "t"))
    assert line(found) == (10.0, 0.0)
    net = OtherNames()
    found = binding(net, lambda x, t, y: net(noisy=x, kind=y, noise_level=1 - t), y=y)
    assert (found.x, found.t) == (Place(None, "noisy"), Place(None, "noise_level"))
    assert found.y == Place(None, "kind")
    assert line(found) == (-1.0, 1.0)
    found = binding(NET, lambda x, t: NET(t=t, x=x))
    assert (found.x, found.t) == (Place(0, "x"), Place(1, "t"))
    found = binding(NET, lambda x, t: NET(x, t, extra=torch.ones(3)))
    assert found.t == Place(1, "t")


def test_an_argument_is_found_however_it_is_passed():
    place = Place(1, "t")
    assert place.of((5, 7), {}) == 7
    assert place.of((5,), {"t": 7}) == 7
    for args, kwargs in (((5,), {}), ((5,), {"time": 7})):
        with pytest.raises(AttachError, match="called without its argument t"):
            place.of(args, kwargs)


@pytest.mark.parametrize(
    "call",
    [
        lambda net, x, t: -net(x, t),
        lambda net, x, t: net(x, t) + 1e-3,
        lambda net, x, t: net(x, t).add_(1),
        lambda net, x, t: net(x, t) + net(x, t),
        lambda net, x, t: [net(x, t), net(x, t)][1],
        lambda net, x, t: x,
        lambda net, x, t: net(2 * x, t),
        lambda net, x, t: net(x.mul_(2), t),
        lambda net, x, t: net(x * (1 + (t > 0.5).all()), t),
        lambda net, x, t: net(x.flip(-1), t),
        lambda net, x, t: net(x, t).flip(-1),
        lambda net, x, t: net(torch.cat([x, x]), torch.cat([t, t]))[:2],
    ],
    ids=[
        "negated",
        "added to",
        "added to in place",
        "twice, added",
        "twice",
        "not called",
        "scaled input",
        "scaled input in place",
        "input scaled at some times",
        "mirrored input",
        "mirrored output",
        "guidance",
    ],
)
def test_a_call_that_does_more_than_pass_on_is_left_to_the_denoiser(call):
    assert binding(NET, lambda x, t: call(NET, x, t)) is None


def test_an_input_with_a_condition_is_left_to_the_denoiser():
    net, condition = Net(channels=3), torch.ones(2, 1, 4, 4)
    assert binding(net, lambda x, t: net(torch.cat([x, condition[: len(x)]], 1), t)) is None


def test_a_network_that_returns_no_tensor_is_left_to_the_denoiser():
    net = Dictionary()
    assert binding(net, lambda x, t: net(x, t)["eps"]) is None


def test_a_learned_variance_may_be_cut_off():
    class Both(Net):
        def forward(self, x, t):
            return torch.cat([super().forward(x, t)] * 2, 1)

    net = Both()
    assert line(binding(net, lambda x, t: net(x, t / 10)[:, :2])) == (0.1, 0.0)


def test_a_function_has_no_call_of_its_own():
    assert binding(lambda x, t: x) is None


def test_without_a_call_x_comes_first_and_the_time_second_whatever_they_are_called():
    class Odd(Net):
        def forward(self, sigma, temperature, timestep=None):
            return super().forward(sigma, temperature)

    found = binding(Odd())
    assert (found.x, found.t, found.y) == (Place(0, "sigma"), Place(1, "temperature"), None)
    assert binding(NET, y=torch.tensor([1])).y == Place(2, "y")


def test_a_binding_cannot_be_found_without_a_label_but_later_with_one():
    denoiser = Denoiser(
        NET, ContinuousVP(), "noise", SHAPE, call=lambda x, t, y: NET(x, t, y), conditional=True
    )
    assert denoiser.binding() is None
    assert denoiser.binding(torch.tensor([1])).y == Place(2, "y")


def test_binding_survives_as_plain_values():
    found = binding(NET, lambda x, t, y: NET(x, t / 1000, y), y=torch.tensor([1]))
    assert Binding.from_settings(found.settings()) == found


def test_looking_leaves_nothing_behind():
    net = Net().train()
    hooks = dict(net._forward_hooks)
    binding(net, lambda x, t: net(x, t / 1000))
    assert net._forward_hooks == hooks
    assert net.training


# What lies around a network


@pytest.fixture(scope="module")
def group():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(net):
    return torch.compile(net, backend="eager")


WRAPPERS = {
    "compile": compiled,
    "DataParallel": nn.DataParallel,
    "DDP": DDP,
    "FSDP": lambda net: FSDP(net, use_orig_params=True, device_id=torch.device("cpu")),
    "DDP of compiled": lambda net: DDP(compiled(net)),
    "compiled DDP": lambda net: compiled(DDP(net)),
    "compiled DataParallel of compiled": lambda net: compiled(nn.DataParallel(compiled(net))),
}


class Hook:
    corrects_output = enabled = True

    def __call__(self, module, args, kwargs, raw):
        return raw + 1 if self.enabled else raw


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_correction_is_seen_through_every_wrapper(name, group):
    """A corrected network was measured as if it were bare."""
    net = Net()
    x_t, t = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0)), torch.tensor([0.2, 0.7])
    with torch.no_grad():
        plain = net(x_t, t)
    net.register_forward_hook(Hook(), with_kwargs=True)
    wrapped = WRAPPERS[name](net)
    assert unwrapped(wrapped) is net
    assert len(corrections(wrapped)) == 1
    denoiser = Denoiser(wrapped, ContinuousVP(), "noise", SHAPE)
    assert denoiser.corrected
    assert denoiser.description == "Net"
    with torch.no_grad():
        torch.testing.assert_close(denoiser.predict(x_t, t), plain + 1)
        with denoiser.bare():
            torch.testing.assert_close(denoiser.predict(x_t, t), plain)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_call_is_read_through_every_wrapper(name, group):
    net = Net()
    wrapped = WRAPPERS[name](net)
    found = binding(wrapped, lambda x, t: wrapped(x, t / 1000))
    assert (found.x, found.t, line(found)) == (Place(0, "x"), Place(1, "t"), (0.001, 0.0))
    assert binding(wrapped).t == Place(1, "t")


class PassesOn(nn.Module):
    """Of which nobody can read what it takes, as PEFT's models."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, *args, **kwargs):
        return self.inside(*args, **kwargs)


def with_lora(net):
    return get_peft_model(net, LoraConfig(target_modules=["conv"]))


@pytest.mark.parametrize("wrap", [PassesOn, with_lora])
def test_a_network_inside_one_that_passes_everything_on_says_what_it_is_called_with(wrap):
    """It is corrected alike, called by place or by name."""
    wrapped = wrap(Net())
    found = binding(wrapped)
    assert (found.x, found.t) == (Place(0, "x"), Place(1, "t"))
    calibration = make(SHAPE, ContinuousVP(), binding=found, network=wrapped)
    x, t = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0)), torch.tensor([0.5, 0.5])
    with torch.no_grad():
        bare = wrapped(x, t)
        with trueup.attach(wrapped, calibration):
            assert torch.equal(wrapped(x=x, t=t), wrapped(x, t))
            assert not torch.equal(wrapped(x=x, t=t), bare)


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_weights_are_the_same(name, group):
    assert fingerprint(WRAPPERS[name](Net())) == fingerprint(Net())


def test_parts_that_are_wrapped_do_not_change_the_weights(group):
    whole = nn.Sequential(Net(), Net())
    parts = nn.Sequential(compiled(Net()), WRAPPERS["FSDP"](Net()))
    assert fingerprint(parts) == fingerprint(whole)
