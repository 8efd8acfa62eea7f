# SPDX-License-Identifier: Apache-2.0
"""The etcd client over etcd3 0.12.0, a library of threads whose last release is of March 2020.

It is imported with the messages that etcd3aio carries in place of its own, which protobuf above 3 refuses.
Its locks need ``tenacity<7``; KVCR uses none. Watches run over its channel but not through its watcher,
which neither notices a lost stream without a busy loop nor can be stopped.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeVar

import grpc

from kvcr.dynamo.etcd.base import (
    CALL_TIMEOUT_S,
    KEEPALIVE_OPTIONS,
    Credentials,
    EtcdClient,
    EtcdError,
    EtcdUnavailable,
    KeyChanges,
    KeyValue,
    LeaseNotFound,
    Listing,
    prefix_end,
)
from kvcr.dynamo.etcd.messages import changes_in, entry_of, rpc, stubs, watch_request
from kvcr.errors import ConfigError

T = TypeVar("T")

_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def load_etcd3() -> ModuleType:
    """The ``etcd3`` module, on messages that work with today's protobuf. Nobody may import it before."""
    if "etcd3" not in sys.modules:
        shim = ModuleType("etcd3.etcdrpc")
        for generated in (rpc, stubs):
            public = {key: value for key, value in vars(generated).items() if not key.startswith("_")}
            vars(shim).update(public)
        sys.modules[shim.__name__] = shim
    return importlib.import_module("etcd3")


class Etcd3CompatClient(EtcdClient):
    """See :class:`EtcdClient`. Each call runs in a thread of the loop's default executor."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        credentials: Credentials,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        if len(addresses) != 1:
            raise ConfigError(
                f"the etcd3 backend takes one endpoint, got {len(addresses)}; use backend 'aio'"
            )
        if any(credentials):
            raise ConfigError("the etcd3 backend has neither TLS nor users here; use backend 'aio'")
        etcd3 = load_etcd3()
        host, port = addresses[0]
        self._known_errors: tuple[type[Exception], ...] = (
            etcd3.exceptions.ConnectionFailedError,
            etcd3.exceptions.ConnectionTimeoutError,
        )
        self._library_error: type[Exception] = etcd3.exceptions.Etcd3Exception
        self._timeout_s = timeout_s
        self._client: Any = etcd3.client(
            host=host,
            port=port,
            timeout=timeout_s,
            grpc_options=KEEPALIVE_OPTIONS,
        )

    async def get(self, key: str) -> KeyValue | None:
        answer = await self._call(f"get {key}", lambda: self._client.get_response(key))
        return entry_of(answer.kvs[0]) if answer.kvs else None

    async def get_prefix(self, prefix: str) -> Listing:
        answer = await self._call(f"list {prefix}", lambda: self._client.get_prefix_response(prefix))
        return Listing([entry_of(kv) for kv in answer.kvs], answer.header.revision)

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> None:
        await self._call(f"put {key}", lambda: self._client.put(key, value, lease=lease or None), lease)

    async def delete(self, key: str) -> bool:
        return bool(await self._call(f"delete {key}", lambda: self._client.delete(key)))

    async def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes, *, lease: int = 0
    ) -> bool:
        steps = self._client.transactions
        condition = steps.create(key) == 0 if expected is None else steps.value(key) == expected
        write = steps.put(key, value, lease=lease or None)
        succeeded, _ = await self._call(
            f"swap {key}",
            lambda: self._client.transaction(compare=[condition], success=[write], failure=[]),
            lease,
        )
        return bool(succeeded)

    async def grant_lease(self, ttl_s: int) -> int:
        return int((await self._call("grant a lease", lambda: self._client.lease(ttl_s))).id)

    async def refresh_lease(self, lease_id: int) -> int:
        def first_answer() -> int:
            return int(next(iter(self._client.refresh_lease(lease_id))).TTL)

        return await self._call(f"refresh lease {lease_id:x}", first_answer)

    async def revoke(self, lease_id: int) -> bool:
        try:
            await self._call(
                f"revoke lease {lease_id:x}", lambda: self._client.revoke_lease(lease_id), lease_id
            )
        except LeaseNotFound:
            return False
        return True

    async def close(self) -> None:
        self._client.close()

    async def _follow(self, prefix: str, revision: int) -> AsyncGenerator[KeyChanges, None]:
        loop = asyncio.get_running_loop()
        answers: asyncio.Queue[Any] = asyncio.Queue()
        request = watch_request(prefix.encode(), prefix_end(prefix), revision + 1)
        finished = threading.Event()

        def requests() -> Iterator[Any]:
            yield request
            # The stream lives as long as its requests do not end.
            finished.wait()

        stream = stubs.WatchStub(self._client.channel).Watch(requests())

        def forward() -> None:
            end: Any = None
            try:
                for answer in stream:
                    loop.call_soon_threadsafe(answers.put_nowait, answer)
            except grpc.RpcError as error:
                end = error
            # The loop may be closed by now; then nobody waits for the end either.
            if not loop.is_closed():
                loop.call_soon_threadsafe(answers.put_nowait, end)

        thread = threading.Thread(target=forward, name="kvcr-etcd3-watch", daemon=True)
        thread.start()
        try:
            while True:
                answer = await answers.get()
                if isinstance(answer, grpc.RpcError):
                    raise EtcdUnavailable(f"watch {prefix}: {answer}") from answer
                if answer is None or answer.canceled or answer.compact_revision:
                    return
                if answer.events:
                    yield changes_in(answer)
        finally:
            finished.set()
            stream.cancel()

    async def _call(self, what: str, call: Callable[[], T], lease: int = 0) -> T:
        try:
            return await asyncio.to_thread(call)
        except self._known_errors as error:
            raise EtcdUnavailable(f"etcd does not answer ({what}): {type(error).__name__}") from error
        except self._library_error as error:
            raise EtcdError(f"etcd refused to {what}: {type(error).__name__} {error}") from error
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            if code is grpc.StatusCode.NOT_FOUND and lease:
                raise LeaseNotFound(f"{what}: lease {lease:x} has expired or was revoked") from error
            kind = EtcdUnavailable if code in _TRANSIENT else EtcdError
            raise kind(f"etcd did not {what}: {error}") from error
