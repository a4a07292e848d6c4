"""What a network looks like to us: what it may be, what it may return, and how its weights are recognised."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trueup.denoiser import Denoiser, fingerprint, prediction, same_weights
from trueup.errors import ModelError
from trueup.parametrization import Parametrization
from trueup.process import ContinuousVP, DiscreteVP

SHAPE = (2, 4, 6)
X_T = torch.arange(3 * 48, dtype=torch.float32).reshape(3, *SHAPE)
T = torch.tensor([0.1, 0.5, 0.9])


class Tiny(nn.Module):
    """A convolution that also sees the time."""

    def __init__(self, channels: int = 2, out: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(channels, out, 3, padding=1)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x_t, t):
        return self.conv(x_t) + self.scale * t[:, None, None, None].to(x_t.dtype)


def wrap(network, **settings) -> Denoiser:
    settings = {"process": ContinuousVP(), "parametrization": "noise", "shape": SHAPE, **settings}
    return Denoiser(network, **settings)


def test_a_function_is_a_network():
    denoiser = wrap(lambda x_t, t: x_t * t[:, None, None, None])
    torch.testing.assert_close(denoiser(X_T, T), X_T * T[:, None, None, None])
    assert denoiser.device.type == "cpu"
    assert denoiser.dtype == torch.float32
    assert denoiser.fingerprint() == {}


def test_a_module_is_a_network():
    module = Tiny()
    assert torch.equal(wrap(module)(X_T, T), module(X_T, T))


def test_a_conditional_network_gets_its_condition_and_others_do_not():
    seen = []
    wrap(lambda *args: seen.append(args) or args[0], conditional=True)(X_T, T, torch.tensor([1, 2, 3]))
    wrap(lambda *args: seen.append(args) or args[0])(X_T, T, torch.tensor([1, 2, 3]))
    assert [len(args) for args in seen] == [3, 2]
    assert seen[0][2].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x,
        lambda x: (x,),
        lambda x: [x, None],
        lambda x: (x, {"extra": 1}),
        lambda x: SimpleNamespace(sample=x),
    ],
    ids=["tensor", "tuple", "list", "tuple with more", ".sample"],
)
def test_every_form_of_output_is_read(form):
    assert torch.equal(wrap(lambda x_t, t: form(x_t + 1))(X_T, T), X_T + 1)


@pytest.mark.parametrize("raw", [None, 3.0, (), ("a",), {"sample": 1}, SimpleNamespace(sample=None)], ids=str)
def test_an_output_without_a_tensor_is_refused(raw):
    with pytest.raises(ModelError, match=f"returned {type(raw).__name__}; expected a tensor"):
        prediction(raw)


def test_a_learned_variance_is_cut_off():
    denoiser = wrap(lambda x_t, t: torch.cat([x_t + 1, torch.full_like(x_t, 99.0)], 1))
    assert torch.equal(denoiser(X_T, T), X_T + 1)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.zeros(3, 3, 4, 6), "3 channels for 2: expected 2, or 4"),
        (torch.zeros(3, 1, 4, 6), "1 channels for 2"),
        (torch.zeros(2, 2, 4, 6), "batch and spatial sizes must agree"),
        (torch.zeros(3, 2, 4, 5), "batch and spatial sizes must agree"),
        (torch.zeros(3, 2, 4), "batch and spatial sizes must agree"),
        (torch.zeros(3), "batch and spatial sizes must agree"),
        (torch.tensor(0.0), "batch and spatial sizes must agree"),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "",
)
def test_an_output_of_the_wrong_shape_is_refused(output, message):
    with pytest.raises(ModelError, match=message):
        wrap(lambda x_t, t: output)(X_T, T)


def test_whole_timesteps_reach_the_network_as_int64_and_fractional_ones_as_they_are():
    seen = []
    denoiser = wrap(lambda x_t, t: seen.append(t) or x_t, process=DiscreteVP.linear())
    denoiser(X_T, torch.tensor([1, 2, 3], dtype=torch.int32))
    denoiser(X_T, torch.tensor([1.5, 2.0, 3.0]))
    assert [t.dtype for t in seen] == [torch.int64, torch.float32]


def test_inputs_take_the_networks_dtype():
    module = Tiny().double()
    assert wrap(module).dtype == torch.float64
    assert wrap(module)(X_T, T).dtype == torch.float64
    assert wrap(lambda x_t, t: x_t, dtype=torch.float16)(X_T, T).dtype == torch.float16


def test_one_dimensional_and_volumetric_samples_work():
    for shape in ((1, 7), (2, 3, 4, 5)):
        x_t = torch.zeros(3, *shape)
        assert wrap(lambda x_t, t: x_t, shape=shape)(x_t, T).shape == x_t.shape


def test_a_call_may_stand_before_the_network():
    module = Tiny()
    denoiser = wrap(module, call=lambda x_t, t: -module(x_t, t))
    assert torch.equal(denoiser(X_T, T), -module(X_T, T))
    assert denoiser.fingerprint() == fingerprint(module)


def test_a_parametrization_may_be_given_by_name_or_whole():
    assert wrap(Tiny(), parametrization="data").parametrization == Parametrization("data")
    edm = Parametrization("edm", 0.5)
    assert wrap(Tiny(), parametrization=edm).parametrization is edm


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"network": 3}, "must be callable, got int"),
        ({"process": "linear"}, "must be a NoiseProcess"),
        ({"parametrization": "epsilon"}, "unknown parametrization 'epsilon'"),
        ({"shape": (3,)}, r"\(channels, \*spatial\), got \(3,\)"),
        ({"shape": (3, 0)}, r"got \(3, 0\)"),
    ],
    ids=str,
)
def test_nonsense_is_refused_with_a_reason(settings, message):
    with pytest.raises(ModelError, match=message):
        wrap(**{"network": Tiny(), **settings})


def test_the_same_weights_are_recognised_in_half_precision():
    ours = fingerprint(Tiny())
    assert same_weights(ours, fingerprint(Tiny()))
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        theirs = fingerprint(Tiny().to(dtype))
        assert same_weights(ours, theirs)
        assert same_weights(theirs, ours)


def test_weights_kept_in_float32_inside_a_half_network_do_not_hide_it():
    """diffusers keeps some layers in float32 when it loads a transformer in half precision."""
    mixed = Tiny().half()
    mixed.scale.data = mixed.scale.data.float()
    assert same_weights(fingerprint(Tiny()), fingerprint(mixed))


def test_float16_and_bfloat16_do_not_claim_to_be_one():
    assert not same_weights(fingerprint(Tiny().half()), fingerprint(Tiny().bfloat16()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_changed_weight_is_seen(dtype):
    changed = Tiny()
    with torch.no_grad():
        changed.conv.weight[1, 1, 2, 0] += 0.01
    assert not same_weights(fingerprint(Tiny()), fingerprint(changed.to(dtype)))


def test_a_change_too_fine_for_float16_is_seen_in_float32_only():
    changed = Tiny()
    with torch.no_grad():
        changed.scale += 1e-6
    assert not same_weights(fingerprint(Tiny()), fingerprint(changed))
    assert same_weights(fingerprint(Tiny()), fingerprint(changed.half()))


def test_names_and_shapes_are_part_of_the_weights():
    flat, square = nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False)
    square.weight.data = flat.weight.data.reshape(4, 1)
    assert not same_weights(fingerprint(flat), fingerprint(square))
    assert not same_weights(fingerprint(nn.Sequential(flat)), fingerprint(nn.ModuleDict({"a": flat})))


def test_wrappers_do_not_change_the_weights():
    module = Tiny()
    ours = fingerprint(module)
    assert fingerprint(torch.compile(module)) == ours
    assert fingerprint(nn.DataParallel(module)) == ours
    assert fingerprint(nn.DataParallel(torch.compile(module))) == ours
    inside = Tiny()
    inside.conv = torch.compile(inside.conv)  # diffusers' compile_repeated_blocks
    assert fingerprint(inside) == ours


def test_frozen_and_training_networks_have_the_same_weights():
    assert fingerprint(Tiny().train()) == fingerprint(Tiny().eval().requires_grad_(False))


def test_large_tensors_are_told_apart_by_a_sample_of_their_weights():
    """Another checkpoint moves every weight; the hash reads some thousands of each tensor."""
    torch.manual_seed(0)
    one, other = nn.Linear(300, 300), nn.Linear(300, 300)
    assert not same_weights(fingerprint(one), fingerprint(other))
    other.load_state_dict(one.state_dict())
    assert same_weights(fingerprint(one), fingerprint(other))


@pytest.mark.parametrize(
    "network",
    [lambda x_t, t: x_t, nn.Identity(), nn.Linear(2, 2, device="meta")],
    ids=["function", "no parameters", "meta"],
)
def test_what_holds_no_weights_has_no_fingerprint(network):
    assert fingerprint(network) == {}
    assert not same_weights({}, {})
    assert not same_weights(fingerprint(Tiny()), {})
