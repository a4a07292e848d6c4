"""diffusers models, schedulers, pipelines and directories, read as diffusers itself reads them."""

import copy
import json
import pickle
import shutil
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    LCMScheduler,
    Transformer2DModel,
    UNet1DModel,
    UNet2DConditionModel,
)
from safetensors.torch import load_file, save_file

from trueup.denoiser import Denoiser
from trueup.errors import ModelError
from trueup.hf import Autoencoder, as_denoiser, is_pipeline, network_of, schedule
from trueup.images import open_images
from trueup.parametrization import Parametrization
from trueup.process import EDM, DiscreteVP, Flow

from tiny import tiny_unet


def tiny_dit(**settings) -> DiTTransformer2DModel:
    torch.manual_seed(0)
    defaults = {
        "num_attention_heads": 2,
        "attention_head_dim": 4,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 1,
        "sample_size": 8,
        "num_embeds_ada_norm": 10,
        "norm_num_groups": 4,
    }
    model = DiTTransformer2DModel(**{**defaults, **settings}).eval()
    torch.nn.init.normal_(model.proj_out_2.weight)
    return model


def tiny_vae() -> AutoencoderKL:
    return AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, latent_channels=4, sample_size=8)


def config_of(scheduler) -> dict:
    return {**scheduler.config, "_class_name": type(scheduler).__name__}


def answers(denoiser: Denoiser, network, **labels) -> bool:
    """Whether the denoiser says what the network says."""
    x_t = torch.randn(2, *denoiser.shape, generator=torch.Generator().manual_seed(1))
    t = torch.tensor([3, 700])
    with torch.no_grad():
        expected = network(x_t, t, **labels).sample[:, : denoiser.shape[0]]
        return torch.equal(denoiser(x_t, t, labels.get("class_labels")), expected)


# Schedulers ----------------------------------------------------------------------------------------


def seen_by_the_network(scheduler, data: float, noise: float, index: int) -> float:
    """What a pipeline would feed the network at its index-th step, for constant data and noise."""
    x0, eps = torch.full((1, 1, 1, 1), data), torch.full((1, 1, 1, 1), noise)
    t = scheduler.timesteps[index : index + 1]
    scheduler._step_index = None
    if hasattr(scheduler, "scale_noise"):
        return float(scheduler.scale_noise(x0, t, eps))
    return float(scheduler.scale_model_input(scheduler.add_noise(x0, eps, t), t[0]))


@pytest.mark.parametrize(
    ("name", "kind", "parametrization"),
    [
        ("DDPMScheduler", "discrete_vp", "noise"),
        ("DDPMParallelScheduler", "discrete_vp", "noise"),
        ("DDIMScheduler", "discrete_vp", "noise"),
        ("DDIMParallelScheduler", "discrete_vp", "noise"),
        ("PNDMScheduler", "discrete_vp", "noise"),
        ("UnCLIPScheduler", "discrete_vp", "noise"),
        ("CogVideoXDDIMScheduler", "discrete_vp", "noise"),
        ("CogVideoXDPMScheduler", "discrete_vp", "noise"),
        ("DPMSolverMultistepScheduler", "discrete_vp", "noise"),
        ("DPMSolverSinglestepScheduler", "discrete_vp", "noise"),
        ("UniPCMultistepScheduler", "discrete_vp", "noise"),
        ("DEISMultistepScheduler", "discrete_vp", "noise"),
        ("SASolverScheduler", "discrete_vp", "noise"),
        ("LMSDiscreteScheduler", "discrete_vp", "noise"),
        ("EulerDiscreteScheduler", "discrete_vp", "noise"),
        ("EulerAncestralDiscreteScheduler", "discrete_vp", "noise"),
        ("HeunDiscreteScheduler", "discrete_vp", "noise"),
        ("KDPM2DiscreteScheduler", "discrete_vp", "noise"),
        ("KDPM2AncestralDiscreteScheduler", "discrete_vp", "noise"),
        ("EDMEulerScheduler", "edm", "edm"),
        ("EDMDPMSolverMultistepScheduler", "edm", "edm"),
        ("FlowMatchEulerDiscreteScheduler", "flow", "flow"),
        ("FlowMatchHeunDiscreteScheduler", "flow", "flow"),
    ],
)
def test_the_process_is_the_noise_the_scheduler_adds(name, kind, parametrization):
    scheduler = getattr(diffusers, name)()
    process, read = schedule(config_of(scheduler))
    assert (process.kind, read.name) == (kind, parametrization)
    scheduler.set_timesteps(10)
    checked = 0
    for index, t in enumerate(scheduler.timesteps.tolist()):
        if kind == "discrete_vp" and t != round(t):
            continue  # between timesteps diffusers' solvers interpolate in ways of their own
        alpha = seen_by_the_network(scheduler, 1.0, 0.0, index)
        sigma = seen_by_the_network(scheduler, 0.0, 1.0, index)
        # They work in float32 through sigma/alpha, up to 160 here: a few 1e-6.
        assert float(process.alpha(t)) == pytest.approx(alpha, abs=1e-5)
        assert float(process.sigma(t)) == pytest.approx(sigma, abs=1e-5)
        checked += 1
    assert checked >= 8


@pytest.mark.parametrize("name", ["EulerDiscreteScheduler", "UniPCMultistepScheduler", "DDIMScheduler"])
def test_zero_terminal_snr_is_read(name):
    scheduler = getattr(diffusers, name)(rescale_betas_zero_snr=True, beta_schedule="scaled_linear")
    process, _ = schedule(config_of(scheduler))
    alpha2 = scheduler.alphas_cumprod[:-1].double()  # the last is 0 or a stand-in for it
    # float32 over 999 factors, and the difference of two square roots
    torch.testing.assert_close(process.alpha(torch.arange(999)), alpha2.sqrt(), rtol=1e-4, atol=0)
    assert float(process.alpha(999)) < 1e-3


def test_snr_shift_is_read():
    scheduler = diffusers.CogVideoXDDIMScheduler(snr_shift_scale=1.7, rescale_betas_zero_snr=True)
    alpha2 = scheduler.alphas_cumprod[:-1].double()
    alpha = schedule(config_of(scheduler))[0].alpha(torch.arange(999))
    torch.testing.assert_close(alpha, alpha2.sqrt(), rtol=1e-4, atol=0)  # float32 over 999 factors


@pytest.mark.parametrize(
    ("kind", "name"), [("epsilon", "noise"), ("sample", "data"), ("v_prediction", "velocity")]
)
def test_prediction_types_of_variance_preserving_schedulers(kind, name):
    for scheduler in (DDPMScheduler(prediction_type=kind), DPMSolverMultistepScheduler(prediction_type=kind)):
        assert schedule(config_of(scheduler))[1] == Parametrization(name)


@pytest.mark.parametrize(("kind", "name"), [("epsilon", "edm"), ("v_prediction", "edm_velocity")])
def test_prediction_types_of_edm_schedulers(kind, name):
    process, read = schedule(config_of(diffusers.EDMEulerScheduler(prediction_type=kind, sigma_data=0.7)))
    assert read == Parametrization(name, 0.7)
    assert process.agrees_with(EDM(0.7))


@pytest.mark.parametrize("kind", ["flow_prediction", "epsilon", "sample"])
@pytest.mark.parametrize("name", ["DPMSolverMultistepScheduler", "UniPCMultistepScheduler"])
def test_flow_sigmas_are_read_as_the_solver_reads_them(name, kind):
    scheduler = getattr(diffusers, name)(use_flow_sigmas=True, prediction_type=kind, flow_shift=3.0)
    scheduler.set_timesteps(6)
    process, read = schedule(config_of(scheduler))
    assert isinstance(process, Flow)
    output = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    x_t = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    for index in (1, 3, 5):
        scheduler._step_index = index
        t = 1000 * scheduler.sigmas[index]  # the solver rounds the time it hands out to a whole number
        ours = read.to_x0(output, x_t, process.alpha(t), process.sigma(t))
        torch.testing.assert_close(
            ours.float(), scheduler.convert_model_output(output, sample=x_t), rtol=1e-4, atol=1e-5
        )  # float32, and 1 - sigma cancels at the noisiest step


def test_eulers_continuous_timesteps_are_edms():
    """Stable Video Diffusion's setting: the network receives ln(sigma)/4 and predicts v."""
    scheduler = EulerDiscreteScheduler(
        timestep_type="continuous", prediction_type="v_prediction", sigma_min=0.002, sigma_max=700.0
    )
    scheduler.set_timesteps(8)
    process, read = schedule(config_of(scheduler))
    x0, eps = torch.tensor(0.3), torch.tensor(-1.2)
    for index, t in enumerate(scheduler.timesteps):
        noise = scheduler.sigmas[index]
        sample = x0 + noise * eps
        scheduler._step_index = None
        x_t = scheduler.scale_model_input(sample, t)
        alpha, sigma = process.alpha(t), process.sigma(t)
        assert float(alpha * x0 + sigma * eps) == pytest.approx(float(x_t), abs=1e-5)  # float32
        output = torch.tensor(0.5)
        theirs = scheduler.step(output, t, sample[None], generator=None).pred_original_sample
        ours = read.to_x0(output, x_t, alpha, sigma)
        assert float(ours) == pytest.approx(float(theirs), abs=1e-5)  # float32
    assert process.t_max == pytest.approx(0.25 * np.log(700.0))


def test_continuous_timesteps_without_a_range_take_the_schedules():
    scheduler = EulerDiscreteScheduler(timestep_type="continuous", prediction_type="v_prediction")
    process, _ = schedule(config_of(scheduler))
    ends = [float(scheduler.timesteps[-1]), float(scheduler.timesteps[0])]
    assert [process.t_min, process.t_max] == pytest.approx(ends, abs=1e-3)  # float32 in 1 - alpha^2


@pytest.mark.parametrize(
    "name",
    [
        "CMStochasticIterativeScheduler",
        "FlowMapEulerDiscreteScheduler",
        "FlowMatchLCMScheduler",
        "HeliosDMDScheduler",
        "LCMScheduler",
        "PiflowScheduler",
        "SCMScheduler",
        "TCDScheduler",
    ],
)
def test_distilled_models_are_refused(name):
    with pytest.raises(ModelError, match=f"{name} belongs to .* not conditional expectations"):
        schedule({"_class_name": name, "beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02})


def test_a_distilled_scheduler_made_from_another_is_refused(tmp_path):
    DDPMScheduler().save_pretrained(tmp_path)
    loaded = DDPMScheduler.from_pretrained(tmp_path)  # its config carries the class it was saved as
    with pytest.raises(ModelError, match="LCMScheduler belongs to"):
        as_denoiser(tiny_unet(), scheduler=LCMScheduler.from_config(loaded.config))


@pytest.mark.parametrize("name", ["IPNDMScheduler", "DDPMWuerstchenScheduler", "KarrasVeScheduler"])
def test_schedulers_with_noise_of_their_own_are_refused(name):
    """They have no betas; reading them as DDPM's would calibrate against noise the network never saw."""
    scheduler = getattr(diffusers, name, None)
    config = dict(scheduler().config) if name != "KarrasVeScheduler" else {"sigma_min": 0.02}
    with pytest.raises(ModelError, match=f"config of {name} names no beta_schedule.*pass process="):
        schedule({**config, "_class_name": name})


LINEAR = {"_class_name": "DDPMScheduler", "beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prediction_type": "trigflow"}, "unknown prediction type 'trigflow'.*known: epsilon, sample"),
        ({"prediction_type": None}, "unknown prediction type 'None'"),
        (
            {"_class_name": "EDMEulerScheduler", "prediction_type": "sample"},
            "knows no prediction type 'sample'",
        ),
        ({"use_flow_sigmas": True, "prediction_type": "v_prediction"}, "no meaning for a 'v_prediction'"),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "invert_sigmas": True}, "counts time backwards"),
        ({"beta_schedule": "laplace"}, "unknown beta schedule 'laplace'; pass process="),
        ({"beta_schedule": None}, "names no beta_schedule"),
        ({"beta_start": None}, "needs beta_start and beta_end"),
        ({"beta_start": "a"}, "config of DDPMScheduler cannot be read"),
        ({"beta_end": 2.0}, r"\[0, 1\)"),
        ({"num_train_timesteps": None}, "config of DDPMScheduler cannot be read"),
        ({"num_train_timesteps": 1}, "at least two timesteps"),
        ({"trained_betas": "a"}, "betas must be a list or tensor of numbers"),
        ({"_class_name": "EDMEulerScheduler", "sigma_min": -1}, "0 < sigma_min"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_read_is_refused_with_a_reason(change, message):
    with pytest.raises(ModelError, match=message):
        schedule({**LINEAR, **change})


def test_reading_a_scheduler_needs_no_class_name():
    process, read = schedule({k: v for k, v in LINEAR.items() if k != "_class_name"})
    assert process.agrees_with(DiscreteVP.linear())
    assert read == Parametrization("noise")


# Objects -------------------------------------------------------------------------------------------


def test_a_pipeline_is_a_denoiser():
    unet = tiny_unet()
    pipeline = DDPMPipeline(unet, DDPMScheduler())
    assert is_pipeline(pipeline)
    assert network_of(pipeline) is unet
    denoiser = as_denoiser(pipeline)
    assert denoiser.network is unet
    assert denoiser.shape == (1, 8, 8)
    assert denoiser.description == "UNet2DModel"
    assert denoiser.data_range == (-1.0, 1.0)
    assert not denoiser.conditional
    assert denoiser.process.agrees_with(DiscreteVP.linear())
    assert answers(denoiser, unet)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda path: DDIMScheduler(beta_end=0.01),
        lambda path: DDIMScheduler(beta_end=0.01).config,
        lambda path: path,
        lambda path: str(path / "scheduler_config.json"),
    ],
    ids=["scheduler", "config", "directory", "file"],
)
def test_a_model_with_its_scheduler_is_a_denoiser(scheduler, tmp_path):
    DDIMScheduler(beta_end=0.01).save_pretrained(tmp_path)
    unet = tiny_unet()
    denoiser = as_denoiser(unet, scheduler=scheduler(tmp_path))
    assert denoiser.network is unet
    assert denoiser.process.agrees_with(DiscreteVP.linear(beta_end=0.01))
    assert answers(denoiser, unet)


def test_a_scheduler_given_by_hand_wins_over_the_pipelines():
    pipeline = DDPMPipeline(tiny_unet(), DDPMScheduler())
    denoiser = as_denoiser(pipeline, scheduler=DDPMScheduler(prediction_type="v_prediction"))
    assert denoiser.parametrization.name == "velocity"
    process = DiscreteVP.cosine()
    denoiser = as_denoiser(pipeline, process=process)
    assert denoiser.process is process
    assert denoiser.parametrization.name == "noise"
    assert as_denoiser(tiny_unet(), process=process, prediction="data").parametrization.name == "data"


def test_a_denoiser_stays_what_it_is():
    denoiser = as_denoiser(tiny_unet(), scheduler=DDPMScheduler())
    assert as_denoiser(denoiser) is denoiser
    assert as_denoiser(denoiser, device="cpu") is denoiser
    with pytest.raises(ModelError, match="already carries its process"):
        as_denoiser(denoiser, scheduler=DDPMScheduler())


def test_a_compiled_model_is_still_itself():
    denoiser = as_denoiser(torch.compile(tiny_unet(), backend="eager"), scheduler=DDPMScheduler())
    assert denoiser.description == "UNet2DModel"
    assert denoiser.fingerprint() == as_denoiser(tiny_unet(), scheduler=DDPMScheduler()).fingerprint()


def test_dropout_is_off_while_measuring_and_back_on_afterwards():
    unet = tiny_unet(dropout=0.5).train()
    unet.conv_in.eval()
    modes = [module.training for module in unet.modules()]
    denoiser = as_denoiser(unet, scheduler=DDPMScheduler())
    x_t, t = torch.zeros(2, 1, 8, 8), torch.tensor([5, 5])
    with torch.no_grad(), denoiser.evaluating():
        assert torch.equal(denoiser(x_t, t), denoiser(x_t, t))
    assert [module.training for module in unet.modules()] == modes
    assert not torch.equal(denoiser(x_t, t), denoiser(x_t, t))


@pytest.mark.parametrize("settings", [{"num_class_embeds": 10}, {"class_embed_type": "timestep"}], ids=str)
def test_a_class_conditional_unet_gets_its_labels(settings):
    unet = tiny_unet(**settings)
    denoiser = as_denoiser(unet, scheduler=DDPMScheduler())
    assert denoiser.conditional
    assert answers(denoiser, unet, class_labels=torch.tensor([3, 9]))
    x_t, t = torch.zeros(2, 1, 8, 8), torch.tensor([500, 500])
    with torch.no_grad():
        a, b = (denoiser(x_t, t, torch.tensor(y)) for y in ([0, 0], [0, 9]))
    assert torch.equal(a[0], b[0])
    assert not torch.equal(a[1], b[1])


def test_a_learned_variance_is_cut_off():
    unet = tiny_unet(out_channels=2)
    assert answers(as_denoiser(unet, scheduler=DDPMScheduler()), unet)


def test_non_square_samples_work():
    denoiser = as_denoiser(tiny_unet(sample_size=(4, 8)), scheduler=DDPMScheduler())
    assert denoiser.shape == (1, 4, 8)
    assert answers(denoiser, denoiser.network)


def test_one_dimensional_models_work():
    torch.manual_seed(0)
    model = UNet1DModel(
        sample_size=16,
        in_channels=2,
        out_channels=2,
        extra_in_channels=64,  # where the first block takes the time
        block_out_channels=(32, 32),
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
        up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
    )
    for network in (model, torch.compile(model, backend="eager")):
        assert as_denoiser(network, scheduler=DDPMScheduler()).shape == (2, 16)
    assert answers(as_denoiser(model, scheduler=DDPMScheduler()), model)


def test_dit_gets_its_labels_and_loses_its_variance():
    dit = tiny_dit()
    denoiser = as_denoiser(dit, scheduler=DDPMScheduler())
    assert denoiser.conditional
    assert denoiser.shape == (4, 8, 8)
    assert answers(denoiser, dit, class_labels=torch.tensor([1, 10]))  # 10 is the null label of ten classes


def test_a_pipeline_with_an_autoencoder_works_on_latents():
    pipeline = DiTPipeline(tiny_dit(), tiny_vae(), DDIMScheduler())
    assert as_denoiser(pipeline).data_range is None


def test_text_conditioned_models_are_refused():
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        attention_head_dim=2,
        cross_attention_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    with pytest.raises(ModelError, match=r"takes more than .*encoder_hidden_states.*trueup.Denoiser"):
        as_denoiser(unet, scheduler=DDPMScheduler())


def test_models_whose_second_argument_is_not_the_time_are_refused():
    model = Transformer2DModel(
        num_attention_heads=2,
        attention_head_dim=4,
        in_channels=4,
        num_layers=1,
        sample_size=8,
        patch_size=2,
        norm_type="ada_norm_zero",
        num_embeds_ada_norm=10,
        norm_num_groups=4,
    )
    with pytest.raises(ModelError, match=r"more than a sample, a time and a label \(encoder_hidden_states\)"):
        as_denoiser(model, scheduler=DDPMScheduler())


def test_guidance_distilled_models_are_refused():
    unet = tiny_unet()
    unet.register_to_config(guidance_embeds=True)
    with pytest.raises(ModelError, match="distilled from guided outputs"):
        as_denoiser(unet, scheduler=DDPMScheduler())


def without_scheduler() -> DDPMPipeline:
    pipeline = DDPMPipeline(tiny_unet(), DDPMScheduler())
    pipeline.scheduler = None
    return pipeline


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (tiny_unet, {}, "UNet2DModel has no scheduler.*pass the one it was trained with as scheduler"),
        (without_scheduler, {}, "DDPMPipeline has no scheduler"),
        (tiny_unet, {"scheduler": 3}, "cannot read a noise schedule from int"),
        (tiny_unet, {"process": DiscreteVP.linear()}, "no scheduler"),
        (lambda: tiny_unet(sample_size=None), {"scheduler": LINEAR}, "does not state its sample size"),
        (lambda: tiny_unet(in_channels=2), {"scheduler": LINEAR}, "takes 2 channels and returns 1"),
        (lambda: torch.nn.Linear(2, 2), {"scheduler": LINEAR}, "cannot read Linear as a diffusion model"),
        (lambda: DDPMScheduler(), {}, "cannot read DDPMScheduler as a diffusion model"),
        (tiny_vae, {"scheduler": LINEAR}, "AutoencoderKL takes more than a sample.*sample_posterior"),
    ],
    ids=[
        "no scheduler",
        "pipeline without scheduler",
        "scheduler of the wrong type",
        "half a description",
        "no sample size",
        "channels that are a condition",
        "plain module",
        "scheduler as model",
        "autoencoder",
    ],
)
def test_what_cannot_be_read_is_refused_with_a_reason(model, settings, message):
    with pytest.raises(ModelError, match=message):
        as_denoiser(model(), **settings)


# Directories ---------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path) -> Path:
    """A pipeline as `save_pretrained` writes it."""
    DDPMPipeline(tiny_unet(), DDPMScheduler(beta_end=0.01)).save_pretrained(tmp_path / "pipeline")
    return tmp_path / "pipeline"


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def check(denoiser: Denoiser) -> None:
    assert denoiser.process.agrees_with(DiscreteVP.linear(beta_end=0.01))
    assert answers(denoiser, tiny_unet())


def test_a_saved_pipeline_is_a_denoiser(saved):
    check(as_denoiser(saved))
    check(as_denoiser(str(saved)))


def test_a_pipeline_in_one_flat_directory_is_a_denoiser(saved, tmp_path):
    """As the original DDPM pipelines are on the Hub."""
    flat = tmp_path / "flat"
    flat.mkdir()
    for part in ("unet/config.json", "unet/diffusion_pytorch_model.safetensors"):
        shutil.copy(saved / part, flat)
    shutil.copy(saved / "scheduler" / "scheduler_config.json", flat)
    shutil.copy(saved / "model_index.json", flat)
    assert DDPMPipeline.from_pretrained(flat).unet.config.sample_size == 8  # diffusers takes it too
    check(as_denoiser(flat))


def test_a_saved_model_finds_its_scheduler_inside_or_beside_it(saved, tmp_path):
    check(as_denoiser(saved / "unet"))
    alone = tmp_path / "alone"
    shutil.copytree(saved / "unet", alone)
    with pytest.raises(ModelError, match=r"alone has no scheduler.*as scheduler"):
        as_denoiser(alone)
    check(as_denoiser(alone, scheduler=saved / "scheduler"))
    shutil.copy(saved / "scheduler" / "scheduler_config.json", alone)
    check(as_denoiser(alone))


def test_half_precision_files_load_as_float32(tmp_path):
    tiny_unet().half().save_pretrained(tmp_path, variant="fp16")
    assert [p.name for p in tmp_path.glob("*.safetensors")] == ["diffusion_pytorch_model.fp16.safetensors"]
    denoiser = as_denoiser(tmp_path, scheduler=DDPMScheduler())
    assert denoiser.dtype == torch.float32
    assert answers(denoiser, tiny_unet().half().float())


def test_full_precision_is_preferred_to_half(tmp_path):
    tiny_unet().half().save_pretrained(tmp_path, variant="fp16")
    tiny_unet().save_pretrained(tmp_path)
    assert answers(as_denoiser(tmp_path, scheduler=DDPMScheduler()), tiny_unet())


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_sharded_weights_load(tmp_path, variant):
    tiny_unet().save_pretrained(tmp_path, max_shard_size="30KB", variant=variant)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert answers(as_denoiser(tmp_path, scheduler=DDPMScheduler()), tiny_unet())


def test_a_saved_dit_loads_under_its_old_name_too(tmp_path):
    """The published DiT checkpoints name the class they had before it was split off."""
    tiny_dit().save_pretrained(tmp_path)
    for name in ("DiTTransformer2DModel", "Transformer2DModel"):
        edit(tmp_path / "config.json", _class_name=name)
        denoiser = as_denoiser(tmp_path, scheduler=DDPMScheduler())
        assert answers(denoiser, tiny_dit(), class_labels=torch.tensor([1, 10]))


def test_a_saved_latent_pipeline_works_on_latents(tmp_path):
    DiTPipeline(tiny_dit(), tiny_vae(), DDIMScheduler()).save_pretrained(tmp_path)
    assert as_denoiser(tmp_path).data_range is None
    assert as_denoiser(tmp_path / "transformer").data_range is None


class Bomb:
    """Unpickling it leaves a trace."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return (Path.touch, (self.trace,))


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside other safetensors"])
def test_pickled_weights_are_never_loaded(saved, tmp_path, beside):
    trace = tmp_path / "trace"
    unet = saved / "unet"
    weights = unet / "diffusion_pytorch_model.safetensors"
    if beside:
        weights.rename(unet / "pytorch_lora_weights.safetensors")
    else:
        weights.unlink()
    (unet / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.raises(ModelError, match="safetensors"):
        as_denoiser(saved)
    assert not trace.exists()
    pickle.loads((unet / "diffusion_pytorch_model.bin").read_bytes())
    assert trace.exists()  # the bomb was live


def drop_weight(path: Path) -> None:
    weights = load_file(path)
    weights.pop("conv_out.weight")
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: shutil.rmtree(p), "is not a directory.*save_pretrained.*name on the Hub"),
        (lambda p: (p / "model_index.json").unlink(), "neither model_index.json nor config.json"),
        (lambda p: (p / "model_index.json").write_text("{"), "model_index.json cannot be read"),
        (lambda p: (p / "model_index.json").write_text("[]"), "does not hold a JSON object"),
        (lambda p: edit(p / "model_index.json", unet=[None, None]), "neither a unet nor a transformer"),
        (lambda p: edit(p / "model_index.json", unet="UNet2DModel"), "neither a unet nor a transformer"),
        (lambda p: (p / "unet/config.json").unlink(), "config.json does not exist"),
        (lambda p: (p / "unet/config.json").write_text("{'a'"), "config.json cannot be read"),
        (lambda p: (p / "unet/config.json").write_text("[" * 100_000), "config.json cannot be read"),
        (lambda p: (p / "unet/config.json").write_bytes(b"\xff\xfe\x00"), "config.json cannot be read"),
        (lambda p: edit(p / "unet/config.json", _class_name="UNet9D"), "'UNet9D', which is no network"),
        (lambda p: edit(p / "unet/config.json", _class_name="DDPMScheduler"), "is no network"),
        (lambda p: edit(p / "unet/config.json", _class_name="DDPMPipeline"), "is no network"),
        (lambda p: edit(p / "unet/config.json", _class_name=None), "is no network"),
        (lambda p: edit(p / "unet/config.json", block_out_channels=[8, 16]), "unet cannot be loaded"),
        (
            lambda p: drop_weight(p / "unet/diffusion_pytorch_model.safetensors"),
            "lacks weights.*conv_out.weight",
        ),
        (
            lambda p: (p / "unet/diffusion_pytorch_model.safetensors").write_bytes(b"\x08" + bytes(100)),
            "unet cannot be loaded",
        ),
        (lambda p: (p / "scheduler/scheduler_config.json").write_text("nonsense"), "cannot be read"),
        (lambda p: (p / "scheduler/scheduler_config.json").unlink(), "has no scheduler"),
    ],
    ids=[
        "no directory",
        "no index",
        "damaged index",
        "index of the wrong type",
        "index without a network",
        "index entry of the wrong type",
        "no config",
        "damaged config",
        "config without an end",
        "config in no encoding",
        "unknown class",
        "a scheduler's class",
        "a pipeline's class",
        "no class",
        "config of another network",
        "a missing weight",
        "damaged weights",
        "damaged scheduler",
        "no scheduler",
    ],
)
def test_a_damaged_directory_is_refused_with_a_reason(saved, damage, message):
    damage(saved)
    with pytest.raises(ModelError, match=message):
        as_denoiser(saved)


def test_a_wrapped_model_is_still_itself():
    for wrap in (
        torch.nn.DataParallel,
        lambda net: torch.compile(torch.nn.DataParallel(net), backend="eager"),
    ):
        denoiser = as_denoiser(wrap(tiny_unet()), scheduler=DDPMScheduler())
        assert denoiser.description == "UNet2DModel"
        assert denoiser.shape == (1, 8, 8)
        assert answers(denoiser, tiny_unet())


@pytest.mark.parametrize("settings", [{"num_class_embeds": 10}, {}], ids=["labels", "no labels"])
def test_where_a_diffusers_network_holds_its_arguments_is_known(settings):
    denoiser = as_denoiser(tiny_unet(**settings), scheduler=DDPMScheduler())
    found = denoiser.binding(torch.tensor([3]) if settings else None)
    assert (found.x.name, found.t.name) == ("sample", "timestep")
    assert (found.scale, found.offset) == (1.0, 0.0)
    if settings:
        assert found.y.name == "class_labels"


def test_copies_of_a_labelled_network_run_the_copy():
    denoiser = as_denoiser(tiny_unet(num_class_embeds=10), scheduler=DDPMScheduler())
    other = copy.deepcopy(denoiser)
    assert answers(other, other.network, class_labels=torch.tensor([3, 9]))
    with torch.no_grad():
        other.network.conv_out.weight.zero_()
    assert answers(denoiser, tiny_unet(num_class_embeds=10), class_labels=torch.tensor([3, 9]))
    assert answers(other, other.network, class_labels=torch.tensor([3, 9]))


# Autoencoders ----------------------------------------------------------------------------------------------


def autoencoder(kind: str, **config):
    """A tiny one that halves (or, with three blocks, quarters) each side."""
    torch.manual_seed(0)
    if kind == "AutoencoderTiny":
        return diffusers.AutoencoderTiny(
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
            **config,
        ).eval()
    blocks = {
        "block_out_channels": (4, 4, 4),
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "norm_num_groups": 2,
        "latent_channels": 4,
    }
    if kind == "VQModel":
        return diffusers.VQModel(**blocks, num_vq_embeddings=16, **config).eval()
    return AutoencoderKL(**blocks, **config).eval()


PICTURES = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("kind", ["AutoencoderKL", "AutoencoderTiny", "VQModel"])
def test_pictures_have_the_shape_their_latents_decode_to(kind):
    module = autoencoder(kind)
    wrapped = Autoencoder(module)
    size = 8 if kind == "AutoencoderTiny" else 4
    assert wrapped.picture_shape((4, size, size)) == (3, 16, 16)
    assert wrapped.picture_shape((4, size, 2 * size)) == (3, 16, 32)
    assert wrapped.encode(PICTURES).shape == (3, 4, size, size)
    assert wrapped.decode(torch.zeros(2, 4, size, size)).shape == (2, 3, 16, 16)


def test_the_shape_of_pictures_is_found_by_decoding_where_no_config_says_it():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def encode(self, x):
            return (torch.nn.functional.avg_pool2d(x, 2) * self.weight,)

        def decode(self, x):
            return (x.repeat_interleave(2, -1).repeat_interleave(2, -2) * self.weight,)

    wrapped = Autoencoder(Twice())
    assert wrapped.picture_shape((4, 3, 5)) == (4, 6, 10)
    latents = torch.randn(2, 4, 3, 5)
    torch.testing.assert_close(wrapped.encode(wrapped.decode(latents)), latents)


def per_channel(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).view(1, 4, 1, 1)


MEAN, STD = [0.1, -0.2, 0.3, 0.4], [0.5, 1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("config", "to_network", "from_network"),
    [
        # Stable Diffusion
        ({"scaling_factor": 0.18215}, lambda z: z * 0.18215, lambda z: z / 0.18215),
        # Stable Diffusion 3 and Flux
        (
            {"scaling_factor": 1.5305, "shift_factor": 0.0609},
            lambda z: (z - 0.0609) * 1.5305,
            lambda z: z / 1.5305 + 0.0609,
        ),
        # Playground 2.5, in the pipeline of SDXL
        (
            {"scaling_factor": 0.5, "latents_mean": MEAN, "latents_std": STD},
            lambda z: (z - per_channel(MEAN)) * 0.5 / per_channel(STD),
            lambda z: z * per_channel(STD) / 0.5 + per_channel(MEAN),
        ),
    ],
    ids=["scaling", "scaling and shift", "mean and std"],
)
def test_latents_are_scaled_as_diffusers_pipelines_do(config, to_network, from_network):
    module = autoencoder("AutoencoderKL", **config)
    wrapped = Autoencoder(module)
    with torch.no_grad():
        expected = to_network(module.encode(PICTURES).latent_dist.mode())
        latents = torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(1))
        pictures = module.decode(from_network(latents)).sample
    # The same operations in another order: float32 rounding of values near one.
    torch.testing.assert_close(wrapped.encode(PICTURES), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(wrapped.decode(latents), pictures, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["AutoencoderTiny", "VQModel"])
def test_latents_without_a_distribution_are_scaled_too(kind):
    module = autoencoder(kind, scaling_factor=0.3)
    with torch.no_grad():
        expected = module.encode(PICTURES).latents * 0.3
    torch.testing.assert_close(Autoencoder(module).encode(PICTURES), expected, rtol=1e-5, atol=1e-6)


def test_an_autoencoder_answers_in_float32():
    module = autoencoder("AutoencoderTiny").double()
    assert Autoencoder(module).encode(PICTURES).dtype == torch.float32
    assert Autoencoder(module).decode(torch.zeros(1, 4, 8, 8)).dtype == torch.float32


def test_latents_that_are_not_finite_are_refused():
    """As the autoencoder of SDXL makes them in half precision."""
    module = autoencoder("AutoencoderKL")
    torch.nn.init.constant_(module.quant_conv.bias, float("inf"))
    with pytest.raises(ModelError, match="latents that are not finite: load it in float32"):
        Autoencoder(module).encode(PICTURES)


def test_an_autoencoder_that_runs_out_of_memory_takes_fewer_at_once():
    module = autoencoder("AutoencoderTiny")
    expected, encode, sizes = Autoencoder(module).encode(PICTURES), module.encode, []

    def limited(x):
        sizes.append(len(x))
        if len(x) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(x)

    module.encode = limited
    torch.testing.assert_close(Autoencoder(module).encode(PICTURES), expected, rtol=1e-5, atol=1e-6)
    assert sizes == [3, 2, 1, 1, 1]


def test_what_is_no_autoencoder_is_refused(tmp_path):
    with pytest.raises(ModelError, match="Linear is no autoencoder"):
        Autoencoder(torch.nn.Linear(2, 2))
    tiny_unet().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is no autoencoder"):
        Autoencoder(tmp_path).module  # noqa: B018


def test_a_latent_model_reads_pictures_through_its_autoencoder(tmp_path):
    """Its 8-bit data were refused, or decoded latents of the data taken for the data."""
    pipeline = DiTPipeline(tiny_dit(sample_size=4), autoencoder("AutoencoderKL"), DDIMScheduler())
    pipeline.save_pretrained(tmp_path)
    array = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    pixels = torch.from_numpy(array).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        expected = pipeline.vae.encode(pixels).latent_dist.mode() * pipeline.vae.config.scaling_factor
    for model in (pipeline, tmp_path, tmp_path / "transformer"):
        denoiser = as_denoiser(model, **({} if model is pipeline else {"scheduler": DDIMScheduler()}))
        assert denoiser.data_range is None
        x0 = torch.cat([batch.x0 for batch in open_images(array, denoiser).batches(2)])
        torch.testing.assert_close(x0, expected, rtol=1e-5, atol=1e-5)  # convolutions of other batch sizes
    latents = torch.randn(2, 4, 4, 4)
    assert torch.equal(next(open_images(latents, denoiser).batches(2)).x0, latents)


def test_an_autoencoder_may_be_named_by_hand_or_left_out(tmp_path):
    vae, dit = autoencoder("AutoencoderKL"), tiny_dit(sample_size=4)
    vae.save_pretrained(tmp_path)
    for given in (vae, tmp_path, str(tmp_path), Autoencoder(vae)):
        denoiser = as_denoiser(dit, scheduler=DDIMScheduler(), vae=given)
        assert denoiser.data_range is None
        assert denoiser.autoencoder.identity == Autoencoder(vae).identity
    ranged = as_denoiser(DiTPipeline(dit, vae, DDIMScheduler()), model_range=(0.0, 1.0))
    assert (ranged.data_range, ranged.autoencoder) == ((0.0, 1.0), None)
    with pytest.raises(ModelError, match="already carries"):
        as_denoiser(denoiser, vae=vae)
    with pytest.raises(ModelError, match="already carries"):
        as_denoiser(denoiser, model_range=(0.0, 1.0))
