"""The fused kernel against the operations it stands in for: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from torch import nn

import trueup
from trueup.hook import CorrectOutput
from trueup.process import ContinuousVP

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


@pytest.fixture(scope="module")
def fused():
    pytest.importorskip("triton", reason="Triton comes with PyTorch on machines with a GPU")
    with pytest.MonkeyPatch.context() as patch:
        if not GPU:
            patch.setenv("TRITON_INTERPRET", "1")  # read when the kernel is declared
        import trueup.fused

        yield trueup.fused


def hook_for(shape):
    denoiser = trueup.Denoiser(
        lambda x_t, t: 0.9 * x_t + 0.1, ContinuousVP(), "velocity", shape, data_range=None
    )
    return CorrectOutput(
        trueup.calibrate(denoiser, torch.randn(12, *shape), estimator="paired", levels=[0.2, 0.6])
    )


def operations(hook, output, x_t, t):
    """What the hook does where there is no kernel, on the CPU."""
    return hook.correct(output.cpu().float(), x_t.cpu().float(), t.cpu())


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 7, 12), (4, 17, 9), (2, 64, 48)])
@pytest.mark.parametrize("t", [torch.tensor(0.3), torch.tensor([0.2, 0.3, 0.5, 0.6])])
def test_the_kernel_does_what_the_operations_do(fused, shape, t):
    hook = hook_for(shape)
    output, x_t = torch.randn(2, 4, *shape, device=DEVICE)
    tables = hook._tables(DEVICE, torch.float32)
    assert fused.fits(output, x_t)
    got = fused.correct(output, x_t, hook._rows(t, 4, tables), tables.forward)
    assert torch.allclose(
        got.cpu(), operations(hook, output, x_t, t), atol=1e-5
    )  # float32 sums in another order
    assert not torch.allclose(got, output, atol=1e-2)


def test_slices_half_precision_and_a_narrow_box(fused):
    hook = hook_for((2, 8, 8))
    hook.matrices = [m[:3] for m in hook.matrices]  # as if only the lowest frequencies were corrected
    hook.table = hook.table.reshape(-1, 2, 2, 2, 8, 8)[..., :3, :3].flatten(1)
    both = torch.randn(2, 4, 4, 8, 8, device=DEVICE).half()
    output, x_t, t = both[0, :, :2], both[1, :, 2:], torch.tensor(0.4)  # strided over the batch
    tables = hook._tables(DEVICE, torch.float32)
    assert fused.fits(output, x_t)
    got = fused.correct(output, x_t, hook._rows(t, 4, tables), tables.forward)
    assert got.dtype == torch.float16
    assert torch.allclose(got.cpu().float(), operations(hook, output, x_t, t), atol=4e-3)  # half's rounding


def test_it_declines_what_it_cannot_do(fused):
    image = torch.zeros(2, 3, 8, 8)
    assert fused.fits(image, image)
    assert not fused.fits(image, torch.zeros(2, 3, 8, 8, requires_grad=True))
    assert not fused.fits(image.double(), image)
    assert not fused.fits(image.to(memory_format=torch.channels_last), image)
    assert not fused.fits(torch.zeros(2, 3, 65, 8), torch.zeros(2, 3, 65, 8))
    assert not fused.fits(torch.zeros(2, 3, 8), torch.zeros(2, 3, 8))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_an_attached_network_uses_it_on_a_gpu(fused, monkeypatch):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(0.9))

        def forward(self, x_t, t):
            return self.gain * x_t + 0.1

    network = Network().to(DEVICE)
    denoiser = trueup.Denoiser(network, ContinuousVP(), "noise", (3, 16, 16), data_range=None)
    cal = trueup.calibrate(denoiser, torch.randn(40, 3, 16, 16), estimator="paired", levels=[0.2, 0.6])
    x_t, t = torch.randn(4, 3, 16, 16, device=DEVICE), torch.full((4,), 0.4, device=DEVICE)
    with trueup.attach(network, cal):
        with torch.no_grad():
            fast = network(x_t, t)
        slow = network(x_t, t)  # with gradients it takes the operations
        assert slow.requires_grad
        half = network.half()(x_t.half(), t).float()
        network.float()
    assert torch.allclose(fast, slow, atol=1e-5)
    assert torch.allclose(half, slow, atol=2e-2)


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

    monkeypatch.setattr(fused, "_correct", Fails())
    image, matrices = torch.zeros(1, 1, 8, 8, device=DEVICE), [torch.eye(8, device=DEVICE)] * 2
    assert fused.fits(image, image)
    assert fused.correct(image, image, torch.zeros(1, 256, device=DEVICE), matrices) is None
    assert not fused.fits(image, image)
    fused._TOO_LARGE.clear()
