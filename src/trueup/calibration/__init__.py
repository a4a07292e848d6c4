"""A calibration: the correction and its evidence, its file, and how it is put on a model."""

from trueup.calibration.attachment import Attachment, as_calibration, attach, detach
from trueup.calibration.calibration import Calibration, load
from trueup.calibration.classes import OfClass
from trueup.calibration.conditions import OfConditions
from trueup.calibration.correction import GAINS, Correction, Innovation
from trueup.calibration.drawn import Drawn
from trueup.calibration.evidence import Evidence
from trueup.calibration.pictures import OfPictures
from trueup.fitted import FittedSolver

__all__ = ["GAINS", "Attachment", "Calibration", "Correction", "Drawn", "Evidence", "FittedSolver"]
__all__ += ["Innovation", "OfClass", "OfConditions", "OfPictures"]
__all__ += ["as_calibration", "attach", "detach", "load"]
