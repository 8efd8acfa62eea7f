# SPDX-License-Identifier: Apache-2.0
"""What the cluster thread may see of a guard, and the little it may ask of it.

The authority thread owns everything; this object is the only bridge. Every member may be used from any
thread. Nothing here waits for longer than :data:`ANSWER_TIMEOUT_S`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from kvcr.config import PeerRecord
from kvcr.guard.addresses import Place
from kvcr.guard.listing import chains
from kvcr.guard.meters import Meters
from kvcr.layout import Layout
from kvcr.metrics import Registry
from kvcr.pool import Listing
from kvcr.protocol.events import Act, ActionResult, Heartbeat, Inventory, StateChange

ANSWER_TIMEOUT_S = 2.0

T = TypeVar("T")


class GuardState(enum.StrEnum):
    """Who holds the pool's lease."""

    EMPTY = "EMPTY"
    """No pool yet: no engine has ever attached."""
    STANDBY = "STANDBY"
    """A live engine is attached."""
    CHECKING = "CHECKING"
    """The engine's connections are closed, its death is not proven; nothing is reclaimed."""
    ACTIVE = "ACTIVE"
    """No engine: its death is proven, its grants are reclaimed, the pool is served by the guard alone."""


class Backing(Protocol):
    """The part of the guard that a view reads; attributes are replaced whole, never mutated."""

    name: str
    namespace: str
    incarnation: int
    control_endpoint: str
    unix_socket: str
    metrics_endpoint: str
    pool_dir: str
    place: Place
    public_key: bytes
    secret: bytes | None
    meters: Meters

    @property
    def epoch(self) -> int: ...
    @property
    def layout(self) -> Layout | None: ...
    @property
    def engine_namespace(self) -> str: ...
    @property
    def engine_id(self) -> str: ...
    @property
    def engine_pids(self) -> tuple[int, ...]: ...
    @property
    def state(self) -> GuardState: ...

    def call(self, function: Callable[[], T], timeout_s: float) -> T: ...
    def post(self, function: Callable[[], None]) -> None: ...
    def heartbeat(self) -> Heartbeat: ...
    def status(self) -> dict[str, Any]: ...
    def inspect(self, keys: bytes) -> dict[str, Any]: ...
    def listing(self) -> Listing | None: ...
    def set_peers(self, peers: dict[str, PeerRecord]) -> None: ...
    def subscribe(self, callback: Callable[[Inventory], None]) -> None: ...
    def subscribe_state(self, callback: Callable[[StateChange], None]) -> None: ...
    def raise_epoch(self, above: int) -> int: ...
    @property
    def pool_id(self) -> str: ...
    def act(self, act: Act, done: Callable[[], None]) -> None: ...
    def subscribe_results(self, callback: Callable[[ActionResult], None]) -> None: ...


class GuardView:
    """Read access to a running guard, for adapters such as :mod:`kvcr.dynamo.cluster`."""

    def __init__(self, backing: Backing, pid: int) -> None:
        self._backing = backing
        self.pid = pid

    @property
    def name(self) -> str:
        return self._backing.name

    @property
    def namespace(self) -> str:
        """Dynamo namespace the guard registers in."""
        return self._backing.namespace

    @property
    def incarnation(self) -> int:
        """Differs at every start of the guard."""
        return self._backing.incarnation

    @property
    def epoch(self) -> int:
        """Epoch of the pool, 0 while there is none."""
        return self._backing.epoch

    @property
    def pool_id(self) -> str:
        """Differs for every pool ever made; empty while there is none."""
        return self._backing.pool_id

    @property
    def control_endpoint(self) -> str:
        return self._backing.control_endpoint

    @property
    def unix_socket(self) -> str:
        return self._backing.unix_socket

    @property
    def metrics_endpoint(self) -> str:
        """URL, or empty when metrics are off."""
        return self._backing.metrics_endpoint

    @property
    def pool_dir(self) -> str:
        return self._backing.pool_dir

    @property
    def boot_id(self) -> str:
        return self._backing.place.boot_id

    @property
    def place(self) -> Place:
        """What it shares with other processes: kernel, loopback interface, process ids."""
        return self._backing.place

    @property
    def layout(self) -> Layout | None:
        """None until an engine attached or an existing pool was found."""
        return self._backing.layout

    @property
    def engine_namespace(self) -> str:
        """Namespace part of the engine's key space; empty until an engine attached."""
        return self._backing.engine_namespace

    @property
    def engine_id(self) -> str:
        """The engine that holds, or last held, the pool's lease; empty before the first."""
        return self._backing.engine_id

    @property
    def engine_pids(self) -> tuple[int, ...]:
        """Processes of that engine, as they said in their Hello (pids of *their* PID namespace)."""
        return self._backing.engine_pids

    @property
    def public_key(self) -> bytes:
        """CURVE public key of the control socket, 32 bytes; empty without a secret."""
        return self._backing.public_key

    @property
    def secret(self) -> bytes | None:
        """The deployment's secret, for signing instance records."""
        return self._backing.secret

    @property
    def state(self) -> GuardState:
        """STANDBY, CHECKING, ACTIVE or EMPTY (a string enum)."""
        return self._backing.state

    @property
    def registry(self) -> Registry:
        """Where an adapter puts metrics of its own, to be served with the guard's."""
        return self._backing.meters.registry

    def subscribe(self, callback: Callable[[Inventory], None]) -> None:
        """Call back with every inventory batch from now on, in sequence.

        The callback runs on the authority thread and must only enqueue
        (``loop.call_soon_threadsafe``); an exception in it is logged and the subscriber dropped.
        """
        self._backing.post(lambda: self._backing.subscribe(callback))

    def subscribe_state(self, callback: Callable[[StateChange], None]) -> None:
        """Call back with the last change of state, and then with every new one after it took effect.

        On the authority thread, under the same rules as :meth:`subscribe`. On ACTIVE the epoch is raised
        and the grants of the dead engine are reclaimed already. ``worker_id`` is 0: a guard knows no Dynamo.
        """
        self._backing.post(lambda: self._backing.subscribe_state(callback))

    def raise_epoch(self, above: int) -> int:
        """Make the epoch higher than ``above``, of which somebody remembers that it was ours. Returns it.

        Without a pool, the next one starts above it; 0 is returned. A live engine has to attach again, which
        it does by itself. Raises TimeoutError.
        """
        return self._backing.call(lambda: self._backing.raise_epoch(above), ANSWER_TIMEOUT_S)

    def act(self, act: Act, done: Callable[[], None]) -> None:
        """Carry out a router's actions. ``done`` is called once, on the authority thread, when every action
        has ended or was refused; under the same rules as the callback of :meth:`subscribe`."""
        self._backing.post(lambda: self._backing.act(act, done))

    def subscribe_results(self, callback: Callable[[ActionResult], None]) -> None:
        """Call back with the result of every action from now on, under the rules of :meth:`subscribe`."""
        self._backing.post(lambda: self._backing.subscribe_results(callback))

    def heartbeat(self) -> Heartbeat:
        """Sequence, count and digest of the inventory, consistent with each other."""
        return self._backing.call(self._backing.heartbeat, ANSWER_TIMEOUT_S)

    def status(self) -> dict[str, Any]:
        """JSON-ready summary: identity, state, pool, engine, peers, pulls. Raises TimeoutError."""
        return self._backing.call(self._backing.status, ANSWER_TIMEOUT_S)

    def inspect(self, keys: bytes) -> dict[str, Any]:
        """JSON-ready facts about the blocks of these keys (16 bytes each).

        Raises TimeoutError, and ProtocolError on a ragged blob.
        """
        return self._backing.call(lambda: self._backing.inspect(keys), ANSWER_TIMEOUT_S)

    def chains(self, limit: int) -> dict[str, Any]:
        """JSON-ready: what the pool holds, see :func:`kvcr.guard.listing.chains`. Looked up on the authority
        thread and summed up on this one: 0.2 s for 200,000 blocks. Raises TimeoutError."""
        listing, layout = self._backing.call(
            lambda: (self._backing.listing(), self._backing.layout), ANSWER_TIMEOUT_S
        )
        if listing is None or layout is None:
            return {"blocks": 0, "bytes": 0, "chains": 0, "rows": []}
        return chains(listing, layout.part_bytes * layout.ranks, limit)

    def set_peers(self, peers: dict[str, PeerRecord]) -> None:
        """Replace what discovery knows of other guards, by control endpoint. Static peers are kept."""
        self._backing.post(lambda: self._backing.set_peers(dict(peers)))
