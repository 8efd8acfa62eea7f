# SPDX-License-Identifier: Apache-2.0
"""Where guards are relative to each other, as far as the price of a copy depends on it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

RDMA_DOMAIN = "rdma_domain"
"""Name of the topology domain inside which NICs reach each other, as Dynamo's cards use it."""


class Link(enum.IntEnum):
    """Distance between two guards; a smaller one is never slower."""

    HOST = 0
    """Same host: shared memory or CMA."""
    DOMAIN = 1
    """Same RDMA domain, or nothing is known about either side."""
    FAR = 2
    """Different RDMA domains, or only one side names its own."""


class Place(msgspec.Struct, frozen=True):
    """Where one guard is."""

    boot_id: str = ""
    """Identifies the running host; empty when unknown."""
    rdma_domain: str = ""


class Topology(msgspec.Struct, frozen=True):
    """Places by guard name."""

    places: Mapping[str, Place] = {}

    def link(self, source: str, target: str) -> Link:
        """Distance from one guard to another; an unknown guard is one of whom nothing is known."""
        here, there = self.places.get(target, Place()), self.places.get(source, Place())
        if here.boot_id and here.boot_id == there.boot_id:
            return Link.HOST
        return Link.DOMAIN if here.rdma_domain == there.rdma_domain else Link.FAR

    def among(self, sources: Sequence[str]) -> Neighbours:
        """The same distances from all of ``sources`` at once."""
        return Neighbours(self, [self.places.get(source, Place()) for source in sources])


class Neighbours:
    """Distances from a fixed list of guards, as arrays."""

    def __init__(self, topology: Topology, sources: Sequence[Place]) -> None:
        self._topology = topology
        # Numbers for names: comparing arrays of text is several times as slow.
        self._codes: dict[str, int] = {}
        self._hosts = self._coded([place.boot_id for place in sources])
        self._domains = self._coded([place.rdma_domain for place in sources])

    def links(self, target: str) -> npt.NDArray[np.int8]:
        """:class:`Link` from each of them to ``target``, int8."""
        here = self._topology.places.get(target, Place())
        links: npt.NDArray[np.int8] = (self._domains != self._codes.get(here.rdma_domain, -1)).astype(
            np.int8
        ) + np.int8(Link.DOMAIN)
        if here.boot_id in self._codes and here.boot_id:
            links[self._hosts == self._codes[here.boot_id]] = Link.HOST
        return links

    def _coded(self, names: Sequence[str]) -> npt.NDArray[np.int32]:
        return np.array([self._codes.setdefault(name, len(self._codes)) for name in names], dtype=np.int32)
