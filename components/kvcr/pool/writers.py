# SPDX-License-Identifier: Apache-2.0
"""The writer table: which engine a grant's small owner number stands for, across guard restarts."""

from __future__ import annotations

from kvcr.errors import PoolError
from kvcr.pool.locks import check_engine_id
from kvcr.pool.state import U8

GUARD_OWNER = 0
"""Owner of slots granted to the guard itself, for a pull."""


class WriterTable:
    """Engine ids in the superblock's table, entry *i* being owner *i* + 1. Authority thread only."""

    def __init__(self, entries: U8) -> None:
        self._entries = entries
        self._owners: dict[str, int] = {"": GUARD_OWNER}
        for index, entry in enumerate(entries):
            engine_id = entry.tobytes().rstrip(b"\0").decode("ascii", "replace")
            if engine_id:
                self._owners[engine_id] = index + 1

    def engine_ids(self) -> list[str]:
        """Engines in the table, in the order they came."""
        return [engine_id for engine_id in self._owners if engine_id]

    def find(self, engine_id: str) -> int | None:
        """Owner number of an engine, 0 for the guard itself (empty id), None for one not in the table."""
        return self._owners.get(engine_id)

    def owner_of(self, engine_id: str) -> int:
        """Owner number of an engine, entering it if need be.

        Raises ConfigError on an id that cannot name a file, PoolError when the table is full.
        """
        known = self._owners.get(engine_id)
        if known is not None:
            return known
        raw = check_engine_id(engine_id).encode("ascii")
        taken = set(self._owners.values())
        for index in range(len(self._entries)):
            if index + 1 not in taken:
                self._entries[index, :] = 0
                self._entries[index, : len(raw)] = list(raw)
                self._owners[engine_id] = index + 1
                return index + 1
        raise PoolError(
            f"{len(self._entries)} engines have grants in this pool, no room for {engine_id!r}; "
            "reclaim the dead ones"
        )

    def forget(self, engine_id: str) -> None:
        """Free an engine's entry. It must have no grants left."""
        owner = self._owners.get(engine_id)
        if owner:
            self._entries[owner - 1, :] = 0
            del self._owners[engine_id]
