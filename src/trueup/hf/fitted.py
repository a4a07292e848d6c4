"""A solver fitted to a model as a scheduler of diffusers: `pipe.scheduler = cal.scheduler(nfe=8)`.

Pipelines save and load it like any other: everything it needs is in its config, tensors as text. diffusers
looks for it in what the process has imported, so that `import trueup` comes before `from_pretrained`. This
module loads diffusers, so that nothing imports it until a scheduler is asked for.
"""

from __future__ import annotations

import base64
import json
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import SchedulerMixin
from diffusers.configuration_utils import ConfigMixin
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from trueup import fitted
from trueup.denoiser.layout import LAYOUTS, SEEN, arranged, restored, spatial_of
from trueup.errors import Argument, ArtifactError, MismatchError, TrueupError
from trueup.files import line, unpacked
from trueup.fitted import MEMORY, FittedSolver
from trueup.hf.loading import config_of
from trueup.hf.schedulers import betas_of
from trueup.hf.schedules import PREDICTION_TYPES, schedule
from trueup.hf.shared import find_scheduler
from trueup.parametrization import Parametrization
from trueup.process import DiscreteVP, NoiseProcess
from trueup.stored import sample_shape

_FETCHING = ("revision", "token", "cache_dir", "local_files_only", "force_download")  # as diffusers has them
_NEAR = 5e-3  # a time in half precision, relative
# In a config their names begin with _: other schedulers that are made of it, as is usual, neither take what
# is private nor print it in a warning.
_OWN = ("process", "parametrization", "solver", "tensors", "layout")
_COMMON = ("num_train_timesteps", "prediction_type", "trained_betas")
_HIDDEN = ("_class_name", "_diffusers_version", "_name_or_path", *(f"_{name}" for name in _OWN))


class FittedScheduler(SchedulerMixin, ConfigMixin):
    """The steps of a `trueup.fitted.FittedSolver`, for pipelines; made by `Calibration.scheduler`.

    States are x_t as the network sees it, so nothing is scaled, and the last one is the sample. The pipeline
    takes as many steps as it was fitted for, with that guidance. From an image (strength below 1) it starts
    in the middle: the first steps, before which too little is remembered, are then those of DDIM.

    It cannot see the network: the correction that it was fitted with has to be attached for as long as it is
    on the pipeline. `import trueup` before a pipeline that was saved with it is loaded.
    """

    order = 1
    _compatibles: list[str] = []  # noqa: RUF012 (diffusers' name)

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        prediction_type: str = "epsilon",
        trained_betas: list[float] | None = None,
        *,
        process: dict[str, Any] | None = None,
        parametrization: dict[str, Any] | None = None,
        solver: dict[str, Any] | None = None,
        tensors: str = "",
        layout: str | None = None,
        others: dict[str, Any] | None = None,
    ):
        """From a config: trained_betas or process is the noise, solver and tensors are what steps it.

        layout: how samples are arranged, see `trueup.denoiser.layout`.
        others: what schedulers that are made of this config, in its place, are to know (clipping, spacing).
        """
        if not isinstance(solver, dict) or not isinstance(parametrization, dict):
            raise TrueupError("a FittedScheduler is made by Calibration.scheduler(nfe), or loaded")
        if layout not in (None, *LAYOUTS):
            raise ArtifactError("how this scheduler's samples are arranged makes no sense")
        own = {"process": process, "parametrization": parametrization, "solver": solver, "tensors": tensors}
        own["layout"], self.layout = layout, layout
        common = dict(zip(_COMMON, (num_train_timesteps, prediction_type, trained_betas), strict=True))
        more = {"clip_sample": False} if others is None else others
        self.register_to_config(**{**more, **common, **{f"_{name}": own[name] for name in _OWN}})
        self.process, self.parametrization = schedule({**self.config, "_class_name": type(self).__name__})
        self.solver = unpacked(_unpack, solver, _decoded(tensors), "this scheduler")
        self.spatial: tuple[int, ...] | None = None  # of latents that come as tokens, which do not say
        self.init_noise_sigma = self.process.prior_std
        self.num_inference_steps: int | None = None
        self._start_again(None)

    @classmethod
    def of(
        cls,
        solver: FittedSolver,
        process: NoiseProcess,
        parametrization: Parametrization,
        layout: str | None = None,
    ) -> FittedScheduler:
        """The scheduler that steps as a solver does; parametrization: of what a pipeline hands it."""
        meta, tensors = fitted.pack(solver, "solver")
        meta = json.loads(json.dumps({**meta, "shape": solver.shape}, default=lambda v: v.tolist()))
        betas = betas_of(process) if isinstance(process, DiscreteVP) else None
        settings = process.settings()
        return cls(
            num_train_timesteps=int(settings.get("time_scale", 1000)) if betas is None else len(betas),
            prediction_type=PREDICTION_TYPES.get(parametrization.name, parametrization.name),
            trained_betas=betas,
            process=settings if betas is None else None,
            parametrization=parametrization.settings(),
            solver=meta,
            tensors=_encoded(tensors),
            layout=layout,
        )

    def replacing(self, scheduler: Any) -> FittedScheduler:
        """The same with the config of the scheduler whose place it takes.

            pipe.scheduler = cal.scheduler(nfe=8).replacing(pipe.scheduler)

        Other schedulers, made of this one's config later, then clip and space as the model's own did.
        """
        config = config_of(scheduler)
        process, parametrization = schedule(config)
        if not process.agrees_with(self.process) or parametrization != self.parametrization:
            raise MismatchError(f"{config['_class_name']} is of another noise or prediction than this solver")
        common, others = _parted({**{name: self.config[name] for name in _COMMON[:2]}, **config})
        return type(self)(**common, **{name: self.config[f"_{name}"] for name in _OWN}, others=others)

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """As diffusers' schedulers have it."""
        if isinstance(config, dict):
            kwargs = {**{name: config.get(f"_{name}") for name in _OWN}, **kwargs}
            common, others = _parted(config)
            config = {name: value for name, value in config.items() if name in common or name in _HIDDEN}
            kwargs.setdefault("others", others)
        return super().from_config(config, return_unused_kwargs, **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        subfolder: str | None = None,
        return_unused_kwargs: bool = False,
        *,
        nfe: int | None = None,
        guidance: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """From a scheduler's directory, or what `Calibration.save_pretrained` wrote, here or on the Hub.

        nfe, guidance: which one, where there are several.
        """
        how = {name: kwargs.pop(name) for name in _FETCHING if name in kwargs}
        folder = find_scheduler(pretrained_model_name_or_path, subfolder, nfe, guidance, **how)
        return super().from_pretrained(folder, None, return_unused_kwargs, **kwargs)

    @property
    def identity(self) -> str:
        """A short hash of what it does."""
        return self.solver.identity

    def __repr__(self) -> str:
        return f"<FittedScheduler: {self.solver.summary()}>"

    def __len__(self) -> int:
        return int(self.config["num_train_timesteps"])

    @property
    def step_index(self) -> int | None:
        """Which step comes next; None before the first."""
        return self._step_index

    @property
    def begin_index(self) -> int | None:
        """With which step a pipeline said that it begins."""
        return self._begin_index

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        sigmas: Any = None,
        **kwargs: Any,
    ) -> None:
        """Start again. Levels are its own: of sigmas, which some pipelines pass, only the number counts."""
        if kwargs.get("timesteps") is not None:
            raise MismatchError("the timesteps of this scheduler are its own: pass num_inference_steps alone")
        steps = len(sigmas) if num_inference_steps is None and sigmas is not None else num_inference_steps
        if steps is not None and steps != self.solver.nfe:
            problem = f"this scheduler was fitted for {self.solver.nfe} steps, not {steps}"
            advice = "pass {}, or fit one for so many (trueup.fit_solver)"
            raise MismatchError(problem, advice, Argument("num_inference_steps", self.solver.nfe))
        self.num_inference_steps = self.solver.nfe
        self._start_again(device)

    def _start_again(self, device: torch.device | str | None) -> None:
        whole = self.process.integer_times and bool((self.solver.t == self.solver.t.round()).all())
        self.timesteps = self._told.to(torch.int64 if whole else torch.float32).to(device)
        # As pipelines read them: of a flow the share of noise, else noise over signal.
        solver, of_signal = self.solver, 1.0 if self.process.kind == "flow" else self.solver.alpha
        self.sigmas = (solver.sigma / of_signal).to(torch.float32)
        self._history: list[Tensor] = []
        self._step_index: int | None = None
        self._begin_index: int | None = None

    @property
    def _told(self) -> Tensor:
        """Its times as the network counts them."""
        scale, offset = self.process.told
        return scale * self.solver.t + offset

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Begin with another step than the first, as from an image."""
        self._begin_index = begin_index

    def scale_model_input(self, sample: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The same: states are what the network sees."""
        return sample

    def index_for_timestep(self, timestep: Any, schedule_timesteps: Any = None) -> int:
        """Which step begins at a timestep."""
        value, t = float(timestep), self._told
        index = int((t - value).abs().argmin())
        if not abs(float(t[index]) - value) <= max(_NEAR * abs(value), 1e-6):
            there = ", ".join(f"{float(time):g}" for time in t)
            raise MismatchError(f"this scheduler has no step at t = {value:g}: its timesteps are {there}")
        return index

    def step(
        self,
        model_output: Tensor,
        timestep: Any,
        sample: Tensor,
        return_dict: bool = True,
        generator: Any = None,
        **kwargs: Any,
    ) -> SchedulerOutput | tuple[Tensor]:
        """The next state from what the network said of this one; nothing is random, whatever eta."""
        if kwargs.get("eta"):
            warnings.warn("a fitted solver adds no noise: eta is ignored", stacklevel=2)
        solver = self.solver
        if self.layout is not None:
            spatial = self._size(sample)
            sample, model_output = (restored(v, self.layout, spatial) for v in (sample, model_output))
        shape, given, told = solver.shape, sample.shape, model_output.shape
        channels = shape[0]
        as_wanted = len(given) == 1 + len(shape) and given[1] == channels and given[2:] == told[2:]
        if not as_wanted or told[1] not in (channels, 2 * channels):
            shapes = f"{tuple(given[1:])} and outputs of shape {tuple(told[1:])}"
            made_for = f"samples of shape {shape}, or with as many channels and axes"
            raise MismatchError(f"this scheduler was fitted for {made_for}, not {shapes}")
        if told[1] != channels:
            model_output = model_output[:, :channels]  # the rest is a variance
        if self._step_index is None:
            begin = self._begin_index
            self._step_index = self.index_for_timestep(timestep) if begin is None else begin
        i = self._step_index
        if not 0 <= i < solver.nfe:
            raise TrueupError(f"all {solver.nfe} steps are done: call set_timesteps before starting again")
        if torch.is_autocast_enabled(sample.device.type):  # leaving it is not free
            with torch.autocast(sample.device.type, enabled=False):
                made = self._stepped(i, model_output, sample)
        else:
            made = self._stepped(i, model_output, sample)
        self._step_index = i + 1
        return SchedulerOutput(prev_sample=made) if return_dict else (made,)

    def _stepped(self, i: int, output: Tensor, sample: Tensor) -> Tensor:
        wide = torch.float64 in (sample.dtype, output.dtype)
        x = sample.to(torch.float64 if wide else torch.float32)
        self._history.insert(0, self.solver.remembered(i, output, x, self.parametrization))
        del self._history[MEMORY:]
        return arranged(self.solver.step(i, x, self._history).to(sample.dtype), self.layout)

    def _size(self, sample: Tensor) -> tuple[int, ...]:
        """Of samples that come as tokens: as was said, as the network was told, or as fitted if square."""
        like = self.solver.shape[1:] if self.spatial is None else self.spatial
        packed = self.layout == "packed" and self.spatial is None
        # Taken away, since a network that nothing is attached to says nothing before the next step.
        seen = SEEN.pop(sample.shape[1], None) if packed else None
        spatial = seen or spatial_of(sample, self.layout, like)
        if spatial is None or (packed and not seen and spatial[0] != spatial[1]):
            tokens = f"{sample.shape[1]} tokens may be a picture of other proportions than {like}"
            advice = "attach the calibration, or set scheduler.spatial to the height and width of the latents"
            raise MismatchError(f"{tokens}: {advice}")
        return spatial

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x_t of samples and noise, a time per row; at its own timesteps of the levels that it steps from."""
        t = torch.as_tensor(timesteps).detach().cpu().double().reshape(-1)
        gap, near = (t[:, None] - self._told).abs().min(1)
        own = gap <= 1e-6 * t.abs().clamp_min(1e-3)
        scale, offset = self.process.told
        t = (t - offset) / scale
        wide = (-1, *[1] * (original_samples.ndim - 1))
        alpha = torch.where(own, self.solver.alpha[near], self.process.alpha(t)).reshape(wide)
        sigma = torch.where(own, self.solver.sigma[near], self.process.sigma(t)).reshape(wide)
        wide_samples = original_samples.to(_wide(original_samples))
        made = alpha.to(wide_samples) * wide_samples + sigma.to(wide_samples) * noise
        return made.to(original_samples.dtype)

    def scale_noise(self, sample: Tensor, timestep: Tensor, noise: Tensor) -> Tensor:
        """`add_noise`, as pipelines of flows call it."""
        return self.add_noise(sample, noise, timestep)


# diffusers keeps this name in what it saves, and finds there only what the process has imported.
FittedScheduler.__module__ = "trueup"
Scheduler = FittedScheduler  # its name at the top


def _parted(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a config what this scheduler reads, and what it keeps for others."""
    common = {name: config[name] for name in _COMMON if name in config}
    return common, {name: v for name, v in config.items() if name not in common and name not in _HIDDEN}


def _wide(sample: Tensor) -> torch.dtype:
    return torch.float64 if sample.dtype == torch.float64 else torch.float32


def _unpack(meta: dict[str, Any], tensors: dict[str, Tensor]) -> FittedSolver:
    return fitted.unpack(meta, tensors, "solver", sample_shape({"shape": list(meta.get("shape", ()))}))


def _encoded(tensors: dict[str, Tensor]) -> str:
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return base64.b64encode(to_bytes(held)).decode("ascii")


def _decoded(text: str) -> dict[str, Tensor]:
    try:
        return from_bytes(base64.b64decode(text, validate=True))
    except (SafetensorError, TypeError, ValueError) as error:
        raise ArtifactError(f"the tensors of this scheduler cannot be read: {line(error)}") from None
