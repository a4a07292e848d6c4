"""Noise processes: discrete and continuous variance preserving, variance exploding, EDM, rectified flow."""

from trueup.process.base import NoiseProcess, as_times, from_settings
from trueup.process.exploding import EDM, VE
from trueup.process.flow import Flow
from trueup.process.vp import ContinuousVP, DiscreteVP

__all__ = ["EDM", "VE", "ContinuousVP", "DiscreteVP", "Flow", "NoiseProcess", "as_times", "from_settings"]
