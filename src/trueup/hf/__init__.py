"""The only room that imports diffusers, and only to load something: its models, pipelines and schedules."""

from trueup.hf.autoencoder import Autoencoder
from trueup.hf.models import as_denoiser, is_pipeline, network_of
from trueup.hf.schedules import schedule

__all__ = ["Autoencoder", "as_denoiser", "is_pipeline", "network_of", "schedule"]
