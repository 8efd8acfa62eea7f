# SPDX-License-Identifier: Apache-2.0
"""Carries out plans: sends the request with its hint to the chosen worker and passes its stream through.

A worker that cannot be reached, or goes away before its first output, costs another plan. After the first
output the frontend is told, which sends the rest of the request again (``--migration-limit``): prompt and
answer so far, planned like any other prompt. Errors of the worker itself pass through.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from dynamo.llm import HttpError
from dynamo.llm.exceptions import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    EngineShutdown,
    StreamIncomplete,
    WorkerUnavailable,
)

from kvcr.errors import ConfigError
from kvcr.protocol.events import event, hints_subject
from kvcr.tracing import NOT_TRACING, Tracer
from router_hints.costs import CostModel, Rank
from router_hints.egress import Outlet, Sender
from router_hints.explain import PlanLog
from router_hints.guards import GuardDirectory
from router_hints.hints import build_notice
from router_hints.metrics import Metrics, RequestOutcome
from router_hints.placement import Placed, Placement
from router_hints.planner import NoWorker
from router_hints.requests import Prompt, read_prompt
from router_hints.tenants import of_tenant
from router_hints.tracing import hint_attributes, plan_attributes
from router_hints.underway import Underway
from router_hints.visits import Visit, Visits
from router_hints.workers import WorkerTable

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
_SLOW_CLIENTS = 256
"""Clients that read too slowly to be sent to at once, each of which holds a thread."""

_UNREACHABLE = (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    EngineShutdown,
    StreamIncomplete,
    WorkerUnavailable,
)
_UNREACHABLE_TEXT = ("Unavailable: ", "DeadlineExceeded: ")
"""How the binding of 1.6.1 spells a refused connection, an unknown instance and a stream that broke off, and
a worker that was stopped and takes no request for 5 s: plain Exception or ValueError with this beginning
(observed)."""


class Context(Protocol):
    """The part of Dynamo's request context that is used here."""

    @property
    def metadata(self) -> Any: ...
    def id(self) -> str: ...
    def is_stopped(self) -> bool: ...
    def trace_headers(self) -> dict[str, str] | None: ...


Send = Callable[[dict[str, Any], int, Context], Awaitable[AsyncIterator[Any]]]
"""``send(request, worker_id, context)`` begins to send at once; what it returns is awaited for the worker's
output stream."""
Publish = Callable[[str, bytes], Coroutine[Any, Any, bool]]


class Bookings(Protocol):
    """Where requests are booked: the ledger here, and those of the other replicas."""

    def book(
        self,
        request_id: str,
        rank: Rank,
        *,
        prefill_tokens: int,
        blocks: int,
        copies: Mapping[str, int],
        copied_by_s: float = ...,
    ) -> None: ...
    def first_output(self, request_id: str) -> object: ...
    def release(self, request_id: str) -> None: ...


@dataclass(frozen=True)
class Books:
    """Everything a dispatch is written into."""

    workers: WorkerTable
    guards: GuardDirectory
    bookings: Bookings
    visits: Visits
    costs: CostModel
    metrics: Metrics
    plans: PlanLog
    underway: Underway
    publish: Publish
    namespace: str
    router: str
    """Name of this router in events."""
    tracer: Tracer = NOT_TRACING


class Dispatcher:
    """Handler of the router's endpoint. One event loop."""

    def __init__(self, placement: Placement, send: Send, books: Books, tenant_key: str = "") -> None:
        """``tenant_key``: where the metadata of a request has its tenant; empty for no tenants."""
        self._tenant_key = tenant_key
        self._last_refusal = ""
        self._placement = placement
        self._send = send
        self._books = books
        self._notices: set[asyncio.Task[bool]] = set()
        self._threads = ThreadPoolExecutor(_SLOW_CLIENTS, thread_name_prefix="egress")

    async def generate(
        self, request: dict[str, Any], context: Context, response_sender: Sender | None = None
    ) -> AsyncIterator[Any]:
        """Serve one request.

        Outputs go to the sender, which Dynamo passes to a handler that names it, and then none is yielded.
        Its health check and callers in this process pass none. Raises HttpError where a stock router would
        fail, Disconnected when the worker went away after its first output, or what the worker raised.
        """
        begun = time.monotonic()
        request, prompt = self._read(request, context.metadata)
        visit = self._books.visits.arrive(prompt)
        try:
            async with contextlib.aclosing(self._serve(request, context, prompt, visit, begun)) as served:
                if response_sender is None:
                    async for output in served:
                        yield output
                else:
                    await self._push(served, response_sender, context)
        finally:
            # Also when the client left and this generator is closed at its yield.
            self._books.visits.leave(visit)

    async def _push(self, served: AsyncIterator[Any], sender: Sender, context: Context) -> None:
        outlet = Outlet(sender, self._threads)
        try:
            try:
                async for output in served:
                    await outlet.put(output)
            finally:
                # Also before an error: what the worker put out is the client's.
                await outlet.flush()
        except RuntimeError:
            # How the sender says that the client left, beside stopping the context.
            if not context.is_stopped():
                raise

    async def _serve(
        self, request: dict[str, Any], context: Context, prompt: Prompt, visit: Visit, begun: float
    ) -> AsyncGenerator[Any]:
        tried: list[int] = []
        while True:
            placed = await self._place_traced(prompt, tried, visit, context)
            worker_id = placed.plan.rank[0]
            opening = self._open(_with_plan(request, placed), worker_id, context)
            # The request is on its way: what is written down of it makes it wait no longer, and is there
            # before anything else is planned.
            attempt = _Attempt(self._books, placed, context.id(), len(tried), begun)
            self._placement.count(placed.plan, prompt)
            self._tell(placed, context.id())
            self._books.visits.planned(visit, placed)
            try:
                async for output in await opening:
                    arrived_s = time.monotonic()
                    # To the client first.
                    yield output
                    attempt.output(arrived_s)
                    self._books.visits.output(visit, _tokens(output))
            except Exception as error:
                if context.is_stopped():
                    # The client left; how its stream ended says nothing about the worker.
                    return
                if not _is_unreachable(error):
                    attempt.outcome = RequestOutcome.ERROR
                    raise
                self._books.workers.mark_down(worker_id, time.monotonic())
                if attempt.started:
                    attempt.outcome = RequestOutcome.LOST
                    # Of Dynamo's errors the one that the frontend migrates for without taking this router out
                    # of service (observed in 1.6.1; StreamIncomplete and EngineShutdown do take it out).
                    raise Disconnected(
                        f"worker {worker_id:x} went away while it was answering: {error}"
                    ) from error
                attempt.outcome = RequestOutcome.UNREACHABLE
                tried.append(worker_id)
                log.warning(
                    "request %s: worker %x cannot be reached (%s); planning again",
                    context.id(),
                    worker_id,
                    error,
                )
                if len(tried) >= MAX_ATTEMPTS:
                    raise _unavailable(
                        f"{len(tried)} workers could not be reached, the last: {error}"
                    ) from error
            else:
                attempt.outcome = RequestOutcome.CANCELLED if context.is_stopped() else RequestOutcome.OK
                return
            finally:
                attempt.close()

    def _open(
        self, request: dict[str, Any], worker_id: int, context: Context
    ) -> Awaitable[AsyncIterator[Any]]:
        """Begin to send it. Whatever goes wrong does so when it is awaited."""
        try:
            return self._send(request, worker_id, context)
        except Exception as error:  # noqa: BLE001 - of whatever kind, it is the dispatch that failed
            return _failed(error)

    def _read(self, request: dict[str, Any], metadata: Mapping[str, str]) -> tuple[dict[str, Any], Prompt]:
        try:
            request = of_tenant(request, metadata, self._tenant_key)
            return request, read_prompt(request, metadata)
        except ConfigError as error:
            self._books.metrics.ended("", RequestOutcome.INVALID)
            # The frontend tells its client no more than that it was a bad request.
            if str(error) != self._last_refusal:
                self._last_refusal = str(error)
                log.warning("a request is refused: %s", error)
            raise HttpError(400, str(error)) from error

    async def _place_traced(self, prompt: Prompt, tried: list[int], visit: Visit, context: Context) -> Placed:
        """Plan; what the hint brings about elsewhere is below it in the request's trace."""
        tracer = self._books.tracer
        parent = (context.trace_headers() or {}).get("traceparent", "")
        span = tracer.start(
            "kvcr.plan", parent, {"kvcr.request_id": context.id(), "kvcr.attempt": len(tried)}, root=True
        )
        try:
            placed = await self._place(prompt, tried, visit)
        except HttpError:
            span.end({"kvcr.result": "no worker"})
            raise
        hint = placed.hint
        if hint is not None:
            hinted = tracer.start("kvcr.hint", span.traceparent, hint_attributes(placed.plan))
            for action in hint["actions"] if hinted.traceparent else ():
                action["payload"]["traceparent"] = hinted.traceparent
            hinted.end()
        span.end(plan_attributes(placed.plan))
        return placed

    async def _place(self, prompt: Prompt, tried: list[int], visit: Visit) -> Placed:
        try:
            return await self._placement.place(prompt, tried, visit.turn, visit.view, visit.chain)
        except NoWorker as error:
            self._books.metrics.ended("", RequestOutcome.NO_WORKER)
            raise _unavailable(str(error)) from error

    def _tell(self, placed: Placed, request_id: str) -> None:
        """Publish a copy of the hint, without making the request wait for it."""
        hint, made, books = placed.hint, placed.plan, self._books
        if hint is None or placed.target is None:
            return
        for action in hint["actions"]:
            books.metrics.hints.labels(action["action_type"]).inc()
        books.metrics.hinted_blocks.inc(made.chosen.copied_blocks)
        notice = build_notice(made, hint, request_id=request_id, router=books.router)
        subject = hints_subject(books.namespace, placed.target.name)
        task = asyncio.get_running_loop().create_task(books.publish(subject, event.encode(notice)))
        self._notices.add(task)
        task.add_done_callback(self._notices.discard)


class _Attempt:
    """One dispatch of one plan: its booking, its timing, its place in the books. Closed exactly once."""

    def __init__(self, books: Books, placed: Placed, request_id: str, number: int, begun_s: float) -> None:
        made = placed.plan
        self._books = books
        self._placed = placed
        self._request_id = request_id
        self._begun_s = begun_s
        self._sent_s = time.monotonic()
        self.started = False
        self.outcome = RequestOutcome.CANCELLED
        books.bookings.book(
            request_id,
            made.rank,
            prefill_tokens=made.prefill_tokens,
            blocks=made.blocks,
            copies=made.byte_counts,
            copied_by_s=self._sent_s + made.copies_s,
        )
        books.plans.record(made, request_id, number, placed.hint, placed.inputs)
        if not made.no_retain:
            books.underway.begin(made.plan_id, made.rank, placed.keys)

    def output(self, now: float) -> None:
        """The worker gave an output at that time; the first one says how long things took."""
        if self.started:
            return
        self.started = True
        books, made = self._books, self._placed.plan
        books.bookings.first_output(self._request_id)
        books.underway.end(made.plan_id)
        books.workers.mark_up(made.rank[0])
        books.visits.arrived(self._placed)
        books.plans.first_output(made.plan_id, now - self._sent_s)
        books.metrics.first_output_seconds.observe(now - self._begun_s)
        self._learn(now - self._sent_s)

    def close(self) -> None:
        books, made, target = self._books, self._placed.plan, self._placed.target
        books.bookings.release(self._request_id)
        books.underway.end(made.plan_id)
        books.plans.ended(made.plan_id, self.outcome.value)
        books.metrics.ended(target.name if target is not None else "", self.outcome)

    def _learn(self, seconds: float) -> None:
        books, made, target = self._books, self._placed.plan, self._placed.target
        if made.chosen.wait_s > 0 and not made.sources:
            alone_s = made.chosen.fetch_s + made.chosen.prefill_s + made.chosen.load_s
            books.costs.observe_wait(made.rank, made.chosen.wait_s, seconds - alone_s)
        if made.chosen.wait_s > 0:
            # It waited for others: its time says nothing about prefill or copies.
            return
        seconds -= made.chosen.load_s
        asked = made.byte_counts
        if not asked:
            books.costs.observe_prefill(made.rank, made.prefill_tokens, seconds - made.chosen.fetch_s)
        elif len(asked) == 1 and target is not None:
            ((source, byte_count),) = asked.items()
            link = books.guards.topology.link(source, target.name)
            loaded_s = byte_count / books.costs.settings.load_bytes_per_s
            books.costs.observe_copy(
                source, target.name, link, byte_count, seconds - made.chosen.prefill_s - loaded_s
            )


async def _failed(error: Exception) -> AsyncIterator[Any]:
    raise error


def _with_plan(request: dict[str, Any], placed: Placed) -> dict[str, Any]:
    """The request as the worker gets it: unchanged but for its place and its hint.

    A hint that came with the request is replaced, also by none: only the router plans.
    """
    worker_id, rank = placed.plan.rank
    planned = dict(request)
    planned.pop("kv_hint", None)
    planned["routing"] = dict(request.get("routing") or {}, backend_instance_id=worker_id, dp_rank=rank)
    if placed.hint is not None:
        planned["kv_hint"] = placed.hint
    return planned


def _tokens(output: Any) -> Sequence[int]:
    """What a worker's output decoded."""
    found = output.get("token_ids") if isinstance(output, dict) else None
    return found if isinstance(found, list) else ()


def _is_unreachable(error: Exception) -> bool:
    return isinstance(error, _UNREACHABLE) or str(error).startswith(_UNREACHABLE_TEXT)


def _unavailable(text: str) -> HttpError:
    # Dynamo's own WorkerUnavailable would make the frontend take this router out of service, for about
    # fifteen seconds and for every request (observed in 1.6.1): what is away is a worker, not the router.
    return HttpError(503, text)
