"""The nodes: load a calibration, put it on a MODEL, sample with the steps fitted to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
from comfy.samplers import KSAMPLER
from torch import Tensor

import trueup
from trueup.calibration import GAINS, Calibration
from trueup.errors import DataError

from .correcting import corrected
from .sampling import fitted, sampler_function

_FOLDER, _BY_PATH, _AUTO = "trueup", "(the path below)", "auto"
folder_paths.add_model_folder_path(_FOLDER, str(Path(folder_paths.models_dir) / _FOLDER))


class LoadCalibration:
    """A .trueup.safetensors file, from ComfyUI's models/trueup or anywhere."""

    CATEGORY, FUNCTION = "trueup", "load"
    RETURN_TYPES, RETURN_NAMES = ("TRUEUP", "STRING"), ("trueup", "summary")
    DESCRIPTION = "Loads a calibration that `trueup calibrate` wrote. The summary says what it does."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """As ComfyUI asks for them."""
        names = [name for name in folder_paths.get_filename_list(_FOLDER) if name.endswith(".safetensors")]
        path = {"default": "", "tooltip": "a file anywhere on this machine"}
        return {"required": {"name": ([*names, _BY_PATH],)}, "optional": {"path": ("STRING", path)}}

    @classmethod
    def IS_CHANGED(cls, name: str, path: str = "") -> str:
        """Something else once the file is."""
        file = _file(name, path)
        return f"{file} {file.stat().st_mtime_ns}" if file.is_file() else str(file)

    def load(self, name: str, path: str = "") -> tuple[Calibration, str]:
        """The calibration, and what it says of itself."""
        calibration = trueup.load(_file(name, path))
        return calibration, calibration.summary()


class Calibrate:
    """A MODEL whose network is corrected at every noise level."""

    CATEGORY, FUNCTION = "trueup", "calibrate"
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = (
        "Corrects the network's systematic error. Gains: auto is what samples chose; see trueup's guide."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """As ComfyUI asks for them."""
        gains = [_AUTO, *(form for form in GAINS if form != "none")]
        return {"required": {"model": ("MODEL",), "trueup": ("TRUEUP",)}, "optional": {"gains": (gains,)}}

    def calibrate(self, model: Any, trueup: Calibration, gains: str = _AUTO) -> tuple[Any]:
        """The corrected MODEL; the one that came in stays as it is."""
        return (corrected(model, trueup, None if gains == _AUTO else gains),)


class FittedSteps:
    """The noise levels of the solver fitted to a model, and a sampler that takes its steps."""

    CATEGORY, FUNCTION = "trueup", "steps"
    RETURN_TYPES = ("SIGMAS", "SAMPLER")
    DESCRIPTION = "For SamplerCustom: the calibrated MODEL in nfe steps, with the cfg they were fitted for."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """As ComfyUI asks for them."""
        nfe = {
            "default": 8,
            "min": 1,
            "max": 1000,
            "tooltip": "how many evaluations; the file has solvers for some numbers",
        }
        cfg = {"default": 1.0, "min": 0.0, "max": 100.0, "step": 0.1, "tooltip": "as in the sampler"}
        given = {"model": ("MODEL",), "trueup": ("TRUEUP",), "nfe": ("INT", nfe), "cfg": ("FLOAT", cfg)}
        return {"required": given}

    def steps(self, model: Any, trueup: Calibration, nfe: int, cfg: float) -> tuple[Tensor, Any]:
        """SIGMAS and SAMPLER."""
        sigmas, solver, levels = fitted(model, trueup, nfe, cfg)
        return sigmas, KSAMPLER(sampler_function(solver, levels))


def _file(name: str, path: str) -> Path:
    if name != _BY_PATH:
        return Path(folder_paths.get_full_path(_FOLDER, name) or name)
    if not path.strip():
        raise DataError("choose a file of models/trueup, or give the path of one")
    return Path(path.strip()).expanduser()


NODE_CLASS_MAPPINGS = {
    "TrueupLoadCalibration": LoadCalibration,
    "TrueupCalibrate": Calibrate,
    "TrueupFittedSteps": FittedSteps,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "TrueupLoadCalibration": "trueup: load calibration",
    "TrueupCalibrate": "trueup: calibrate",
    "TrueupFittedSteps": "trueup: fitted sigmas",
}
