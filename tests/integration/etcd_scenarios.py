# SPDX-License-Identifier: Apache-2.0
"""What any etcd backend must do, as scenarios against a real server.

``python etcd_scenarios.py BACKEND SCENARIO DIRECTORY`` runs one in an environment of its own; the tests
in ``test_etcd_conformance.py`` run them in theirs too.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from waiting import BUSY_S, PATIENCE_S

from kvcr.dynamo.etcd import EtcdClient, EtcdUnavailable, LeaseNotFound, connect
from kvcr.graph.infra import Server, start_etcd


class Follower:
    """Applies every batch of a watch to a dictionary, as a user of a watch does."""

    def __init__(self, client: EtcdClient, prefix: str) -> None:
        self.content: dict[str, bytes] = {}
        self.batches = 0
        self._task = asyncio.create_task(self._run(client, prefix))

    async def _run(self, client: EtcdClient, prefix: str) -> None:
        async with contextlib.aclosing(client.watch_prefix(prefix)) as stream:
            async for changes in stream:
                self.content.update({entry.key: entry.value for entry in changes.puts})
                for key in changes.deletes:
                    self.content.pop(key, None)
                self.batches += 1

    async def reaches(self, content: dict[str, bytes], timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while self.content != content:
            if self._task.done():
                self._task.result()
                raise AssertionError("the watch ended")
            assert time.monotonic() < deadline, f"watch shows {self.content}, expected {content}"
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


@contextlib.asynccontextmanager
async def following(client: EtcdClient, prefix: str) -> AsyncIterator[Follower]:
    follower = Follower(client, prefix)
    try:
        yield follower
    finally:
        await follower.close()


async def put_until_done(client: EtcdClient, key: str, value: bytes, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await client.put(key, value)
        except EtcdUnavailable:
            assert time.monotonic() < deadline, f"puts did not recover within {timeout_s} s"
            await asyncio.sleep(0.2)


async def values_are_read_back_and_deleted(client: EtcdClient, _: Server) -> None:
    assert await client.get("/kv/none") is None
    await client.put("/kv/a", b"1")
    await client.put("/kv/b", b"\x00\xff")
    await client.put("/kw", b"not below the prefix")
    found = await client.get("/kv/b")
    assert found is not None
    assert (found.value, found.lease) == (b"\x00\xff", 0)
    listing = await client.get_prefix("/kv/")
    assert [(entry.key, entry.value) for entry in listing.values] == [("/kv/a", b"1"), ("/kv/b", b"\x00\xff")]
    assert listing.revision >= listing.values[-1].revision
    empty = await client.get_prefix("/nothing/")
    assert empty.values == []
    assert empty.revision == listing.revision
    assert await client.delete("/kv/a")
    assert not await client.delete("/kv/a")


async def a_swap_needs_the_expected_value(client: EtcdClient, _: Server) -> None:
    assert await client.compare_and_swap("/cas", None, b"1")
    assert not await client.compare_and_swap("/cas", None, b"2")
    assert not await client.compare_and_swap("/cas", b"0", b"2")
    assert await client.compare_and_swap("/cas", b"1", b"2")
    found = await client.get("/cas")
    assert found is not None
    assert found.value == b"2"
    results = await asyncio.gather(*(client.compare_and_swap("/cas", b"2", b"%d" % i) for i in range(3, 11)))
    assert sum(results) == 1


async def a_lease_keeps_and_takes_its_keys(client: EtcdClient, _: Server) -> None:
    lease = await client.grant_lease(2)
    await client.put("/lease/kept", b"", lease=lease)
    for _ in range(3):
        await asyncio.sleep(1.5)
        assert await client.refresh_lease(lease) > 0
    kept = await client.get("/lease/kept")
    assert kept is not None
    assert kept.lease == lease
    assert await client.revoke(lease)
    assert await client.get("/lease/kept") is None
    assert not await client.revoke(lease)
    assert await client.refresh_lease(lease) <= 0
    try:
        await client.put("/lease/late", b"", lease=lease)
    except LeaseNotFound:
        pass
    else:
        raise AssertionError("a put under a revoked lease was accepted")


async def a_lease_nobody_keeps_expires(client: EtcdClient, _: Server) -> None:
    lease = await client.grant_lease(1)
    await client.put("/expires/x", b"", lease=lease)
    async with following(client, "/expires/") as follower:
        await follower.reaches({"/expires/x": b""})
        await follower.reaches({})


async def a_watch_lists_and_follows(client: EtcdClient, _: Server) -> None:
    await client.put("/watch/a", b"1")
    async with following(client, "/watch/") as follower, following(client, "/empty/") as empty:
        await follower.reaches({"/watch/a": b"1"})
        await client.put("/watch/b", b"2")
        await client.put("/watch/a", b"3")
        await client.put("/watcher", b"not below the prefix")
        await follower.reaches({"/watch/a": b"3", "/watch/b": b"2"})
        await client.delete("/watch/a")
        await follower.reaches({"/watch/b": b"2"})
        # Whoever may write to etcd may write keys that are no text.
        await client.put(b"/watch/\xff", b"4")  # type: ignore[arg-type]
        await follower.reaches({"/watch/b": b"2", "/watch/\\xff": b"4"})
        assert len((await client.get_prefix("/watch/")).values) == 2
        await client.delete(b"/watch/\xff")  # type: ignore[arg-type]
        await follower.reaches({"/watch/b": b"2"})
        # A user must learn that there is nothing, too.
        assert empty.batches == 1
        assert empty.content == {}


async def everything_recovers_from_a_killed_server(client: EtcdClient, server: Server) -> None:
    await client.put("/kill/stays", b"1")
    await client.put("/kill/goes", b"1")
    async with following(client, "/kill/") as follower:
        await follower.reaches({"/kill/stays": b"1", "/kill/goes": b"1"})
        await asyncio.to_thread(server.kill)
        started = time.monotonic()
        try:
            await client.put("/kill/stays", b"lost")
        except EtcdUnavailable:
            pass
        else:
            raise AssertionError("a put was acknowledged by a dead server")
        assert time.monotonic() - started < 5 + BUSY_S, "a call must end within its time-out"
        await asyncio.sleep(1.0)
        again = await restarted(server)
        try:
            await put_until_done(client, "/kill/stays", b"2")
            assert await client.delete("/kill/goes")
            await follower.reaches({"/kill/stays": b"2"})
            await client.put("/kill/new", b"3")
            await follower.reaches({"/kill/stays": b"2", "/kill/new": b"3"})
        finally:
            await asyncio.to_thread(again.stop)


async def a_watch_notices_a_server_that_lost_its_data(client: EtcdClient, server: Server) -> None:
    for value in range(20):
        await client.put("/wiped/old", b"%d" % value)
    async with following(client, "/wiped/") as follower:
        await follower.reaches({"/wiped/old": b"19"})
        await asyncio.to_thread(server.kill)
        empty = server.log.parent / "etcd-empty"
        again = await asyncio.to_thread(start_etcd, empty, server.log, port=server.port)
        try:
            # Revisions start again: a watch from the old revision would be silent for twenty writes.
            await put_until_done(client, "/wiped/new", b"1")
            await follower.reaches({"/wiped/new": b"1"})
        finally:
            await asyncio.to_thread(again.stop)


async def everything_recovers_from_a_server_stopped_for_5_s(client: EtcdClient, server: Server) -> None:
    lease = await client.grant_lease(30)
    await client.put("/stop/a", b"1", lease=lease)
    async with following(client, "/stop/") as follower:
        await follower.reaches({"/stop/a": b"1"})
        server.pause()
        try:
            await asyncio.sleep(5.0)
        finally:
            server.resume()
        await put_until_done(client, "/stop/b", b"2")
        await follower.reaches({"/stop/a": b"1", "/stop/b": b"2"})
    assert await client.refresh_lease(lease) > 0


async def restarted(server: Server) -> Server:
    """The killed server again, on its data and its port."""
    return await asyncio.to_thread(start_etcd, server.log.parent / "etcd", server.log, port=server.port)


Scenario = Callable[[EtcdClient, Server], Awaitable[None]]

SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        values_are_read_back_and_deleted,
        a_swap_needs_the_expected_value,
        a_lease_keeps_and_takes_its_keys,
        a_lease_nobody_keeps_expires,
        a_watch_lists_and_follows,
        everything_recovers_from_a_killed_server,
        a_watch_notices_a_server_that_lost_its_data,
        everything_recovers_from_a_server_stopped_for_5_s,
    )
}


def run(backend: str, scenario: str, directory: Path) -> None:
    """One scenario on a server of its own, in a new event loop."""
    server = start_etcd(directory / "etcd", directory / "etcd.log")

    async def main() -> None:
        client = await connect(server.url, backend)  # type: ignore[arg-type]
        async with client:
            await SCENARIOS[scenario](client, server)

    try:
        asyncio.run(main())
    finally:
        server.stop()


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
