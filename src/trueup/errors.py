"""What can go wrong, in words that say what to do."""


class TrueupError(Exception):
    """Base of every error this library raises on purpose."""


class ModelError(TrueupError):
    """The network, its schedule or what it predicts cannot be used as given."""


class DataError(TrueupError):
    """The calibration images cannot be used as given."""


class ArtifactError(TrueupError):
    """A calibration file is damaged, of an unknown version, or inconsistent."""


class MismatchError(TrueupError):
    """A calibration does not belong to this model."""


class AttachError(TrueupError):
    """A calibration cannot be put on, or taken off, this model."""
