# SPDX-License-Identifier: Apache-2.0
"""The connection of an engine to a guard that does not empty its socket for a while."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from kvcr.client.link import GuardLink
from kvcr.protocol.engine import Finish, Hello, Role, Use, Welcome, to_engine, to_guard
from tests.unit.pools import layout


def test_what_would_be_held_for_ever_is_told_in_order_when_the_guard_listens_again(tmp_path: Path) -> None:
    path = str(tmp_path / "guard.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        link: GuardLink[None] = GuardLink(
            find_socket=lambda: path,
            hello=Hello(1, Role.SCHEDULER, "engine", 0, 0, layout(), "test"),
            attach=lambda welcome, before: None,
        )
        guard, _ = listener.accept()
        with guard:
            guard.settimeout(5)
            guard.recv(1 << 20)
            welcome = Welcome(
                epoch=1,
                guard="g",
                incarnation=1,
                pool_dir="",
                slots=1,
                slot_part_bytes=1,
                control_endpoint="",
                heartbeat_s=0.0,
            )
            guard.send(to_engine.encode(welcome))
            assert link.wait(5)
            fitting = 0
            while link.send(Use(1, bytes(16 * 64))):
                fitting += 1
            link.deliver(Finish("first"))
            link.deliver(Finish("second"))
            for _ in range(fitting):
                guard.recv(1 << 20)
            deadline_s = time.monotonic() + 20
            while link.keeps and time.monotonic() < deadline_s:
                link.receive()
                time.sleep(0.02)
            assert link.send(Finish("third"))
            heard = [to_guard.decode(guard.recv(1 << 20)) for _ in range(3)]
            assert heard == [Finish("first"), Finish("second"), Finish("third")]

            while link.send(Use(1, bytes(16 * 64))):
                pass
            link.deliver(Finish("fourth"))
            assert link.keeps
        link.receive()
        assert not link.keeps, "the end of the connection says it all"
        link.close()
