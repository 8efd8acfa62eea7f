# SPDX-License-Identifier: Apache-2.0
"""A guard's inbox on JetStream: actions that ride on no request, and the results of all of them.

An action waits in the stream while its guard is away, until it expires. It is acknowledged when it has ended,
or was refused: a guard that dies in the middle gets it again when it is back. Results are plain messages; a
router that missed one sends the action again and is answered from the guard's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from kvcr.errors import ProtocolError
from kvcr.guard.view import GuardView
from kvcr.metrics import Gauge
from kvcr.protocol.events import Act, ActionResult, actions_subject, event, results_subject, stream_name

log = logging.getLogger(__name__)

MAX_AGE_S = 600.0
"""Longest life of an action in the stream, whatever its own expiry."""
MAX_STREAM_BYTES = 64 << 20
FORGOTTEN_S = 2 * MAX_AGE_S
"""A guard that reads nothing for so long loses its consumer: pods get new names, and consumers of guards that
never come back would pile up. Nothing that such a guard has read is still in the stream then."""

ACK_WAIT_S = 5.0
"""After it, an action is delivered again: to a guard that was restarted, or was silent. One under way is
vouched for every third of it."""

MAX_DELIVERIES = 5
BATCH = 32
MAX_UNDER_WAY = 256
FETCH_WAIT_S = 5.0
"""How long one wait for actions takes; after each, stream and consumer are looked for."""
RETRY_S = 0.5
MAX_WAITING = 1024
"""Results kept while NATS is away; then the oldest are dropped."""


def consumer_name(guard: str) -> str:
    """Name of a guard's durable consumer: its alphabet has no dot, that of guards no equals sign."""
    return guard.replace(".", "=")


async def ensure_stream(jetstream: JetStreamContext, namespace: str) -> None:
    """Make the stream if it is missing, as after a NATS that lost its storage. Raises nats.errors.Error.

    Whoever publishes actions calls it, and every guard: who comes first does not matter.
    """
    name = stream_name(namespace, "actions")
    with contextlib.suppress(nats.js.errors.NotFoundError):
        await jetstream.stream_info(name)
        return
    await jetstream.add_stream(
        StreamConfig(
            name=name,
            subjects=[actions_subject(namespace, "*")],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            discard=DiscardPolicy.OLD,
            max_age=MAX_AGE_S,
            max_bytes=MAX_STREAM_BYTES,
        )
    )
    log.info("created stream %s", name)


class ActionInlet:
    """Reads actions and publishes results until cancelled. Belongs to one event loop, but for callbacks."""

    def __init__(self, view: GuardView, connection: Callable[[], Client | None], waiting: Gauge) -> None:
        """``connection``: the NATS client that is connected now, if there is one. ``waiting`` is set to how
        many actions are behind the last one that was read."""
        self._view = view
        self._connection = connection
        self._waiting = waiting
        self._loop: asyncio.AbstractEventLoop | None = None
        self._results: deque[ActionResult] = deque(maxlen=MAX_WAITING)
        self._wake = asyncio.Event()
        self._under_way: dict[asyncio.Task[None], None] = {}
        self._reported = ""
        view.subscribe_results(self._offer)

    async def run(self) -> None:
        """Never returns; what goes wrong with NATS is logged once and tried again."""
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._wake.set()
        telling = self._loop.create_task(self._tell())
        try:
            while True:
                client = self._connection()
                if client is not None:
                    try:
                        await self._read(client)
                    except (nats.errors.Error, TimeoutError, OSError) as error:
                        self._report(f"{type(error).__name__}: {error}")
                await asyncio.sleep(RETRY_S)
        finally:
            self._loop = None
            for task in [telling, *self._under_way]:
                task.cancel()
            await asyncio.gather(telling, *self._under_way, return_exceptions=True)

    # --- actions ----------------------------------------------------------------------------------

    async def _read(self, client: Client) -> None:
        """Take actions for as long as this connection, the stream and the consumer are there."""
        jetstream = client.jetstream()
        stream, durable = stream_name(self._view.namespace, "actions"), consumer_name(self._view.name)
        subject = actions_subject(self._view.namespace, self._view.name)
        await ensure_stream(jetstream, self._view.namespace)
        config = ConsumerConfig(
            durable_name=durable,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_deliver=MAX_DELIVERIES,
            max_ack_pending=MAX_UNDER_WAY,
            filter_subject=subject,
            inactive_threshold=FORGOTTEN_S,
        )
        subscription = await jetstream.pull_subscribe(subject, durable, stream, config=config)
        self._reported = ""
        try:
            while client.is_connected:
                try:
                    messages = await subscription.fetch(BATCH, timeout=FETCH_WAIT_S)
                except TimeoutError:
                    # Nothing came, or nobody is there to send it.
                    self._waiting.set((await subscription.consumer_info()).num_pending or 0)
                    continue
                self._waiting.set(messages[-1].metadata.num_pending)
                for message in messages:
                    task = asyncio.create_task(self._carry_out(message))
                    self._under_way[task] = None
                    task.add_done_callback(lambda task: self._under_way.pop(task, None))
        finally:
            with contextlib.suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()

    async def _carry_out(self, message: Msg) -> None:
        try:
            act = event.decode(message.data)
        except ProtocolError as error:
            log.warning("an action for guard %s cannot be read: %s", self._view.name, error)
            act = None
        if isinstance(act, Act):
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()

            def done() -> None:
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(ended.set)

            self._view.act(act, done)
            while not ended.is_set():
                try:
                    async with asyncio.timeout(ACK_WAIT_S / 3):
                        await ended.wait()
                except TimeoutError:
                    await _try(message.in_progress)
        await _try(message.ack)

    # --- results ----------------------------------------------------------------------------------

    def _offer(self, result: ActionResult) -> None:
        """On the guard's authority thread."""
        self._results.append(result)
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._wake.set)

    async def _tell(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._results:
                client = self._connection()
                if client is None:
                    await asyncio.sleep(RETRY_S)
                    continue
                result = self._results.popleft()
                try:
                    await client.publish(results_subject(self._view.namespace), event.encode(result))
                except (nats.errors.Error, ProtocolError, TimeoutError, OSError) as error:
                    self._report(f"result not told: {type(error).__name__}: {error}")

    def _report(self, trouble: str) -> None:
        """Once per cause."""
        if trouble != self._reported:
            self._reported = trouble
            log.warning("guard %s reads no actions: %s", self._view.name, trouble)


async def _try(send: Callable[..., object]) -> None:
    """An acknowledgement that is lost means one more delivery, which the guard knows how to take."""
    with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
        await send()  # type: ignore[misc]
