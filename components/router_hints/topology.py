# SPDX-License-Identifier: Apache-2.0
"""Where guards are relative to each other, as far as the price of a copy depends on it.

A tree of link classes: host, RDMA domain, zone, and the rest. The names come from Dynamo's
``topology_domains``. A guard that names no domain is the only one in its own, as soon as any guard names
one; where nobody does, nothing is known and all are taken to be in one.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

HOST = "host"
RDMA_DOMAIN = "rdma_domain"
"""Name of the topology domain inside which NICs reach each other, as Dynamo's cards use it."""
ZONE = "zone"


class Link(enum.IntEnum):
    """Distance between two guards; a smaller one is never slower by default."""

    HOST = 0
    """Same host: shared memory or CMA. Also between the data-parallel ranks of one server."""
    DOMAIN = 1
    """Same RDMA domain, or nobody names domains."""
    ZONE = 2
    """Another RDMA domain of the same zone."""
    FAR = 3


class Place(msgspec.Struct, frozen=True):
    """Where one guard is. Empty: not known."""

    boot_id: str = ""
    """Identifies the running host."""
    rdma_domain: str = ""
    zone: str = ""
    host: str = ""
    """Two that name different hosts are not on one, even if they run there."""


class Paths(NamedTuple):
    """Arrays ``[targets, sources]``."""

    links: npt.NDArray[np.int8]
    """:class:`Link` of each"""
    open: npt.NDArray[np.bool_]
    """whether a copy may be planned"""


class Topology(msgspec.Struct, frozen=True, dict=True):
    """Places by guard name, and the pairs of which it is known that nothing goes from one to the other."""

    places: Mapping[str, Place] = {}
    required: bool = False
    """Copies stay inside an RDMA domain whatever they would gain; otherwise distance is only a price."""
    unready: Mapping[str, tuple[str, ...]] = {}
    """By target, the guards that it says it cannot read from. Of other pairs nothing bad is known."""

    def link(self, source: str, target: str) -> Link:
        """Distance from one guard to another; an unknown guard is one of whom nothing is known."""
        return Link(int(self.paths([source], [target]).links[0, 0]))

    def paths(self, sources: Sequence[str], targets: Sequence[str]) -> Paths:
        """From each source to each target."""
        here, there = self._at(targets), self._at(sources)
        return Paths(
            self._all_links.take(here, 0).take(there, 1), self._all_open.take(here, 0).take(there, 1)
        )

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.places)}

    def _at(self, names: Sequence[str]) -> npt.NDArray[np.int64]:
        """Rows of the matrices; the last is of guards of whom nothing is known."""
        rows = self._rows
        return np.array([rows.get(name, len(rows)) for name in names], dtype=np.int64)

    @cached_property
    def _all_open(self) -> npt.NDArray[np.bool_]:
        may: npt.NDArray[np.bool_] = self._all_links <= (Link.DOMAIN if self.required else Link.FAR)
        for target, sources in self.unready.items():
            if target in self._rows:
                may[self._rows[target], self._at([name for name in sources if name in self._rows])] = False
        return may

    @cached_property
    def _all_links(self) -> npt.NDArray[np.int8]:
        """Between all places, and in the last row and column, one of whom nothing is known."""
        places = [*self.places.values(), Place()]
        links = np.full((len(places), len(places)), Link.FAR, dtype=np.int8)
        zones = _codes([place.zone for place in places])
        links[_same(zones)] = Link.ZONE
        domains = _codes([place.rdma_domain for place in places])
        if domains.any():
            links[_same(domains)] = Link.DOMAIN
        else:
            # Nobody names a domain: only two named zones that differ tell guards apart.
            apart = (zones[:, None] != zones) & (zones[:, None] != 0) & (zones != 0)
            links[~apart] = Link.DOMAIN
        boots = _codes([place.boot_id for place in places])
        hosts = _codes([place.host for place in places])
        # What the deployment calls them goes before what they run on.
        apart = (hosts[:, None] != hosts) & (hosts[:, None] != 0) & (hosts != 0)
        links[_same(hosts) | (_same(boots) & ~apart)] = Link.HOST
        return links


def _codes(names: Sequence[str]) -> npt.NDArray[np.int64]:
    """Numbers for names, 0 for none: comparing arrays of text is several times as slow."""
    codes: dict[str, int] = {"": 0}
    return np.array([codes.setdefault(name, len(codes)) for name in names], dtype=np.int64)


def _same(codes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    same: npt.NDArray[np.bool_] = (codes[:, None] == codes) & (codes != 0)
    return same
