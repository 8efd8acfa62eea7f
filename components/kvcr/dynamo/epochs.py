# SPDX-License-Identifier: Apache-2.0
"""The mirror of a pool's epoch in etcd, under ``kvcr/v1/{namespace}/epochs/{guard}``.

The epoch's home is the superblock. The mirror outlives the pool: a guard whose pool was lost finds in it the
highest epoch there ever was, and goes on above it, so that nothing of before is taken for new. It is bound to
a lease of a day that the guard refreshes: pods get new names, and guards that never come back would pile up.
While etcd is away nothing waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from kvcr.dynamo.etcd import EtcdClient
from kvcr.protocol.signatures import EPOCH_RECORD, is_signed, sign

log = logging.getLogger(__name__)

MAX_EPOCH = 1 << 53
"""What JSON readers tell apart. Nobody gets there by dying."""
ATTEMPTS = 8
TTL_S = 24 * 3600
"""How long a guard that is gone is remembered. What was said in its epochs is forgotten within minutes."""
REFRESH_S = TTL_S / 8


class EpochRecord(msgspec.Struct, frozen=True):
    """What is remembered of one guard's pool."""

    epoch: int
    pool: str
    """``pool_id`` of the pool that had it"""
    worker_id: int = 0
    """Dynamo instance of the engine of that epoch, for the guard's successor; 0 when it is not known"""


class _Signed(msgspec.Struct, frozen=True):
    record: msgspec.Raw
    signature: str = ""


_signed_decoder = msgspec.json.Decoder(_Signed)
_record_decoder = msgspec.json.Decoder(EpochRecord)
_encoder = msgspec.json.Encoder(order="deterministic")


def epoch_key(namespace: str, guard: str) -> str:
    """etcd key of one guard's epoch."""
    return f"kvcr/v1/{namespace}/epochs/{guard}"


def encode(key: str, record: EpochRecord, secret: bytes | None) -> bytes:
    """The value to store under ``key``."""
    raw = _encoder.encode(record)
    return _encoder.encode(_Signed(msgspec.Raw(raw), sign(EPOCH_RECORD, key, raw, secret)))


def decode(key: str, value: bytes, secret: bytes | None) -> EpochRecord | None:
    """The record stored under ``key``; None for what is none, or not signed with the deployment's secret."""
    try:
        signed = _signed_decoder.decode(value)
        raw = bytes(signed.record)
        if not is_signed(EPOCH_RECORD, key, raw, signed.signature, secret):
            return None
        record = _record_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return record if 0 <= record.epoch < MAX_EPOCH else None


def _is_past(there: EpochRecord, ours: EpochRecord) -> bool:
    """Whether what etcd remembers is of another pool, or of a later time, that ours has not gone beyond."""
    return there.epoch > ours.epoch or (there.pool != ours.pool and there.epoch == ours.epoch)


class EpochMirror:
    """One guard's mirror. One event loop."""

    def __init__(
        self,
        namespace: str,
        guard: str,
        secret: bytes | None,
        raise_above: Callable[[int], Awaitable[int]],
    ) -> None:
        """``raise_above(epoch)`` has the guard go above ``epoch`` and gives the new one, 0 without a pool."""
        self.key = epoch_key(namespace, guard)
        self._secret = secret
        self._raise_above = raise_above
        self._stored: EpochRecord | None = None
        self._lease = 0
        self._refreshed_s = 0.0

    async def remembered(self, etcd: EtcdClient) -> EpochRecord | None:
        """What etcd has. Raises EtcdError."""
        found = await etcd.get(self.key)
        return None if found is None else decode(self.key, found.value, self._secret)

    async def store(self, etcd: EtcdClient, ours: EpochRecord) -> EpochRecord:
        """Make etcd say ``ours``, by compare-and-swap; returns what it says then.

        When etcd remembers this epoch, or a later one, of another pool, ours is raised to one more first:
        ``max(local, etcd) + 1``. ``ours.pool`` may be empty: there is no pool yet, and the next one is made
        above what is remembered. Raises EtcdError; what was swapped is then asked for again next time.
        """
        if ours == self._stored and (
            time.monotonic() < self._refreshed_s + REFRESH_S or await self._refreshed(etcd, self._lease)
        ):
            return ours
        for _ in range(ATTEMPTS):
            found = await etcd.get(self.key)
            there = None if found is None else decode(self.key, found.value, self._secret)
            if there is not None and _is_past(there, ours):
                ours = msgspec.structs.replace(ours, epoch=await self._raise_above(there.epoch))
            if not ours.pool or not ours.epoch:
                break
            expected = None if found is None else found.value
            kept = found is not None and there is not None and await self._refreshed(etcd, found.lease)
            if not kept and not await self._refreshed(etcd, self._lease):
                self._lease = await etcd.grant_lease(TTL_S)
                self._refreshed_s = time.monotonic()
            if (there == ours and kept) or await etcd.compare_and_swap(
                self.key, expected, encode(self.key, ours, self._secret), lease=self._lease
            ):
                self._stored = ours
                return ours
        else:
            log.warning("epoch %d is not mirrored: %s changes all the time", ours.epoch, self.key)
            return ours
        # Without a pool there is nothing to mirror; one that comes has another id, and so asks again.
        self._stored = msgspec.structs.replace(ours, epoch=0)
        return ours

    async def _refreshed(self, etcd: EtcdClient, lease: int) -> bool:
        """Keep ``lease`` for ours; False when it is none, or gone."""
        if not lease or await etcd.refresh_lease(lease) <= 0:
            return False
        self._lease, self._refreshed_s = lease, time.monotonic()
        return True

    def forget(self) -> None:
        """etcd may have lost the key: look again."""
        self._stored = None
