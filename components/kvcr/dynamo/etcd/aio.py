# SPDX-License-Identifier: Apache-2.0
"""The etcd client over etcd3aio 0.3.0."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import grpc.aio
from etcd3aio.errors import EtcdConnectionError, EtcdTransientError, EtcdUnauthenticatedError
from etcd3aio.errors import EtcdError as LibraryError
from etcd3aio.kv import KVService
from etcd3aio.lease import LeaseService

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

T = TypeVar("T")


class AioClient(EtcdClient):
    """See :class:`EtcdClient`. Made by :meth:`open`."""

    def __init__(self, channel: grpc.aio.Channel, credentials: Credentials, timeout_s: float) -> None:
        self._channel = channel
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._kv = KVService(channel)
        self._lease = LeaseService(channel)
        self._lease_stub = stubs.LeaseStub(channel)
        self._watch_stub = stubs.WatchStub(channel)
        self._auth_stub = stubs.AuthStub(channel)
        self._token = ""

    @classmethod
    async def open(
        cls,
        addresses: Sequence[tuple[str, int]],
        credentials: Credentials,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> AioClient:
        """``addresses`` are (host, port). Raises EtcdUnavailable when several are named and none resolves."""
        target = await _target(addresses)
        options = [*KEEPALIVE_OPTIONS, ("grpc.lb_policy_name", "round_robin")]
        if not credentials.ca:
            return cls(grpc.aio.insecure_channel(target, options=options), credentials, timeout_s)
        tls = grpc.ssl_channel_credentials(
            root_certificates=credentials.ca.encode(),
            private_key=credentials.key.encode() or None,
            certificate_chain=credentials.certificate.encode() or None,
        )
        # The target may be a list of addresses; certificates name hosts.
        options.append(("grpc.ssl_target_name_override", addresses[0][0]))
        return cls(grpc.aio.secure_channel(target, tls, options=options), credentials, timeout_s)

    async def get(self, key: str) -> KeyValue | None:
        answer = await self._call(f"get {key}", lambda: self._kv.get(key, timeout=self._timeout_s))
        return entry_of(answer.kvs[0]) if answer.kvs else None

    async def get_prefix(self, prefix: str) -> Listing:
        answer = await self._call(
            f"list {prefix}", lambda: self._kv.get(prefix, prefix_end(prefix), timeout=self._timeout_s)
        )
        return Listing([entry_of(kv) for kv in answer.kvs], answer.header.revision)

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> None:
        await self._call(
            f"put {key}", lambda: self._kv.put(key, value, lease=lease, timeout=self._timeout_s), lease
        )

    async def delete(self, key: str) -> bool:
        answer = await self._call(f"delete {key}", lambda: self._kv.delete(key, timeout=self._timeout_s))
        return bool(answer.deleted)

    async def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes, *, lease: int = 0
    ) -> bool:
        if expected is None:
            condition = self._kv.txn_compare_create_revision(key, 0)
        else:
            condition = self._kv.txn_compare_value(key, expected)
        write = self._kv.txn_op_put(key, value, lease=lease)
        answer = await self._call(
            f"swap {key}",
            # One attempt: a repeated swap that had happened would report failure.
            lambda: self._kv.txn([condition], [write], timeout=self._timeout_s, max_attempts=1),
            lease,
        )
        return bool(answer.succeeded)

    async def grant_lease(self, ttl_s: int) -> int:
        answer = await self._call("grant a lease", lambda: self._lease.grant(ttl_s, timeout=self._timeout_s))
        return int(answer.ID)

    async def refresh_lease(self, lease_id: int) -> int:
        async def ask() -> int:
            stream = self._lease_stub.LeaseKeepAlive(metadata=self._metadata())
            try:
                async with asyncio.timeout(self._timeout_s):
                    await stream.write(rpc.LeaseKeepAliveRequest(ID=lease_id))
                    answer = await stream.read()
            finally:
                stream.cancel()
            if answer is grpc.aio.EOF:
                raise EtcdUnavailable(f"refresh lease {lease_id:x}: the server closed the stream")
            return int(answer.TTL)

        return await self._call(f"refresh lease {lease_id:x}", ask)

    async def revoke(self, lease_id: int) -> bool:
        try:
            await self._call(
                f"revoke lease {lease_id:x}",
                lambda: self._lease.revoke(lease_id, timeout=self._timeout_s),
                lease_id,
            )
        except LeaseNotFound:
            return False
        return True

    async def close(self) -> None:
        await self._channel.close()

    async def _log_in(self) -> None:
        request = rpc.AuthenticateRequest(name=self._credentials.user, password=self._credentials.password)
        self._token = (await self._auth_stub.Authenticate(request, timeout=self._timeout_s)).token
        self._kv.set_token(self._token)
        self._lease.set_token(self._token)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("token", self._token),) if self._token else ()

    async def _follow(self, prefix: str, revision: int) -> AsyncGenerator[KeyChanges, None]:
        # Not the library's own watch: it reconnects by itself, to a server restored to an older state and
        # over a compaction alike, and leaves a pending task behind each time.
        stream = self._watch_stub.Watch(metadata=self._metadata())
        try:
            await stream.write(watch_request(prefix.encode(), prefix_end(prefix), revision + 1))
            while True:
                answer = await stream.read()
                if answer is grpc.aio.EOF or answer.canceled or answer.compact_revision:
                    return
                if answer.events:
                    yield changes_in(answer)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # InvalidStateError: the call ended before the request was written.
            raise EtcdUnavailable(f"watch {prefix}: {error}") from error
        finally:
            stream.cancel()

    async def _call(self, what: str, call: Callable[[], Awaitable[T]], lease: int = 0) -> T:
        try:
            if self._credentials.user and not self._token:
                await self._log_in()
            try:
                return await call()
            except (EtcdUnauthenticatedError, grpc.aio.AioRpcError) as error:
                if not (self._credentials.user and _token_is_stale(error)):
                    raise
                # Refused before it did anything, so that it may be repeated.
                await self._log_in()
                return await call()
        except (EtcdTransientError, EtcdConnectionError, TimeoutError) as error:
            raise EtcdUnavailable(f"etcd does not answer ({what}): {error or 'timed out'}") from error
        except LibraryError as error:
            raise EtcdError(f"etcd refused to {what}: {error}") from error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND and lease:
                raise LeaseNotFound(f"{what}: lease {lease:x} has expired or was revoked") from error
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise EtcdUnavailable(f"etcd does not answer ({what}): {error.details()}") from error
            raise EtcdError(f"etcd refused to {what}: {error.code().name}: {error.details()}") from error


def _token_is_stale(error: EtcdUnauthenticatedError | grpc.aio.AioRpcError) -> bool:
    """etcd forgets tokens when it restarts and after five minutes without use, and when rights change."""
    if isinstance(error, EtcdUnauthenticatedError):
        return True
    return error.code() is grpc.StatusCode.UNAUTHENTICATED or "auth store is old" in (error.details() or "")


async def _target(addresses: Sequence[tuple[str, int]]) -> str:
    """One address is resolved by gRPC, again at each connect; a list must hold IP addresses."""
    if len(addresses) == 1:
        host, port = addresses[0]
        return f"dns:///{host}:{port}"
    loop = asyncio.get_running_loop()
    found: list[str] = []
    for host, port in addresses:
        with contextlib.suppress(OSError, UnicodeError):
            for answer in await loop.getaddrinfo(host, port, family=2, type=1):
                found.append(f"{answer[4][0]}:{port}")
    if not found:
        raise EtcdUnavailable(f"none of the etcd hosts {', '.join(host for host, _ in addresses)} resolves")
    return "ipv4:" + ",".join(dict.fromkeys(found))
