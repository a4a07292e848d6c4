"""A small stand-in for what ComfyUI's nodes and samplers have to do with a MODEL, under ComfyUI's own names.

Written after what ComfyUI 0.3.75 does, for tests that must run without it; with COMFYUI_PATH set to a
checkout, `modules` hands out that instead, and the same tests run against it.
"""

from __future__ import annotations

import copy
import math
import os
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

REAL = os.environ.get("COMFYUI_PATH")


def modules(models_dir) -> SimpleNamespace:
    """ComfyUI's modules, its own or these, importable from now on."""
    if REAL:
        sys.path.insert(0, REAL)
        import comfy.options

        comfy.options.enable_args_parsing(False)
        from comfy.cli_args import args

        args.cpu = not torch.cuda.is_available()
        import comfy.latent_formats
        import comfy.model_base
        import comfy.model_patcher
        import comfy.samplers
        import folder_paths

        folder_paths.models_dir = str(models_dir)
        return SimpleNamespace(**vars(comfy), folder_paths=folder_paths)
    made = {
        "model_base": [ModelType, BaseModel],
        "model_patcher": [ModelPatcher],
        "samplers": [KSAMPLER, CFGGuider],
        "latent_formats": [SD15, Flux],
    }
    top = sys.modules["comfy"] = ModuleType("comfy")
    for name, members in made.items():
        module = sys.modules[f"comfy.{name}"] = ModuleType(f"comfy.{name}")
        vars(module).update({member.__name__: member for member in members})
        setattr(top, name, module)
    sys.modules["folder_paths"] = folder_paths = _folder_paths(str(models_dir))
    return SimpleNamespace(**{name: getattr(top, name) for name in made}, folder_paths=folder_paths)


def _folder_paths(models_dir: str) -> ModuleType:
    module, known = ModuleType("folder_paths"), {}
    module.models_dir = models_dir
    module.add_model_folder_path = lambda name, path: known.setdefault(name, []).append(path)
    module.get_filename_list = lambda name: sorted(
        str(file.relative_to(folder)) for folder in known[name] for file in Path(folder).rglob("*.*")
    )
    there = lambda name, file: (Path(folder) / file for folder in known[name])  # noqa: E731
    module.get_full_path = lambda name, file: next(
        (str(path) for path in there(name, file) if path.is_file()), None
    )
    return module


class SD15:
    latent_channels = 4

    def __init__(self, scale_factor=0.18215):
        self.scale_factor = scale_factor

    def process_in(self, latent):
        return latent * self.scale_factor

    def process_out(self, latent):
        return latent / self.scale_factor


class Flux:
    latent_channels, scale_factor, shift_factor = 16, 0.3611, 0.1159

    def process_in(self, latent):
        return (latent - self.shift_factor) * self.scale_factor

    def process_out(self, latent):
        return latent / self.scale_factor + self.shift_factor


def _rows(sigma, like):
    return sigma.reshape(()) if sigma.numel() == 1 else sigma.reshape(-1, *[1] * (like.ndim - 1))


class EPS:
    """States are x0 + sigma eps; the network sees them with the variance of the data."""

    def calculate_input(self, sigma, noise):
        return noise / (_rows(sigma, noise) ** 2 + self.sigma_data**2).sqrt()

    def calculate_denoised(self, sigma, model_output, model_input):
        return model_input - model_output * _rows(sigma, model_output)

    def noise_scaling(self, sigma, noise, latent_image, max_denoise=False):
        return latent_image + noise * ((1 + sigma**2).sqrt() if max_denoise else sigma)

    def inverse_noise_scaling(self, sigma, latent):
        return latent


class V_PREDICTION(EPS):
    sign = -1.0

    def calculate_denoised(self, sigma, model_output, model_input):
        sigma, data = _rows(sigma, model_output), self.sigma_data
        total = sigma**2 + data**2
        return model_input * data**2 / total + self.sign * model_output * sigma * data / total.sqrt()


class EDM(V_PREDICTION):
    sign = 1.0


class CONST:
    """States are (1 - sigma) x0 + sigma eps, which the network sees as they are."""

    def calculate_input(self, sigma, noise):
        return noise

    def calculate_denoised(self, sigma, model_output, model_input):
        return model_input - model_output * _rows(sigma, model_output)

    def noise_scaling(self, sigma, noise, latent_image, max_denoise=False):
        return sigma * noise + (1.0 - sigma) * latent_image

    def inverse_noise_scaling(self, sigma, latent):
        return latent / (1.0 - sigma)


class _Sampling(torch.nn.Module):
    @property
    def sigma_max(self):
        return self.sigmas[-1]


class ModelSamplingDiscrete(_Sampling):
    """Networks are told the whole timestep whose log sigma is nearest."""

    sigma_data = 1.0

    def __init__(self, model_config):
        super().__init__()
        ends = [
            model_config.sampling_settings.get(*of)
            for of in (("linear_start", 0.00085), ("linear_end", 0.012))
        ]
        betas = torch.linspace(*(end**0.5 for end in ends), 1000, dtype=torch.float64) ** 2
        kept = torch.cumprod(1 - betas, 0)
        if model_config.sampling_settings.get("zsnr"):
            root = kept.sqrt()
            kept = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
            kept[-1] = 5e-8  # no sigma is infinite
        self.register_buffer("sigmas", ((1 - kept) / kept).sqrt().float())

    def timestep(self, sigma):
        gap = sigma.log() - self.sigmas.log()[:, None]
        return gap.abs().argmin(0).view(sigma.shape)


class ModelSamplingContinuousEDM(_Sampling):
    def __init__(self, model_config):
        super().__init__()
        said = model_config.sampling_settings
        ends = math.log(said.get("sigma_min", 0.002)), math.log(said.get("sigma_max", 120.0))
        self.sigma_data = said.get("sigma_data", 1.0)
        self.register_buffer("sigmas", torch.linspace(*ends, 1000).exp())

    def timestep(self, sigma):
        return 0.25 * sigma.log()


class ModelSamplingDiscreteFlow(_Sampling):
    multiplier = 1000

    def __init__(self, model_config):
        super().__init__()
        shift, s = model_config.sampling_settings.get("shift", 1.0), torch.arange(1, 1001) / 1000
        self.register_buffer("sigmas", shift * s / (1 + (shift - 1) * s))

    def timestep(self, sigma):
        return sigma * self.multiplier


class ModelSamplingFlux(ModelSamplingDiscreteFlow):
    multiplier = 1


_SAMPLING = {
    "EPS": (ModelSamplingDiscrete, EPS),
    "V_PREDICTION": (ModelSamplingDiscrete, V_PREDICTION),
    "V_PREDICTION_EDM": (ModelSamplingContinuousEDM, V_PREDICTION),
    "EDM": (ModelSamplingContinuousEDM, EDM),
    "FLOW": (ModelSamplingDiscreteFlow, CONST),
    "FLUX": (ModelSamplingFlux, CONST),
}
ModelType = Enum("ModelType", list(_SAMPLING))


class BaseModel(torch.nn.Module):
    """The network with its noise: states and sigma in, denoised states out."""

    def __init__(self, model_config, model_type=ModelType.EPS, device=None):
        super().__init__()
        self.latent_format = model_config.latent_format
        self.model_sampling = type("ModelSampling", _SAMPLING[model_type.name], {})(model_config)

    def apply_model(
        self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs
    ):
        seen, told = self.model_sampling.calculate_input(t, x), self.model_sampling.timestep(t).float()
        options = transformer_options or {}
        output = self.diffusion_model(
            seen, told, context=c_crossattn, control=control, transformer_options=options, **kwargs
        )
        return self.model_sampling.calculate_denoised(t, output.float(), x)


class ModelPatcher:
    """A MODEL: a model that is shared, and options that are not."""

    def __init__(self, model, load_device, offload_device):
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.patches, self.model_options = {}, {"transformer_options": {}}

    def clone(self):
        made = ModelPatcher(self.model, self.load_device, self.offload_device)
        made.patches, made.model_options = dict(self.patches), copy.deepcopy(self.model_options)
        return made

    def set_model_unet_function_wrapper(self, unet_wrapper_function):
        self.model_options["model_function_wrapper"] = unet_wrapper_function

    def get_model_object(self, name):
        return getattr(self.model, name)


class KSAMPLER:
    """A sampler made of a function of k-diffusion's kind."""

    def __init__(self, sampler_function):
        self.sampler_function = sampler_function

    def sample(self, model_wrap, sigmas, extra_args, callback, noise, latent_image):
        sampling = model_wrap.inner_model.model_sampling
        top, first = float(sampling.sigma_max), float(sigmas[0])
        most = math.isclose(top, first, rel_tol=1e-5) or first > top
        x = sampling.noise_scaling(sigmas[0], noise, latent_image, most)
        masked = _Masked(model_wrap)
        made = self.sampler_function(
            masked, x, sigmas, extra_args=extra_args, callback=callback, disable=True
        )
        return sampling.inverse_noise_scaling(sigmas[-1], made)


class _Masked:
    """Between a sampler and the guider; what ComfyUI's does with masks of inpainting is left out."""

    def __init__(self, inner_model):
        self.inner_model = inner_model

    def __call__(self, x, sigma, model_options, seed=None):
        return self.inner_model(x, sigma, model_options)


class CFGGuider:
    """Conditional and unconditional rows in one batch, through the wrapper where there is one."""

    def __init__(self, model_patcher):
        self.model_patcher, self.inner_model, self.cfg = model_patcher, model_patcher.model, 1.0

    def set_conds(self, positive, negative):
        self.conds = {"positive": positive[0][0], "negative": negative[0][0]}

    def set_cfg(self, cfg):
        self.cfg = cfg

    def __call__(self, x, sigma, model_options):
        sides = ["positive"] if math.isclose(self.cfg, 1.0) else ["negative", "positive"]
        context = torch.cat([self.conds[side].expand(len(x), -1, -1) for side in sides])
        both, sigmas = x.repeat(len(sides), 1, 1, 1), sigma.repeat(len(sides))
        c, apply_model = {"c_crossattn": context, "transformer_options": {}}, self.inner_model.apply_model
        wrapper = model_options.get("model_function_wrapper")
        if wrapper is None:
            made = apply_model(both, sigmas, **c)
        else:
            order = [1, 0][-len(sides) :]
            made = wrapper(apply_model, {"input": both, "timestep": sigmas, "c": c, "cond_or_uncond": order})
        found = dict(zip(sides, made.chunk(len(sides)), strict=True))
        if len(sides) == 1:
            return found["positive"]
        return found["negative"] + (found["positive"] - found["negative"]) * self.cfg

    @torch.no_grad()
    def sample(self, noise, latent_image, sampler, sigmas, seed=None):
        latent_format = self.inner_model.latent_format
        if latent_image.any():  # an empty one is not shifted
            latent_image = latent_format.process_in(latent_image)
        extra_args = {"model_options": self.model_patcher.model_options, "seed": seed}
        return latent_format.process_out(sampler.sample(self, sigmas, extra_args, None, noise, latent_image))
