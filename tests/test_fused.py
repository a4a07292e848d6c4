"""The fused kernel against the operations it stands in for: on a GPU, or in Triton's interpreter."""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import trueup
from trueup import process
from trueup.calibration import tables
from trueup.calibration.hook import CorrectOutput

from calibrations import by_definition, make

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def kernel(fused, hook, output, x_t, t):
    """What the hook would hand the kernel."""
    made = hook._tables(DEVICE, torch.float32, tuple(output.shape[2:]))
    parts = (made.constant, made.slopes, made.bands, made.forward)
    assert fused.fits(output, x_t)
    times = t.reshape(-1).to(DEVICE)
    searched = fused.correct(output, x_t, times, made.between(times), made.knots, *parts).cpu()
    knots = hook._knots(times, None, output, made)
    told = fused.correct(output, x_t, None, made.boundaries, knots, *parts).cpu()
    assert torch.equal(searched, told)
    return searched


def operations(hook, output, x_t, t):
    """What the hook does where there is no kernel, on the CPU."""
    return hook.correct(output.cpu().float(), x_t.cpu().float(), t.cpu())


def scale(*tensors):
    return max(float(v.abs().max()) for v in tensors)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 7, 12), (4, 17, 9), (2, 64, 48)])
@pytest.mark.parametrize("t", [torch.tensor(0.3), torch.tensor([0.2, 0.3, 0.5, 0.6])])
@pytest.mark.parametrize("keep", [(), (0, 1), range(99)])
def test_the_kernel_does_what_the_operations_do(fused, shape, t, keep):
    cal = make(shape, kind="velocity", levels=[0.2, 0.6], keep=keep)
    hook = CorrectOutput(cal)
    generator = torch.Generator().manual_seed(0)
    output, x_t = torch.randn(2, 4, *shape, generator=generator).to(DEVICE)
    got = kernel(fused, hook, output, x_t, t)
    expected = operations(hook, output, x_t, t)
    size = scale(expected - output.cpu())
    assert torch.allclose(got, expected, rtol=0, atol=2e-5 * size)  # float32 sums in another order
    exact = by_definition(cal, output.cpu(), x_t.cpu(), t)
    assert torch.allclose(got.double(), exact, rtol=0, atol=5e-3 * size)  # and times from a table
    assert size > 0.05


@pytest.mark.parametrize("kind", ["noise", "data", "flow", "edm"])
def test_gains_reach_the_band_and_channel_they_are_for(fused, kind):
    """One band of one channel alone: a gain read from a neighbour would change others."""
    cal = make((3, 9, 8), kind=kind, levels=[0.2, 0.6], keep=())
    a, d = cal.correction.a, cal.correction.d
    a[:, [0, 2]], d[:, [0, 2]] = 0, 0
    a[:, 1, [0, 1, 3, 4]], d[:, 1, [0, 1, 2, 4]] = 0, 0
    hook = CorrectOutput(cal)
    output, x_t = torch.randn(2, 2, 3, 9, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    t = torch.tensor([0.25, 0.55])
    got = kernel(fused, hook, output, x_t, t)
    assert torch.equal(got[:, [0, 2]], output[:, [0, 2]].cpu())
    expected = operations(hook, output, x_t, t)
    assert torch.allclose(got, expected, rtol=0, atol=2e-5 * scale(expected, output))
    assert not torch.allclose(got[:, 1], output[:, 1].cpu(), atol=1e-2)


def test_slices_half_precision_and_a_narrow_box(fused):
    cal = make((2, 8, 8), kind="velocity", levels=[0.2, 0.6], keep=(0, 1))
    cal.correction.a[..., 2:], cal.correction.d[..., 2:] = 0, 0  # only the lowest frequencies are corrected
    hook = CorrectOutput(cal)
    assert [m.shape for m in hook._tables(DEVICE, torch.float32, (8, 8)).forward] == [(2, 8), (2, 8)]
    both = torch.randn(2, 4, 4, 8, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE).half()
    output, x_t, t = both[0, :, :2], both[1, :, 2:], torch.tensor(0.4)  # strided over the batch
    got = kernel(fused, hook, output, x_t, t)
    assert got.dtype == torch.float16
    expected = operations(hook, output, x_t, t)
    assert torch.allclose(got.float(), expected, rtol=0, atol=1e-3 * scale(expected))  # half's rounding


def test_it_declines_what_it_cannot_do(fused):
    image = torch.zeros(2, 3, 8, 8)
    assert fused.fits(image, image)
    assert not fused.fits(image, torch.zeros(2, 3, 8, 8, requires_grad=True))
    assert not fused.fits(image.double(), image)
    assert not fused.fits(image.to(memory_format=torch.channels_last), image)
    assert not fused.fits(torch.zeros(2, 3, 65, 8), torch.zeros(2, 3, 65, 8))
    assert not fused.fits(torch.zeros(2, 3, 8), torch.zeros(2, 3, 8))


def test_it_leaves_forward_mode_derivatives_to_the_operations(fused):
    image = torch.zeros(2, 3, 8, 8)
    with torch.autograd.forward_ad.dual_level():
        assert not fused.fits(torch.autograd.forward_ad.make_dual(image, image), image)
    assert torch.func.vmap(lambda x: torch.tensor(fused.fits(x[None], x[None])))(image).any().item() is False
    assert fused.fits(image, image)


def test_a_size_the_gpu_cannot_hold_is_left_to_the_operations(fused, monkeypatch):
    from triton.runtime.errors import OutOfResources

    class Fails:
        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                raise OutOfResources(81920, 65536, "shared memory")

            return launch

    assert fused.works(DEVICE, 8, 12)
    monkeypatch.setattr(fused, "_correct", Fails())
    assert not fused.works(DEVICE, 8, 12)
    found = SimpleNamespace(works=lambda device, *size: size == (8, 8))
    monkeypatch.setattr(tables, "import_module", lambda name: found)
    tables._fused_kernel.cache_clear()
    assert tables._fused_kernel(torch.device("cuda"), (8, 8)) is found
    assert tables._fused_kernel(torch.device("cuda"), (8, 12)) is None
    tables._fused_kernel.cache_clear()


def test_the_look_whether_it_works_runs_it(fused):
    assert fused.works(DEVICE, 2, 2)
    assert not fused.works(DEVICE, 65, 8)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_an_attached_network_uses_it_on_a_gpu(fused, monkeypatch):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(0.9))

        def forward(self, x, t):
            return self.gain * x + 0.1

    network = Network().to(DEVICE)
    cal = make((3, 16, 16), levels=[0.2, 0.6], network=network)
    x_t, t = torch.randn(4, 3, 16, 16, device=DEVICE), torch.full((4,), 0.4, device=DEVICE)
    used = []
    correct = fused.correct
    monkeypatch.setattr(fused, "correct", lambda *args: used.append(1) or correct(*args))
    with trueup.attach(network, cal):
        with torch.no_grad():
            fast = network(x_t, t)
        assert used
        slow = network(x_t, t)  # with gradients it takes the operations
        assert slow.requires_grad
        half = network.half()(x_t.half(), t).float()
        network.float()
    size = scale(slow)
    assert torch.allclose(fast, slow, atol=1e-5 * size)
    assert torch.allclose(half, slow, atol=5e-3 * size)


@pytest.mark.parametrize("times", [torch.tensor([0, 77, 500, 999]), torch.tensor([3.0, 77.25, 499.5, 998.0])])
def test_the_kernel_finds_the_nodes_that_bucketize_finds(fused, times):
    """Whole times, others, half precision, one time of all rows, and one expanded."""
    cal = make(
        (1, 8, 8),
        levels=[77, 500],
        noise=process.DiscreteVP.from_betas(torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)),
    )
    hook = CorrectOutput(cal)
    output, x_t = torch.randn(2, 4, 1, 8, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    made = hook._tables(DEVICE, torch.float32, (8, 8))
    parts = (made.constant, made.slopes, made.bands, made.forward)
    times = times.to(DEVICE)
    for t in (times, times[1:2], times[2:3].expand(4), times.half(), times.int()):
        got = fused.correct(output, x_t, t, made.between(t), made.knots, *parts)
        knots = hook._knots(t, None, output, made)
        assert torch.equal(got, fused.correct(output, x_t, None, made.boundaries, knots, *parts))
    assert not torch.equal(got, output)


def test_a_learned_variance_is_left_as_it_is(fused):
    cal = make((2, 8, 8), kind="velocity", levels=[0.2, 0.6])
    hook = CorrectOutput(cal)
    output, x_t = torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    got = kernel(fused, hook, output, x_t[:, :2], torch.tensor(0.4))
    assert torch.equal(got[:, 2:], output[:, 2:].cpu())
    assert torch.equal(got[:, :2], kernel(fused, hook, output[:, :2], x_t[:, :2], torch.tensor(0.4)))
    expected = operations(hook, output, x_t[:, :2], torch.tensor(0.4))
    assert torch.allclose(got, expected, rtol=0, atol=2e-5 * scale(expected))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("shape", [(3, 32, 32), (4, 64, 64), (1, 7, 12)])
def test_calls_of_a_form_that_was_seen_give_the_same_bits(fused, shape):
    """Launched directly, wherever things lie and whoever knows the times."""
    cal = make(shape, kind="velocity", levels=[0.2, 0.6])
    hook, bare = CorrectOutput(cal), CorrectOutput(cal)
    bare._launched = lambda *_: None
    whole = torch.randn(12, 2, 5, 2 * shape[0], *shape[1:], generator=torch.Generator().manual_seed(0)).to(
        DEVICE
    )
    with torch.no_grad():
        for k, t in enumerate((0.21, 0.3, 0.55, 0.6)):
            for dtype in (torch.float32, torch.float16):
                output, x_t = whole[k, 0].to(dtype), whole[k, 1, :, : shape[0]].to(dtype)
                for time in (t, torch.full((5,), t, device=DEVICE), torch.tensor(t, device=DEVICE).expand(5)):
                    got = hook.correct(output, x_t, time)
                    assert torch.equal(got, bare.correct(output, x_t, time))
                    assert not torch.equal(got, output)
                mean = output[:, : shape[0]]  # a part of a batch's memory
                assert torch.equal(hook.correct(mean, x_t, t), bare.correct(mean, x_t, t))
        ready = [launch for launch in hook._launches.values() if launch is not None]
        assert len(ready) == len(hook._launches) == 8
        flat = torch.randn(1 + 5 * whole[0, 0, 0].numel(), device=DEVICE)
        output, x_t = flat[1:].view(5, -1, *shape[1:]), whole[0, 1, :, : shape[0]]
        assert output.data_ptr() % 16
        assert torch.equal(hook.correct(output, x_t, 0.3), bare.correct(output, x_t, 0.3))
    with torch.enable_grad():
        assert hook.correct(whole[0, 0].requires_grad_(), whole[0, 1, :, : shape[0]], 0.3).requires_grad


def test_a_form_is_all_that_a_compiled_kernel_depends_on(fused):
    output, x_t, t = torch.zeros(2, 6, 8, 8), torch.zeros(2, 3, 8, 8), torch.tensor([0.1, 0.2])
    form = fused.form_of(output, x_t, t)
    assert form == fused.form_of(output + 1, x_t + 1, t + 1) is not None
    others = [
        (output.half(), x_t, t),
        (output[:1], x_t[:1], t[:1]),
        (torch.zeros(4, 6, 8, 8)[::2], x_t, t),
        (output, torch.zeros(2, 4, 8, 8)[:, :3], t),
        (output, x_t, t.double()),
        (output, x_t, t[:1].expand(2)),
        (output, x_t, 0.3),
    ]
    forms = [fused.form_of(*call) for call in others]
    assert len({form, *forms}) == 1 + len(others)
    assert fused.form_of(output, x_t, 0.3) == fused.form_of(output, x_t, 0.7)  # the host picks the row
    with torch.enable_grad():
        assert fused.form_of(output.clone().requires_grad_(), x_t, t) is None
    with torch.autograd.forward_ad.dual_level():
        assert fused.form_of(output, x_t, t) is None
    assert fused.form_of(nn.Parameter(output, requires_grad=False), x_t, t) is None


def test_a_direct_launch_is_handed_addresses(fused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # which is that of the CPU here
    knots, tables, calls = torch.zeros(9, 6), (torch.zeros(8), torch.zeros(4)), []
    ready = fused.Ready(lambda *given: calls.append(given), knots, tables, [3, 7])
    output, x_t, t = torch.zeros(2, 6, 8, 8)[:, :4], torch.zeros(2, 3, 8, 8), torch.tensor([0.1, 0.2])
    fixed = (*(table.data_ptr() for table in tables), 3, 7)
    made = ready(output, x_t, t)
    of_times = (output.data_ptr(), x_t.data_ptr(), made.data_ptr(), t.data_ptr(), knots.data_ptr(), *fixed)
    made = ready(output, x_t, 5)
    of_node = (output.data_ptr(), x_t.data_ptr(), made.data_ptr(), 0, knots[5].data_ptr(), *fixed)
    assert calls == [of_times, of_node]
    assert made.shape == output.shape
    assert made.is_contiguous()
    assert ready(torch.zeros(1 + x_t.numel())[1:].view_as(x_t), x_t, t) is None
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert ready(output, x_t, t) is None
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("triton", "amd", "expected"),
    [("3.9.0", False, "tf32x3"), ("3.3.1", False, "tf32x3"), ("3.10.0+git1", False, "tf32x3")]
    + [("3.2.0", False, "ieee"), ("3.0.0", False, "ieee"), ("3.9.0", True, "ieee")],
)
def test_old_triton_and_amd_multiply_without_matrix_units(fused, triton, amd, expected):
    assert fused.precision(triton, amd) == expected


# What Triton makes of the kernel for a GPU that is not there, as it is handed over, down to machine code.
BUILD = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trueup.calibration import fused

target, kernel = GPUTarget(*json.loads(sys.argv[1])), fused._correct
precision = fused.precision(triton.__version__, target.backend == "hip")
names, images = kernel.arg_names, ("output_at", "x_at", "corrected_at")
pointers = [name for name in names if name.endswith("_at")]
aligned = set(pointers) - {"times_at", "knots_at"}
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
for height, width in ((8, 64), (64, 64)):
    constants = {"SEARCH": True, "H": fused._tile(height), "W": fused._tile(width), "PRECISION": precision}
    types = {name: "*fp16" if name in images else "*fp32" for name in pointers} | {"bands_at": "*i32"}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in names}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    triton.compile(source, target=target, options={"num_warps": 16 if height > 32 else 4})
"""


@pytest.mark.parametrize("target", [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)])
def test_the_kernel_can_be_built_for_gpus(target, tmp_path):
    """In a process of its own: a compiler that gives up takes that along."""
    pytest.importorskip("triton", reason="Triton comes with PyTorch on machines with a GPU")
    if tuple(int(part) for part in version("triton").split(".")[:2]) < (3, 4):
        pytest.skip("needs a Triton whose compiler is called as this one is")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    path = tmp_path / "build.py"
    path.write_text(BUILD)
    command = [sys.executable, path, json.dumps(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def launched(fused, monkeypatch):
    """How often the kernel went through Triton, and how often directly, for which a copy stands in."""
    count, last = {"triton": 0, "direct": 0}, {}
    through = fused._launch

    class Compiled:
        def __getitem__(self, grid):
            def run(output, x_t, corrected, times, knots, *rest):
                count["direct"] += 1
                ctypes.memmove(corrected, last["made"].data_ptr(), last["made"].nbytes)

            return run

    def launch(output, x_t, corrected, t, knots, parts):
        count["triton"] += 1
        _, numbers, constants = through(output, x_t, corrected, t, knots, parts)
        last["made"] = corrected.clone()
        return Compiled(), numbers, constants

    monkeypatch.setattr(fused, "_launch", launch)
    monkeypatch.setattr(tables, "_fused_kernel", lambda device, spatial: fused)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return count


@pytest.mark.skipif(GPU, reason="stands in for what a GPU does")
@pytest.mark.parametrize("first", ["good", "unaligned", "not a number"])
def test_calls_are_launched_directly_whatever_the_first_was(launched, first):
    hook = CorrectOutput(make((2, 8, 8), kind="velocity", levels=[0.2, 0.6]))
    output, x_t = torch.randn(2, 2, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    odd = {"good": output, "unaligned": torch.zeros(1 + output.numel())[1:].view_as(output)}
    with torch.no_grad():
        hook.correct(odd.get(first, output * torch.nan), x_t, 0.3)
        expected = hook.correct(output, x_t, 0.3)  # ready by now, or made so
        before = launched["triton"]
        for _ in range(5):
            assert torch.equal(hook.correct(output, x_t, 0.3), expected) or first == "not a number"
    assert launched["triton"] == before
    assert launched["direct"] >= 5


@pytest.mark.skipif(GPU, reason="stands in for what a GPU does")
def test_a_form_that_another_thread_forgets_meanwhile_is_made_again(launched):
    class Forgetful(dict):
        def __contains__(self, form):
            found = super().__contains__(form)
            self.clear()
            return found

        def get(self, form, default=None):
            found = super().get(form, default)
            self.clear()
            return found

    hook = CorrectOutput(make((2, 8, 8), kind="velocity", levels=[0.2, 0.6]))
    output, x_t = torch.randn(2, 2, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = hook.correct(output, x_t, 0.3)
        hook._launches = Forgetful(hook._launches)
        for _ in range(3):
            assert torch.equal(hook.correct(output, x_t, 0.3), expected)
