# SPDX-License-Identifier: Apache-2.0
"""All guards of a deployment, seen from outside: for the command line and for scripts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcr.dynamo.component import COMPONENT, prepare_environment
from kvcr.dynamo.environment import COMMAND_PATIENCE
from kvcr.dynamo.etcd import EtcdClient, EtcdUnavailable, Listing, connect, credentials_from_environment
from kvcr.dynamo.orders import drain_key, mode_key
from kvcr.dynamo.polling import poll
from kvcr.dynamo.records import BadSignature, InstanceRecord, decode, guards_prefix
from kvcr.errors import KvcrError, ProtocolError
from kvcr.guard.inspecting import MAX_INSPECT_KEYS

ANSWER_TIMEOUT_S = 5.0
ROUTER = "router"
"""Component that our router registers as, unless it was told another name."""


@dataclass(frozen=True)
class Deployment:
    """Where a deployment is found."""

    namespace: str
    etcd: str
    nats: str
    secret: bytes | None
    source: str
    """Where this is known from, for messages."""
    model: str | None = None
    """Directory of the model, for its tokenizer."""


class Unreachable(KvcrError):
    """A guard or router is registered and does not answer."""


@dataclass(frozen=True)
class SilentRouter:
    """A router that is registered and did not answer."""

    router: str
    """As it calls itself."""
    address: str
    """Where Dynamo would have found it."""
    reason: str

    def __str__(self) -> str:
        return f"{self.router} at {self.address} did not answer: {self.reason}"


@dataclass(frozen=True)
class Routers:
    """What the routers of a deployment said when all of them were asked."""

    answers: list[Any]
    silent: list[SilentRouter]


@dataclass
class Fleet:
    """``async with Fleet(deployment) as fleet``. Belongs to one event loop."""

    deployment: Deployment
    ignored: Counter[str] = field(default_factory=Counter)
    """Records that are not believed, by reason."""
    _etcd: EtcdClient | None = None
    _runtime: Any = None
    _clients: dict[str, Any] = field(default_factory=dict)

    async def __aenter__(self) -> Fleet:
        self._etcd = await connect(self.deployment.etcd, credentials=credentials_from_environment())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runtime is not None:
            self._runtime.shutdown()
        if self._etcd is not None:
            await self._etcd.close()

    async def guards(self) -> list[InstanceRecord]:
        """Registered guards, by name. Raises EtcdUnavailable."""
        listing = await self._list(guards_prefix(self.deployment.namespace))
        found = []
        self.ignored.clear()
        for entry in listing.values:
            try:
                found.append(decode(entry.key, entry.value, self.deployment.secret))
            except (BadSignature, ProtocolError) as error:
                self.ignored[str(error)] += 1
        return sorted(found, key=lambda record: record.name)

    async def ask(self, record: InstanceRecord, endpoint: str, request: Any = None) -> dict[str, Any]:
        """One answer of a guard's Dynamo endpoint. Raises Unreachable, KvcrError for a refusal."""
        client = await self._client(endpoint)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await poll(lambda: record.lease_id in client.instance_ids())
                stream = await client.direct(request or {}, record.lease_id, annotated=False)
                answers = [answer async for answer in stream]
        except TimeoutError as error:
            raise Unreachable(f"guard {record.name} did not answer within {ANSWER_TIMEOUT_S:g} s") from error
        except Exception as error:
            # The runtime raises plain exceptions.
            raise Unreachable(f"guard {record.name} did not answer: {error}") from error
        answer: dict[str, Any] = answers[0] if answers else {}
        if "error" in answer:
            raise KvcrError(f"guard {record.name}: {answer['reason']}")
        return answer

    async def ask_all(
        self, records: list[InstanceRecord], endpoint: str, request: Any = None
    ) -> list[dict[str, Any] | KvcrError]:
        """The answers in the same order; what one guard does wrong is its answer."""

        async def one(record: InstanceRecord) -> dict[str, Any] | KvcrError:
            try:
                return await self.ask(record, endpoint, request)
            except KvcrError as error:
                return error

        return list(await asyncio.gather(*(one(record) for record in records)))

    async def inspect(self, record: InstanceRecord, keys: Sequence[str]) -> list[dict[str, Any]]:
        """What a guard says of these blocks, one answer a key (hex); ``tier`` is None where it is not there.
        Raises as :meth:`ask`."""
        blocks: list[dict[str, Any]] = []
        for first in range(0, len(keys), MAX_INSPECT_KEYS):
            asked = list(keys[first : first + MAX_INSPECT_KEYS])
            answer = await self.ask(record, "inspect", {"keys": asked})
            # A guard whose engine never attached has no pool, and lists nothing.
            blocks += answer["blocks"] or [{"key": key, "tier": None} for key in asked]
        return blocks

    async def routers(self) -> Routers:
        """What every router says of itself. Raises EtcdUnavailable."""
        return await self._ask_routers("status", {})

    async def engine_memory(self, tokens: Sequence[int], salt: str) -> list[dict[str, Any]]:
        """Engines that have blocks of this prompt in G1, as the first router that answers sees it."""
        answers = (await self._ask_routers("where", {"tokens": list(tokens), "salt": salt})).answers
        found: list[dict[str, Any]] = answers[0] if answers else []
        return found

    async def _list(self, prefix: str) -> Listing:
        assert self._etcd is not None
        with self._naming_etcd():
            return await self._etcd.get_prefix(prefix)

    @contextlib.contextmanager
    def _naming_etcd(self) -> Iterator[None]:
        """Which one does not answer: the command line may have found it in the environment or a graph."""
        try:
            yield
        except EtcdUnavailable as error:
            why = str(error).removeprefix("etcd does not answer ")
            raise EtcdUnavailable(f"etcd at {self.deployment.etcd} does not answer {why}") from error

    async def _ask_routers(self, endpoint: str, request: dict[str, Any]) -> Routers:
        """All of them at once, within one deadline."""
        listing = await self._list(f"v1/instances/{self.deployment.namespace}/{ROUTER}/{endpoint}/")
        if not listing.values:
            return Routers([], [])
        client = await self._client(endpoint, ROUTER)
        deadline_s = asyncio.get_running_loop().time() + ANSWER_TIMEOUT_S

        async def one(instance: int, address: str) -> Any:
            try:
                async with asyncio.timeout_at(deadline_s):
                    await poll(lambda: instance in client.instance_ids())
                    stream = await client.direct(request, instance, annotated=False)
                    answers = [answer async for answer in stream]
                if answers:
                    return answers[0]
                reason = "its answer is empty"
            except TimeoutError:
                reason = f"no answer within {ANSWER_TIMEOUT_S:g} s"
            except Exception as error:  # noqa: BLE001, the runtime raises plain ones; they are shown
                reason = str(error) or type(error).__name__
            return SilentRouter(f"{ROUTER}-{instance:x}", address, reason)

        registered = sorted(
            (int(entry.key.rpartition("/")[2], 16), _address(entry.value)) for entry in listing.values
        )
        found = await asyncio.gather(*(one(*router) for router in registered))
        silent = [router for router in found if isinstance(router, SilentRouter)]
        return Routers([answer for answer in found if not isinstance(answer, SilentRouter)], silent)

    async def sessions(self, chains: list[tuple[int, str]]) -> dict[str, dict[str, str]]:
        """Key of a chain's last block, given with its position, to the session that goes through it, as far
        as a router knows one."""
        known: dict[str, dict[str, str]] = {}
        for answer in (await self._ask_routers("status", {"chains": chains})).answers:
            known |= answer.get("sessions", {})
        return known

    async def try_etcd(self, key: str) -> float:
        """Write, read and remove a key; seconds that took. Raises EtcdError when one of it is not allowed."""
        assert self._etcd is not None
        begun_s = time.monotonic()
        await self._etcd.put(key, b"{}")
        await self._etcd.get_prefix(guards_prefix(self.deployment.namespace))
        await self._etcd.delete(key)
        return time.monotonic() - begun_s

    async def order_mode(self, mode: str) -> None:
        """Tell the routers; they follow etcd. Raises EtcdUnavailable."""
        assert self._etcd is not None
        with self._naming_etcd():
            await self._etcd.put(mode_key(self.deployment.namespace), mode.encode())

    async def order_drain(self, worker_id: int, draining: bool) -> None:
        """No new requests for this Dynamo instance, or requests again. Raises EtcdUnavailable."""
        assert self._etcd is not None
        key = drain_key(self.deployment.namespace, worker_id)
        with self._naming_etcd():
            if draining:
                await self._etcd.put(key, b"{}")
            else:
                await self._etcd.delete(key)

    async def _client(self, endpoint: str, component: str = COMPONENT) -> Any:
        path = f"{self.deployment.namespace}.{component}.{endpoint}"
        if path not in self._clients:
            if self._runtime is None:
                self._runtime = self._make_runtime()
            self._clients[path] = await self._runtime.endpoint(path).client()
        return self._clients[path]

    def _make_runtime(self) -> Any:
        os.environ["ETCD_ENDPOINTS"] = self.deployment.etcd
        os.environ.update({**COMMAND_PATIENCE, **os.environ})
        prepare_environment()
        os.environ.pop("DYN_SYSTEM_PORT", None)
        from dynamo.runtime import DistributedRuntime

        try:
            return DistributedRuntime(
                asyncio.get_running_loop(),
                "etcd",
                os.environ.get("DYN_REQUEST_PLANE", "tcp"),
                event_plane="zmq",
            )
        except Exception as error:
            # The runtime raises plain exceptions.
            raise Unreachable(f"etcd at {self.deployment.etcd} does not answer: {error}") from error


def _address(instance: bytes) -> str:
    """Host and port of a Dynamo instance, out of its record in etcd."""
    try:
        (transport,) = json.loads(instance)["transport"].values()
        return str(transport).partition("/")[0]
    except (ValueError, KeyError, TypeError, AttributeError):
        return "an address that cannot be read"
