# SPDX-License-Identifier: Apache-2.0
"""The pool: host memory for KV blocks in two files beside each other, shared between processes.

``meta`` is the directory, written by one guard and mapped read-only by everyone else; ``data`` holds
the blocks, one region per rank. :class:`Pool` is the guard's handle, :class:`PoolReader` and
:class:`DataRegion` are everyone else's.
"""

from kvcr.pool.locks import FileLock, WriterLock, engine_is_dead, is_dead, writer_path, writers_of
from kvcr.pool.meta import DATA, META, SPARE_ROWS, boot_id, next_incarnation, time_namespace
from kvcr.pool.pool import Pool
from kvcr.pool.reader import Found, Hits, PoolReader
from kvcr.pool.record import Changes, CommitResult, Granted, Listing, Record, SnapshotPage
from kvcr.pool.recovery import Recovery
from kvcr.pool.region import DataRegion, RegionInfo, checksum_parts, copy_parts
from kvcr.pool.state import COOLING_S, SlotState, pack_control, unpack_control

__all__ = [
    "COOLING_S",
    "DATA",
    "META",
    "SPARE_ROWS",
    "Changes",
    "CommitResult",
    "DataRegion",
    "FileLock",
    "Found",
    "Granted",
    "Hits",
    "Listing",
    "Pool",
    "PoolReader",
    "Record",
    "Recovery",
    "RegionInfo",
    "SlotState",
    "SnapshotPage",
    "WriterLock",
    "boot_id",
    "checksum_parts",
    "copy_parts",
    "engine_is_dead",
    "is_dead",
    "next_incarnation",
    "pack_control",
    "time_namespace",
    "unpack_control",
    "writer_path",
    "writers_of",
]
