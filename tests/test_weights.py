"""Adapters, fused adapters and quantised weights: noticed, named, and what to do said."""

import copy
import warnings

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from torch import nn

import trueup
from trueup.calibration import detach
from trueup.denoiser import Binding, Denoiser, fingerprint
from trueup.denoiser.binding import Place
from trueup.denoiser.weights import same_weights
from trueup.errors import MismatchError
from trueup.process import DiscreteVP

from calibrations import make

SHAPE = (3, 8, 8)
LEVELS = [0, 300, 999]
BINDING = Binding(Place(0, "sample"), Place(1, "timestep"))


PROMPT = torch.ones(1, 3, 8)


def unet(channels=3):
    """Stable Diffusion's network, small."""
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8, in_channels=channels, out_channels=channels, block_out_channels=(8, 16),
        norm_num_groups=4, cross_attention_dim=8, attention_head_dim=4, layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip


def lora(seed=1, **settings):
    torch.manual_seed(seed)  # PEFT draws its weights
    targets = {"r": 2, "target_modules": ["to_q", "to_v"], "init_lora_weights": False}
    return LoraConfig(**{**targets, **settings})


def add(network, name, seed=1, **settings):
    network.add_adapter(lora(seed, **settings), name)
    return network


def calibration_of(network):
    return make(shape=SHAPE, levels=LEVELS, noise=DiscreteVP.linear(), network=network, binding=BINDING)


def refusal(network, cal):
    with pytest.raises(MismatchError) as error:
        trueup.attach(network, cal)
    trueup.attach(network, cal, force=True).remove()
    return str(error.value)


# LoRA


def test_resting_adapters_are_not_part_of_the_weights():
    network = unet()
    before = fingerprint(network)
    add(network, "style")
    assert not same_weights(before, fingerprint(network))
    network.disable_adapters()
    assert fingerprint(network) == before
    network.enable_adapters()
    network.set_adapters("style", 0.0)
    assert fingerprint(network) == before
    network.set_adapters("style", 1.0)
    assert fingerprint(network) != before
    network.unload_lora()
    assert fingerprint(network) == before


def test_adapters_at_work_are_part_of_the_weights_with_their_scales():
    one, same, other = (add(unet(), "style", seed) for seed in (1, 1, 2))
    assert fingerprint(one) == fingerprint(same)
    assert not same_weights(fingerprint(one), fingerprint(other))
    same.set_adapters("style", 0.5)
    assert not same_weights(fingerprint(one), fingerprint(same))
    one.set_adapters("style", 0.5)
    assert fingerprint(one) == fingerprint(same)


def test_adapters_are_recognised_in_half_precision():
    one = add(unet(), "style")
    cal = calibration_of(one)
    trueup.attach(copy.deepcopy(one).half(), cal).remove()
    assert "adapters on (style), and they are off" in refusal(unet().half(), cal)


def test_only_those_of_several_adapters_that_are_set_count():
    both = add(add(unet(), "style"), "subject", 2)
    both.set_adapters("style")
    assert fingerprint(both) == fingerprint(add(unet(), "style"))


def test_a_calibration_without_adapters_names_those_that_are_on():
    cal, network = calibration_of(unet()), add(unet(), "style")
    said = refusal(network, cal)
    assert said.startswith(
        "this network has LoRA adapters (style) on top of the weights that were calibrated: "
        "calibrate it with them on, turn them off, or pass force=True"
    )
    network.disable_adapters()
    trueup.attach(network, cal).remove()


def test_a_calibration_with_adapters_asks_for_them():
    network = add(unet(), "style")
    cal = calibration_of(network)
    trueup.attach(network, cal).remove()
    network.set_adapters("style", 0.25)
    assert "and their scales are others now" in refusal(network, cal)
    network.disable_adapters()
    assert "adapters on (style), and they are off now" in refusal(network, cal)
    assert "adapters on (style), and they are off now" in refusal(unet(), cal)
    assert "others of that name are on now" in refusal(add(unet(), "style", 2), cal)
    assert "not with those that are on now (subject)" in refusal(add(unet(), "subject"), cal)
    detached = add(unet(), "style")
    trueup.attach(detached, cal).remove()


def test_adapters_on_other_weights_are_other_weights():
    torch.manual_seed(5)
    other = unet()
    with torch.no_grad():
        for p in other.parameters():
            p += 0.1
    assert "made for other weights (fingerprint" in refusal(add(other, "style"), calibration_of(unet()))


def test_weights_of_two_half_precisions_do_not_compare():
    """What bfloat16 and float16 both hold has one fingerprint, which told nobody what differs."""
    network = unet()
    with torch.no_grad():
        for p in network.parameters():
            p.copy_((8 * p).round() / 8)
    cal = calibration_of(copy.deepcopy(network).bfloat16())
    said = refusal(network.half(), cal)
    assert "made for other weights, or the same in bfloat16, while these are in float16" in said
    trueup.attach(network.bfloat16(), cal).remove()


def test_peft_around_a_network_is_seen_through():
    network = unet()
    before = fingerprint(network)
    wrapped = get_peft_model(network, lora())
    assert fingerprint(wrapped) == fingerprint(add(unet(), "default"))
    with wrapped.disable_adapter():
        assert fingerprint(wrapped) == before


def test_fused_adapters_are_named_while_peft_knows_them():
    cal, network = calibration_of(unet()), add(unet(), "style")
    network.fuse_lora()
    assert (
        "LoRA adapters (style) are fused into the weights of this network: calibrate it as it is"
        in refusal(network, cal)
    )
    network.unload_lora()
    said = refusal(network, cal)
    assert "biases and norms of the one that was calibrated, and other matrices, as after fusing" in said
    trueup.attach(network, calibration_of(network)).remove()


def test_fused_projections_are_named_and_fused_after_attaching_they_are_corrected():
    cal, network = calibration_of(unet()), unet()
    network.fuse_qkv_projections()
    said = refusal(network, cal)
    assert "before projections of this network were fused (fuse_qkv_projections)" in said
    assert "calibrate it as it is, attach before they are fused" in said
    network = unet()
    with trueup.attach(network, cal):
        expected = call(network)
        network.fuse_qkv_projections()
        assert torch.allclose(call(network), expected, atol=1e-5 * float(expected.abs().max()))


def test_a_fine_tune_of_everything_is_no_fused_lora():
    tuned = unet()
    with torch.no_grad():
        for p in tuned.parameters():
            p += 0.01
    assert "made for other weights (fingerprint" in refusal(tuned, calibration_of(unet()))


# Adapters that come after


def call(network):
    with torch.inference_mode():
        return network(torch.ones(1, *SHAPE), torch.tensor(300), PROMPT).sample


def test_adapters_that_come_later_are_warned_of_once():
    network = unet()
    cal = calibration_of(network)
    bare = call(network)
    attached = trueup.attach(network, cal)
    corrected = call(network)
    add(network, "style")
    with pytest.warns(UserWarning, match=r"has LoRA adapters \(style\) on, unlike when .* attached"):
        call(network)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed = call(network)
        network.unload_lora()
        assert torch.equal(call(network), corrected)
    attached.remove()
    assert torch.equal(call(network), bare)
    add(network, "style")
    with trueup.attach(network, cal, force=True), warnings.catch_warnings():
        warnings.simplefilter("error")  # force: they were there already
        assert torch.equal(call(network), changed)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda n: n.disable_adapters(), "has no LoRA adapters on"),
        (lambda n: n.unload_lora(), "has no LoRA adapters on"),
        (lambda n: n.set_adapters("style", 0.5), r"has LoRA adapters \(style\) on, unlike"),
        (lambda n: n.fuse_lora(), r"adapters \(style\) are fused into"),
        (lambda n: add(n, "subject", target_modules=["to_k"]), r"adapters \(subject\) on, unlike"),
    ],
    ids=["disabled", "unloaded", "scaled", "fused", "another"],
)
def test_adapters_that_change_later_are_warned_of(change, said):
    network = add(unet(), "style")
    with trueup.attach(network, calibration_of(network)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(network)
        change(network)
        with pytest.warns(UserWarning, match=said):
            call(network)


def test_a_copy_watches_its_own_adapters():
    network = add(unet(), "style")
    with trueup.attach(network, calibration_of(network)):
        other = copy.deepcopy(network)
        other.disable_adapters()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(network)
        with pytest.warns(UserWarning, match="has no LoRA adapters on"):
            call(other)
        detach(other)


@torch.inference_mode()
def test_compiled_code_follows_adapters_and_stays_corrected():
    torch.compiler.reset()
    network = unet()
    cal = calibration_of(network)
    fast = torch.compile(network, backend="eager", fullgraph=True)
    given = (torch.ones(1, *SHAPE), torch.tensor(300), PROMPT)
    with trueup.attach(network, cal):
        corrected = fast(*given).sample
        add(network, "style")
        with_lora = fast(*given).sample
        with pytest.warns(UserWarning, match="LoRA"):
            assert torch.allclose(network(*given).sample, with_lora, atol=1e-6)
        network.unload_lora()
        assert torch.equal(fast(*given).sample, corrected)
    assert not torch.allclose(with_lora, corrected, atol=1e-4)


def small_sd():
    """Stable Diffusion's own pipeline; its text encoder and autoencoder are not asked for here."""
    parts = ("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor")
    betas = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    scheduler = DDIMScheduler(**betas, steps_offset=1, clip_sample=False)
    return StableDiffusionPipeline(
        unet=unet(4), scheduler=scheduler, requires_safety_checker=False, **dict.fromkeys(parts)
    )


def test_a_lora_file_loaded_into_a_pipeline_after_attach(tmp_path):
    trained = small_sd()
    add(trained.unet, "default")
    layers = get_peft_model_state_dict(trained.unet, adapter_name="default")
    StableDiffusionPipeline.save_lora_weights(tmp_path, unet_lora_layers=layers)

    pipe = small_sd()
    scaled = DiscreteVP.from_betas(pipe.scheduler.betas)
    cal = make(shape=(4, 8, 8), levels=LEVELS, noise=scaled, network=pipe.unet, binding=BINDING)
    call = {"sample": torch.ones(1, 4, 8, 8), "timestep": torch.tensor(300), "encoder_hidden_states": PROMPT}
    with torch.inference_mode(), trueup.attach(pipe, cal):
        before = pipe.unet(**call).sample
        pipe.load_lora_weights(tmp_path, adapter_name="style")
        with pytest.warns(UserWarning, match=r"LoRA adapters \(style\) on, unlike"):
            assert not torch.allclose(pipe.unet(**call).sample, before)
        pipe.unload_lora_weights()
        assert torch.equal(pipe.unet(**call).sample, before)
    pipe.load_lora_weights(tmp_path, adapter_name="style")
    assert "LoRA adapters (style) on top of" in refusal(pipe, cal)
    pipe.disable_lora()
    trueup.attach(pipe, cal).remove()


# Quantised weights


class Int8(nn.Module):
    """Weight-only int8 by output channel, around a Linear or Conv2d."""

    def __init__(self, layer):
        super().__init__()
        weight = layer.weight.detach()
        scale = weight.flatten(1).abs().amax(1).reshape(-1, *[1] * (weight.dim() - 1)) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.scale, self.bias = nn.Parameter(scale), layer.bias
        self.how = layer.__dict__

    def forward(self, x):
        weight = self.scale * self.weight
        if weight.dim() == 2:
            return nn.functional.linear(x, weight, self.bias)
        return nn.functional.conv2d(x, weight, self.bias, self.how["stride"], self.how["padding"])


class Packed(torch.Tensor):
    """A parameter that is none inside, as torchao's and quanto's are."""

    @staticmethod
    def __new__(cls, data, scale):
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)
        made.data_, made.scale_ = data, scale
        return made

    def __tensor_flatten__(self):
        return ["data_", "scale_"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_, args[0].scale_)
        plain = [one.data_ * one.scale_ if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


def by_hand(network):
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, (nn.Linear, nn.Conv2d)):
                setattr(module, name, Int8(child))
    return network


def packed(network):
    for module in network.modules():
        if isinstance(module, nn.Linear):
            scale = module.weight.detach().abs().amax() / 127
            data = (module.weight.detach() / scale).round().to(torch.int8)
            module.weight = nn.Parameter(Packed(data, scale), requires_grad=False)
    return network


def bytes_only(network):
    """As bitsandbytes and GGUF keep them: parameters of bytes."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            data = (module.weight.detach() * 1000).round().to(torch.int8)
            module.weight = nn.Parameter(data, requires_grad=False)
    return network


def dynamic(network):
    return torch.ao.quantization.quantize_dynamic(network, {nn.Linear}, dtype=torch.qint8)


def float8(network):
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.to(torch.float8_e4m3fn)
    return network


@pytest.mark.parametrize("quantise", [by_hand, packed, bytes_only, dynamic, float8])
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_weights_are_noticed_and_have_their_own(quantise):
    cal, network = calibration_of(unet()), quantise(unet())
    said = refusal(network, cal)
    assert said.startswith(
        "this calibration was made in full precision, and the network is quantised: its err"
    )
    assert "calibrate it quantised, or pass force=True (docs/guide.md#quantised" in said
    own = calibration_of(network)
    trueup.attach(network, own).remove()
    trueup.attach(quantise(unet()), own).remove()
    assert "made for a quantised network, and this one is in full precision" in refusal(unet(), own)
    with torch.no_grad():
        other = unet()
        other.mid_block.attentions[0].transformer_blocks[0].attn1.to_q.weight *= -1
    assert not same_weights(fingerprint(quantise(other)), fingerprint(network))


def test_a_quantised_network_is_calibrated_like_any_other():
    network = by_hand(unet())
    denoiser = Denoiser(
        network,
        DiscreteVP.linear(),
        "noise",
        shape=SHAPE,
        call=lambda x_t, t: network(x_t, t, PROMPT.expand(len(x_t), -1, -1)),
    )
    data = torch.rand(24, *SHAPE, generator=torch.Generator().manual_seed(0)) * 2 - 1
    cal = trueup.calibrate(denoiser, data, levels=[290, 300, 310], trust=True)
    bare = call(network)
    with trueup.attach(network, cal, gains="least-squares"):
        assert not torch.equal(call(network), bare)
    assert torch.equal(call(network), bare)
