# SPDX-License-Identifier: Apache-2.0
"""A guard's changes of state on JetStream: kept while NATS is away, published in order when it is back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import nats
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from kvcr.dynamo.outbox import Outbox
from kvcr.metrics import Counter
from kvcr.protocol.events import StateChange, event, state_subject, stream_name
from kvcr.protocol.signatures import HEADER, STATE_CHANGE, sign

log = logging.getLogger(__name__)

MAX_WAITING = 256
"""Changes kept while NATS is away; then the oldest are dropped, and counted."""
MAX_AGE_S = 7 * 24 * 3600.0
MAX_BYTES = 16 << 20
"""A change is about 120 bytes: a hundred thousand of them."""
ACKNOWLEDGED_S = 2.0
RETRY_S = 0.5

_NO_JETSTREAM = (10039, 10076)
"""Error codes of nats-server: JetStream is not enabled, for the account or at all."""


class StatePublisher:
    """:meth:`offer` may be called from any thread; the rest belongs to one event loop."""

    def __init__(
        self,
        namespace: str,
        guard: str,
        secret: bytes | None,
        connection: Callable[[], Client | None],
        published: Counter,
        dropped: Counter,
    ) -> None:
        """``connection`` gives a live connection to NATS, or None. With a ``secret`` changes are signed."""
        self._secret = secret
        self._subject = state_subject(namespace, guard)
        self._subjects = state_subject(namespace, ">")
        self._stream = stream_name(namespace, "state")
        self._connection = connection
        self._published = published
        self._waiting: Outbox[StateChange] = Outbox(MAX_WAITING, dropped)
        self._ready_for: tuple[int, int] | None = None
        """Connection, and how often it was made again, on which the stream was seen."""
        self._kept = False
        self._reported = ""

    @property
    def waiting(self) -> int:
        """Changes that are not published yet."""
        return len(self._waiting)

    def offer(self, change: StateChange) -> None:
        """Take a change without waiting, and without ever raising: the authority thread calls this."""
        self._waiting.offer(change)

    async def run(self) -> None:
        """Publish what is offered, one after the other, until cancelled; a lost connection loses none."""
        with self._waiting.opened():
            while True:
                await self._waiting.wait()
                while (change := self._waiting.first()) is not None:
                    if not await self._publish(change):
                        await asyncio.sleep(RETRY_S)
                        continue
                    self._waiting.take(change)
                    self._published.inc()

    async def _publish(self, change: StateChange) -> bool:
        client = self._connection()
        if client is None:
            return False
        raw = event.encode(change)
        # The server drops a change that was stored and whose acknowledgement was lost.
        headers = {"Nats-Msg-Id": f"{change.guard}-{change.incarnation}-{change.epoch}-{change.unix_s}"}
        if self._secret is not None:
            headers[HEADER] = sign(STATE_CHANGE, self._subject, raw, self._secret)
        try:
            # A publish without a stream is only told apart from a slow server where nobody subscribes.
            connection = (id(client), client.stats["reconnects"])
            if connection != self._ready_for:
                self._kept = await self._make_stream(client)
                self._ready_for = connection
            if self._kept:
                jetstream = client.jetstream(timeout=ACKNOWLEDGED_S)
                await jetstream.publish(self._subject, raw, headers=headers)
            else:
                await client.publish(self._subject, raw, headers=headers)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            # The stream may be gone, with the disk of its server.
            self._ready_for = None
            self._report(f"{type(error).__name__} {error}".strip())
            return False
        if self._kept:
            self._reported = ""
        return True

    async def _make_stream(self, client: Client) -> bool:
        """Make the stream if it is not there. False when this server has no JetStream.

        Raises nats.errors.Error, TimeoutError.
        """
        jetstream = client.jetstream(timeout=ACKNOWLEDGED_S)
        try:
            try:
                await jetstream.stream_info(self._stream)
            except nats.js.errors.NotFoundError:
                await jetstream.add_stream(
                    StreamConfig(
                        name=self._stream,
                        subjects=[self._subjects],
                        retention=RetentionPolicy.LIMITS,
                        storage=StorageType.FILE,
                        discard=DiscardPolicy.OLD,
                        max_age=MAX_AGE_S,
                        max_bytes=MAX_BYTES,
                    )
                )
                log.info("created stream %s on %s", self._stream, self._subjects)
        except (nats.errors.NoRespondersError, nats.js.errors.ServiceUnavailableError):
            self._report("this server has no JetStream: changes of state are told and not kept")
            return False
        except nats.js.errors.APIError as error:
            if error.err_code not in _NO_JETSTREAM:
                raise
            self._report("this account has no JetStream: changes of state are told and not kept")
            return False
        return True

    def _report(self, trouble: str) -> None:
        """Once per cause."""
        if trouble != self._reported:
            self._reported = trouble
            log.warning("state changes: %s", trouble)
