"""A sampler's states, and what keeps them on the marginals: an affine map per state, channel and band."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.errors import MismatchError
from trueup.hf.schedules import scheduler_settings

# The miss of held-out trajectories in nats: by band (S, bands); the errors also of all bands together (S,).
EVIDENCE = ("before", "before_se", "after", "after_se")
TOTALS = ("before_total_se", "after_total_se")
Adjust = Callable[[int, Tensor], Tensor]  # (i, state i) -> what to go on with


@dataclass(frozen=True)
class States:
    """State i is alpha[i] x0 + sigma[i] eps, if nothing went wrong; t[i] is where the step to it began.

    A scheduler of several stages per step shows inner states, from which it does not go on: they are no
    samples of x_t, and are left alone.
    """

    t: Tensor  # (S,)
    alpha: Tensor  # (S,) in the sampler's own scale
    sigma: Tensor  # (S,)
    inner: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))  # (S,) within a step

    def __post_init__(self) -> None:
        if len(self.inner) != len(self.t):
            object.__setattr__(self, "inner", torch.zeros(len(self.t), dtype=torch.bool))

    def __len__(self) -> int:
        return len(self.t)


@dataclass(frozen=True)
class Sampler:
    """What a trajectory belongs to: the solver with its settings, the evaluations, the guidance."""

    name: str
    nfe: int
    settings: dict[str, Any] = field(default_factory=dict)  # plain values, as JSON keeps them
    guidance: float = 1.0

    @classmethod
    def of(cls, name: str, settings: Mapping[str, Any], nfe: int, guidance: float = 1.0) -> Sampler:
        """The sampler that a solver with these settings makes with `nfe` evaluations."""
        plain = json.loads(json.dumps(dict(settings), default=_plain))
        for setting, value in plain.items():
            if isinstance(value, float) and not math.isfinite(value):
                plain[setting] = str(value)  # infinity, some schedulers' default, is no JSON
        return cls(name, nfe, plain, float(guidance))

    @classmethod
    def of_scheduler(cls, scheduler: Any, nfe: int, guidance: float = 1.0) -> Sampler:
        """The sampler that a diffusers scheduler makes."""
        return cls.of(type(scheduler).__name__, scheduler_settings(scheduler), nfe, guidance)

    def __str__(self) -> str:
        grid = f" ({self.settings['grid']})" if "grid" in self.settings else ""
        guided = f", guidance {self.guidance:g}" if self.guidance != 1.0 else ""
        return f"{self.name}{grid} at {self.nfe} evaluations{guided}"

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"solver": self.name, "nfe": self.nfe, "guidance": self.guidance, "settings": self.settings}

    def differences(self, other: Sampler) -> list[str]:
        """In what two samplers differ; their names do not count."""
        found = [] if self.nfe == other.nfe else ["number of evaluations"]
        found += [] if self.guidance == other.guidance else ["guidance"]
        # A release of diffusers may add a setting: only those that both know are compared.
        names = self.settings.keys() & other.settings.keys()
        return found + [n for n in sorted(names) if self.settings[n] != other.settings[n]]


@dataclass(eq=False, repr=False)
class Trajectory:
    """x -> mu + gain (x - mu - shift) for every state i, mu = alpha_i E[x0], in the DCT (equation 35)."""

    sampler: Sampler
    states: States
    bands: Bands
    mean: Tensor  # (C, K) DCT of E[x0]
    shift: Tensor  # (S, C, K)
    gain: Tensor  # (S, C, bands)
    evidence: dict[str, Tensor]  # see EVIDENCE
    trajectories: int
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ready: dict[tuple[Any, ...], tuple[Tensor, Tensor] | None] = {}

    def __repr__(self) -> str:
        return f"<{self.summary()}>"

    def summary(self) -> str:
        """What it is for and what it does, in a line."""
        text = f"trajectory of {self.sampler}"
        values = [float(self.evidence[name][-1].sum()) for name in EVIDENCE[::2]]
        errors = [float(self.evidence[name][-1]) for name in TOTALS]
        before, after = (f"{v:.3g} ± {2 * e:.2g}" for v, e in zip(values, errors, strict=True))
        if self.empty:
            return f"{text}: its samples miss the data's moments by {before} nats, nothing is corrected"
        changed = f"{sum(map(self._changes, range(len(self.states))))} of {len(self.states)} states corrected"
        return f"{text}: {changed}; samples missed the data's moments by {before}, now by {after} nats"

    @property
    def identity(self) -> str:
        """A short hash of what it does: the same for a trajectory and what was loaded from its file."""
        of_states = (self.states.t, self.states.alpha, self.states.sigma)
        return digest_of(self.sampler.as_json(), (self.shift, self.gain, *of_states, self.mean))

    @property
    def empty(self) -> bool:
        """Whether it changes no state."""
        return not any(map(self._changes, range(len(self.states))))

    def _changes(self, i: int) -> bool:
        return bool(self.shift[i].any() or (self.gain[i] != 1).any())

    def __call__(self, i: int, x: Tensor) -> Tensor:
        """State i (B, C, *spatial) with its moments restored, in its own dtype."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        key = (i, x.device, dtype)
        if key not in self._ready:
            self._ready[key] = self._tables(*key)
        tables = self._ready[key]
        if tables is None:
            return x
        gain, offset = tables
        with torch.autocast(x.device.type, enabled=False):
            wide = x.to(dtype)  # only what is changed goes through the DCT, and its rounding with it
            return (wide + self.bands.idct(gain * self.bands.dct(wide)) + offset).to(x.dtype)

    def fitted(self, i: int) -> tuple[Tensor, Tensor]:
        """In which bands means and variances of state i come from maps, its own or those before it."""
        shifted = [bool(self.shift[: i + 1, :, members].any()) for members in self.bands.members]
        return torch.tensor(shifted), (self.gain[: i + 1] != 1).any(0).any(0)

    def check(self, states: States) -> None:
        """Raise unless these are the states it was made for."""
        if len(states) != len(self.states) or not torch.allclose(states.t, self.states.t, rtol=1e-3):
            raise MismatchError(f"the trajectory of {self.sampler} was made for other steps than it takes")

    def at_step(self, i: int, t: float, x: Tensor) -> Tensor:
        """State i of somebody else's loop, which says where step i began; nothing is taken on trust."""
        own = float(self.states.t[i]) if i < len(self.states) else math.nan
        if not abs(t - own) <= 1e-3 * max(1.0, abs(t)):
            there = "does not exist" if math.isnan(own) else f"at {own:g}"
            problem = f"step {i} begins at t = {t:g}, that of the trajectory {there}"
            raise MismatchError(f"{problem}: it was made for other timesteps")
        shape = (len(self.mean), *self.bands.spatial)
        if tuple(x.shape[1:]) != shape:
            raise MismatchError(f"the trajectory is of states of shape {shape}, not {tuple(x.shape[1:])}")
        return self(i, x)

    def _tables(self, i: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """The map as gain - 1 (C, *spatial) on the DCT and an image to add."""
        if not self._changes(i):
            return None
        with torch.inference_mode(False):
            gain = self.bands.spread(self.gain[i].double())
            mu = self.states.alpha[i] * self.mean.double()
            offset = mu - gain * (mu + self.shift[i].double())
            added, image = (v.reshape(-1, *self.bands.spatial) for v in (gain - 1, offset))
            return added.to(device, dtype), self.bands.idct(image).to(device, dtype)


def digest_of(settings: Any, parts: Iterable[Tensor]) -> str:
    """A short hash of plain values and of tensors as files keep them."""
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8)
    for part in parts:
        digest.update((part.float() + 0.0).contiguous().numpy().tobytes())  # files do not keep -0
    return digest.hexdigest()


def find(trajectories: Sequence[Trajectory], sampler: Sampler) -> Trajectory | None:
    """The trajectory for a sampler, if there is one."""
    return next((made for made in trajectories if not made.sampler.differences(sampler)), None)


def choose(trajectories: Sequence[Trajectory], sampler: Sampler) -> Trajectory:
    """The trajectory for a sampler, or an error that says which there are."""
    if not trajectories:
        raise MismatchError(f"no trajectory for {sampler}: this calibration has none (see calibrate_sampler)")
    nearest = min(trajectories, key=lambda made: len(made.sampler.differences(sampler)))
    differences = nearest.sampler.differences(sampler)
    if not differences:
        return nearest
    there = "; ".join(str(made.sampler) for made in trajectories)
    hint = ""
    if not {"number of evaluations", "guidance", "kind"} & {*differences}:
        hint = f"; that of {nearest.sampler} was made with another {' and another '.join(differences)}"
    raise MismatchError(f"no trajectory for {sampler}: this calibration has those of {there}{hint}")


def _plain(value: Any) -> Any:
    """An array of a scheduler's config as a list."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
