# SPDX-License-Identifier: Apache-2.0
"""The guards the router knows, and which worker each of them is beside. Pure: discovery feeds it.

Holders of blocks are guards, by name; workers change their ids at every restart. The join is the control
endpoint, which a worker's card names for each data-parallel rank and a guard's record names as its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvcr.keys import KeySpace
from kvcr.layout import Layout
from router_hints.cards import WorkerCard
from router_hints.planner import Holder
from router_hints.topology import Place, Topology


class Guard(msgspec.Struct, frozen=True):
    """What the router needs of one guard's record."""

    name: str
    incarnation: int
    endpoint: str
    """Control endpoint, where snapshots and replays are asked for and peers read from."""
    namespace: str
    """Namespace part of its engine's keys."""
    layout: Layout | None = None
    """None until an engine attached: it holds nothing then."""
    curve_key: str = ""
    """CURVE public key, hex; empty without a secret."""
    boot_id: str = ""
    rdma_domain: str = ""
    zone: str = ""
    host: str = ""
    state: str = ""
    """Of its engine, see :class:`kvcr.guard.view.GuardState`."""
    epoch: int = 0

    def key_space(self, salt: str) -> KeySpace | None:
        """The space its blocks are named in, for one tenant; None while there is no layout."""
        if self.layout is None:
            return None
        return KeySpace(self.namespace, self.layout.model, group=self.layout.group, salt=salt)


class GuardDirectory:
    """All known guards. One thread; what it returns is replaced, never changed."""

    def __init__(self, *, domain_required: bool = False) -> None:
        """``domain_required``: no copies between RDMA domains, whatever they would gain."""
        self._required = domain_required
        self._guards: dict[str, Guard] = {}
        self._by_endpoint: dict[str, Guard] = {}
        self._holders: dict[str, Holder] = {}
        self._topology = Topology({}, domain_required)
        self._unready: dict[str, tuple[str, ...]] = {}

    def put(self, guard: Guard) -> None:
        """A guard registered, or its record changed."""
        self._guards[guard.name] = guard
        self._derive()

    def drop(self, name: str) -> Guard | None:
        """Its record is gone. Returns what was known."""
        gone = self._guards.pop(name, None)
        self._unready.pop(name, None)
        self._derive()
        return gone

    def heard_unready(self, name: str, sources: tuple[str, ...]) -> None:
        """A guard said which of the others it cannot read from."""
        if name in self._guards and self._unready.get(name, ()) != sources:
            self._unready[name] = sources
            self._derive()

    def get(self, name: str) -> Guard | None:
        return self._guards.get(name)

    def all(self) -> list[Guard]:
        return list(self._guards.values())

    def beside(self, card: WorkerCard, rank: int) -> Guard | None:
        """The guard of one data-parallel rank of a worker, or None: no KVCR there, or not registered."""
        endpoint = card.control_endpoints.get(rank)
        return None if endpoint is None else self._by_endpoint.get(endpoint)

    @property
    def holders(self) -> Mapping[str, Holder]:
        """Guards that may be sources, for the planner."""
        return self._holders

    @property
    def topology(self) -> Topology:
        return self._topology

    def _derive(self) -> None:
        guards = self._guards.values()
        self._by_endpoint = {guard.endpoint: guard for guard in guards}
        self._topology = Topology(
            {g.name: Place(g.boot_id, g.rdma_domain, g.zone, g.host) for g in guards},
            self._required,
            {name: sources for name, sources in self._unready.items() if sources},
        )
        self._holders = {
            guard.name: Holder(
                guard.name,
                guard.endpoint,
                guard.layout.digest(),
                guard.layout.part_bytes * guard.layout.ranks,
            )
            for guard in guards
            if guard.layout is not None
        }
