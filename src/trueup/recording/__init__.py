"""Moments kept beside training: a calibration without a pass of its own, and how calibrated the model is so
far."""

from trueup.recording.recorder import Recorder
from trueup.recording.shallow import ShallowNetwork

__all__ = ["Recorder", "ShallowNetwork"]
