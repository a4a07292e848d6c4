"""Samplers whose states stay on the marginals: measure how they drift, and bring them back.

`calibrating` runs samplers, and is imported late: sampling itself needs the maps.
"""

from trueup.trajectory.maps import Sampler, Trajectory
from trueup.trajectory.states import States

__all__ = ["Sampler", "States", "Trajectory"]
