"""A network as everything else sees it: one call, its noise process and what it predicts."""

from trueup.denoiser.binding import Binding
from trueup.denoiser.denoiser import CORRECTED, Denoiser
from trueup.denoiser.edm import is_preconditioned, preconditioned
from trueup.denoiser.memory import in_parts
from trueup.denoiser.network import corrections, prediction, signature, unwrapped
from trueup.denoiser.weights import fingerprint

__all__ = [
    "CORRECTED",
    "Binding",
    "Denoiser",
    "corrections",
    "fingerprint",
    "in_parts",
    "is_preconditioned",
    "preconditioned",
    "prediction",
    "signature",
    "unwrapped",
]
