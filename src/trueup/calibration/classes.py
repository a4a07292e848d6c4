"""The correction of one class, beside that of all classes together."""

from __future__ import annotations

from dataclasses import dataclass

from trueup.calibration.correction import Correction
from trueup.statistics import Number


@dataclass(frozen=True, eq=False, repr=False)
class OfClass:
    """What was found of a class. correction: its own, whole, or None where that of all classes is as good.

    gain: of the likelihood bound, in nats a sample, over the correction of all classes, on images of the
    class that what it differs by was not fitted on; nan where it has none of its own, or at one level.
    """

    label: int
    images: int
    gain: Number
    correction: Correction | None = None
