# SPDX-License-Identifier: Apache-2.0
"""One life of the Dynamo component ``{namespace}.kvcr``: endpoints ``status``, ``inspect`` and ``control``.

A Dynamo runtime ends for good when its lease is lost, so that a guard may live through several of these.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from typing import Any

import msgspec
from dynamo.runtime import DistributedRuntime

from kvcr.dynamo import environment
from kvcr.dynamo.records import InstanceRecord
from kvcr.errors import KvcrError, ProtocolError
from kvcr.guard.inspecting import MAX_INSPECT_KEYS
from kvcr.guard.listing import MAX_LISTED
from kvcr.guard.view import GuardView
from kvcr.keys import KEY_BYTES

log = logging.getLogger(__name__)

COMPONENT = "kvcr"
ENDPOINTS = ("status", "inspect", "control")

EVENT_PLANE = "zmq"
"""Dynamo's own event plane, on which this component says nothing: its events go to NATS by themselves.
With "nats" the runtime could not even be made while NATS is away."""

Request = Any
Answer = dict[str, Any]


def prepare_environment() -> None:
    """Set what the runtime reads by itself; call it before the first :class:`KvcrComponent`."""
    environment.prepare_environment()
    for name, value in environment.PATIENCE.items():
        os.environ.setdefault(name, value)


class KvcrComponent:
    """Registered and serving from its construction on. Belongs to the running event loop.

    The constructor raises what the runtime raises, a plain Exception, when etcd is away; it blocks the
    interpreter meanwhile, so ask etcd something first.
    """

    def __init__(
        self,
        view: GuardView,
        executor: Executor,
        record: Callable[[], InstanceRecord],
        extra_status: Callable[[], Answer],
    ) -> None:
        """``executor`` runs calls that wait for the guard; ``extra_status`` is added to its status."""
        self._view = view
        self._executor = executor
        self._record = record
        self._extra_status = extra_status
        self._runtime = DistributedRuntime(
            asyncio.get_running_loop(),
            "etcd",
            os.environ.get("DYN_REQUEST_PLANE", "tcp"),
            event_plane=EVENT_PLANE,
        )
        handlers = {"status": self._status, "inspect": self._inspect, "control": self._control}
        endpoints = {
            name: self._runtime.endpoint(f"{view.namespace}.{COMPONENT}.{name}") for name in ENDPOINTS
        }
        self.lease_id: int = endpoints["status"].connection_id()
        """The runtime's etcd lease: Dynamo takes its id as the id of the instance."""
        self._serving: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(
                endpoint.serve_endpoint(
                    _answering(handlers[name]),
                    graceful_shutdown=False,
                    metrics_labels=[("guard", view.name)],
                )
            )
            for name, endpoint in endpoints.items()
        ]

    async def ended(self) -> None:
        """Returns when the runtime has stopped serving, by itself or after :meth:`shutdown`."""
        done, _ = await asyncio.wait(self._serving, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            if not future.cancelled() and future.exception() is not None:
                log.warning("Dynamo runtime of guard %s ended: %s", self._view.name, future.exception())

    async def shutdown(self, timeout_s: float) -> None:
        """End the runtime; returns when it stopped serving, or after ``timeout_s``."""
        self._runtime.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.wait(self._serving)
        for future in self._serving:
            if not future.done():
                future.cancel()
            elif not future.cancelled():
                future.exception()

    # --- endpoints -------------------------------------------------------------------------------

    async def _status(self, _: Request) -> Answer:
        """The guard's own status, and how it stands with the cluster."""
        return {**await self._ask(self._view.status), "cluster": self._extra_status()}

    async def _inspect(self, request: Request) -> Answer:
        """``{"keys": [hex, ...]}``, or the keys as one blob of 16 bytes each."""
        keys = _keys(request)
        return dict(await self._ask(lambda: self._view.inspect(keys)))

    async def _control(self, request: Request) -> Answer:
        """``{"op": "identity"}``: the instance record. ``{"op": "heartbeat"}``: state of the inventory.
        ``{"op": "list", "limit": n}``: chains in the pool, see :func:`kvcr.guard.listing.chains`."""
        op = request.get("op") if isinstance(request, dict) else None
        if op == "identity":
            identity: Answer = msgspec.to_builtins(self._record())
            return identity
        if op == "heartbeat":
            beat = await self._ask(self._view.heartbeat)
            return {
                "guard": beat.guard,
                "incarnation": beat.incarnation,
                "sequence": beat.sequence,
                "count": beat.count,
                "digest": beat.digest,
            }
        if op == "list":
            limit = request.get("limit")
            if not isinstance(limit, int) or not 0 <= limit <= MAX_LISTED:
                raise ProtocolError(f"limit is {limit!r}; it must be a number from 0 to {MAX_LISTED}")
            worker_id = self._extra_status()["worker_id"]
            return {**await self._ask(lambda: self._view.chains(limit)), "worker_id": f"{worker_id:x}"}
        raise ProtocolError(f"control op {op!r} is unknown; use 'identity', 'heartbeat' or 'list'")

    async def _ask(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)


def _answering(
    handler: Callable[[Request], Awaitable[Answer]],
) -> Callable[[Request], AsyncIterator[Answer]]:
    """A handler as Dynamo wants it: one answer; what it refuses is an answer too."""

    async def answer(request: Request) -> AsyncIterator[Answer]:
        try:
            yield await handler(request)
        except (KvcrError, TimeoutError) as error:
            yield {"error": type(error).__name__, "reason": str(error) or "the guard did not answer in time"}

    return answer


def _keys(request: Request) -> bytes:
    keys = request.get("keys") if isinstance(request, dict) else None
    try:
        blob = keys if isinstance(keys, bytes) else bytes.fromhex("".join(keys or ()))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"keys must be a list of {2 * KEY_BYTES} hex digits each: {error}") from error
    if len(blob) % KEY_BYTES or len(blob) > MAX_INSPECT_KEYS * KEY_BYTES:
        raise ProtocolError(
            f"keys have {len(blob)} bytes; {KEY_BYTES} bytes each, at most {MAX_INSPECT_KEYS} of them"
        )
    return blob
