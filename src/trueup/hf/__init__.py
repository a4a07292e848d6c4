"""diffusers: models, pipelines and saved directories as denoisers, autoencoders, schedules.

The only room that imports diffusers, and only when it must load something; everything else works on the
objects it is handed.
"""

from trueup.hf.autoencoder import Autoencoder
from trueup.hf.models import as_denoiser, is_pipeline, network_of
from trueup.hf.schedules import schedule

__all__ = ["Autoencoder", "as_denoiser", "is_pipeline", "network_of", "schedule"]
