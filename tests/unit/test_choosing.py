# SPDX-License-Identifier: Apache-2.0
"""Choosing a way to a peer, when the link is lost meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcr.guard import choosing
from kvcr.guard.canary import Canary
from kvcr.guard.choosing import Chooser
from kvcr.guard.ways import Way, Ways
from kvcr.layout import Layout
from kvcr.pool import SPARE_ROWS
from kvcr.protocol.peer import Leased, Release
from kvcr.transfer.base import LocalRegions, Step, StepResult

SLOTS = 4
LAYOUT = Layout(
    model="m", dtype="float32", block_size=16, layers=1, kv_heads=1, head_size=8, part_bytes=512,
    attention_layout="test", engine="test",
)  # fmt: skip
LEASED = Leased(
    op=1, incarnation=1, lease_id=7, statuses=bytes(1), slots=bytes(4), generations=bytes(8),
    checksums=bytes(8), lease_ms=1000,
)  # fmt: skip


class SlowTransport:
    """Its reads are under way for ever."""

    name = "slow"

    def __init__(self) -> None:
        self.reads: list[Step] = []
        self.closed = False

    def read(self, step: Step, done: Callable[[StepResult], None], quiet: Callable[[Step], None]) -> None:
        self.reads.append(step)

    def close(self) -> None:
        self.closed = True


class Peer:
    """The link to it: says at once what it needs for the transport, leases when the test says so."""

    endpoint = "unix:///peer.sock"

    def __init__(self) -> None:
        self.released: list[int] = []
        self.answer: Callable[[Leased | None, str], None] | None = None

    def hello(self, want: str, done: Callable[[Any, str], None]) -> None:
        done(SimpleNamespace(offer=b""), "")

    def canary_lease(self, transport: str, done: Callable[[Leased | None, str], None]) -> None:
        self.answer = done

    def release(self, message: Release) -> None:
        self.released.append(message.lease_id)

    def chosen(self, chooser: Chooser) -> None:
        raise AssertionError("the link is lost")


@pytest.mark.parametrize("reading", [False, True], ids=["before the lease is answered", "during the read"])
def test_a_canary_that_is_leased_is_released_when_the_link_is_lost(
    monkeypatch: pytest.MonkeyPatch, reading: bool
) -> None:
    monkeypatch.setattr(choosing, "ways", lambda *_: Ways([Way("slow", "", "")], [], {}))
    rows = np.zeros((SLOTS + SPARE_ROWS, LAYOUT.part_bytes), np.uint8)
    local, transport, peer = LocalRegions(LAYOUT, [rows], [0]), SlowTransport(), Peer()
    context: Any = SimpleNamespace(
        local=local,
        canary=Canary(local, SLOTS, incarnation=1),
        plugins={"slow": SimpleNamespace(reach="any", open=lambda *_: transport)},
        loop=SimpleNamespace(later=lambda *_: SimpleNamespace(cancel=lambda: None)),
        choice="auto", place=None, nixl_backend="UCX",
    )  # fmt: skip
    welcome: Any = SimpleNamespace(nixl_metadata=b"")
    chooser = Chooser(context, peer, welcome)
    chooser.start()
    assert peer.answer is not None
    if reading:
        peer.answer(LEASED, "")
    chooser.cancel()
    if not reading:
        peer.answer(LEASED, "")
    assert (len(transport.reads), transport.closed, peer.released) == (int(reading), True, [7])
