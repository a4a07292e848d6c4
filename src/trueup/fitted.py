"""A solver fitted to a model: where it asks the network, what it makes of the answers, and how it is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trueup.bands import Bands
from trueup.errors import ArtifactError, TrueupError
from trueup.parametrization import Parametrization
from trueup.stored import (
    LARGEST,
    Bounds,
    check_tensors,
    digest_of,
    kept_coefficients,
    numbers,
    packed,
    part,
    whole,
    word,
)

MEMORY = 3  # how many of the network's answers a step may use
ENOUGH = 128  # trajectories; of fewer, a fit may not be sure that it helps
HISTORIES = ("eps", "x0")
_MOST = 1000  # evaluations
_AT_ONCE = 2**23  # values of a state that a step makes together; at least one sample's
_EXACT = ("t", "alpha", "sigma", "weights")  # kept as float64


@dataclass(eq=False, repr=False)
class FittedSolver:
    """x_(i+1) = w_x x_i + w_0 h_i + w_1 h_(i-1) + w_2 h_(i-2), weights by channel and band, and a map.

    State 0 is noise of the process's `prior_std`, x_t as the network sees it; state N is the sample. A solver
    for guided outputs remembers these.
    """

    nfe: int
    t: Tensor  # (N,) what the network is told, falling
    alpha: Tensor  # (N + 1,) of the states; the last is the sample, 1
    sigma: Tensor  # (N + 1,) the last is 0
    history: str  # what is remembered, "eps" or "x0"
    weights: Tensor  # (N, 4) of the rule it started from
    bands: Bands
    tables: Tensor  # (N, 4, C, bands) what is added to them
    offset: Tensor  # (N, C, K) in the DCT
    guidance: float = 1.0
    gains: str = "none"  # form of the correction it was fitted with
    evidence: dict[str, float] = field(default_factory=dict)  # of trajectories not fitted to; nan: unknown
    provenance: dict[str, Any] = field(default_factory=dict)  # base: the rule and its grid, in words

    def __post_init__(self) -> None:
        self._ready: dict[Any, Any] = {}
        self._check_plain()
        self._check_shapes()
        self._check_levels()

    def _check_plain(self) -> None:
        if type(self.nfe) is not int or not 1 <= self.nfe <= _MOST:
            raise TrueupError(f"a solver makes 1 to {_MOST} evaluations, not {self.nfe!r}")
        if self.history not in HISTORIES:
            raise TrueupError(f"a solver remembers {' or '.join(HISTORIES)}, not {self.history!r}")
        if not isinstance(self.gains, str):
            raise TrueupError(f"gains are a form of the correction, not {type(self.gains).__name__}")
        numbers = {"guidance": self.guidance, **self.evidence}
        for name, value in numbers.items():
            finite = isinstance(value, (int, float)) and not math.isinf(value)
            if not finite or (name == "guidance" and math.isnan(value)):
                raise TrueupError(f"{name} of a solver is a number, not {value!r}")

    def _check_shapes(self) -> None:
        channels, size = self.offset.shape[1:2], self.bands.length
        shapes: dict[str, tuple[int, ...]] = {
            "t": (self.nfe,),
            "alpha": (self.nfe + 1,),
            "sigma": (self.nfe + 1,),
            "weights": (self.nfe, 1 + MEMORY),
            "tables": (self.nfe, 1 + MEMORY, *channels, self.bands.count),
            "offset": (self.nfe, *channels, size),
        }
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tuple(tensor.shape) != shape:
                found = f"not {tuple(tensor.shape)}"
                raise TrueupError(f"{name} of a solver for {self.purpose} has shape {shape}, {found}")
            if not torch.isfinite(tensor).all():
                raise TrueupError(f"{name} of a solver for {self.purpose} holds values that are not finite")

    def _check_levels(self) -> None:
        alpha, sigma = self.alpha, self.sigma
        if not (self.t.diff() < 0).all():
            raise TrueupError(f"times of a solver for {self.purpose} do not fall")
        if not (alpha[-1] == 1 and sigma[-1] == 0):
            raise TrueupError(f"the last state of a solver for {self.purpose} is no sample: alpha 1, sigma 0")
        # sigma/alpha falls; alpha may be 0 at first.
        if not ((alpha >= 0).all() and (sigma[1:] * alpha[:-1] < sigma[:-1] * alpha[1:]).all()):
            raise TrueupError(f"noise of a solver for {self.purpose} does not fall")

    def __repr__(self) -> str:
        return f"<{self.summary()}>"

    @property
    def purpose(self) -> str:
        """What it is for, in words."""
        return purpose(self.nfe, self.guidance)

    def is_for(self, nfe: int, guidance: float = 1.0) -> bool:
        """Whether it makes so many evaluations, guided like this."""
        return self.nfe == nfe and math.isclose(self.guidance, guidance, rel_tol=1e-6)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a sample, (C, *spatial)."""
        return (self.offset.shape[1], *self.bands.spatial)

    @property
    def empty(self) -> bool:
        """Whether fitting added nothing to the rule it started from."""
        return not (self.tables.any() or self.offset.any())

    @property
    def identity(self) -> str:
        """A short hash of what it does: the same for a solver and what was loaded from its file."""
        settings = [self.nfe, float(self.guidance), self.history, self.gains]
        exact = [getattr(self, name).double() for name in _EXACT]
        return digest_of(
            [*settings, self.bands.edges, self.bands.spatial],
            [*exact, self.tables.float(), self.offset.float()],
        )

    def summary(self) -> str:
        """What it is for and what fitting did, in a line."""
        text = f"solver for {self.purpose}: {self.provenance.get('base', 'a rule')}"
        text += ", as it is" if self.empty else f", {self.provenance.get('fitted', 'fitted')}"
        few = self.provenance.get("trajectories")
        if self.empty and isinstance(few, int) and few < ENOUGH:
            text += f" (by {few} trajectories; {ENOUGH} may improve it)"
        text += self._told("whitened error to the limit", "error")
        text += self._told("miss of the data's bands", "miss", " nats a coefficient")
        limit = self.evidence.get("limit_miss", math.nan)
        return text if math.isnan(limit) else f"{text} (of the limit {max(limit, 0.0):.2g})"

    def _told(self, what: str, name: str, unit: str = "") -> str:
        # A miss is unbiased, and may come out below 0.
        before, after = (self.evidence.get(key, math.nan) for key in (f"{name}_base", name))
        if math.isnan(after):
            return ""
        first = "" if math.isnan(before) else f"{max(before, 0.0):.2g} -> "
        error = self.evidence.get(f"{name}_se", math.nan)
        reach = "" if math.isnan(error) else f" ± {2 * error:.2g}"
        return f"; {what} {first}{max(after, 0.0):.2g}{reach}{unit}"

    def remembered(self, i: int, output: Tensor, x: Tensor, parametrization: Parametrization) -> Tensor:
        """What the network said at level i, as eps or x0; in x's precision if output's is lower."""
        on_output, on_x = self._read(i, parametrization)
        if on_x == 0.0:
            return output.to(torch.promote_types(x.dtype, output.dtype)) * on_output
        return torch.add(x if on_x == 1.0 else x * on_x, output, alpha=on_output)

    def _read(self, i: int, parametrization: Parametrization) -> tuple[float, float]:
        """Weights of the network's output and of x in what is remembered."""
        key = (i, parametrization)
        if key not in self._ready:
            alpha, sigma = self.alpha[i], self.sigma[i]
            p, q = parametrization.coefficients(alpha, sigma)
            on_output, on_x = (alpha, -p) if self.history == "eps" else (-sigma, q)
            bottom = alpha * q - sigma * p
            self._ready[key] = float(on_output / bottom), float(on_x / bottom)
        return self._ready[key]

    def step(self, i: int, x: Tensor, history: Sequence[Tensor]) -> Tensor:
        """State i + 1 from state i and what was remembered, the latest first, at most MEMORY.

        Where less is remembered than it needs, as after a start in the middle, it is a step of first order.
        """
        if x.shape[2:] != self.bands.spatial:
            return self.resized(x.shape[2:]).step(i, x, history)
        if x.numel() > _AT_ONCE and len(x) > 1:
            rows = max(1, len(x) * _AT_ONCE // x.numel())
            split = zip(*(v.split(rows) for v in (x, *history)), strict=True)
            return torch.cat([self.step(i, one, said) for one, *said in split])
        weights, tables, offset = self._on(i, x, len(history) >= self.memory(i))
        parts = torch.stack(
            [x, *(history[back] for back in range(len(weights) - 1))], 2
        )  # (B, C, J, *spatial)
        # The rule's part is made of pixels: products of matrices may be coarse on a GPU.
        if tables is None or offset is None:
            return (parts * weights).sum(2)
        bands = self.bands
        if bands.whole:
            added = bands.idct(torch.addcmul(offset, bands.dct(parts), tables))
            return torch.addcmul(added, parts, weights).sum(2)
        # Large samples' tables are as large, so that they are not kept for every step, and sums come first.
        tables, offset = bands.spread_all(tables), bands.fill(offset)
        added = bands.idct(torch.addcmul(offset, bands.dct(parts), tables).sum(2))
        return added + (parts * weights).sum(2)

    def resized(self, spatial: Sequence[int]) -> FittedSolver:
        """For samples of another size: the rule it started from, on its levels.

        What was fitted to trajectories of one size does harm at others (docs/results.md, "Other sizes").
        """
        size = tuple(spatial)
        if size == self.bands.spatial:
            return self
        if size not in self._ready:
            bands = self.bands.resized(size)[0]
            tables = self.tables.new_zeros(*self.tables.shape[:-1], bands.count)
            offset = self.offset.new_zeros(*self.offset.shape[:-1], bands.length)
            made = replace(self, bands=bands, tables=tables, offset=offset, evidence={})
            self._ready[size] = made
        return self._ready[size]

    def memory(self, i: int) -> int:
        """How many of the network's answers step i uses."""
        if i not in self._ready:
            used = [bool(self.weights[i, j] != 0 or self.tables[i, j].any()) for j in range(1, 1 + MEMORY)]
            self._ready[i] = max([1, *(j for j, there in enumerate(used, 1) if there)])
        return self._ready[i]

    def first_order(self, i: int) -> tuple[float, float]:
        """DDIM's step from level i to the next, as weights on x_i and h_i (equation 30)."""
        (alpha, after_alpha), (sigma, after_sigma) = (v[i : i + 2].tolist() for v in (self.alpha, self.sigma))
        if self.history == "eps":
            return after_alpha / alpha, after_sigma - after_alpha / alpha * sigma
        return after_sigma / sigma, after_alpha - after_sigma / sigma * alpha

    def _on(self, i: int, x: Tensor, enough: bool) -> _Step:
        """What step i is made with beside x, made once; enough: of what it remembers, not of first order."""
        key = (i, x.device, x.dtype, enough)
        if key not in self._ready:
            with torch.inference_mode(False):  # they may be part of a backward pass later
                self._ready[key] = self._made(i, x, enough)
        return self._ready[key]

    def _made(self, i: int, x: Tensor, enough: bool) -> _Step:
        bands, count = self.bands, 1 + (self.memory(i) if enough else 1)
        rule = self.weights[i, :count] if enough else torch.tensor(self.first_order(i), dtype=torch.float64)
        weights = rule.to(x).reshape(count, *[1] * len(bands.spatial))
        if not (enough and (self.tables[i].any() or self.offset[i].any())):
            return _Step(weights, None, None)
        tables = self.tables[i, :count].transpose(0, 1).to(x)
        offset = self.offset[i, :, None].to(x) / count  # in this order: a file has single precision
        if bands.whole:
            tables, offset = bands.spread_all(tables), bands.fill(offset)
        return _Step(weights, tables, offset)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": {}}  # made again where it is needed


class _Step(NamedTuple):
    """What a step makes of J parts, x and what it remembers."""

    weights: Tensor  # (J, 1, ...)
    tables: Tensor | None  # (C, J, *spatial), of large samples (C, J, bands); None where nothing was fitted
    offset: Tensor | None  # (C, 1, *spatial), of large samples (C, 1, K); a part's share


def purpose(nfe: int, guidance: float = 1.0) -> str:
    """What a solver is for, in words.

    >>> purpose(8), purpose(1, 2.5)
    ('8 evaluations', '1 evaluation (guidance 2.5)')
    """
    guided = f" (guidance {guidance:g})" if guidance != 1.0 else ""
    return f"{nfe} evaluation{'s' * (nfe != 1)}{guided}"


def pack(solver: FittedSolver, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A solver as metadata and tensors, their names beginning with `name`; of the offset what is not zero."""
    kept, offset = packed(solver.offset, solver.bands)
    meta = {
        **{key: getattr(solver, key) for key in ("nfe", "history", "gains", "provenance")},
        "guidance": float(solver.guidance),
        "band_edges": list(solver.bands.edges),
        "kept_bands": kept,
        "evidence": {key: None if math.isnan(value) else value for key, value in solver.evidence.items()},
        "identity": solver.identity,
    }
    exact = {key: getattr(solver, key).double() for key in _EXACT}
    tensors = {**exact, "tables": solver.tables.float(), "offset": offset}
    return meta, {f"{name}.{key}": tensor for key, tensor in tensors.items()}


def unpack(
    meta: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]
) -> FittedSolver:
    """The solver of samples of this shape, or ArtifactError if it makes no sense."""
    nfe, channels = whole(meta, "nfe", 1, _MOST), shape[0]
    bands = Bands.of(shape, numbers(meta.get("band_edges"), "band_edges", 0.0, 1e9, most=1000))
    if nfe * channels * bands.length * 8 > LARGEST:
        raise ArtifactError(f"{name} has {nfe} steps of {channels} x {bands.length} values")
    coefficients = kept_coefficients(meta, bands)
    single = torch.float32
    bounds = {
        "t": Bounds((nfe,), -1e9, 1e9),
        **dict.fromkeys(("alpha", "sigma"), Bounds((nfe + 1,), 0.0, 1e6)),
        "weights": Bounds((nfe, 1 + MEMORY), -1e9, 1e9),
        "tables": Bounds((nfe, 1 + MEMORY, channels, bands.count), -1e6, 1e6, single),
        "offset": Bounds((nfe, channels, len(coefficients)), -1e9, 1e9, single),
    }
    check_tensors(tensors, {f"{name}.{key}": bound for key, bound in bounds.items()})
    offset = torch.zeros(nfe, channels, bands.length, dtype=torch.float64)
    offset[..., coefficients] = tensors[f"{name}.offset"].double()
    (guidance,) = numbers([meta.get("guidance")], "guidance", -1e4, 1e4)
    evidence, provenance = (part(meta, key, dict) for key in ("evidence", "provenance"))
    words = (provenance.get(key, "") for key in ("base", "fitted"))
    if len(evidence) > _MOST or not all(isinstance(text, str) for text in words):
        raise ArtifactError(f"what {name} says of itself makes no sense")
    for key in {"trajectories", "seed"} & provenance.keys():
        whole(provenance, key, 0, 2**53)
    made = FittedSolver(
        nfe,
        tensors[f"{name}.t"],
        tensors[f"{name}.alpha"],
        tensors[f"{name}.sigma"],
        word(meta, "history"),
        tensors[f"{name}.weights"],
        bands,
        tensors[f"{name}.tables"].double(),
        offset,
        guidance,
        word(meta, "gains"),
        {key: numbers([value], key[:40], -1e12, 1e12, unknown=True)[0] for key, value in evidence.items()},
        provenance,
    )
    if made.identity != meta.get("identity"):
        raise ArtifactError(f"{name} is not the one that was saved")
    return made
