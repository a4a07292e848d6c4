"""Small pipelines of diffusers' real classes, with weights nobody trained; as people have them otherwise."""

from __future__ import annotations

import diffusers
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from test_edm import EDMPrecond, Precond
from trueup import Denoiser
from trueup.hf import as_denoiser
from trueup.process import ContinuousVP, Flow

from tiny import tiny_unet

WORDS = ["a", "cat", "dog", "photo", "of", "the", "red", "small", "house", "two"]


def tokenizer(length: int = 12) -> PreTrainedTokenizerFast:
    """Whole words as tokens, padded and ended as CLIP's."""
    vocabulary = {word: k for k, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=length,
    )


def clip(projected: bool = False, width: int = 16):
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=20,
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=12,
        projection_dim=width,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config).eval()


def t5(width: int = 16):
    torch.manual_seed(0)
    return T5EncoderModel(
        T5Config(vocab_size=20, d_model=width, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ).eval()


def vae(latent: int = 4, **more):
    """Whose latents are as good as certain, since pipelines draw them."""
    torch.manual_seed(0)
    made = diffusers.AutoencoderKL(
        block_out_channels=(4, 4),
        norm_num_groups=2,
        latent_channels=latent,
        sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        **more,
    ).eval()
    torch.nn.init.constant_(made.quant_conv.bias[latent:], -40.0)
    return made


def unet(**more):
    torch.manual_seed(0)
    settings = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "layers_per_block": 1,
        "block_out_channels": (8, 16),
        "norm_num_groups": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 4,
    }
    return diffusers.UNet2DConditionModel(**{**settings, **more}).eval()


SCHEDULE = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "clip_sample": False,
    "steps_offset": 1,
}


def sd(cls=None, scheduler=None, network=None, **more):
    cls = cls or diffusers.StableDiffusionPipeline
    return cls(
        vae=vae(),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        unet=network or unet(),
        scheduler=scheduler or diffusers.DDIMScheduler(**SCHEDULE),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **more,
    )


def sdxl():
    network = unet(
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=16 + 6 * 4,
        cross_attention_dim=32,
    )
    return diffusers.StableDiffusionXLPipeline(
        vae=vae(),
        text_encoder=clip(),
        text_encoder_2=clip(projected=True),
        tokenizer=tokenizer(),
        tokenizer_2=tokenizer(),
        unet=network,
        scheduler=diffusers.EulerDiscreteScheduler(
            **{k: v for k, v in SCHEDULE.items() if k != "clip_sample"}
        ),
        add_watermarker=False,
    )


def pixart():
    torch.manual_seed(0)
    network = diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=16,
        in_channels=4,
        cross_attention_dim=16,
        out_channels=8,
        norm_num_groups=1,
        use_additional_conditions=False,
    ).eval()
    return diffusers.PixArtAlphaPipeline(
        tokenizer=tokenizer(),
        text_encoder=t5(),
        vae=vae(),
        transformer=network,
        scheduler=diffusers.DDIMScheduler(**SCHEDULE),
    )


def sd3():
    torch.manual_seed(0)
    network = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        out_channels=4,
    ).eval()
    return diffusers.StableDiffusion3Pipeline(
        transformer=network,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(shift_factor=0.06, scaling_factor=1.5),
        text_encoder=clip(True),
        tokenizer=tokenizer(),
        text_encoder_2=clip(True),
        tokenizer_2=tokenizer(),
        text_encoder_3=t5(32),
        tokenizer_3=tokenizer(),
    )


def flux(guidance_embeds=False):
    torch.manual_seed(0)
    network = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=[4, 4, 8],
        guidance_embeds=guidance_embeds,
    ).eval()
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        text_encoder=clip(),
        text_encoder_2=t5(),
        tokenizer=tokenizer(),
        tokenizer_2=tokenizer(),
        transformer=network,
        vae=vae(shift_factor=0.06),
    )


def flux_controlled():
    parts = flux().components
    net = diffusers.FluxControlNetModel.from_transformer(
        parts["transformer"], num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2
    )
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.1)
    known = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer")
    return diffusers.FluxControlNetPipeline(**{name: parts[name] for name in known}, controlnet=net.eval())


def aura():
    torch.manual_seed(0)
    network = diffusers.AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pos_embed_max_size=64,
        out_channels=4,
    ).eval()
    return diffusers.AuraFlowPipeline(
        tokenizer=tokenizer(),
        text_encoder=t5(),
        vae=vae(),
        transformer=network,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


def inpaint():
    return sd(diffusers.StableDiffusionInpaintPipeline, network=unet(in_channels=9))


def upscale():
    return diffusers.StableDiffusionUpscalePipeline(
        vae=vae(),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        unet=unet(in_channels=7, num_class_embeds=1000),
        low_res_scheduler=diffusers.DDPMScheduler(),
        scheduler=diffusers.DDIMScheduler(**SCHEDULE, prediction_type="v_prediction"),
    )


def img2img():
    return sd(diffusers.StableDiffusionImg2ImgPipeline)


def controlled():
    torch.manual_seed(1)
    net = diffusers.ControlNetModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        in_channels=4,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        conditioning_embedding_out_channels=(4, 4),
    )
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return sd(diffusers.StableDiffusionControlNetPipeline, controlnet=net.eval())


def deepfloyd(cls=None, channels=3, scheduler=None, **more):
    """In pixels, with a learned variance."""
    torch.manual_seed(0)
    network = diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(32, 32),
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        in_channels=channels,
        out_channels=6,
        cross_attention_dim=32,
        encoder_hid_dim=16,
        attention_head_dim=8,
        addition_embed_type="text",
        addition_embed_type_num_heads=2,
        cross_attention_norm="group_norm",
        resnet_time_scale_shift="scale_shift",
        class_embed_type="timestep" if channels > 3 else None,
        norm_num_groups=4,
    ).eval()
    return (cls or diffusers.IFPipeline)(
        tokenizer=tokenizer(),
        text_encoder=t5(),
        unet=network,
        scheduler=scheduler or diffusers.DDPMScheduler(variance_type="learned_range"),
        safety_checker=None,
        feature_extractor=None,
        watermarker=None,
        requires_safety_checker=False,
        **more,
    )


def deepfloyd_fixed():
    return deepfloyd(scheduler=diffusers.DDPMScheduler())


def deepfloyd_larger():
    """Its second stage, told a picture in three more channels."""
    kind = diffusers.IFSuperResolutionPipeline
    return deepfloyd(kind, 6, image_noising_scheduler=diffusers.DDPMScheduler())


def svd():
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

    torch.manual_seed(0)
    network = diffusers.UNetSpatioTemporalConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=16,
        num_attention_heads=8,
        projection_class_embeddings_input_dim=96,
        addition_time_embed_dim=32,
    ).eval()
    decoder = diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32), down_block_types=["DownEncoderBlock2D"] * 2, latent_channels=4
    )
    seeing = CLIPVisionConfig(
        hidden_size=16,
        projection_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=224,
        patch_size=112,
    )
    noise = {name: SCHEDULE[name] for name in ("beta_schedule", "beta_start", "beta_end", "steps_offset")}
    noise |= {"timestep_type": "continuous", "timestep_spacing": "leading", "use_karras_sigmas": True}
    return diffusers.StableVideoDiffusionPipeline(
        vae=decoder.eval(),
        image_encoder=CLIPVisionModelWithProjection(seeing).eval(),
        unet=network,
        scheduler=diffusers.EulerDiscreteScheduler(
            **noise, sigma_min=0.002, sigma_max=700.0, prediction_type="v_prediction"
        ),
        feature_extractor=CLIPImageProcessor(),
    )


def lumina2():
    from transformers import Gemma2Config, Gemma2Model

    torch.manual_seed(0)
    network = diffusers.Lumina2Transformer2DModel(
        sample_size=4,
        patch_size=2,
        in_channels=4,
        hidden_size=8,
        num_layers=2,
        num_attention_heads=1,
        num_kv_heads=1,
        multiple_of=16,
        ffn_dim_multiplier=None,
        norm_eps=1e-5,
        scaling_factor=1.0,
        axes_dim_rope=[4, 2, 2],
        axes_lens=[128, 128, 128],
        cap_feat_dim=8,
    ).eval()
    text = Gemma2Model(
        Gemma2Config(
            head_dim=4,
            hidden_size=8,
            intermediate_size=8,
            num_attention_heads=2,
            num_hidden_layers=2,
            num_key_value_heads=2,
            sliding_window=2,
            vocab_size=20,
        )
    ).eval()
    return diffusers.Lumina2Pipeline(
        transformer=network,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(),
        text_encoder=text,
        tokenizer=tokenizer(),
    )


def wan():
    torch.manual_seed(0)
    network = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=16,
        freq_dim=16,
        ffn_dim=16,
        num_layers=1,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    ).eval()
    v = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return diffusers.WanPipeline(
        tokenizer=tokenizer(),
        text_encoder=t5(),
        vae=v,
        transformer=network,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def cogvideo():
    torch.manual_seed(0)
    network = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=16,
        num_layers=1,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=12,
    ).eval()
    v = diffusers.AutoencoderKLCogVideoX(
        in_channels=3,
        out_channels=3,
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )
    return diffusers.CogVideoXPipeline(
        tokenizer=tokenizer(),
        text_encoder=t5(),
        vae=v,
        transformer=network,
        scheduler=diffusers.CogVideoXDDIMScheduler(snr_shift_scale=3.0),
    )


def sana():
    from transformers import Gemma2Config, Gemma2Model

    torch.manual_seed(0)
    network = diffusers.SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=32,
    ).eval()
    v = diffusers.AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=[1, 1],
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    text = Gemma2Model(
        Gemma2Config(
            head_dim=4,
            hidden_size=8,
            intermediate_size=8,
            num_attention_heads=2,
            num_hidden_layers=1,
            num_key_value_heads=2,
            vocab_size=20,
        )
    ).eval()
    return diffusers.SanaPipeline(
        tokenizer=tokenizer(),
        text_encoder=text,
        vae=v,
        transformer=network,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def animate():
    torch.manual_seed(0)
    adapter = diffusers.MotionAdapter(
        block_out_channels=(8, 16),
        motion_layers_per_block=1,
        motion_norm_num_groups=2,
        motion_num_attention_heads=2,
    )
    return diffusers.AnimateDiffPipeline(
        vae=vae(),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        unet=unet(),
        motion_adapter=adapter,
        scheduler=diffusers.DDIMScheduler(**SCHEDULE),
        feature_extractor=None,
        image_encoder=None,
    )


def sd_velocity():
    return sd(scheduler=diffusers.DDIMScheduler(**SCHEDULE, prediction_type="v_prediction"))


def sd_zero_snr():
    more = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return sd(scheduler=diffusers.DDIMScheduler(**SCHEDULE, **more))


def ddpm():
    return diffusers.DDPMPipeline(tiny_unet(), diffusers.DDPMScheduler())


def ddim():
    return diffusers.DDIMPipeline(tiny_unet(), diffusers.DDIMScheduler())


def score_sde():
    network = tiny_unet(in_channels=3, out_channels=3, time_embedding_type="fourier")
    return diffusers.ScoreSdeVePipeline(network, diffusers.ScoreSdeVeScheduler(sigma_max=50.0))


def improved():
    network = tiny_unet(out_channels=2)
    return diffusers.DDPMPipeline(network, diffusers.DDPMScheduler(variance_type="learned_range"))


def edm_raw():
    return diffusers.DDPMPipeline(tiny_unet(), diffusers.EDMEulerScheduler(sigma_data=0.5))


def edm():
    return EDMPrecond(img_resolution=8, img_channels=1)


def edm2():
    return Precond(img_resolution=8, img_channels=4, label_dim=4)


def dit():
    torch.manual_seed(0)
    network = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=4,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        sample_size=8,
        num_embeds_ada_norm=4,
        norm_num_groups=4,
    ).eval()
    torch.nn.init.normal_(network.proj_out_2.weight)
    return diffusers.DiTPipeline(network, vae(), diffusers.DDIMScheduler())


def by_class():
    network = tiny_unet(num_class_embeds=3)
    return as_denoiser(network, scheduler=diffusers.DDPMScheduler())


def audio():
    torch.manual_seed(0)
    network = diffusers.UNet1DModel(
        sample_size=16,
        in_channels=2,
        out_channels=2,
        extra_in_channels=64,  # where the first block takes the time
        block_out_channels=(32, 32),
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
        up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
    ).eval()
    return as_denoiser(network, scheduler=diffusers.DDPMScheduler())


class Research(torch.nn.Module):
    """Somebody's own network: a convolution that looks at the time."""

    def __init__(self, channels):
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.time = torch.nn.Conv2d(channels, channels, 3, padding=1), torch.nn.Linear(1, channels)

    def forward(self, x, t):
        return self.mix(x) + self.time(t.reshape(-1, 1).to(x))[..., None, None]


def reversed_flow():
    return Denoiser(Research(3), Flow(reversed=True), "reversed_flow", (3, 8, 8))


def fields():
    return Denoiser(Research(5), ContinuousVP(), "velocity", (5, 6, 20), data_range=None)


def flux_distilled():
    return flux(guidance_embeds=True)


def lcm():
    return sd(network=unet(time_cond_proj_dim=8))


def consistent():
    return sd(scheduler=diffusers.LCMScheduler())


def two_networks():
    made = wan()
    other = diffusers.WanTransformer3DModel.from_config(made.transformer.config)
    parts = {
        name: made.components[name]
        for name in ("tokenizer", "text_encoder", "vae", "transformer", "scheduler")
    }
    return diffusers.WanPipeline(**parts, transformer_2=other, boundary_ratio=0.9)
