"""Pipelines on a GPU: in half precision, offloaded, placed by a device map, compiled."""

import pytest
import torch
from torch import nn

import trueup
from test_pipelines import calibration_of, run, samples
from trueup.denoiser import prediction
from trueup.hf import as_denoiser
from trueup.hf.models import network_of

import pipelines
from calibrations import by_definition, make
from matrix import TEXT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def corrected_as_defined(model, pipe, denoiser, calibration):
    """Whether every call of the network in a guided run is corrected, to the rounding of its dtype."""
    network, binding = network_of(pipe), denoiser.binding()
    bare, made = [], []

    def note(into):
        return lambda m, args, kwargs, output: into.append((args, kwargs, prediction(output).clone()))

    first = network.register_forward_hook(note(bare), with_kwargs=True)
    with trueup.attach(pipe, calibration):
        last = network.register_forward_hook(note(made), with_kwargs=True)
        run(model, pipe)
        last.remove()
    first.remove()
    assert len(bare) == len(made) >= 3
    seen = []
    for (args, kwargs, before), (_, _, after) in zip(bare, made, strict=True):
        assert after.is_cuda
        t = float((binding.t.of(args, kwargs).double().reshape(-1)[0] - binding.offset) / binding.scale)
        x_t = samples(denoiser, binding.x.of(args, kwargs)).cpu()
        output = samples(denoiser, before).cpu()
        expected = by_definition(calibration, output.float(), x_t.float(), min(t, denoiser.process.t_max))
        change, size = (expected - output).abs().max(), expected.abs().max()
        rounding = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}.get(before.dtype, 2e-4)
        torch.testing.assert_close(
            samples(denoiser, after).cpu().double(),
            expected,
            rtol=0,
            atol=float(rounding * size + 2e-2 * change),
        )
        seen.append(bool(change > 2 * rounding * size))
    assert any(seen)  # at the ends of a process nothing is corrected


def placed(model, how, folder):
    """A pipeline on the GPU, with a calibration of it in single precision on a CPU."""
    pipe = model.make()
    denoiser = as_denoiser(pipe, arguments=model.arguments)
    calibration = calibration_of(denoiser)
    if how == "device_map":
        pipe.save_pretrained(folder)
        pipe = type(pipe).from_pretrained(folder, device_map="balanced", torch_dtype=torch.float16)
    elif how == "offloaded":
        pipe.to(dtype=torch.float16)
        pipe.enable_model_cpu_offload()
    else:
        pipe.to("cuda", how)
    pipe.set_progress_bar_config(disable=True)
    return pipe, denoiser, calibration


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat16"])
@pytest.mark.parametrize("model", TEXT, ids=lambda model: model.name.replace(" ", "-"))
def test_half_precision(model, dtype, tmp_path):
    corrected_as_defined(model, *placed(model, dtype, tmp_path))


@pytest.mark.parametrize("how", ["offloaded", "device_map"])
@pytest.mark.parametrize("model", [TEXT[0], next(model for model in TEXT if model.make is pipelines.sd3)])
def test_where_its_weights_are_does_not_matter(model, how, tmp_path):
    corrected_as_defined(model, *placed(model, how, tmp_path))


class Network(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.inner = nn.Conv2d(4, channels, 3, padding=1)

    def forward(self, x, t):
        return self.inner(x) + 0.01 * t.reshape(-1, 1, 1, 1).to(x)


@pytest.mark.parametrize("channels", [4, 8], ids=["mean", "variance-too"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["single", "half"])
@torch.no_grad()
def test_compiled_is_what_it_is_uncompiled(channels, dtype):
    network = Network(channels).cuda()
    calibration = make((4, 16, 16), levels=[0.2, 0.6], network=network)
    network.to(dtype)
    x_t, t = torch.randn(3, 4, 16, 16, device="cuda", dtype=dtype), torch.tensor([0.2, 0.45, 0.6]).cuda()
    bare = network(x_t, t)
    with trueup.attach(network, calibration):
        expected = network(x_t, t)
        compiled = torch.compile(network, dynamic=False)
        atol = (1e-5 if dtype == torch.float32 else 2e-3) * float(expected.abs().max())
        torch.testing.assert_close(compiled(x_t, t), expected, rtol=0, atol=atol)
        torch.testing.assert_close(compiled(x_t, t[1]), network(x_t, t[1]), rtol=0, atol=atol)
    assert not torch.allclose(bare, expected, atol=10 * atol)
    torch.testing.assert_close(expected[:, 4:], bare[:, 4:])
