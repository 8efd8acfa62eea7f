# SPDX-License-Identifier: Apache-2.0
"""KVCR for an embedding program: store blocks, find them, fetch them from peers, load them.

::

    layout = Layout(model=model_identity("m", "abc"), dtype="float32", block_size=32, ...)
    memory = HostBlockMemory([blocks])                       # uint8 [blocks, layout.part_bytes]
    kv = Kvcr.open(EngineConfig(socket="/run/kvcr/guard.sock"), layout, memory)
    chain = extend_chain(KeySpace("dynamo", layout.model).root(), tokens, layout.block_size)
    kv.deposit(chain, block_ids)                             # engine memory -> pool
    kv.query(chain)                                          # which are here
    kv.fetch("r1", chain, sources=[Source("tcp://10.0.0.6:7100", 0, len(chain))])
    kv.deliver("r1", chain, block_ids, deadline_s=2.0)       # pool -> engine memory
    kv.close()

This needs neither torch nor vLLM nor Dynamo. :class:`Kvcr` is both roles of an engine in one process, for
engines of one rank; an engine of several processes uses :class:`SchedulerHandle` in the one that schedules
and a :class:`WorkerHandle` in each that computes. A guard that is absent, slow or dead is a status
(:class:`BlockStatus`), not an exception.
"""

from __future__ import annotations

import array
import contextlib
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcr.client import (
    BlockMemory,
    FetchState,
    Grants,
    HostBlockMemory,
    LoadResult,
    LoadSpec,
    SaveSpec,
    SchedulerHandle,
    WorkerHandle,
)
from kvcr.client.hints import missing_run, other_actions, parse_envelope, sources_for
from kvcr.config import EngineConfig
from kvcr.errors import KvcrError
from kvcr.keys import KEY_BYTES, BlockKey, KeySpace, extend_chain, model_identity, pack_keys
from kvcr.layout import Layout
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE
from kvcr.protocol.engine import BlockStatus, Source

__all__ = [
    "BlockKey",
    "BlockMemory",
    "BlockStatus",
    "EngineConfig",
    "FetchState",
    "Grants",
    "HostBlockMemory",
    "KeySpace",
    "Kvcr",
    "KvcrError",
    "Layout",
    "LoadResult",
    "LoadSpec",
    "SaveSpec",
    "SchedulerHandle",
    "Source",
    "Statuses",
    "WorkerHandle",
    "extend_chain",
    "model_identity",
]

Statuses = npt.NDArray[np.uint8]
"""uint8 :class:`BlockStatus`, one a key."""

_OK = int(BlockStatus.OK)

SPIN_S = 0.0001
"""How long a deposit asks the directory for its blocks before it sleeps: the guard takes half of that, if
it has a core."""

STANDING_BLOCKS = 256


class _Blocks(NamedTuple):
    """What is deposited: blobs with one entry a block, as a SaveSpec has them."""

    block_ids: bytes
    keys: bytes
    parents: bytes
    engine_hashes: bytes
    positions: bytes

    def part(self, start: int, stop: int) -> _Blocks:
        """The blocks from ``start`` to before ``stop``."""
        if start == 0 and stop * KEY_BYTES == len(self.keys):
            return self
        return _Blocks(
            *(blob[start * size : stop * size] for blob, size in zip(self, _BLOB_SIZES, strict=True))
        )

    def at(self, chosen: npt.NDArray[np.intp]) -> _Blocks:
        """Some of the blocks."""
        return _Blocks(
            *(
                np.frombuffer(blob, f"V{size}")[chosen].tobytes()
                for blob, size in zip(self, _BLOB_SIZES, strict=True)
            )
        )


_BLOB_SIZES = (4, KEY_BYTES, KEY_BYTES, 8, 4)


class Kvcr:
    """Scheduler and worker of an engine with one rank. All methods are for one thread at a time.

    Methods that take a ``wait_s`` or ``deadline_s`` return by then, whatever the guard does; with 0 they
    return at once and :meth:`poll` moves things on.
    """

    def __init__(self, scheduler: SchedulerHandle, worker: WorkerHandle) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._next_job = 1
        self._drops = 0
        self._results: dict[str, LoadResult] = {}
        self._corrupt: set[bytes] = set()
        """Keys that the directory may still list though their bytes did not verify."""
        self.skipped_hints: Counter[str] = Counter()
        """Hints, or parts of hints, that were not used, by reason."""

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        layout: Layout,
        memory: BlockMemory,
        *,
        engine_id: str = "",
        standing_blocks: int = STANDING_BLOCKS,
        wait_s: float = 15.0,
    ) -> Kvcr:
        """Connect to the configured guard, or start one. Waits up to ``wait_s`` for it; without one the
        object works, and everything is a miss until a guard appears.

        ``engine_id`` must never have been used before; empty: a fresh one. Raises ValueError when the layout
        has more than one rank, or ``memory`` does not fit it, and MustFail when the pool has another layout
        and ``on_mismatch``, of the engine or of the guard, is ``fail``.
        """
        if layout.ranks != 1:
            raise ValueError(
                f"Kvcr is for engines of one rank, the layout has {layout.ranks}; use SchedulerHandle and "
                "one WorkerHandle a rank"
            )
        engine_id = engine_id or f"api-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        deadline_s = time.monotonic() + wait_s
        with contextlib.ExitStack() as undo:
            worker = WorkerHandle(config, layout, memory, engine_id=engine_id)
            undo.callback(worker.close)
            worker.wait_connected(wait_s)
            scheduler = SchedulerHandle(config, layout, engine_id=engine_id, standing_blocks=standing_blocks)
            undo.callback(scheduler.close)
            scheduler.wait_connected(max(0.0, deadline_s - time.monotonic()))
            worker.require_start()
            scheduler.require_start()
            undo.pop_all()
        return cls(scheduler, worker)

    @property
    def connected(self) -> bool:
        """Whether a guard is there and listens."""
        return self._scheduler.connected and self._worker.connected

    @property
    def control_endpoint(self) -> str:
        """Where peers reach this engine's guard, '' without one."""
        return self._scheduler.own_endpoint

    # --- engine memory -> pool ------------------------------------------------------------------

    def deposit(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[int],
        *,
        parents: Sequence[BlockKey] | None = None,
        engine_hashes: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
        root: BlockKey | None = None,
        wait_s: float = 5.0,
    ) -> Statuses:
        """Copy blocks of engine memory into the pool, one a key.

        Without ``parents`` the keys are a chain that starts at ``root`` (or, without one, at a key of
        zeros); ``positions`` then default to 0, 1, ...; ``engine_hashes`` (uint64) to the first 8 bytes of
        each key. Statuses: OK committed (or there already), PENDING copied and not confirmed within
        ``wait_s``, MISS no room was granted, GONE no guard. Blocks must not change until the call returns.
        """
        count = len(keys)
        if len(block_ids) != count:
            raise ValueError(f"{count} keys and {len(block_ids)} block ids; give one block id a key")
        for name, given in (("parents", parents), ("hashes", engine_hashes), ("positions", positions)):
            if given is not None and len(given) != count:
                raise ValueError(f"{count} keys and {len(given)} {name}; give one a key, or none")
        blob = pack_keys(keys)
        before = (root or bytes(KEY_BYTES)) + blob[:-KEY_BYTES] if parents is None else pack_keys(parents)
        blocks = _Blocks(
            array.array("i", block_ids).tobytes(),
            blob,
            before[: len(blob)],
            np.frombuffer(blob, "<u8")[::2].tobytes()
            if engine_hashes is None
            else np.array(engine_hashes, "<u8").tobytes(),
            np.arange(count, dtype="<u4").tobytes()
            if positions is None
            else np.array(positions, "<u4").tobytes(),
        )
        deadline_s = time.monotonic() + wait_s
        self.poll()
        missing = np.arange(count)
        replaces = False
        if self._scheduler.hits(blob):
            wanted = ~self._scheduler.lookup(blob)
            if self._corrupt:
                corrupt = np.fromiter((key in self._corrupt for key in keys), np.bool_, count)
                replaces = bool((corrupt & ~wanted).any())
                wanted |= corrupt
            missing = np.flatnonzero(wanted)
            blocks = blocks.at(missing)
        if self._corrupt:
            self._corrupt.difference_update(keys)
        with self._worker.borrowed():
            saved = self._save(blocks, deadline_s)
            if saved and not replaces:
                last = blocks.keys[KEY_BYTES * (saved - 1) : KEY_BYTES * saved]
                # The directory shows it sooner than the guard tells it, and the last block last.
                self._worker.work_until(
                    lambda: self._scheduler.hits(last) > 0 or self._worker.unconfirmed_fills == 0,
                    deadline_s,
                    spin_s=SPIN_S,
                )
            self._worker.take_saved_jobs()
            if not replaces and self._scheduler.hits(blob) == count:
                statuses = np.empty(count, np.uint8)
                statuses.fill(_OK)
                return statuses
            # What was refused, or is there as another's, or as a damaged one, the guard has to say.
            self._worker.work_until(lambda: self._worker.unconfirmed_fills == 0, deadline_s)
        self.poll()
        here = self._scheduler.lookup(blob)
        statuses = np.full(count, BlockStatus.PENDING, np.uint8)
        statuses[missing[saved:]] = BlockStatus.MISS
        if not self._scheduler.connected:
            statuses[:] = BlockStatus.GONE
        statuses[here] = BlockStatus.OK
        return statuses

    def _save(self, blocks: _Blocks, deadline_s: float) -> int:
        """Copy blocks to granted slots, from the first on; returns how many there were slots for."""
        count, saved = len(blocks.positions) // 4, 0
        while saved < count:
            grants = self._scheduler.take_grants(min(count - saved, MAX_BLOCKS_PER_MESSAGE))
            if len(grants):
                self._worker.save_now(self._save_spec(grants, blocks.part(saved, saved + len(grants))))
                saved += len(grants)
            elif time.monotonic() >= deadline_s or not self._scheduler.connected:
                break
            else:
                self._until(self._granted_or_lost, deadline_s)
        return saved

    def _save_spec(self, grants: Grants, blocks: _Blocks) -> SaveSpec:
        job = self._next_job
        self._next_job += 1
        return SaveSpec(
            job_id=job,
            request_id=f"deposit-{job}",
            pool_token=grants.pool_token,
            epoch=grants.epoch,
            slots=grants.slots.astype("<i4", copy=False).tobytes(),
            generations=grants.generations.astype("<u8", copy=False).tobytes(),
            drops=self._drops,
            **blocks._asdict(),
        )

    # --- finding and fetching -------------------------------------------------------------------

    def query(self, keys: Sequence[BlockKey]) -> Statuses:
        """Which blocks are in the local pool: OK or MISS. Reads shared memory; sends nothing."""
        here = self._scheduler.lookup(pack_keys(keys))
        return np.where(here, BlockStatus.OK, BlockStatus.MISS).astype(np.uint8)

    def fetch(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        *,
        sources: Sequence[Source],
        first: int = 0,
        parent: BlockKey | None = None,
        engine_hashes: Sequence[int] | None = None,
        give_up_ms: float = 0.0,
        deadline_s: float = 2.0,
        no_retain: bool = False,
        wait: bool = True,
    ) -> Statuses:
        """Have the guard pull blocks of one chain from other guards into the local pool.

        ``keys`` start at position ``first``, after ``parent``; ``sources`` name positions. One fetch a
        ``request_id`` at a time; end it with :meth:`finish`. With ``wait`` the result is final; without, it
        is what is known now, see :meth:`fetch_state`. ``give_up_ms``: a pull that would end later is stopped.
        """
        until_s = time.monotonic() + deadline_s
        self.poll()
        hashes = (
            np.zeros(len(keys), np.uint64) if engine_hashes is None else np.array(engine_hashes, np.uint64)
        )
        state = self._scheduler.fetch(
            request_id,
            first=first,
            parent=parent or bytes(KEY_BYTES),
            keys=pack_keys(keys),
            engine_hashes=hashes,
            sources=list(sources),
            deadline_ms=1000 * deadline_s,
            give_up_ms=give_up_ms,
            no_retain=no_retain,
        )
        if wait:
            # The guard keeps the deadline; the margin is for its last word to get here.
            self._scheduler.wait_for(state, until_s + 0.25)
            if not state.final:
                state.end(BlockStatus.TOO_SLOW, "the guard did not answer in time")
        return state.statuses

    def fetch_state(self, request_id: str) -> FetchState | None:
        """What is known of the fetch of this request."""
        self.poll()
        return self._scheduler.fetch_state(request_id)

    def submit_hint(
        self, request_id: str, envelope: Any, keys: Sequence[BlockKey], engine_hashes: Sequence[int] = ()
    ) -> FetchState | None:
        """Act on a ``kv_hint`` envelope for a request whose whole chain is ``keys``; never waits.

        None when it names nothing to fetch; see :attr:`skipped_hints` for what was not understood. Its other
        actions are passed on to the guard.
        """
        actions = other_actions(envelope, self.skipped_hints)
        if actions is not None:
            self._scheduler.act(request_id, actions)
        hint = parse_envelope(envelope, self.skipped_hints)
        if hint is None:
            return None
        sources = sources_for(hint, pack_keys(keys), np.array(engine_hashes, np.uint64), self.skipped_hints)
        run = missing_run(sources, self._scheduler.lookup(pack_keys(keys)))
        if run is None:
            return None
        first, count = run
        self.poll()
        hashes = np.zeros(len(keys), np.uint64)
        hashes[: len(engine_hashes)] = np.array(engine_hashes, np.uint64)
        return self._scheduler.fetch(
            request_id,
            first=first,
            parent=keys[first - 1] if first else bytes(KEY_BYTES),
            keys=pack_keys(keys[first : first + count]),
            engine_hashes=hashes[first : first + count],
            sources=sources,
            deadline_ms=hint.deadline_ms,
            give_up_ms=hint.give_up_ms,
            plan_id=hint.plan_id,
            no_retain=hint.no_retain,
            move=hint.move,
            action_id=hint.action_id,
            traceparent=hint.traceparent,
        )

    # --- pool -> engine memory ------------------------------------------------------------------

    def deliver(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        block_ids: Sequence[int],
        *,
        first: int = 0,
        deadline_s: float = 2.0,
        wait: bool = True,
    ) -> Statuses:
        """Copy blocks from the pool into engine memory, verified. Joins the request's fetch, if one runs.

        ``keys`` start at position ``first`` of the request's chain. With ``wait`` every status is final, by
        the deadline, and no byte is written to a block afterwards. Without, all are PENDING and
        :meth:`delivered` has the result once.
        """
        count = len(keys)
        if len(block_ids) != count:
            raise ValueError(f"{count} keys and {len(block_ids)} block ids; give one block id a key")
        self.poll()
        state = self._scheduler.fetch_state(request_id)
        blob = pack_keys(keys)
        spec = LoadSpec(
            request_id=request_id,
            first=first,
            keys=blob,
            block_ids=array.array("i", block_ids).tobytes(),
            deadline_s=deadline_s,
            fetching=state is not None and not state.final,
            fetch_first=state.first if state is not None else 0,
            fetch_count=state.count if state is not None else 0,
            prefix_only=False,
        )
        if not wait:
            self._scheduler.use(blob)
            self._worker.submit_load(spec)
            return np.zeros(count, np.uint8)
        with self._worker.borrowed():
            self._worker.submit_load(spec)
            ends_s = time.monotonic() + deadline_s
            self._worker.work_until(lambda: self._take_results() and request_id in self._results, ends_s)
        if request_id not in self._results:
            # This thread was kept from asking, for however long: the load is late by now, which ends it.
            self._take_results()
        # Not before the copy, which would then share the processor with the guard.
        self._scheduler.use(blob)
        return self._results.pop(request_id).statuses

    def delivered(self, request_id: str) -> LoadResult | None:
        """The result of a :meth:`deliver` that was not waited for: once, None before."""
        self.poll()
        return self._results.pop(request_id, None)

    def cancel(self, request_id: str) -> None:
        """End a running :meth:`deliver`: what has not arrived is TOO_SLOW."""
        self._worker.cancel_load(request_id)

    # --- the rest -------------------------------------------------------------------------------

    def pin(self, keys: Sequence[BlockKey], ttl_s: float) -> str:
        """Keep blocks from eviction for ``ttl_s`` seconds. Returns a pin id, '' without a guard."""
        return self._scheduler.pin(pack_keys(keys), ttl_s)

    def release(self, pin_id: str) -> None:
        """End a pin early."""
        self._scheduler.unpin(pin_id)

    def finish(self, request_id: str) -> None:
        """The request is over: its fetch is dropped, its load, if one runs, cancelled."""
        self._scheduler.finish(request_id)
        self._worker.cancel_load(request_id)

    def poll(self) -> None:
        """Take in what the guard said and what the copy thread finished. Never waits."""
        self._scheduler.poll()
        for drop in self._scheduler.take_drops():
            # Engine memory is the caller's: nothing of it is found by a key. What is deposited from here on
            # is newer than the invalidation.
            self._scheduler.dropped(drop, 0)
            self._drops = max(self._drops, drop.drop_id)
        self._take_results()

    def close(self) -> None:
        """Disconnect. The pool and its blocks stay with the guard. Idempotent."""
        self._worker.close()
        self._scheduler.close()

    def _take_results(self) -> bool:
        """Whether a load ended."""
        results = self._worker.take_loads()
        for result in results:
            self._results[result.request_id] = result
            self._corrupt |= result.corrupt_keys
        return bool(results)

    def _granted_or_lost(self) -> bool:
        return self._scheduler.grants_available > 0 or not self._scheduler.connected

    def _until(self, done: Callable[[], bool], deadline_s: float) -> None:
        def polled() -> bool:
            self.poll()
            return done()

        self._worker.work_until(polled, deadline_s, self._scheduler.fileno)
