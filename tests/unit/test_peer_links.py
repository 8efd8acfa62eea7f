# SPDX-License-Identifier: Apache-2.0
"""When a link to a peer is tried."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcr.config import PeerRecord
from kvcr.guard import channels
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
