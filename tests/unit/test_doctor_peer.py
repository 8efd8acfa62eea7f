# SPDX-License-Identifier: Apache-2.0
"""``kvcr doctor --peer``: what its own guard says when it cannot take part."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from kvcr.cli import doctor_peer
from kvcr.config import PeerRecord
from kvcr.errors import ConfigError, GuardUnavailable
from kvcr.protocol.engine import Hello, Rejected, to_engine, to_guard
from tests.unit.pools import layout


def answering(path: Path, answer: bytes | None) -> threading.Thread:
    """A guard that gives one answer to one engine, or hangs up."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with listener, listener.accept()[0] as engine:
            assert isinstance(to_guard.decode(engine.recv(1 << 18)), Hello)
            if answer is not None:
                engine.send(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (to_engine.encode(Rejected("pool", "/dev/shm has no room")), "/dev/shm has no room"),
        (None, "it closed the connection"),
    ],
)
def test_why_no_pool_was_made_here_is_told(tmp_path: Path, answer: bytes | None, why: str) -> None:
    guard = answering(tmp_path / "s", answer)
    with pytest.raises(GuardUnavailable, match=why):
        doctor_peer._attach(str(tmp_path / "s"), layout())
    guard.join()


def test_a_guard_that_says_nothing_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_peer, "START_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with pytest.raises(GuardUnavailable, match="timed out"):
            doctor_peer._attach(str(tmp_path / "s"), layout())


def test_a_key_that_is_none_is_told_by_whose_it_is() -> None:
    record = PeerRecord("tcp://127.0.0.1:9", name="g0", curve_key="zz")
    with pytest.raises(ConfigError, match="the CURVE key of g0 is 'zz'"):
        doctor_peer._Control(record, b"x" * 16)
