# SPDX-License-Identifier: Apache-2.0
"""The router's connection to NATS. It may be away at any time: nothing waits for it, everything goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvcr.dynamo.nats_options import nats_options

log = logging.getLogger(__name__)

Headed = Callable[[bytes, Mapping[str, str]], None]
Answer = Callable[[bytes, dict[str, str]], Awaitable[bytes]]

_RECONNECT_S = 1.0
_CLOSE_S = 2.0
_PUBLISH_S = 1.0
_OUTBOX = 8192


class Bus:
    """One connection, kept up in the background. One event loop."""

    def __init__(self, url: str, name: str, on_dropped: Callable[[], None]) -> None:
        self._url = url
        self._name = name
        self._on_dropped = on_dropped
        self._client: Client | None = None
        self._wanted: list[tuple[str, Headed]] = []
        self._on_connect: list[Callable[[Client], Awaitable[None]]] = []
        self._answering: list[tuple[str, str, Answer]] = []
        self._outbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(_OUTBOX)
        self._tasks: list[asyncio.Task[None]] = []
        self._handling: set[asyncio.Task[None]] = set()
        self._down = False

    def subscribe(self, subject: str, callback: Callable[[bytes], None]) -> None:
        """Call back with every message on ``subject``; to be called before :meth:`start`.

        The callback must not block; an exception in it is logged and costs that message.
        """
        self.subscribe_headed(subject, lambda payload, _: callback(payload))

    def subscribe_headed(self, subject: str, callback: Headed) -> None:
        """:meth:`subscribe`, for a callback that takes the message's headers too."""
        self._wanted.append((subject, callback))

    def answer(self, subject: str, answer: Answer, queue: str = "") -> None:
        """Await ``answer(payload, headers)`` for each message on ``subject``, at most one of ``queue``'s
        members, and send what it returns to whoever asked; to be called before :meth:`start`."""
        self._answering.append((subject, queue, answer))

    def on_connect(self, callback: Callable[[Client], Awaitable[None]]) -> None:
        """Await ``callback`` with the connection, now and after each reconnect."""
        self._on_connect.append(callback)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._connect()), loop.create_task(self._post_all())]

    @property
    def connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    @property
    def client(self) -> Client | None:
        """The connection, once there was one; it may be reconnecting."""
        return self._client

    async def publish(self, subject: str, payload: bytes) -> bool:
        """Send, or drop and count while NATS is away. True: it was handed to the connection."""
        client = self._client
        if client is not None and client.is_connected:
            try:
                # A server that is stopped blocks the sender once the buffers are full.
                async with asyncio.timeout(_PUBLISH_S):
                    await client.publish(subject, payload)
                return True
            except (nats.errors.Error, TimeoutError) as error:
                log.warning("event on %s dropped: %s", subject, error or "NATS does not read")
        self._on_dropped()
        return False

    def post(self, subject: str, payload: bytes) -> None:
        """:meth:`publish` without waiting, in order."""
        try:
            self._outbox.put_nowait((subject, payload))
        except asyncio.QueueFull:
            self._on_dropped()

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """Ask whoever answers on ``subject``. Raises TimeoutError, also when nobody is there."""
        client = self._client
        if client is None or not client.is_connected:
            raise TimeoutError("NATS is away")
        try:
            answer: Msg = await client.request(subject, payload, timeout=timeout_s)
        except nats.errors.Error as error:
            raise TimeoutError(f"{type(error).__name__}: {error}") from error
        return bytes(answer.data)

    async def close(self) -> None:
        for task in [*self._tasks, *self._handling]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._handling, return_exceptions=True)
        if self._client is not None:
            with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
                await asyncio.wait_for(self._client.close(), _CLOSE_S)

    async def _post_all(self) -> None:
        while True:
            await self.publish(*await self._outbox.get())

    async def _connect(self) -> None:
        while True:
            try:
                client = await nats.connect(
                    **{**nats_options(), "servers": self._url.split(",")},
                    name=self._name,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_S,
                    connect_timeout=2,
                    # A server that stopped without closing its connections is noticed after 10 s.
                    ping_interval=5,
                    max_outstanding_pings=2,
                    error_cb=self._troubled,
                    disconnected_cb=self._disconnected,
                    reconnected_cb=self._reconnected,
                )
                break
            except Exception as error:  # noqa: BLE001, keys and files that are wrong raise what they like
                await self._troubled(error)
                await asyncio.sleep(_RECONNECT_S)
        self._client = client
        for subject, callback in self._wanted:
            await client.subscribe(subject, cb=_handler(subject, callback))
        for subject, queue, answer in self._answering:
            await client.subscribe(subject, queue=queue, cb=self._answerer(subject, answer))
        await self._reconnected()

    async def _reconnected(self) -> None:
        if self._down:
            log.info("NATS at %s is back", self._url)
        self._down = False
        if self._client is not None:
            for callback in self._on_connect:
                await callback(self._client)

    def _answerer(self, subject: str, answer: Answer) -> Callable[[Msg], Awaitable[None]]:
        async def handle(message: Msg) -> None:
            # Not in the subscription's own task: an answer may take seconds, and others wait behind it.
            task = asyncio.get_running_loop().create_task(self._answer(subject, message, answer))
            self._handling.add(task)
            task.add_done_callback(self._handling.discard)

        return handle

    @staticmethod
    async def _answer(subject: str, message: Msg, answer: Answer) -> None:
        try:
            result = await answer(message.data, dict(message.headers or {}))
            if message.reply:
                await message.respond(result)
        except Exception:
            # One message must not end the subscription, nor the router.
            log.exception("message of %d bytes on %s", len(message.data), subject)

    async def _disconnected(self) -> None:
        await self._troubled(ConnectionError("connection lost"))

    async def _troubled(self, error: Exception) -> None:
        """Say it once, not at every attempt."""
        if not self._down:
            log.warning(
                "NATS at %s: %s; routing goes on, events and hint copies wait for it", self._url, error
            )
        self._down = True


def _handler(subject: str, callback: Headed) -> Callable[[Msg], Awaitable[None]]:
    async def handle(message: Msg) -> None:
        try:
            callback(message.data, message.headers or {})
        except Exception:
            # nats-py ends the subscription's task on an exception, which would deafen us for good.
            log.exception("message of %d bytes on %s", len(message.data), subject)

    return handle
