# SPDX-License-Identifier: Apache-2.0
"""The etcd client interface, and the watch that survives, which every backend shares.

::

    KvcrError
    └── EtcdError            etcd answered with an error that waiting does not cure
        ├── EtcdUnavailable  nobody answered in time; the call may be repeated
        └── LeaseNotFound    the lease of a put has expired or was revoked
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import NamedTuple

from kvcr.errors import KvcrError

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
RELIST_DELAY_S = 0.2
"""Between a watch that broke and the next listing."""
MAX_RELIST_DELAY_S = 2.0

KEEPALIVE_OPTIONS: list[tuple[str, int]] = [
    # A server that stopped without closing its connections is noticed after 15 s. etcd's default policy
    # closes connections that ping more often than every 5 s, or that ping with no call open.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # gRPC's default is to wait up to 120 s between attempts to connect.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


class EtcdError(KvcrError):
    """etcd answered with an error that waiting does not cure."""


class EtcdUnavailable(EtcdError):
    """Nobody answered in time. The call may or may not have taken effect; it may be repeated."""


class LeaseNotFound(EtcdError):
    """The lease has expired or was revoked; grant a new one."""


class KeyValue(NamedTuple):
    key: str
    value: bytes
    lease: int
    """Lease it is bound to, 0 for none."""
    revision: int
    """Revision of the cluster at which it was last written."""


class Listing(NamedTuple):
    values: list[KeyValue]
    revision: int
    """Revision of the cluster the listing is true at."""


class KeyChanges(NamedTuple):
    """What a watch saw at once. The key of an entry is in at most one of the two lists."""

    puts: list[KeyValue]
    deletes: list[str]


class Credentials(NamedTuple):
    """Who a client is. PEM texts, and a user; with all fields empty it is nobody, and there is no TLS."""

    ca: str = ""
    """Whom the client believes; TLS is used if it is given."""
    certificate: str = ""
    """The client's own, for mutual TLS; where etcd has users, its common name is one."""
    key: str = ""
    user: str = ""
    password: str = ""


class EtcdClient(ABC):
    """One cluster, one event loop. Every call ends within ``timeout_s`` of the backend, 5 s by default.

    Every call raises EtcdUnavailable when etcd does not answer in time, and EtcdError when it refuses.
    Calls do not wait for etcd to come back: the caller knows whether its request is still worth making.
    """

    @abstractmethod
    async def get(self, key: str) -> KeyValue | None:
        """The newest value, or None."""

    @abstractmethod
    async def get_prefix(self, prefix: str) -> Listing:
        """Every key that starts with ``prefix``, by key."""

    @abstractmethod
    async def put(self, key: str, value: bytes, *, lease: int = 0) -> None:
        """Write; with ``lease`` the key goes when the lease goes. Raises LeaseNotFound."""

    @abstractmethod
    async def delete(self, key: str) -> bool:
        """True when the key was there."""

    @abstractmethod
    async def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes, *, lease: int = 0
    ) -> bool:
        """Write if the key holds ``expected`` (None: does not exist). Raises LeaseNotFound.

        After EtcdUnavailable the swap may have happened: read before trying again.
        """

    @abstractmethod
    async def grant_lease(self, ttl_s: int) -> int:
        """A new lease's id. It expires unless refreshed within ``ttl_s``; see :meth:`refresh_lease`."""

    @abstractmethod
    async def refresh_lease(self, lease_id: int) -> int:
        """Remaining seconds after the refresh; 0 when the lease is gone."""

    @abstractmethod
    async def revoke(self, lease_id: int) -> bool:
        """End a lease and delete its keys at once. False when it was gone already."""

    @abstractmethod
    async def close(self) -> None:
        """Drop the connection. End watches first."""

    @abstractmethod
    def _follow(self, prefix: str, revision: int) -> AsyncGenerator[KeyChanges, None]:
        """Changes after ``revision``. Ends, or raises EtcdError, at the slightest doubt that it saw all."""

    async def watch_prefix(self, prefix: str) -> AsyncGenerator[KeyChanges, None]:
        """List, then follow, for ever.

        The first batch is the whole listing, even when it is empty. After any trouble (server gone,
        history compacted, server restored to an older state) it lists again and yields the difference:
        applying every batch in order always gives the present content. Never raises EtcdUnavailable.
        """
        known: dict[str, KeyValue] = {}
        listed = False
        delay_s = RELIST_DELAY_S
        while True:
            try:
                listing = await self.get_prefix(prefix)
                changes = _difference(known, listing.values)
                if not listed or changes.puts or changes.deletes:
                    listed = True
                    yield changes
                known = {entry.key: entry for entry in listing.values}
                delay_s = RELIST_DELAY_S
                async with contextlib.aclosing(self._follow(prefix, listing.revision)) as stream:
                    async for changes in stream:
                        for entry in changes.puts:
                            known[entry.key] = entry
                        for key in changes.deletes:
                            known.pop(key, None)
                        yield changes
            except EtcdUnavailable as error:
                log.debug("watch of %s broke, listing again in %.1f s: %s", prefix, delay_s, error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_RELIST_DELAY_S)

    async def __aenter__(self) -> EtcdClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _difference(known: dict[str, KeyValue], values: list[KeyValue]) -> KeyChanges:
    present = {entry.key for entry in values}
    # Not "newer than": a server restored from a backup has the same keys at lower revisions.
    puts = [entry for entry in values if known.get(entry.key) != entry]
    return KeyChanges(puts, [key for key in known if key not in present])


def changes_of(events: list[tuple[KeyValue, bool]]) -> KeyChanges:
    """Events of one answer, each (entry, deleted), as a batch: of several for a key the last one counts."""
    last = {entry.key: (entry, deleted) for entry, deleted in events}
    return KeyChanges(
        [entry for entry, deleted in last.values() if not deleted],
        [entry.key for entry, deleted in last.values() if deleted],
    )


def prefix_end(prefix: str) -> bytes:
    """First key behind every key that starts with ``prefix``, as etcd ranges want it."""
    raw = prefix.encode().rstrip(b"\xff")
    return raw[:-1] + bytes([raw[-1] + 1]) if raw else b"\0"
