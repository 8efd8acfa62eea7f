# SPDX-License-Identifier: Apache-2.0
"""Outputs leave in order, and a client that does not read holds up nobody but its own worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from router_hints.egress import AT_ONCE, MAX_WAITING, Outlet


class Client:
    """A sender that blocks while the client does not read, as Dynamo's does."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.room = AT_ONCE
        self.reads = threading.Event()
        self.error: Exception | None = None

    def send(self, obj: Any, /) -> None:
        self.room -= 1
        if self.room < 0:
            self.reads.wait()
        if self.error is not None:
            raise self.error
        self.got.append(obj)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


def test_outputs_of_many_streams_arrive_each_in_order(threads: ThreadPoolExecutor) -> None:
    clients = [Client() for _ in range(20)]

    async def stream(client: Client) -> None:
        outlet = Outlet(client, threads)
        client.reads.set()
        for number in range(300):
            await outlet.put(number)
            if number % 7 == 0:
                await asyncio.sleep(0)
        await outlet.flush()
        assert client.got == list(range(300))

    async def main() -> None:
        await asyncio.gather(*map(stream, clients))

    asyncio.run(main())


def test_a_client_that_does_not_read_blocks_neither_the_loop_nor_another_client(
    threads: ThreadPoolExecutor,
) -> None:
    stuck, fine = Client(), Client()
    fine.reads.set()

    async def main() -> None:
        outlet, other = Outlet(stuck, threads), Outlet(fine, threads)
        for number in range(AT_ONCE + MAX_WAITING):
            await outlet.put(number)
        for number in range(AT_ONCE + 1):
            await other.put(number)
        await other.flush()
        assert fine.got == list(range(AT_ONCE + 1))
        # One of them is with the sender; beyond what may wait, the worker waits.
        await outlet.put("last but one")
        behind = asyncio.ensure_future(outlet.put("last"))
        assert not (await asyncio.wait([behind], timeout=0.1))[0]
        stuck.reads.set()
        await behind
        await outlet.flush()
        assert stuck.got == [*range(AT_ONCE + MAX_WAITING), "last but one", "last"]

    asyncio.run(main())


def test_clients_that_do_not_read_share_the_threads_there_are(threads: ThreadPoolExecutor) -> None:
    """More of them than threads: who reads again is served again, and none is forgotten."""
    clients = [Client() for _ in range(8)]

    async def stream(client: Client) -> None:
        outlet = Outlet(client, threads)
        for number in range(AT_ONCE + 20):
            await outlet.put(number)
        await outlet.flush()
        assert client.got == list(range(AT_ONCE + 20))

    async def main() -> None:
        streams = [asyncio.ensure_future(stream(client)) for client in clients]
        for client in clients:
            assert len((await asyncio.wait(streams, timeout=0.02))[0]) < len(streams)
            client.reads.set()
        await asyncio.gather(*streams)
        # Threads that were all held up take new work.
        late = Client()
        late.reads.set()
        await stream(late)

    asyncio.run(main())


def test_what_the_sender_raises_reaches_the_request_and_nothing_is_sent_after_it(
    threads: ThreadPoolExecutor,
) -> None:
    client = Client()

    async def main() -> None:
        outlet = Outlet(client, threads)
        for number in range(AT_ONCE + 2):
            await outlet.put(number)
        client.error = RuntimeError("the client left")
        client.reads.set()
        for call in (outlet.flush(), outlet.put("late"), outlet.flush()):
            with pytest.raises(RuntimeError, match="the client left"):
                await call
        client.error = None
        assert client.got == list(range(AT_ONCE))

    asyncio.run(main())


def test_a_short_answer_needs_no_thread(threads: ThreadPoolExecutor) -> None:
    client = Client()

    async def main() -> None:
        outlet = Outlet(client, threads)
        for number in range(AT_ONCE):
            await outlet.put(number)
        await outlet.flush()

    asyncio.run(main())
    assert client.got == list(range(AT_ONCE))
    assert not threads._threads


def test_an_error_of_the_first_outputs_is_raised_at_once(threads: ThreadPoolExecutor) -> None:
    client = Client()
    client.error = ValueError("no output")
    with pytest.raises(ValueError, match="no output"):
        asyncio.run(Outlet(client, threads).put(object()))
