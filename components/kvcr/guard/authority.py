# SPDX-License-Identifier: Apache-2.0
"""The guard: one authority thread that owns the pool, and the parts it hands messages to."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from kvcr import __version__
from kvcr.config import GuardConfig, PeerRecord
from kvcr.errors import ProtocolError
from kvcr.guard import addresses, gauges, leftovers, permissions
from kvcr.guard.actions import Actions
from kvcr.guard.canary import Canary
from kvcr.guard.choosing import PeerContext
from kvcr.guard.connection import Listener
from kvcr.guard.control import ControlServer
from kvcr.guard.custody import Custody
from kvcr.guard.deposits import Deposits
from kvcr.guard.engines import EngineServer
from kvcr.guard.fetches import Fetches
from kvcr.guard.g1 import G1Drops
from kvcr.guard.inspecting import blocks_of, facts_of
from kvcr.guard.invalidate import Invalidations
from kvcr.guard.inventory import InventoryLog
from kvcr.guard.loop import Loop
from kvcr.guard.meters import Meters
from kvcr.guard.peers import Peers
from kvcr.guard.pins import Pins
from kvcr.guard.probing import Prober
from kvcr.guard.reception import Reception
from kvcr.guard.reports import Reports
from kvcr.guard.scrub import Scrubber
from kvcr.guard.seat import Seat
from kvcr.guard.selfcheck import SelfCheck
from kvcr.guard.serving import Caller, PeerServer
from kvcr.guard.states import States
from kvcr.guard.tombstones import Tombstones
from kvcr.guard.tracing import RequestTraces
from kvcr.guard.transit import TransitSlots
from kvcr.guard.transports import Transports
from kvcr.guard.view import GuardState
from kvcr.keys import KEY_BYTES, probe_key
from kvcr.layout import Layout
from kvcr.metrics import serve_metrics
from kvcr.pool import Listing, Pool, boot_id, next_incarnation
from kvcr.protocol.events import Act, ActionResult, Heartbeat, Inventory, StateChange
from kvcr.protocol.peer import ToClient, to_client, to_server
from kvcr.tracing import open_tracer
from kvcr.transfer import plugins
from kvcr.transfer.base import LocalRegions
from kvcr.transfer.mover import MoverPool
from kvcr.transfer.nixl import NixlProcess

log = logging.getLogger(__name__)

T = TypeVar("T")

COLLECT_S = 0.002
"""Changes of the pool are gathered for this long: an event takes as much time to make as a block to copy."""

TICK_S = 1.0
"""The only timer of an idle guard."""

OPEN_AHEAD_S = 10.0
"""How often links to known peers are tried that are not open."""

DEATH_CHECK_S = 0.003
QUICK_CHECKS_S = 0.3
"""After the last connection closed, the locks are looked at every 3 ms for so long, and then once a second: a
process that was killed drops its locks a moment after its sockets. A look takes 50 us for one rank."""

MOVERS = 2
CLOSE_S = 0.4


class Guard:
    """Belongs to the thread that calls :meth:`run`, but for :meth:`call`, :meth:`post` and :meth:`stop`."""

    def __init__(self, config: GuardConfig) -> None:
        """Attach to a pool if there is one, bind the sockets. Raises ConfigError, PoolBusy, OSError."""
        self.config = config
        self.name = config.name
        self.namespace = config.namespace
        self.unix_socket = str(Path(config.socket_path).absolute())
        self.secret = config.secret()
        self.place = addresses.here(boot_id())
        self.addresses = addresses.plan(config)
        self._plugin_entries = plugins.find()
        plugins.require_known(config.transport, self._plugin_entries)
        self.incarnation = next_incarnation(Path(config.pool_dir), time.time_ns() // 1000)
        self._custody = Custody(config, self.incarnation)
        self.pool_dir = str(self._custody.directory)
        self.pool: Pool | None = None
        self.transports: Transports | None = None
        self.control_endpoint = ""
        self.metrics_endpoint = ""
        self.loop = Loop()
        self.meters = Meters()
        self.peers = Peers(config.peers)
        self.inventory = InventoryLog(self.name, self.incarnation)
        self._states = States(self.name, self.incarnation)
        self._last_tick_s = 0.0
        self._self_check = SelfCheck(self.meters)
        self._collecting = False
        self.seat = Seat(self.loop, self.meters, lambda: self.pool, self._state_changed)
        self._movers = MoverPool(MOVERS, self.loop.post)
        self._zmq: zmq.Context[Any] = zmq.Context()
        self._lonely_since_s: float | None = time.monotonic()
        self._next_links_s = 0.0
        self._evicted: dict[str, int] = {}
        self.lingered = False
        """The guard stopped because no engine came for ``linger_s``."""
        self.pool_lost = False
        """The guard stopped because somebody removed or cut its files: no process could join it any more."""
        self._scrubber = Scrubber(
            self.loop, self._movers, self.meters, self._current, self.pool_changed, config.scrub_bytes_per_s
        )
        self._tracer = open_tracer("kvcr-guard", self.name)
        traces = RequestTraces(self._tracer)
        tombstones, pins, g1 = Tombstones(), Pins(), G1Drops(self.seat, self.meters, self.incarnation)
        self._deposits = Deposits(self, self._movers, self.meters, tombstones)
        self._fetches = Fetches(
            self,
            self.loop,
            self.meters,
            config.lease_ms,
            TransitSlots(config.transit_slots, config.transit_share),
            lambda ended: self._actions.fetch_ended(ended),
            traces,
        )
        self._invalidations = Invalidations(self, self.loop, self._fetches, tombstones, g1)
        self._reports = Reports(self.name, self.incarnation, self.meters)
        self._actions = Actions(
            self, self.loop, self.meters, self._fetches, pins, self._invalidations, self._reports
        )
        self._engines = EngineServer(
            self,
            self.loop,
            self.seat,
            self._deposits,
            self._fetches,
            self._scrubber,
            self.meters,
            min(TICK_S, config.fence_after_s / 4),
            pins,
            self._actions,
            g1,
            traces,
        )
        self._server = PeerServer(
            self,
            self.loop,
            self.inventory,
            self.meters,
            self._scrubber,
            config.lease_ms,
            Prober(lambda: self.peer_context),
            self._tracer,
        )
        pool = self._custody.find()
        if pool is not None:
            self._use(pool)
            self._scrubber.found(pool)
            self.seat.found(pool)
        reception = Reception(
            self.loop,
            self.meters,
            self._engines,
            self._server,
            self._self_check.busy,
            lambda: self._listener.gone(),
        )
        self._listener = Listener(self.loop, self.unix_socket, reception.welcome, reception.refused)
        self._control = ControlServer(
            self.loop,
            self._zmq,
            self.addresses.bind,
            self.addresses.advertise,
            self.secret,
            self._control_request,
            self.meters,
        )
        self.control_endpoint = self._control.endpoint
        self.public_key = self._control.public_key
        self.meters.registry.before_render(self._refresh_gauges)
        if config.metrics_port >= 0:
            port = serve_metrics(self.meters.registry, config.metrics_host, config.metrics_port)
            self.metrics_endpoint = f"http://{addresses.bracketed(config.metrics_host)}:{port}/metrics"

    # --- life -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until :meth:`stop`, then close everything."""
        self._tick()
        self.loop.later(0.0, self._look_around)
        try:
            self.loop.run()
        finally:
            self._close()

    def stop(self) -> None:
        """From any thread or signal handler."""
        self.loop.stop()

    def post(self, function: Callable[[], None]) -> None:
        """Run on the authority thread; from any thread, never waits."""
        self.loop.post(function)

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """Run on the authority thread and wait for the result. Raises TimeoutError, and what it raises."""
        return self.loop.call(function, timeout_s)

    def _close(self) -> None:
        self._fetches.stop_all()
        self.peers.close()
        self._control.close()
        self._listener.close()
        for member in list(self.seat.members):
            member.connection.close()
        self._movers.close(CLOSE_S)
        remove = self.lingered or self.config.remove_pool_on_exit
        if self.transports is not None:
            self.transports.close(CLOSE_S, unlink=remove)
        self._zmq.destroy(linger=0)
        self._custody.close(self.pool, remove=remove)
        self._tracer.close()

    def _look_around(self) -> None:
        """What the start need not wait for."""
        permissions.report(self.config.pool_bytes, self.config.transport)
        if not self.config.linger_s:
            return
        # This guard was started by an engine, and others may have been.
        own = self._custody.directory
        dead = leftovers.abandoned(own.parent, own)
        for one in dead:
            log.info("%s is of a dead guard; to be removed unless somebody comes for it", one.directory)
        if dead:
            self.loop.later(self.config.linger_s, lambda: leftovers.reclaim(dead))

    def _tick(self) -> None:
        self.loop.later(TICK_S, self._tick)
        now_s = time.monotonic()
        if self.pool is not None:
            if trouble := self.pool.trouble():
                log.error(
                    "%s: the pool is lost, and with the next start of this guard there is a new one", trouble
                )
                self.pool_lost = True
                self.stop()
                return
            self.pool.tick(now_s)
            self._self_check.tick(self.pool, now_s)
        self._scrubber.tick(now_s)
        self.seat.check(self.pool)
        if now_s >= self._next_links_s:
            self._open_links()
        if self.config.fence_after_s:
            if now_s - self._last_tick_s > 2 * TICK_S:
                self.seat.excuse(now_s)
            self.seat.fence(self.config.fence_after_s, now_s)
        self._last_tick_s = now_s
        if self.seat.state in (GuardState.STANDBY, GuardState.CHECKING):
            self._lonely_since_s = None
        elif self._lonely_since_s is None:
            self._lonely_since_s = now_s
        elif self.config.linger_s and now_s - self._lonely_since_s >= self.config.linger_s:
            log.info("no engine for %.0f s: leaving", now_s - self._lonely_since_s)
            self.lingered = True
            self.stop()

    # --- the pool ---------------------------------------------------------------------------------

    def open_pool(self, layout: Layout) -> Pool:
        """The pool for ``layout``: the one we have, or a new one. For :class:`EngineServer`."""
        if self.pool is not None and not self._custody.suits(self.pool, layout):
            self._discard(self.pool)
        if self.pool is None:
            self._use(self._custody.make(layout))
        assert self.pool is not None
        return self.pool

    def _use(self, pool: Pool) -> None:
        self.pool = pool
        self.transports = Transports(
            pool,
            self.config,
            loop=self.loop,
            zmq_context=self._zmq,
            incarnation=self.incarnation,
            place=self.place,
            secret=self.secret,
            movers=self._movers,
            meters=self.meters,
            plugin_entries=self._plugin_entries,
        )
        for rank in range(pool.layout.ranks):
            pool.data(rank).populate_aside()
        self._evicted = {}
        self._get_ready_for_peers()

    def _get_ready_for_peers(self) -> None:
        """Make ahead what pulls from the peers that are known will need."""
        if self.transports is not None:
            self.transports.warm_up({record.boot_id for record in self.peers.records().values()})
        self._open_links()

    def _open_links(self) -> None:
        self._next_links_s = time.monotonic() + OPEN_AHEAD_S
        # An existing pool is attached before the sockets are bound; the first tick opens the links then.
        if self.peer_context is not None and self.control_endpoint:
            self.peers.open_ahead(self.peer_context, self.control_endpoint, time.monotonic())

    def _discard(self, pool: Pool) -> None:
        """Drop the pool, as its layout is of no use to the engine that comes."""
        self._fetches.stop_all()
        self._server.end_all()
        self.peers.close()
        if self.transports is not None:
            # Its NIXL process writes to the files of the old pool, if at all, and is on its way out.
            self.transports.close(0.0)
        self.inventory.all_removed(pool)
        self._custody.discard(pool)
        self.pool = self.transports = None

    def pool_changed(self) -> None:
        """Publish what changed, a moment later."""
        self._self_check.busy()
        if not self._collecting:
            self._collecting = True
            self.loop.later(COLLECT_S, self._collect)

    def _collect(self) -> None:
        self._collecting = False
        if self.pool is None:
            return
        self.inventory.collect(self.pool)
        for reason, count in self.pool.evicted_blocks.items():
            self.meters.evicted_blocks.inc(count - self._evicted.get(reason, 0), reason=reason)
            self._evicted[reason] = count

    def _current(self) -> tuple[Pool, LocalRegions] | None:
        return (self.pool, self.local) if self.pool is not None and self.local is not None else None

    def _control_request(self, raw: bytes, reply: Callable[[bytes], None]) -> None:
        def answer(message: ToClient) -> None:
            reply(to_client.encode(message))

        try:
            self._server.handle(to_server.decode(raw), Caller(), answer)
        except ProtocolError as error:
            self._control.refused("malformed", str(error))

    # --- what its parts need ----------------------------------------------------------------------

    @property
    def local(self) -> LocalRegions | None:
        return self.transports.local if self.transports is not None else None

    @property
    def canary(self) -> Canary | None:
        return self.transports.canary if self.transports is not None else None

    @property
    def plugins(self) -> Mapping[str, plugins.Plugin]:
        return self.transports.plugins if self.transports is not None else {}

    @property
    def peer_context(self) -> PeerContext | None:
        return self.transports.peer_context if self.transports is not None else None

    def nixl(self) -> NixlProcess:
        """Made at the first call. There must be a pool."""
        assert self.transports is not None
        return self.transports.nixl()

    # --- the view ---------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.pool.epoch if self.pool is not None else 0

    @property
    def pool_id(self) -> str:
        return self.pool.pool_id if self.pool is not None else ""

    @property
    def layout(self) -> Layout | None:
        return self.pool.layout if self.pool is not None else None

    @property
    def engine_namespace(self) -> str:
        return self.seat.namespace

    @property
    def engine_id(self) -> str:
        return self.seat.engine_id

    @property
    def engine_pids(self) -> tuple[int, ...]:
        return self.seat.pids

    @property
    def state(self) -> GuardState:
        return self.seat.state

    def subscribe(self, callback: Callable[[Inventory], None]) -> None:
        self.inventory.subscribe(callback)

    def act(self, act: Act, done: Callable[[], None]) -> None:
        self._self_check.busy()
        self._actions.act(act, done)

    def subscribe_results(self, callback: Callable[[ActionResult], None]) -> None:
        self._reports.subscribe(callback)

    def discard(self, keys: bytes, plan_id: str, who: str) -> int:
        """For :class:`PeerServer`: the end of a move away from here."""
        if self.pool is None:
            return 0
        count = self._invalidations.discard(self.pool, keys)
        log.info(
            "plan %s moved %d blocks to %s; %d dropped here", plan_id, len(keys) // KEY_BYTES, who, count
        )
        return count

    def subscribe_state(self, callback: Callable[[StateChange], None]) -> None:
        self._states.subscribe(callback)

    def raise_epoch(self, above: int) -> int:
        """See :meth:`kvcr.guard.view.GuardView.raise_epoch`."""
        self._custody.past_epoch = max(self._custody.past_epoch, above)
        if self.pool is None:
            return 0
        if self.pool.epoch <= above:
            log.warning("epoch %d of the pool raised above %d, which it once had", self.pool.epoch, above)
            self.pool.raise_epoch(above)
            # Whoever is attached speaks of an epoch that is over: it comes back and is told the new one.
            self.seat.dismiss()
        return self.pool.epoch

    def set_peers(self, peers: dict[str, PeerRecord]) -> None:
        self.peers.set_found(peers)
        self._get_ready_for_peers()

    def heartbeat(self) -> Heartbeat:
        beat = self.inventory.heartbeat(self.pool)
        return msgspec.structs.replace(beat, unready=self.peers.unready(self.control_endpoint))

    def status(self) -> dict[str, Any]:
        """JSON-ready summary, see :meth:`kvcr.guard.view.GuardView.status`."""
        pool = self.pool
        return {
            "name": self.name,
            "version": __version__,
            "unix_s": time.time(),
            "namespace": self.namespace,
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "state": str(self.seat.state),
            "control": self.control_endpoint,
            "bound": self._control.bound,
            "interface": self.addresses.interface,
            "socket": self.unix_socket,
            "metrics": self.metrics_endpoint,
            "engine": {
                "id": self.seat.engine_id,
                "namespace": self.seat.namespace,
                "probe": self._probe(),
                "pids": list(self.seat.pids),
                "connections": len(self.seat.members),
            },
            "pool": facts_of(pool, self.config.linger_s) if pool is not None else None,
            "peers": self.peers.status(),
            "pulls": self._fetches.status(),
            "given_up": self._fetches.give_ups.status(),
            "transit_slots": self._fetches.transit.used,
            "nixl": self.transports.nixl_status() if self.transports is not None else None,
            "leases": self._server.lease_count,
            "inventory_sequence": self.inventory.sequence,
        }

    def _probe(self) -> str:
        """See :func:`kvcr.keys.probe_key`; an attached engine computes the same, or was refused."""
        if self.layout is None or not self.seat.namespace:
            return ""
        return probe_key(self.seat.namespace, self.layout).hex()

    def inspect(self, keys: bytes) -> dict[str, Any]:
        """JSON-ready facts about blocks, see :meth:`kvcr.guard.view.GuardView.inspect`."""
        if len(keys) % KEY_BYTES:
            raise ProtocolError(f"{len(keys)} bytes of keys, {KEY_BYTES} a key")
        if self.pool is None:
            return {"blocks": []}
        return {"guard": self.name, "epoch": self.epoch, "blocks": blocks_of(self.pool, keys)}

    def listing(self) -> Listing | None:
        """See :meth:`kvcr.guard.view.GuardView.chains`."""
        return self.pool.listing(time.monotonic()) if self.pool is not None else None

    def _state_changed(self, previous: GuardState, state: GuardState) -> None:
        change = self._states.changed(previous, state, self.epoch)
        if state is GuardState.CHECKING:
            self.loop.later(DEATH_CHECK_S, lambda: self._look_for_death(change))

    def _look_for_death(self, suspected: StateChange) -> None:
        self.seat.check(self.pool)
        if self._states.last is suspected and self._states.age_s < QUICK_CHECKS_S:
            self.loop.later(DEATH_CHECK_S, lambda: self._look_for_death(suspected))

    def _refresh_gauges(self) -> None:
        """On the metrics thread: reads only."""
        transports = self.transports
        gauges.refresh(
            self.meters,
            self.pool,
            state=self.seat.state,
            peers=self.peers.status(),
            lease_count=self._server.lease_count,
            transit=self._fetches.transit,
            sequence=self.inventory.sequence,
            nixl_restarts=transports.nixl_restarts if transports is not None else 0,
        )
