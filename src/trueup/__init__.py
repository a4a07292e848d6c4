"""trueup: measure how a trained diffusion network misses, and correct it at inference.

    import trueup

    cal = trueup.calibrate(pipe, "images/")
    print(cal.summary())
    with trueup.attach(pipe, cal):
        pipe(num_inference_steps=20)

Names, and the rooms one step down (`trueup.estimate.measure`), are loaded when first used: `import trueup` is
quick and never imports diffusers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "calibrate": "trueup.fitting",
    "fit_solver": "trueup.fitting",
    "load": "trueup.calibration",
    "attach": "trueup.calibration",
    "sample": "trueup.sampling",
    "evaluate": "trueup.evaluation",
    "likelihood": "trueup.density",
    "Denoiser": "trueup.denoiser",
    "Images": "trueup.images",
    "Recorder": "trueup.recording",
    "Parametrization": "trueup.parametrization",
    "TrueupError": "trueup.errors",
}

# These load diffusers, so `from trueup import *` leaves them out. It asks for the last two by name when it
# loads a pipeline that was saved with a scheduler of ours.
_OF_DIFFUSERS = ("Scheduler", "FittedScheduler", "SchedulerMixin")

__all__ = ["__version__", *_HOME, "process"]

if TYPE_CHECKING:
    from trueup import process as process
    from trueup.calibration import attach as attach
    from trueup.calibration import load as load
    from trueup.denoiser import Denoiser as Denoiser
    from trueup.density import likelihood as likelihood
    from trueup.errors import TrueupError as TrueupError
    from trueup.evaluation import evaluate as evaluate
    from trueup.fitting import calibrate as calibrate
    from trueup.fitting import fit_solver as fit_solver
    from trueup.hf.fitted import Scheduler as Scheduler
    from trueup.images import Images as Images
    from trueup.parametrization import Parametrization as Parametrization
    from trueup.recording import Recorder as Recorder
    from trueup.sampling import sample as sample


def __getattr__(name: str) -> Any:
    from importlib import import_module
    from importlib.util import find_spec

    if name in _HOME:
        globals()[name] = value = getattr(import_module(_HOME[name]), name)
        return value
    if name in _OF_DIFFUSERS:
        import_module("trueup.hf.loading").diffusers_module(f"trueup.{name}")
        return getattr(import_module("trueup.hf.fitted"), name)
    if find_spec(f"trueup.{name}") is None:
        raise AttributeError(f"module 'trueup' has no attribute {name!r}")
    return import_module(f"trueup.{name}")


def __dir__() -> list[str]:
    return sorted([*__all__, "Scheduler"])
