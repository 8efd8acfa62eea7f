# SPDX-License-Identifier: Apache-2.0
"""When a link to a peer is tried."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcr.config import PeerRecord
from kvcr.guard import channels
from kvcr.guard.link import PROBED_FOR_S, PeerLink
from kvcr.guard.peers import Peers

ENDPOINT = "unix:///nowhere/peer.sock"


def test_a_peer_that_failed_is_tried_again_after_a_while_or_when_something_is_heard_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []

    def connect(path: str) -> Any:
        tried.append(path)
        return Path(path).stat()

    monkeypatch.setattr(channels, "connect_unix", connect)
    known = Peers([])
    context: Any = SimpleNamespace(boot_id="boot", loop=None)
    reasons: list[str] = []
    for now_s in (10.0, 10.1):
        known.link(context, ENDPOINT).when_ready(now_s, reasons.append)
    assert (len(tried), len(reasons)) == (1, 2)
    assert reasons[0] == reasons[1] == "nobody answers on /nowhere/peer.sock: No such file or directory"
    known.link(context, ENDPOINT).when_ready(10.3, reasons.append)
    assert len(tried) == 2
    record = PeerRecord(ENDPOINT, name="a")
    for _ in range(2):
        known.set_found({ENDPOINT: record})
        known.link(context, ENDPOINT).when_ready(10.4, reasons.append)
    assert len(tried) == 3, "once for the news, and not for the same news again"


def test_links_to_guards_that_nobody_knows_any_more_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "connect_unix", lambda path: Path(path).stat())
    known = Peers([])
    context: Any = SimpleNamespace(boot_id="boot", loop=None, layout_digest="")
    pods = [f"unix:///nowhere/{number}.sock" for number in range(3)]
    known.set_found({pod: PeerRecord(pod, name=pod) for pod in pods})
    known.open_ahead(context, "", 10.0)
    assert [link["endpoint"] for link in known.status()] == pods
    # One that a hint names, and nobody else.
    known.link(context, ENDPOINT).when_ready(10.0, lambda reason: None)
    known.set_found({pods[2]: PeerRecord(pods[2], name=pods[2])})
    known.open_ahead(context, "", 20.0)
    assert [link["endpoint"] for link in known.status()] == pods[2:]


def test_a_link_that_was_used_a_moment_ago_is_kept() -> None:
    context: Any = SimpleNamespace(boot_id="boot", loop=None)
    link = PeerLink(context, ENDPOINT, PeerRecord(ENDPOINT))
    assert link.idle(time.monotonic())
    transport: Any = SimpleNamespace(name="shm")
    link.transport = transport
    link.measured("shm", 0, 0.0)
    later_s = time.monotonic() + PROBED_FOR_S
    assert [link.idle(later_s - 1), link.idle(later_s + 1)] == [False, True]
