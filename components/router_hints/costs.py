# SPDX-License-Identifier: Apache-2.0
"""What things cost: seconds for a prefill, seconds for a copy. Defaults first, then what was seen.

Pure: observations come with their durations, nothing here reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from router_hints.topology import Link

Rank = tuple[int, int]
"""One engine replica: Dynamo worker id and data-parallel rank."""

_MEMORY = 0.95
"""Weight left of an observation after each further one: about the last twenty count."""
_PRIOR_WEIGHT = 0.5
_FEW_SAMPLES = 5.0
"""Up to so many the fleet's line says more of a worker than its own."""
_PRIOR_TOKENS = 4096.0
_MIN_TOKENS_PER_S = 1.0
_COPY_WEIGHT = 0.2
_CLASS_WEIGHT = 0.02
"""A pair counts little for its class: one bad cable is no reason to distrust the others."""
_COPY_SAMPLE_BYTES = 256 * 1024
"""Shorter copies measure latency, not bandwidth."""
_SLOWEST_COPY = 0.02
"""One observation may not claim less than this part of the default bandwidth: a first output is late
for many reasons, and a link believed dead is never measured again."""


_FASTEST_COPY = 2.0
"""Nor more than this times what is known: the copy's share of a first output is a difference of estimates."""
_WAIT_SAMPLE_S = 0.05
_WAIT_WEIGHT = 0.1
_WAIT_RANGE = 4.0
"""Continuous batching overlaps waits, full batches stretch them; beyond this the prediction was of
something else."""
_HALF_LIFE_S = 60.0
"""A link that was slow is tried again: what is known of it fades to the default."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults until something better is known, and the prices of things nobody measures."""

    prefill_tokens_per_s: float = 8000.0
    overhead_s: float = 0.01
    """From dispatch to first output with nothing to compute."""
    host_bytes_per_s: float = 3e9
    domain_bytes_per_s: float = 1e9
    zone_bytes_per_s: float = 5e8
    far_bytes_per_s: float = 2e8
    copy_latency_s: float = 0.003
    """Lease, validation and commit of one copy, whatever its size."""
    load_bytes_per_s: float = 5e9
    """Pool to engine memory on one host."""
    slot_wait_s: float = 0.2
    """Expected wait for each request ahead when the engine's batch is full."""
    decode_s: float = 0.002
    """How much each running request slows a prefill down."""
    max_replicas: int = 16
    """Guards that may keep copies of one prefix: further workers fetch it for one request only."""
    copy_budget_bytes_per_s: float = 0.0
    """Bytes that all copies together may take in a second, on average; 0 for no bound."""


class Prefill(msgspec.Struct, frozen=True):
    """Straight line of one worker: first output after ``overhead_s + tokens / tokens_per_s``."""

    tokens_per_s: float
    overhead_s: float

    def seconds(self, tokens: float) -> float:
        return tokens / self.tokens_per_s


class Copy(msgspec.Struct, frozen=True):
    """One directed link between two guards."""

    bytes_per_s: float
    latency_s: float


class CostSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All prices at one moment. The model replaces its parts and never changes them: keeping one is free."""

    settings: Settings
    unseen: Prefill
    prefills: dict[Rank, Prefill]
    waits: dict[Rank, float]
    rates: list[float]
    """bytes/s by :class:`Link`"""
    copies: dict[str, dict[str, tuple[float, Link]]]
    """bytes/s and distance, by target and source"""


class _Line:
    """Weighted least squares of seconds over tokens, drawn to a prior so that it is always defined."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def weight(self) -> float:
        """Observations, the old ones in part."""
        return self._weight

    def observe(self, x: float, y: float) -> None:
        self._weight = self._weight * _MEMORY + 1.0
        self._x = self._x * _MEMORY + x
        self._y = self._y * _MEMORY + y
        self._xx = self._xx * _MEMORY + x * x
        self._xy = self._xy * _MEMORY + x * y

    def fit(self, prior: Prefill) -> Prefill:
        weight, sx, sy, sxx, sxy = self._weight, self._x, self._y, self._xx, self._xy
        for x in (0.0, _PRIOR_TOKENS):
            y = prior.overhead_s + prior.seconds(x)
            weight += _PRIOR_WEIGHT
            sx += _PRIOR_WEIGHT * x
            sy += _PRIOR_WEIGHT * y
            sxx += _PRIOR_WEIGHT * x * x
            sxy += _PRIOR_WEIGHT * x * y
        spread = weight * sxx - sx * sx
        slope = (weight * sxy - sx * sy) / spread if spread > 0 else 0.0
        if slope <= 0:
            # Everything seen took the same time: call it all prefill, the safe side for reuse.
            slope = max(sy / max(sx, 1.0), 1e-9)
        overhead = max(0.0, (sy - slope * sx) / weight)
        return Prefill(max(_MIN_TOKENS_PER_S, 1.0 / slope), overhead)


class CostModel:
    """Prices for the planner. One thread."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self._default = Prefill(self.settings.prefill_tokens_per_s, self.settings.overhead_s)
        self._fleet = _Line()
        self._unseen = self._default
        """what is assumed of a worker not seen yet: that it is like the others"""
        self._lines: dict[Rank, _Line] = {}
        self._fits: dict[Rank, Prefill] = {}
        self._waits: dict[Rank, float] = {}
        self._rates = np.array(
            [
                self.settings.host_bytes_per_s,
                self.settings.domain_bytes_per_s,
                self.settings.zone_bytes_per_s,
                self.settings.far_bytes_per_s,
            ]
        )
        """configured bytes/s by :class:`Link`"""
        self._seen = self._rates.copy()
        """the same as measured over all pairs: what is assumed of a pair not seen yet"""
        self._copies: dict[str, dict[str, tuple[float, Link]]] = {}
        """measured bytes/s by target and source; this and the two above are replaced, never changed"""
        self._matrix: tuple[dict[str, int], npt.NDArray[np.float64]] | None = None

    def prefill(self, rank: Rank) -> Prefill:
        return self._fits.get(rank, self._unseen)

    def wait_factor(self, rank: Rank) -> float:
        """What a second of predicted queue turned out to take on this rank."""
        return self._waits.get(rank, 1.0)

    def copy(self, source: str, target: str, link: Link) -> Copy:
        """Price of a copy from one guard to another that is ``link`` away."""
        known = self._copies.get(target, {}).get(source)
        rate = known[0] if known is not None else self._seen[link]
        return Copy(float(rate), self.settings.copy_latency_s)

    def rates(
        self, sources: Sequence[str], targets: Sequence[str], links: npt.NDArray[np.int8]
    ) -> npt.NDArray[np.float64]:
        """Bytes/s from each source to each target, ``[targets, sources]`` as ``links`` is."""
        rates: npt.NDArray[np.float64] = self._seen[links]
        if not self._copies:
            return rates
        rows, table = self._table()
        unknown = len(rows)
        here = np.array([rows.get(target, unknown) for target in targets], dtype=np.int64)
        there = np.array([rows.get(source, unknown) for source in sources], dtype=np.int64)
        known = table.take(here, 0).take(there, 1)
        return np.where(np.isnan(known), rates, known)

    def _table(self) -> tuple[dict[str, int], npt.NDArray[np.float64]]:
        """Measured pairs as a matrix, NaN where none is; its last row and column are of unknown guards."""
        if self._matrix is None:
            names = self._copies.keys() | {s for copies in self._copies.values() for s in copies}
            rows = {name: row for row, name in enumerate(names)}
            table = np.full((len(rows) + 1, len(rows) + 1), np.nan)
            for target, copies in self._copies.items():
                for source, (rate, _) in copies.items():
                    table[rows[target], rows[source]] = rate
            self._matrix = rows, table
        return self._matrix

    def snapshot(self) -> CostSnapshot:
        """Everything a plan can depend on."""
        return CostSnapshot(
            settings=self.settings,
            unseen=self._unseen,
            prefills=self._fits,
            waits=self._waits,
            rates=self._seen.tolist(),
            copies=self._copies,
        )

    @classmethod
    def restore(cls, snapshot: CostSnapshot) -> CostModel:
        """A model that gives the same prices."""
        model = cls(snapshot.settings)
        model._unseen = snapshot.unseen
        model._fits = snapshot.prefills
        model._waits = snapshot.waits
        model._seen = np.array(snapshot.rates)
        model._copies = snapshot.copies
        return model

    def observe_prefill(self, rank: Rank, tokens: int, seconds: float) -> None:
        """A request that waited for nobody gave its first output after this time."""
        if tokens < 1 or seconds <= 0:
            return
        self._fleet.observe(float(tokens), seconds)
        fleet = self._fleet.fit(self._default)
        # With the fleet as its prior: were an unseen worker priced by a default, the first one measured
        # would look better or worse than the rest for no reason, and get everything or nothing. For the same
        # reason an unseen one is fitted as they are: like a worker that gave every output of the fleet.
        self._unseen = self._fleet.fit(fleet)
        line = self._lines.setdefault(rank, _Line())
        line.observe(float(tokens), seconds)
        # One that is never idle is hardly measured: it must not keep what was believed at its only sample.
        few = {known: each.fit(fleet) for known, each in self._lines.items() if each.weight < _FEW_SAMPLES}
        self._fits = self._fits | few | {rank: line.fit(fleet)}

    def observe_wait(self, rank: Rank, predicted_s: float, seconds: float) -> None:
        """A request waited for others this long, as far as one can tell from its first output."""
        if predicted_s < _WAIT_SAMPLE_S:
            return
        sample = min(max(seconds / predicted_s, 1 / _WAIT_RANGE), _WAIT_RANGE)
        factor = self.wait_factor(rank)
        self._waits = self._waits | {rank: factor + _WAIT_WEIGHT * (sample - factor)}

    def observe_copy(self, source: str, target: str, link: Link, byte_count: int, seconds: float) -> None:
        """A copy of this size took this long, as far as one can tell from the first output."""
        if byte_count < _COPY_SAMPLE_BYTES:
            return
        default = float(self._rates[link])
        copies = self._copies.get(target, {})
        known, _ = copies.get(source, (float(self._seen[link]), link))
        sample = byte_count / seconds if seconds > 0 else math.inf
        sample = min(max(sample, default * _SLOWEST_COPY), known * _FASTEST_COPY)
        rate = (1 - _COPY_WEIGHT) * known + _COPY_WEIGHT * sample
        self._copies = self._copies | {target: copies | {source: (rate, link)}}
        if self._matrix is not None:
            rows, table = self._matrix
            if source in rows and target in rows:
                table[rows[target], rows[source]] = rate
            else:
                self._matrix = None
        self._seen[link] += _CLASS_WEIGHT * (sample - self._seen[link])

    def relax(self, seconds: float) -> None:
        """So much time went by: what is known of links fades."""
        kept = 0.5 ** (seconds / _HALF_LIFE_S)
        self._seen = self._rates + (self._seen - self._rates) * kept
        self._copies = {
            target: {
                source: (float(self._rates[link] + (rate - self._rates[link]) * kept), link)
                for source, (rate, link) in copies.items()
            }
            for target, copies in self._copies.items()
        }
        self._matrix = None

    def forget(self, rank: Rank) -> None:
        """The worker is gone."""
        self._lines.pop(rank, None)
        self._fits = {known: fit for known, fit in self._fits.items() if known != rank}
        self._waits = {known: factor for known, factor in self._waits.items() if known != rank}

    def forget_guard(self, guard: str) -> None:
        """The guard is gone, or another one has its name now."""
        self._copies = {
            target: {source: known for source, known in copies.items() if source != guard}
            for target, copies in self._copies.items()
            if target != guard
        }
        self._matrix = None
