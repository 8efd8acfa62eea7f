# SPDX-License-Identifier: Apache-2.0
"""The cluster thread: everything a guard does with Dynamo, etcd and NATS, beside it and never in its way.

It registers the guard, keeps its signed record, learns of the other guards, and publishes the inventory.
When etcd or NATS is away it waits; when it stalls or fails, the guard goes on without noticing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import socket
import threading
from typing import Any

import uvloop

from kvcr.dynamo.actions import ActionInlet
from kvcr.dynamo.beside import WorkerBeside
from kvcr.dynamo.component import KvcrComponent, prepare_environment
from kvcr.dynamo.epochs import EpochMirror, EpochRecord
from kvcr.dynamo.etcd import (
    EtcdClient,
    EtcdError,
    EtcdUnavailable,
    addresses_of,
    connect,
    credentials_from_environment,
    endpoints_from_environment,
)
from kvcr.dynamo.peers import PeerDirectory
from kvcr.dynamo.publisher import Publisher
from kvcr.dynamo.records import InstanceRecord, decode, encode, guards_prefix, record_key
from kvcr.dynamo.states import StatePublisher
from kvcr.dynamo.topology import read_topology
from kvcr.errors import ProtocolError
from kvcr.guard.view import GuardState, GuardView
from kvcr.protocol.events import StateChange

log = logging.getLogger(__name__)

TICK_S = 1.0
"""Heartbeats, and how soon a change of the guard shows in its record."""
RETRY_S = 0.5
STOP_S = 1.0
RESTART_S = 1.0


def start(view: GuardView) -> ClusterThread:
    """Start the cluster thread of a guard. Returns at once; nothing has to be reachable.

    Raises ConfigError when what the environment says of etcd cannot be right.
    """
    addresses_of(endpoints_from_environment(), credentials_from_environment())
    prepare_environment()
    return ClusterThread(view)


class ClusterThread:
    """Made by :func:`start`. :meth:`stop` may be called from any other thread."""

    def __init__(self, view: GuardView) -> None:
        self._view = view
        self._host = os.environ.get("KVCR_HOST") or socket.gethostname()
        self._topology = read_topology()
        self._key = record_key(view.namespace, view.name)
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requested: asyncio.Event | None = None
        self._state_is_new: asyncio.Event | None = None
        registry = view.registry
        self._ignored = registry.counter(
            "kvcr_cluster_records_ignored_total", "Records of guards that are not believed.", ["reason"]
        )
        self._runtimes = registry.counter("kvcr_cluster_runtimes_total", "Dynamo runtimes made.")
        self._registered = registry.gauge("kvcr_cluster_registered", "1 while the guard's record is in etcd.")
        self._published = registry.counter(
            "kvcr_cluster_batches_published_total", "Inventory batches published."
        )
        self._dropped = registry.counter(
            "kvcr_cluster_batches_dropped_total", "Inventory batches dropped while NATS was away."
        )
        self._publisher = Publisher(
            view.namespace,
            view.name,
            self._published,
            self._dropped,
            registry.counter(
                "kvcr_cluster_nats_connects_total", "Connections made to NATS, the first one included."
            ),
        )
        self._states = StatePublisher(
            view.namespace,
            view.name,
            view.secret,
            lambda: self._publisher.connection,
            registry.counter("kvcr_failover_events_published_total", "Changes of state published."),
            registry.counter(
                "kvcr_failover_events_dropped_total",
                "Changes of state dropped, too many while NATS was away.",
            ),
        )
        states_waiting = registry.gauge(
            "kvcr_failover_events_waiting", "Changes of state that are not published yet."
        )
        registry.before_render(lambda: states_waiting.set(self._states.waiting))
        self._worker = WorkerBeside()
        self._epochs = EpochMirror(view.namespace, view.name, view.secret, self._raise_epoch)
        self._mirrored = registry.gauge("kvcr_failover_mirrored_epoch", "Epoch of the pool as etcd has it.")
        self._actions = ActionInlet(
            view,
            lambda: self._publisher.connection,
            registry.gauge(
                "kvcr_cluster_actions_waiting", "Actions in the stream that this guard has not read yet."
            ),
        )
        self._taken_over = False
        self._stored: bytes | None = None
        self._component: KvcrComponent | None = None
        self._peers: PeerDirectory | None = None
        self._reported = ""
        self._executor = concurrent.futures.ThreadPoolExecutor(2, "kvcr-cluster-ask")
        view.subscribe(self._publisher.offer)
        view.subscribe_state(self._state_changed)
        self._thread = threading.Thread(target=self._run, name="kvcr-cluster", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Deregister and end the thread, within 1 s whatever etcd and NATS do. May be called twice."""
        self._stopping.set()
        loop, requested = self._loop, self._stop_requested
        if loop is not None and requested is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(requested.set)
        self._thread.join(STOP_S)

    def _state_changed(self, change: StateChange) -> None:
        """On the guard's authority thread."""
        self._states.offer(self._worker.changed(change))
        loop, news = self._loop, self._state_is_new
        if loop is not None and news is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(news.set)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                uvloop.run(self._main())
            except Exception:
                # The guard must not depend on this thread, and the deployment must not lose the guard.
                log.exception("cluster thread of guard %s failed, starting it again", self._view.name)
                self._stopping.wait(RESTART_S)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _main(self) -> None:
        self._stop_requested, self._state_is_new = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._stopping.is_set():
            return
        # gRPC resolves names and connects by itself; only a list of hosts needs them resolved here.
        etcd = await self._patiently_connect()
        if etcd is None:
            return
        async with etcd:
            tasks = [
                asyncio.create_task(work)
                for work in (
                    self._publisher.run(),
                    self._states.run(),
                    self._actions.run(),
                    self._beat(),
                    self._watch(etcd),
                    self._register(etcd),
                )
            ]
            stop = asyncio.create_task(self._stop_requested.wait())
            try:
                await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
            finally:
                stop.cancel()
                await asyncio.gather(self._deregister(etcd), *(_end(task) for task in tasks))
            for task in tasks:
                if not task.cancelled():
                    task.result()

    async def _patiently_connect(self) -> EtcdClient | None:
        while not self._stopping.is_set():
            try:
                return await connect(endpoints_from_environment(), credentials=credentials_from_environment())
            except (EtcdUnavailable, OSError) as error:
                self._report(str(error))
                await asyncio.sleep(RETRY_S)
        return None

    # --- registration ----------------------------------------------------------------------------

    async def _register(self, etcd: EtcdClient) -> None:
        """Keep the guard registered: one life of the Dynamo component after the other."""
        while True:
            try:
                if await self._take_place(etcd):
                    await self._live(etcd)
            except EtcdError as error:
                # Away, or it refuses for now, or the lease is gone: in each case the way is to begin again.
                self._report(str(error))
            finally:
                self._registered.set(0)
            await asyncio.sleep(RETRY_S)

    async def _take_place(self, etcd: EtcdClient) -> bool:
        """Remove what a predecessor left. False while the name belongs to another live guard."""
        found = await etcd.get(self._key)
        if found is not None and found.lease:
            try:
                record = decode(found.key, found.value, None)
                ours = record.incarnation == self._view.incarnation
            except ProtocolError:
                record, ours = None, False
            # Once at start we are the successor. Later, a stranger there has taken our place: were we to
            # take it back, two guards of one name would go on revoking each other's leases.
            if self._taken_over and not ours:
                where = f"process {record.pid} of {record.host}" if record else "an unknown process"
                self._report(
                    f"guard name {self._view.name!r} is taken by {where}; give each guard its own --name"
                )
                return False
            await etcd.revoke(found.lease)
        if not self._taken_over:
            remembered = await self._epochs.remembered(etcd)
            if remembered is not None and remembered.pool == self._view.pool_id:
                active = self._view.state is GuardState.ACTIVE
                self._worker.inherit(
                    remembered.worker_id, dead=active and remembered.epoch < self._view.epoch
                )
        self._taken_over = True
        return True

    async def _live(self, etcd: EtcdClient) -> None:
        """From registration to the end of the runtime."""
        try:
            component = KvcrComponent(self._view, self._executor, self._record, self._summary)
        except Exception as error:
            # The runtime raises nothing more specific. etcd answered just before, so it will be back.
            log.warning("Dynamo runtime cannot be made, trying again: %s", error, exc_info=True)
            return
        self._component, self._stored = component, None
        self._epochs.forget()
        self._runtimes.inc()
        self._reported = ""
        ended = asyncio.create_task(component.ended())
        try:
            while not ended.done():
                try:
                    # First of all: the deployment must not send requests to a dead worker.
                    await self._worker.revoke_dead(
                        etcd,
                        self._view.namespace,
                        self._view.control_endpoint,
                        lambda: self._view.state is GuardState.ACTIVE,
                    )
                    await self._store(etcd, component)
                    await self._mirror_epoch(etcd)
                except EtcdUnavailable as error:
                    self._report(str(error))
                await self._until_new_state(ended)
            log.warning("Dynamo runtime of guard %s ended, making another", self._view.name)
        finally:
            ended.cancel()
            # Unless this is the end of the thread, which deregisters in its own time.
            if self._stop_requested is not None and not self._stop_requested.is_set():
                self._component = None
                await component.shutdown(STOP_S)

    async def _until_new_state(self, ended: asyncio.Task[None]) -> None:
        """A tick, or less: what routers should know of a death goes out at once."""
        assert self._state_is_new is not None
        news = asyncio.create_task(self._state_is_new.wait())
        await asyncio.wait([ended, news], timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        self._state_is_new.clear()

    async def _store(self, etcd: EtcdClient, component: KvcrComponent) -> None:
        """Write the record if it is not what etcd has. Raises LeaseNotFound when the runtime is ending."""
        value = encode(self._record(component.lease_id), self._view.secret)
        if value != self._stored:
            await etcd.put(self._key, value, lease=component.lease_id)
            self._stored = value
            self._registered.set(1)
            log.info("guard %s is registered under lease %x", self._view.name, component.lease_id)

    async def _mirror_epoch(self, etcd: EtcdClient) -> None:
        """Learn which worker is beside us, and keep epoch and worker where a successor finds them."""
        view = self._view
        if view.state is GuardState.STANDBY:
            await self._worker.find(etcd, view.namespace, view.control_endpoint)
        # Together with the pool they are of: read before, and checked after.
        pool = view.pool_id
        ours = EpochRecord(view.epoch if pool else 0, pool, self._worker.worker_id)
        if pool != view.pool_id:
            return
        # The authority thread is busy: the next tick will do.
        with contextlib.suppress(TimeoutError):
            stored = await self._epochs.store(etcd, ours)
            if stored.pool:
                self._mirrored.set(stored.epoch)

    async def _raise_epoch(self, above: int) -> int:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: self._view.raise_epoch(above))

    async def _deregister(self, etcd: EtcdClient) -> None:
        component, self._component = self._component, None
        if component is None:
            return

        async def revoke() -> None:
            # The runtime does so too, when it gets to it; the record goes with either.
            with contextlib.suppress(EtcdError, TimeoutError):
                async with asyncio.timeout(STOP_S / 2):
                    await etcd.revoke(component.lease_id)

        await asyncio.gather(component.shutdown(STOP_S / 2), revoke())
        self._registered.set(0)

    def _record(self, lease_id: int = 0) -> InstanceRecord:
        view = self._view
        layout = view.layout
        if not lease_id and self._component is not None:
            lease_id = self._component.lease_id
        return InstanceRecord(
            name=view.name,
            namespace=view.namespace,
            incarnation=view.incarnation,
            epoch=view.epoch,
            state=str(view.state),
            pid=view.pid,
            host=self._host,
            boot_id=view.boot_id,
            net_namespace=view.place.net_namespace,
            control_endpoint=view.control_endpoint,
            unix_socket=view.unix_socket,
            metrics_endpoint=view.metrics_endpoint,
            curve_key=view.public_key.hex(),
            engine_namespace=view.engine_namespace,
            layout=layout,
            layout_digest=layout.digest() if layout is not None else "",
            block_size=layout.block_size if layout is not None else 0,
            topology_domains=self._topology,
            lease_id=lease_id,
        )

    # --- peers and events ------------------------------------------------------------------------

    async def _watch(self, etcd: EtcdClient) -> None:
        """Tell the guard of its peers for as long as etcd answers, and leave it what it knew otherwise."""
        self._peers = PeerDirectory(
            self._view.namespace,
            self._view.name,
            self._view.secret,
            lambda why: self._ignored.inc(reason=why),
            self._view.place,
        )
        while True:
            try:
                stream = etcd.watch_prefix(guards_prefix(self._view.namespace))
                async with contextlib.aclosing(stream):
                    async for changes in stream:
                        if self._key in changes.deletes:
                            self._stored = None
                            self._epochs.forget()
                        if self._peers.apply(changes):
                            self._view.set_peers(self._peers.peers())
            except EtcdError as error:
                self._report(str(error))
                await asyncio.sleep(RETRY_S)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            if self._publisher.connected:
                # The authority thread is busy, or has not started yet: the next beat will tell.
                with contextlib.suppress(TimeoutError):
                    await self._publisher.heartbeat(
                        await loop.run_in_executor(self._executor, self._view.heartbeat)
                    )

    def _summary(self) -> dict[str, Any]:
        """For the ``status`` endpoint."""
        return {
            "lease_id": self._component.lease_id if self._component is not None else 0,
            "peers": {}
            if self._peers is None
            else {endpoint: peer.name for endpoint, peer in self._peers.peers().items()},
            "runtimes": int(self._runtimes.value()),
            "worker_id": self._worker.worker_id,
            "nats_connected": self._publisher.connected,
            "state_changes_waiting": self._states.waiting,
            "batches_published": int(self._published.value()),
            "batches_dropped": int(self._dropped.value()),
            "records_ignored": {
                reason: int(self._ignored.value(reason=reason))
                for reason in ("signature", "format", "loopback")
            },
        }

    def _report(self, trouble: str) -> None:
        """Once per cause."""
        if trouble != self._reported:
            self._reported = trouble
            log.warning("guard %s waits for its registration: %s", self._view.name, trouble)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait([task])
