# SPDX-License-Identifier: Apache-2.0
"""The guard's handle on its pool: the only writer of the directory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvcr.errors import PoolCorrupt
from kvcr.layout import Layout
from kvcr.policy import DefaultPolicy, Offer, Policy, Resident
from kvcr.pool import native
from kvcr.pool.files import create_files, plan_geometry, remove_files
from kvcr.pool.holds import Holds
from kvcr.pool.invariants import find_broken
from kvcr.pool.locks import GUARD_LOCK, WRITERS, FileLock, make_dir, writers_of
from kvcr.pool.meta import DATA, EPOCH_INDEX, INCARNATION_INDEX, META, Meta
from kvcr.pool.record import (
    Changes,
    Columns,
    CommitResult,
    Granted,
    first_of_each,
    key_rows,
)
from kvcr.pool.recovery import Recovery, recover, require_same_clock
from kvcr.pool.slots import CoolingQueue, FreeList
from kvcr.pool.state import (
    GENERATION_MASK,
    I32,
    U32,
    U64,
    Mask,
    SlotState,
    as_slots,
    as_u64,
    generations_of,
    states_of,
)
from kvcr.pool.writers import WriterTable

_ONE = np.uint64(1)
_NO_SLOTS: I32 = np.empty(0, dtype=np.int32)


class Pool(Holds):
    """Grants, publishes, evicts and finds blocks. One per guard, which holds the pool's lock for life.

    All methods are for the guard's authority thread, except :meth:`part`, :meth:`region` and
    :meth:`data`, which any thread may call. None of them blocks or loops over blocks. Arguments from
    the wire may hold any slot and generation: what is out of range or out of date is ignored.

    ``now_s`` is the guard's monotonic clock; it must not go back.
    """

    def __init__(self, dir: Path, meta: Meta, lock: FileLock, policy: Policy, recovery: Recovery) -> None:
        super().__init__(dir, meta)
        self.policy = policy
        self._marks = policy.watermarks(self.slots)
        self._admits_all = type(policy).admit is DefaultPolicy.admit
        self._places_as_we_do = type(policy).place is DefaultPolicy.place
        self.recovery = recovery
        """What attach found; all zero for a new pool."""
        self.evicted_blocks: Counter[str] = Counter()
        """Blocks evicted, by reason."""
        self._lock = lock
        self._writers = WriterTable(meta.writers)
        self._free = FreeList(self.slots)
        self._cooling = CoolingQueue()
        self._directory = native.Directory(
            meta.control,
            meta.buckets,
            meta.keys,
            meta.parents,
            meta.engine_hashes,
            meta.positions,
            meta.stored_at,
            meta.seals,
            meta.checksums,
            self._last_used_s,
            self._pinned_until_s,
            self._demoted,
        )
        self._stored: list[Granted] = []
        self._removed: list[bytes] = []
        states = states_of(meta.control)
        # Descending, so that a new pool grants its slots from 0 on.
        self._free.push(np.flatnonzero(states == SlotState.FREE)[::-1].astype(np.int32))
        self._cooling.push_undated(np.flatnonzero(states == SlotState.COOLING).astype(np.int32))
        ready = states == SlotState.READY
        self._ready = int(np.count_nonzero(ready))
        self._digest = int(np.bitwise_xor.reduce(meta.keys[ready, 0], initial=np.uint64(0)))

    # ------------------------------------------------------------------------------ life of the files

    @classmethod
    def create(
        cls,
        dir: Path,
        layout: Layout,
        pool_bytes: int,
        *,
        guard_incarnation: int,
        policy: Policy | None = None,
        preallocate: bool = True,
        epoch: int = 1,
    ) -> Pool:
        """A new, empty pool in ``dir``, in ``epoch``, replacing an older one there.

        It has as many slots as fit ``pool_bytes``; the directory comes on top. ``preallocate`` reserves
        the memory now, so that no write can fail later. Raises PoolTooSmall, PoolBusy, OSError.
        """
        dir = Path(dir)
        geometry = plan_geometry(layout, pool_bytes)
        make_dir(dir)
        lock = FileLock(dir / GUARD_LOCK)
        lock.acquire()
        try:
            create_files(dir, geometry, epoch=epoch, incarnation=guard_incarnation, preallocate=preallocate)
            make_dir(dir / WRITERS)
            meta = Meta.open(dir / META, writable=True)
            return cls(dir, meta, lock, policy or DefaultPolicy(), Recovery(0, 0, 0, 0, 0, 0, 0))
        except BaseException:
            lock.release()
            raise

    @classmethod
    def attach(cls, dir: Path, *, guard_incarnation: int, policy: Policy | None = None) -> Pool:
        """Go on with the pool in ``dir``: blocks stay READY, grants stay granted, the index is rebuilt.

        Leases and pins of the guard before are gone. Raises FileNotFoundError, PoolBusy, PoolCorrupt.
        """
        dir = Path(dir)
        if not (dir / META).exists():
            raise FileNotFoundError(f"no pool in {dir}: {META} does not exist")
        lock = FileLock(dir / GUARD_LOCK)
        lock.acquire()
        try:
            meta = Meta.open(dir / META, writable=True)
            require_same_clock(meta.geometry)
            backend = native.backend()
            backend.store_words(
                meta.header, INCARNATION_INDEX, np.array([guard_incarnation], dtype=np.uint64)
            )
            return cls(dir, meta, lock, policy or DefaultPolicy(), recover(meta, backend))
        except BaseException:
            lock.release()
            raise

    def close(self, unlink: bool = False) -> None:
        """Unmap and give the lock back; ``unlink`` removes the files too. Memory that a caller still has a
        view of stays mapped until the view is gone."""
        if unlink and self._lock.held:
            remove_files(self.dir)
            for paths in writers_of(self.dir).values():
                for path in paths:
                    path.unlink(missing_ok=True)
            if (self.dir / WRITERS).is_dir():
                (self.dir / WRITERS).rmdir()
        for region in self._regions:
            region.close()
        self._meta.close()
        self._lock.release(unlink=unlink)

    def trouble(self) -> str:
        """Why the files are not what is mapped here any more; empty when they are. Two system calls."""
        geometry = self._meta.geometry
        for name, nbytes in ((META, geometry.meta_bytes), (DATA, geometry.data_bytes)):
            path = self.dir / name
            try:
                status = path.stat()
            except OSError as error:
                return f"{path}: {error.strerror}"
            if status.st_size != nbytes:
                return f"{path} has {status.st_size} bytes, and had {nbytes}"
            if name == META and status.st_ino != self._meta.inode:
                return f"{path} is another file"
        return ""

    @property
    def epoch(self) -> int:
        """The pool's epoch. Messages of an earlier one are refused by the guard."""
        return int(self._meta.header[EPOCH_INDEX[0]])

    @property
    def pool_id(self) -> str:
        """Differs for every pool ever made."""
        return self._meta.geometry.body.pool_id

    @property
    def incarnation(self) -> int:
        """Incarnation of this guard."""
        return int(self._meta.header[INCARNATION_INDEX[0]])

    def raise_epoch(self, above: int = 0) -> int:
        """Raise the epoch to one more than itself and ``above``; returns the new one."""
        raised = max(self.epoch, above) + 1
        self._backend.store_words(self._meta.header, EPOCH_INDEX, np.array([raised], dtype=np.uint64))
        return raised

    # ---------------------------------------------------------------------------- granting and filling

    def allocate(self, count: int, now_s: float, *, engine_id: str = "") -> Granted:
        """Grant up to ``count`` slots to an engine, or (empty id) to the guard itself: FREE to GRANTED.

        May return fewer, or none: evicted slots cool first, so room is made for later calls. Raises
        ConfigError on an id that cannot name a file, PoolError when 64 engines have grants.
        """
        owner = self._writers.owner_of(engine_id)
        self.tick(now_s)
        count = max(0, min(count, self.slots))
        self._evict_ahead(count, now_s)
        count = min(count, len(self._free))
        if not count:
            return Granted(_NO_SLOTS, np.empty(0, dtype=np.uint64))
        slots = self._free.take(self._placed(count))
        generations = np.empty(count, dtype=np.uint64)
        self._backend.grant(self._meta.control, self._meta.owners, slots, generations, owner)
        return Granted(slots, generations)

    def _placed(self, count: int) -> npt.NDArray[np.intp]:
        """Which of the free slots to grant. An answer of a policy that would grant a slot twice, or none at
        all, is not used."""
        free = self._free.slots
        indices = self.policy.place(free, count)
        if not self._places_as_we_do:
            indices = np.asarray(indices).astype(np.intp, copy=False)
            inside = len(indices) == count and indices.min() >= 0 and indices.max() < len(free)
            if not inside or len(np.unique(indices)) < count:
                return DefaultPolicy().place(free, count)
        return indices

    @property
    def free_count(self) -> int:
        """Slots that can be granted now."""
        return len(self._free)

    @property
    def cooling_count(self) -> int:
        """Slots that can be granted once they have cooled and nothing leases them."""
        return len(self._cooling)

    def make_room(self, count: int, now_s: float) -> None:
        """Evict ahead of a need for ``count`` slots: they are there when they have cooled."""
        self.tick(now_s)
        self._evict_ahead(min(count, self.slots), now_s)

    def commit(
        self,
        slots: I32,
        generations: U64,
        keys: bytes,
        parents: bytes,
        engine_hashes: U64,
        positions: U32,
        checksums: U64,
        now_s: float,
    ) -> CommitResult:
        """Publish filled slots: GRANTED to READY. The bytes and their checksums are final.

        ``checksums``: uint64 [n, ranks], or flat in that order. Idempotent. Raises ValueError when the
        arguments have different lengths.
        """
        slots, generations = as_slots(slots), as_u64(generations)
        count = len(slots)
        columns = Columns(
            slots,
            generations,
            rows := key_rows(keys, count, "keys"),
            key_rows(parents, count, "parents"),
            as_u64(engine_hashes),
            np.ascontiguousarray(positions, dtype=np.uint32),
            as_u64(checksums).reshape(count, self.layout.ranks),
        )
        for name, column in columns._asdict().items():
            if len(column) != count:
                raise ValueError(f"{name} has {len(column)} entries, slots has {count}")
        meta = self._meta
        if self._backend.all_new(meta.control, meta.buckets, meta.keys, slots, generations, rows):
            # The usual case: every slot is granted, every key new.
            committed = self._admit(columns, keys, parents, now_s)
            none = np.zeros(count, dtype=np.bool_)
            return CommitResult(committed, none, ~committed, none)
        found = self.lookup(keys)
        committed = (found.slots == slots) & (found.generations == generations) & (slots >= 0)
        duplicate, refused = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
        todo = self._select(slots, generations, SlotState.GRANTED)
        fresh = found.slots[todo] < 0
        fresh[fresh] = first_of_each(rows[todo[fresh]])
        duplicate[todo[~fresh]] = True
        todo = todo[fresh]
        if len(todo):
            fresh_ones = columns.at(todo)
            done = self._admit(fresh_ones, fresh_ones.keys.tobytes(), fresh_ones.parents.tobytes(), now_s)
            committed[todo[done]] = True
            refused[todo[~done]] = True
        unwanted = duplicate | refused
        if duplicate.any():
            self._release(slots[duplicate])
        return CommitResult(committed, duplicate, refused, ~(committed | unwanted))

    def commit_filled(
        self,
        slots: bytes,
        generations: bytes,
        keys: bytes,
        parents: bytes,
        engine_hashes: bytes,
        positions: bytes,
        checksums: bytes,
        now_s: float,
    ) -> int | None:
        """:meth:`commit` of blobs, in the usual case: every slot is granted, and every key new and wanted.

        Returns how many were published, where the index had room. None, and nothing is changed, in any other
        case. Blobs of int32, uint64, 16 bytes, 16 bytes, uint64, uint32 and, [n, ranks], uint64. Somebody may
        wait for the control words: no array is made before they are written.
        """
        meta, backend = self._meta, self._backend
        if not self._admits_all or not backend.all_new(
            meta.control, meta.buckets, meta.keys, slots, generations, keys
        ):
            return None
        indexed: Mask = np.empty(len(slots) // 4, dtype=np.bool_)
        count, digest = backend.publish(
            self._directory,
            slots,
            generations,
            keys,
            parents,
            engine_hashes,
            positions,
            checksums,
            indexed,
            now_s,
        )
        granted = Granted(np.frombuffer(slots, np.int32), np.frombuffer(generations, np.uint64))
        self._published(granted, indexed, count, digest)
        if count < len(indexed):
            self._release(granted.slots[~indexed])
        return count

    def commit_new(
        self,
        granted: Granted,
        keys: bytes,
        parents: bytes,
        engine_hashes: U64,
        positions: U32,
        checksums: U64,
        now_s: float,
    ) -> Mask:
        """:meth:`commit` for slots that were granted in this very call of the authority thread, and distinct
        keys that were missed in it: nothing is checked. True where a block is published; the other slots,
        which the policy did not admit or the index had no room for, are free again.
        """
        rows = np.frombuffer(keys, dtype=np.uint64).reshape(-1, 2)
        parent_rows = np.frombuffer(parents, dtype=np.uint64).reshape(-1, 2)
        columns = Columns(*granted, rows, parent_rows, engine_hashes, positions, checksums)
        return self._admit(columns, keys, parents, now_s)

    def _admit(self, columns: Columns, keys: bytes, parents: bytes, now_s: float) -> Mask:
        """Publish what the policy wants and the index has room for, and free the other slots. ``keys`` and
        ``parents`` are those of the columns."""
        count = len(columns.slots)
        if self._admits_all:
            done = self._publish(columns, now_s)
        else:
            offer = Offer(keys, parents, columns.positions)
            done = np.array(self.policy.admit(offer, now_s), dtype=np.bool_)
            done[done] = self._publish(columns.at(done), now_s)
        if np.count_nonzero(done) < count:
            self._release(columns.slots[~done])
        return done

    def _publish(self, columns: Columns, now_s: float) -> Mask:
        """Granted slots to READY; a mask of those the index had room for."""
        indexed: Mask = np.empty(len(columns.slots), dtype=np.bool_)
        count, digest = self._backend.publish(self._directory, *columns, indexed, now_s)
        self._published(Granted(columns.slots, columns.generations), indexed, count, digest)
        return indexed

    def _published(self, granted: Granted, indexed: Mask, count: int, digest: int) -> None:
        """``count`` of these slots, those in ``indexed``, are READY and in the index now."""
        if count < len(indexed):
            granted = Granted(granted.slots[indexed], granted.generations[indexed])
        self._stored.append(granted)
        self._ready += count
        self._digest ^= digest

    def give_back(self, slots: I32, generations: U64) -> int:
        """Free granted slots that will not be filled: GRANTED to FREE. Returns how many were."""
        chosen = as_slots(slots)[self._select(slots, generations, SlotState.GRANTED)]
        self._release(chosen)
        return len(chosen)

    def grants(self, engine_id: str = "") -> Granted:
        """Slots granted to an engine (empty id: to the guard itself) and neither committed nor returned."""
        owner = self._writers.find(engine_id)
        if owner is None:
            return Granted(_NO_SLOTS, np.empty(0, dtype=np.uint64))
        granted = states_of(self._meta.control) == SlotState.GRANTED
        slots = np.flatnonzero(granted & (self._meta.owners == owner)).astype(np.int32)
        return Granted(slots, generations_of(self._meta.control[slots]))

    def writers(self) -> list[str]:
        """Ids of the engines that were granted slots and not reclaimed since; survives a guard's restart."""
        return self._writers.engine_ids()

    def reclaim_writer(self, engine_id: str = "") -> int:
        """Free every grant of an engine, and forget the engine; returns how many. Empty id: the guard's own.

        Only for an engine proven dead (:func:`kvcr.pool.locks.engine_is_dead`), or for the pulls of the
        guard before, which ended with its process: stores into mapped memory cannot be revoked.
        """
        slots = self.grants(engine_id).slots
        self._release(slots)
        self._writers.forget(engine_id)
        return len(slots)

    # --------------------------------------------------------------------------- eviction and quarantine

    def evict(self, slots: I32, now_s: float, reason: str) -> bytes:
        """Drop blocks: READY to COOLING, out of the index at once. Returns the keys removed.

        Leased slots are dropped too, but not reused before their leases end. ``reason`` is for counting.
        """
        chosen = self._in_state(np.unique(as_slots(slots)), SlotState.READY)
        keys = self._unpublish(chosen, SlotState.COOLING, next_generation=True)
        self._cooling.push(chosen, now_s)
        if len(chosen):
            self.evicted_blocks[reason] += len(chosen)
        return keys

    def quarantine(self, slots: I32, generations: U64) -> int:
        """Take slots out of use: READY or GRANTED to QUARANTINED, same generation. Returns how many were."""
        slots = as_slots(slots)
        ready = slots[self._select(slots, generations, SlotState.READY)]
        granted = slots[self._select(slots, generations, SlotState.GRANTED)]
        self._unpublish(ready, SlotState.QUARANTINED, next_generation=False)
        self._set(granted, SlotState.QUARANTINED, generations_of(self._meta.control[granted]))
        return len(ready) + len(granted)

    def quarantined(self) -> Granted:
        """The slots in quarantine, and their generations."""
        slots = np.flatnonzero(states_of(self._meta.control) == SlotState.QUARANTINED).astype(np.int32)
        return Granted(slots, generations_of(self._meta.control[slots]))

    def requalify(self, slots: I32, generations: U64) -> int:
        """Free quarantined slots that nothing can write to any more, unless leased. Returns how many were."""
        chosen = as_slots(slots)[self._select(slots, generations, SlotState.QUARANTINED)]
        chosen = chosen[self._leases[chosen] == 0]
        self._release(chosen)
        return len(chosen)

    def tick(self, now_s: float) -> int:
        """Free the slots that cooled for 2 s and have no lease; returns how many. Call it once a second."""
        if not self._cooling.due(now_s):
            return 0
        cooled = self._cooling.pop(now_s, lambda slots: self._leases[slots] > 0)
        if len(cooled):
            self._set(cooled, SlotState.FREE, generations_of(self._meta.control[cooled]))
            self._free.push(cooled)
        return len(cooled)

    # --------------------------------------------------------------------------------------- contents

    @property
    def ready_count(self) -> int:
        """READY blocks."""
        return self._ready

    @property
    def digest(self) -> int:
        """XOR of the first 8 bytes (little-endian) of every READY key: equal sets have equal digests."""
        return self._digest

    def drain_changes(self) -> Changes:
        """What was stored and removed since the last call, as a net effect."""
        stored, self._stored = self._stored, []
        removed, self._removed = self._removed, []
        slots = np.concatenate([batch.slots for batch in stored]) if stored else _NO_SLOTS
        generations = (
            np.concatenate([batch.generations for batch in stored])
            if stored
            else np.empty(0, dtype=np.uint64)
        )
        # What was stored and removed again since is in the removed keys only.
        slots = slots[self.still(slots, generations)]
        record = self.record(slots)
        return Changes(record.keys, record.engine_hashes, record.positions, b"".join(removed))

    def check_invariants(self) -> None:
        """Compare what this object believes with the directory. Raises PoolCorrupt on a difference."""
        broken = find_broken(
            self._meta,
            self._backend,
            free=self._free.slots,
            cooling=self._cooling.slots(),
            ready_count=self._ready,
            digest=self.digest,
            leases=self._leases,
        )
        if broken:
            raise PoolCorrupt(f"{self.dir}: {'; '.join(broken)} (counts {self.counts()})")

    # ---------------------------------------------------------------------------------------- internal

    def _release(self, slots: I32) -> None:
        """To FREE, in the next generation: for slots whose bytes no lookup leads to."""
        generations = (generations_of(self._meta.control[slots]) + _ONE) & np.uint64(GENERATION_MASK)
        self._set(slots, SlotState.FREE, generations)
        self._free.push(slots)

    def _unpublish(self, slots: I32, state: SlotState, *, next_generation: bool) -> bytes:
        """READY slots to another state, out of the index, into the changes. Returns their keys."""
        meta = self._meta
        generations = generations_of(meta.control[slots])
        if next_generation:
            generations = (generations + _ONE) & np.uint64(GENERATION_MASK)
        self._set(slots, state, generations)
        rows = meta.keys[slots]
        self._backend.remove(meta.buckets, rows, slots)
        keys = rows.tobytes()
        self._removed.append(keys)
        self._ready -= len(slots)
        self._digest ^= int(np.bitwise_xor.reduce(rows[:, 0], initial=np.uint64(0)))
        return keys

    def _evict_ahead(self, count: int, now_s: float) -> None:
        """Evict one batch when granting ``count`` slots would leave fewer than the low watermark."""
        left = len(self._free) + len(self._cooling) - count
        if left >= self._marks.low or not self._ready:
            return
        chosen = self.policy.victims(self._resident(now_s), self._marks.high - left, now_s)
        victims = self._in_state(np.unique(as_slots(chosen)), SlotState.READY)
        self.evict(victims[~self._held(victims, now_s)], now_s, "space")

    def _resident(self, now_s: float) -> Resident:
        meta, slots = self._meta, self._ready_slots()
        return Resident(
            slots=slots,
            last_used_s=self._last_used_s[slots],
            stored_s=meta.stored_at[slots],
            positions=meta.positions[slots],
            parents=self._parents_of(slots),
            held=self._held(slots, now_s),
            demoted=self._demoted[slots],
        )
