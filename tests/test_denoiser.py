"""What a network looks like to us: what it may be, what it may return, and how its weights are recognised."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trueup.denoiser import Denoiser, fingerprint, in_parts, prediction
from trueup.denoiser.weights import same_weights
from trueup.errors import ModelError
from trueup.parametrization import Parametrization
from trueup.process import ContinuousVP, DiscreteVP, Flow

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
    settings = {"process": ContinuousVP(), "prediction": "noise", "shape": SHAPE, **settings}
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
    "shape", [(3, 3, 4, 6), (3, 1, 4, 6), (2, 2, 4, 6), (3, 2, 4, 5), (3, 2, 4), (3,), ()], ids=str
)
def test_an_output_of_the_wrong_shape_is_refused(shape):
    message = f"returned {shape} for .*: batch and spatial sizes must agree, and channels be 2, or 4"
    with pytest.raises(ModelError, match=message.replace("(", r"\(").replace(")", r"\)")):
        wrap(lambda x_t, t: torch.zeros(shape))(X_T, T)


# Times


def told(process, t, x_t=X_T, **settings) -> torch.Tensor:
    """What a network is told of `t`."""
    seen = []
    denoiser = wrap(lambda x_t, t: seen.append(t) or x_t, process=process, **settings)
    denoiser._whole_times = False  # asked below
    denoiser.predict(x_t, t)
    return seen[-1]


@pytest.mark.parametrize(
    "t", [7, 7.0, torch.tensor(7), torch.tensor(7.0), torch.tensor([7.0]), T * 0 + 7], ids=str
)
def test_whole_timesteps_reach_the_network_as_int64_one_per_row(t):
    assert torch.equal(told(DiscreteVP.linear(), t), torch.tensor([7, 7, 7]))
    assert torch.equal(
        told(DiscreteVP.linear(), torch.tensor([1, 2, 3], dtype=torch.int32)), torch.arange(1, 4)
    )


def test_fractional_timesteps_reach_the_network_as_they_are():
    assert torch.equal(
        told(DiscreteVP.linear(), torch.tensor([1.5, 2.0, 3.0])), torch.tensor([1.5, 2.0, 3.0])
    )
    assert torch.equal(told(DiscreteVP.linear(), 1.5), torch.full((3,), 1.5))


@pytest.mark.parametrize("t", [1, torch.tensor(1), torch.tensor([1, 1, 1])], ids=str)
def test_whole_numbers_of_a_continuous_time_are_floats(t):
    assert torch.equal(told(ContinuousVP(), t), torch.ones(3))


def test_times_are_as_fine_as_the_network():
    third = 1 / 3
    assert torch.equal(told(ContinuousVP(), third), torch.full((3,), third))
    for finer in ({"x_t": X_T.double()}, {"dtype": torch.float64}):
        assert torch.equal(told(ContinuousVP(), third, **finer), torch.full((3,), third, dtype=torch.float64))
    half = told(ContinuousVP(), torch.tensor([third] * 3, dtype=torch.float64), dtype=torch.float16)
    assert torch.equal(half, torch.full((3,), third))  # embeddings of times are made in float32


@pytest.mark.parametrize("t", [torch.tensor(0.5), torch.tensor([0.1, 0.5, 0.9])], ids=["one", "each"])
def test_a_network_may_change_the_times_it_was_given(t):
    before = t.clone()
    wrap(lambda x_t, t: x_t * t.mul_(1000)[:, None, None, None]).predict(X_T, t)
    assert torch.equal(t, before)


def test_labels_follow_the_samples_in_parts():
    seen = []

    def network(x_t, t, y):
        if len(x_t) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        seen.append((float(t), int(y)))
        return x_t

    denoiser = wrap(network, conditional=True)
    assert torch.equal(denoiser.predict(X_T, torch.tensor([0.25, 0.5, 0.75]), torch.tensor([4, 5, 6])), X_T)
    assert seen == [(0.25, 4), (0.5, 5), (0.75, 6)]


# Precision


def test_answers_are_float32_or_finer():
    module = Tiny().double()
    assert wrap(module).dtype == torch.float64
    assert wrap(module).predict(X_T, T).dtype == wrap(module).eps(X_T, T).dtype == torch.float64
    seen = []
    half = wrap(lambda x_t, t: seen.append(x_t.dtype) or x_t, dtype=torch.float16)
    assert half.predict(X_T, T).dtype == half.eps(X_T, T).dtype == torch.float32
    assert set(seen) == {torch.float16}


def test_packed_weights_do_not_say_what_a_network_is_fed():
    """Quantized networks keep 8-bit parameters: a sample cast to them would lose everything."""
    module = nn.Module()
    module.packed = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    module.forward = lambda x_t, t: x_t
    assert wrap(module).dtype == torch.float32
    module.norm = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    assert wrap(module).dtype == torch.float16


def test_eps_is_what_the_output_says_of_the_noise():
    process = ContinuousVP()
    x0, eps = torch.randn(2, 3, *SHAPE, generator=torch.Generator().manual_seed(0)).unbind()
    for name in ("noise", "data", "velocity", "score", "flow", "reversed_flow"):
        for t in (T, 0.3, torch.tensor(0.3)):
            alpha, sigma = process.scales(t, eps)
            target = Parametrization(name).target(x0, eps, alpha, sigma)
            denoiser = wrap(lambda x_t, t, target=target: target, prediction=name)
            found = denoiser.eps(process.noised(x0, eps, t), t)
            # Reading eps out of a data prediction divides float32 rounding by sigma, 0.1 here and more.
            torch.testing.assert_close(found, eps, rtol=0, atol=1e-5)


# Memory


def limited(rows: int, calls: list):
    """A network that holds so many rows at once."""

    def network(x_t, t):
        calls.append(len(x_t))
        if len(x_t) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return x_t + t[:, None, None, None]

    return network


def test_rows_that_do_not_fit_are_evaluated_in_parts_from_then_on():
    calls = []
    denoiser = wrap(limited(3, calls))
    x_t = torch.randn(8, *SHAPE)
    for _ in range(2):
        assert torch.equal(denoiser.predict(x_t, 0.5), x_t + 0.5)
    assert calls == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2]


def test_a_small_batch_does_not_make_the_next_one_small():
    calls = []
    denoiser = wrap(limited(64, calls))
    for rows in (1, 8, 3, 8, 0):
        assert denoiser.predict(torch.zeros(rows, *SHAPE), 0.5).shape == (rows, *SHAPE)
    assert calls == [1, 8, 3, 8, 0]


def test_not_even_one_row_fits():
    with pytest.raises(ModelError, match="not enough memory to evaluate the network on a single sample"):
        wrap(limited(0, [])).predict(X_T, T)


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    def network(x_t, t):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(ModelError, match="mat1 and mat2"):
        wrap(network).predict(X_T, T)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("MPS backend out of memory (MPS allocated: 17 GB)"),
    ],
    ids=lambda error: str(error)[:20],
)
def test_memory_runs_out_in_many_words(error):
    def work(part):
        if part.stop - part.start > 2:
            raise error
        return part.stop - part.start

    assert in_parts(work, 5) == ([2, 2, 1], 2)
    assert in_parts(work, 2) == ([2], None)
    assert in_parts(work, 2, 64) == ([2], 64)


# Whole timesteps


class Table(nn.Module):
    """A network with an embedding of whole timesteps, as asked for."""

    def __init__(self, how, labels=False):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.how, self.labels = nn.Embedding(1000, 1), how, labels

    def forward(self, x_t, t, y=None):
        if self.labels and y is None:
            raise TypeError("class_labels should be provided")
        return x_t + self.how(self.table, t).reshape(-1, 1, 1, 1)


HOWS = {
    "embedding": (lambda table, t: table(t), True),
    "indexed": (lambda table, t: table.weight[t], True),
    "cast": (lambda table, t: table(t.long()), True),
    "rounded": (lambda table, t: table(t.round().long()), True),
    "sinusoid": (lambda table, t: torch.sin(t / 10), False),
    "not looked at": (lambda table, t: torch.zeros(len(t)), False),
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("labels", [False, True], ids=["", "labels"])
def test_whether_only_whole_timesteps_are_told_apart_is_found_by_trying(how, labels):
    network, whole = HOWS[how]
    denoiser = wrap(Table(network, labels), process=DiscreteVP.linear(), conditional=labels)
    assert denoiser.takes_whole_times_only(torch.tensor([3]) if labels else None) == whole
    y = torch.tensor([3, 4, 5]) if labels else None
    fractional = denoiser.predict(X_T, 499.75, y)
    if whole:
        assert torch.equal(fractional, denoiser.predict(X_T, 500, y))


def test_trying_without_the_label_a_network_needs_decides_nothing():
    denoiser = wrap(Table(HOWS["sinusoid"][0], labels=True), process=DiscreteVP.linear(), conditional=True)
    with pytest.raises(TypeError, match="class_labels"):
        denoiser.takes_whole_times_only()
    assert not denoiser.takes_whole_times_only(torch.tensor([3]))


def test_continuous_times_are_never_rounded():
    assert not wrap(Table(HOWS["cast"][0]), process=Flow(1000.0)).takes_whole_times_only()


class Correction:
    """Stands in for what `attach` puts on a network: its nodes are whole timesteps, or halves of them."""

    corrects_output = True

    def __init__(self, whole: bool):
        self.enabled, self.whole = True, whole

    def __call__(self, module, args, kwargs, raw):
        t = args[1].round() if self.whole else args[1]
        return raw + torch.cos(t.float())[:, None, None, None] if self.enabled else raw


@pytest.mark.parametrize("how", ["cast", "sinusoid"])
@pytest.mark.parametrize("whole", [False, True])
def test_an_attached_correction_does_not_change_what_is_found(how, whole):
    network, expected = HOWS[how]
    module = Table(network)
    correction = Correction(whole)
    module.register_forward_hook(correction, with_kwargs=True)
    denoiser = wrap(module, process=DiscreteVP.linear())
    assert denoiser.corrected
    assert denoiser.takes_whole_times_only() == expected
    assert correction.enabled


def test_running_out_of_memory_while_trying_decides_nothing():
    """It was taken for an embedding table that refused a fractional time."""
    left = [1]

    def network(x_t, t):
        if left and (t != t.round()).any():
            left.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x_t * torch.sin(t / 10)[:, None, None, None]

    denoiser = wrap(network, process=DiscreteVP.linear())
    with pytest.raises(ModelError, match="not enough memory"):
        denoiser.takes_whole_times_only()
    assert not denoiser.takes_whole_times_only()


# States and copies


def test_bare_suspends_every_correction_and_puts_it_back_as_it_was():
    module = Tiny()
    on, off = Correction(True), Correction(True)
    off.enabled = False
    denoiser = wrap(module)
    plain = denoiser.predict(X_T, T)
    for correction in (on, off):
        module.register_forward_hook(correction, with_kwargs=True)
    assert not torch.equal(denoiser.predict(X_T, T), plain)
    with denoiser.bare():
        assert torch.equal(denoiser.predict(X_T, T), plain)
    with pytest.raises(TypeError), denoiser.bare():
        denoiser.predict(X_T)
    assert (on.enabled, off.enabled) == (True, False)


class Shift:
    """Stands in for a correction that only the Denoiser can apply."""

    enabled = corrects_output = True

    def correct(self, output, x_t, t, y=None):
        return output - t[:, None, None, None]


def test_the_denoiser_corrects_what_its_network_cannot():
    denoiser = wrap(lambda x_t, t: torch.cat([x_t, x_t], 1))
    denoiser.correction = Shift()
    assert denoiser.corrected
    both = denoiser.predict(X_T, T, variance=True)
    assert torch.equal(both, torch.cat([X_T - T[:, None, None, None], X_T], 1))
    with denoiser.bare():
        assert torch.equal(denoiser.predict(X_T, T), X_T)


def test_the_device_and_dtype_are_those_of_the_network_now():
    module = Tiny()
    denoiser = wrap(module)
    module.to("meta").half()
    assert denoiser.dtype == torch.float16
    moved = wrap(Tiny(), device="cpu")
    assert moved.device == torch.device("cpu")
    with pytest.raises(ModelError, match="device nowhere cannot be used"):
        wrap(Tiny(), device="nowhere")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_network_moved_after_wrapping_is_found_where_it_is():
    module = Tiny()
    denoiser = wrap(module)
    module.cuda()
    assert denoiser.device.type == "cuda"
    assert denoiser.predict(X_T.cuda(), T).device.type == "cuda"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_asking_for_noise_does_not_wait_for_the_device():
    denoiser, x_t = wrap(Tiny().cuda()), X_T.cuda()
    denoiser.eps(x_t, T)
    torch.cuda.set_sync_debug_mode("error")
    try:
        denoiser.eps(x_t, T)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_copies_of_a_module_run_the_copied_network():
    denoiser = wrap(Tiny())
    denoiser.correction = Shift()
    other = copy.deepcopy(denoiser)
    before = denoiser.predict(X_T, T)
    with torch.no_grad():
        other.network.conv.weight.zero_()
    other.correction.enabled = False
    assert torch.equal(denoiser.predict(X_T, T), before)
    assert not torch.equal(other.predict(X_T, T), before)


class Caller:
    def __init__(self, network):
        self.network = network

    def __call__(self, x_t, t):
        return self.network(x_t, t)

    def method(self, x_t, t):
        return self.network(x_t, t)


@pytest.mark.parametrize("method", [False, True])
def test_copies_of_an_object_that_calls_run_the_copied_network(method):
    module = Tiny()
    caller = Caller(module)
    other = copy.deepcopy(wrap(module, call=caller.method if method else caller))
    with torch.no_grad():
        other.network.conv.weight.zero_()
    torch.testing.assert_close(other.predict(X_T, T), other.network(X_T, T))


def test_a_closure_is_not_copied_as_if_it_were_its_network():
    """Functions are copied by reference: the copy ran the original network, without a word."""
    module = Tiny()
    for denoiser in (
        wrap(module, call=lambda x_t, t: module(x_t, t)),
        wrap(module, call=partial(lambda net, x_t, t: net(x_t, t), module)),
        wrap(lambda x_t, t: module(x_t, t)),
    ):
        with pytest.raises(ModelError, match="copy the network and make another Denoiser"):
            copy.deepcopy(denoiser)
    pure = copy.deepcopy(wrap(lambda x_t, t: x_t))  # nothing to share
    assert torch.equal(pure.predict(X_T, T), X_T)


def test_an_autoencoder_whose_scaling_is_not_known_is_refused():
    with pytest.raises(ModelError, match=r"trueup\.hf\.Autoencoder\(vae\)"):
        wrap(Tiny(), autoencoder=nn.Identity())


def test_unknown_labels_are_named():
    table = nn.Embedding(10, 1)
    denoiser = wrap(lambda x_t, t, y: x_t + table(y)[..., None, None], conditional=True)
    with pytest.raises(ModelError, match="does not know one of these labels"):
        denoiser.predict(X_T, T, torch.tensor([1, 2, 10]))


def test_the_same_network_with_another_batch_size():
    denoiser = wrap(Tiny(), batch_size=4)
    other = denoiser.with_batch_size(7)
    assert (denoiser.batch_size, other.batch_size) == (4, 7)
    assert other.network is denoiser.network
    assert denoiser.with_batch_size(None) is denoiser
    for wrong in (0, -1, 2.5, "8"):
        with pytest.raises(ModelError, match="batch_size is a whole number of at least 1"):
            wrap(Tiny(), batch_size=wrong)
        with pytest.raises(ModelError, match="batch_size is a whole number of at least 1"):
            denoiser.with_batch_size(wrong)


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
    assert wrap(Tiny(), prediction="data").parametrization == Parametrization("data")
    edm = Parametrization("edm", 0.5)
    assert wrap(Tiny(), prediction=edm).parametrization is edm


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"network": 3}, "must be callable, got int"),
        ({"process": "linear"}, "must be a NoiseProcess"),
        ({"prediction": "epsilon"}, "unknown prediction 'epsilon'"),
        ({"shape": (3,)}, r"\(channels, \*spatial\), got \(3,\)"),
        ({"shape": (3, 0)}, r"got \(3, 0\)"),
        ({"data_range": (1.0, -1.0)}, r"data_range is \(low, high\) with low < high"),
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


def test_a_network_that_wants_its_arguments_otherwise_is_told_of_call():
    """The commonest mistake with a module of one's own; it ended in an error of torch's."""
    swapped = nn.Conv2d(1, 1, 3, padding=1)
    for network in (lambda x: x, lambda t, x: swapped(x)):
        denoiser = Denoiser(network, DiscreteVP.linear(), "noise", (1, 4, 4))
        with pytest.raises(ModelError, match=r"cannot call the network as network\(x_t, t\).*call=lambda"):
            denoiser.eps(torch.zeros(2, 1, 4, 4), 5)
