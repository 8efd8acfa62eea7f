# SPDX-License-Identifier: Apache-2.0
"""Actions for guards that ride on no request, and what becomes of them.

An action is sent once. A guard that is away reads it when it is back, unless it has expired by then; a guard
that never answers leaves it ``pending``, and its blocks are what its inventory says. One event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from kvcr.dynamo.orders import Orders, RouterMode
from kvcr.errors import ProtocolError
from kvcr.protocol.events import (
    ACTION_VERSION,
    CHANGED,
    Act,
    ActionCode,
    ActionResult,
    action,
    actions_subject,
    envelope,
    event,
)
from kvcr.protocol.pieces import MAX_KEY_BYTES, key_bytes, pieces
from kvcr.protocol.signals import ActionReport
from router_hints.metrics import Metrics

log = logging.getLogger(__name__)

PENDING = "pending"
MAX_BATCHES = 4096


@dataclass(frozen=True)
class Order:
    """One action for one guard."""

    guard: str
    kind: str
    """an action type, such as ``kv.prefetch``"""
    payload: msgspec.Struct


@dataclass
class Batch:
    """The actions of one plan, by action id, and what is known of each."""

    plan_id: str
    sent_s: float
    reports: dict[str, ActionReport] = field(default_factory=dict)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    on_result: Callable[[ActionResult], None] | None = None

    @property
    def pending(self) -> int:
        return sum(report.result == PENDING for report in self.reports.values())

    @property
    def blocks(self) -> int:
        return sum(report.blocks for report in self.reports.values())

    @property
    def byte_count(self) -> int:
        return sum(report.bytes for report in self.reports.values())

    def result(self) -> str:
        """One word for all of them. A guard that had nothing to do does not spoil what others did."""
        codes = {report.result for report in self.reports.values()}
        if PENDING in codes:
            return PENDING
        if codes & CHANGED:
            codes -= {ActionCode.MISS.value}
        return codes.pop() if len(codes) == 1 else ActionCode.PARTIAL.value

    async def settled(self, timeout_s: float) -> None:
        """Wait until every guard answered, or this long."""
        if timeout_s > 0 and self.pending:
            try:
                async with asyncio.timeout(timeout_s):
                    await self.answered.wait()
            except TimeoutError:
                pass


class Actor:
    """Sends actions and collects results. ``publish`` raises nothing and drops while NATS is away."""

    def __init__(
        self,
        publish: Callable[[str, bytes], Awaitable[bool]],
        namespace: str,
        router: str,
        metrics: Metrics,
        orders: Orders | None = None,
    ) -> None:
        """``publish`` says whether the message was handed to NATS."""
        self._orders = orders or Orders()
        self._publish = publish
        self._namespace = namespace
        self._router = router
        self._metrics = metrics
        self._batches: OrderedDict[str, Batch] = OrderedDict()

    def batch(self, plan_id: str) -> Batch | None:
        return self._batches.get(plan_id)

    async def act(
        self,
        plan_id: str,
        orders: Sequence[Order],
        *,
        expires_in_s: float,
        on_result: Callable[[ActionResult], None] | None = None,
    ) -> Batch:
        """Send ``orders``, as further actions of this plan. ``on_result`` is called with each answer."""
        batch = self._batches.get(plan_id)
        if batch is None:
            batch = self._batches[plan_id] = Batch(plan_id, time.monotonic())
            while len(self._batches) > MAX_BATCHES:
                self._batches.popitem(last=False)
        batch.on_result = on_result or batch.on_result
        expires = time.time() + expires_in_s
        split = (Order(each.guard, each.kind, piece) for each in orders for piece in pieces(each.payload))
        for guard, actions in self._by_guard(batch, split):
            act = Act(
                plan_id,
                self._router,
                msgspec.json.encode(envelope(plan_id, actions)),
                expires,
            )
            if self._orders.mode is not RouterMode.ON:
                for each in actions:
                    self._report(
                        batch,
                        each["action_id"],
                        result=ActionCode.REFUSED.value,
                        detail=f"the routers are in mode {self._orders.mode}: nothing is moved",
                    )
                continue
            try:
                sent = await self._publish(actions_subject(self._namespace, guard), event.encode(act))
                problem = "" if sent else "NATS is away"
            except ProtocolError as error:
                problem = str(error)
            for each in actions:
                self._metrics.actions.labels(each["action_type"], "sent" if not problem else "failed").inc()
                if problem:
                    self._report(batch, each["action_id"], result=ActionCode.FAILED.value, detail=problem)
        if not batch.pending:
            batch.answered.set()
        return batch

    def received(self, raw: bytes) -> None:
        """One message from the results subject. Results of other routers' actions are not ours."""
        message = event.decode(raw)
        if not isinstance(message, ActionResult):
            return
        batch = self._batches.get(message.plan_id)
        if batch is None or message.action_id not in batch.reports:
            return
        self._metrics.answered(message.action_type, message.code, message.blocks, message.byte_count)
        self._report(
            batch,
            message.action_id,
            result=message.code,
            blocks=message.blocks,
            bytes=message.byte_count,
            seconds=message.seconds,
            detail=message.detail,
        )
        if not batch.pending:
            batch.answered.set()
        if batch.on_result is not None:
            batch.on_result(message)

    def _by_guard(self, batch: Batch, orders: Iterable[Order]) -> list[tuple[str, list[dict[str, object]]]]:
        by_guard: dict[str, list[dict[str, object]]] = {}
        sizes: dict[str, int] = {}
        messages: list[tuple[str, list[dict[str, object]]]] = []
        for order in orders:
            action_id = f"{batch.plan_id}.{len(batch.reports)}"
            batch.reports[action_id] = ActionReport(guard=order.guard, action=order.kind, result=PENDING)
            batch.answered.clear()
            size = key_bytes(order.payload)
            if order.guard in by_guard and sizes[order.guard] + size > MAX_KEY_BYTES:
                messages.append((order.guard, by_guard.pop(order.guard)))
            sizes[order.guard] = size if order.guard not in by_guard else sizes[order.guard] + size
            by_guard.setdefault(order.guard, []).append(
                action(action_id, order.kind, ACTION_VERSION, order.payload)
            )
        return messages + list(by_guard.items())

    @staticmethod
    def _report(batch: Batch, action_id: object, **fields: object) -> None:
        name = str(action_id)
        batch.reports[name] = msgspec.structs.replace(batch.reports[name], **fields)
