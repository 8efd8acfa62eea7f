# SPDX-License-Identifier: Apache-2.0
"""A guard without a pool: a signed record in etcd, inventory on NATS, and answers on its control socket.

Told what it holds by JSON lines on stdin: ``{"store": [tokens...]}``, ``{"remove": [tokens...]}``,
``{"lose": [tokens...]}`` (stored, but the event is not sent), ``{"quiet": true}`` (no heartbeats),
``{"unready": [names...]}`` (guards it cannot read from).
Each is answered by one line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from typing import Any

import msgspec
import nats
import zmq
import zmq.asyncio

from kvcr.dynamo.etcd import connect
from kvcr.dynamo.records import InstanceRecord, encode, record_key
from kvcr.keys import KeySpace, extend_chain, pack_keys
from kvcr.layout import Layout
from kvcr.protocol.events import Heartbeat, Inventory, event, inventory_subject
from kvcr.protocol.peer import (
    PeerHello,
    PeerRefused,
    PeerWelcome,
    Replay,
    Replayed,
    Snapshot,
    SnapshotChunk,
    to_client,
    to_server,
)
from router_hints.table import fold

HEARTBEAT_S = 0.2


class FakeGuard:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.name: str = options.name
        self.incarnation: int = options.incarnation
        self.layout = Layout(
            options.model, "float32", options.block_size, 2, 2, 16, part_bytes=options.part_bytes
        )
        self.held: dict[bytes, None] = {}
        self.batches: list[bytes] = []
        self.quiet = False
        self.unready: tuple[str, ...] = ()
        self.asked = {"snapshot": 0, "replay": 0}

    def keys(self, tokens: list[int]) -> list[bytes]:
        root = KeySpace(self.options.key_namespace, self.layout.model, salt=self.options.salt).root()
        return list(extend_chain(root, tokens, self.options.block_size))

    def batch(self, stored: list[bytes], removed: list[bytes]) -> bytes:
        count = len(stored)
        raw = event.encode(
            Inventory(
                self.name,
                self.incarnation,
                len(self.batches) + 1,
                2,
                pack_keys(stored),  # type: ignore[arg-type]
                bytes(8 * count),
                bytes(4 * count),
                pack_keys(removed),  # type: ignore[arg-type]
            )
        )
        self.batches.append(raw)
        return raw

    def heartbeat(self) -> Heartbeat:
        digest = fold(b"".join(self.held))
        return Heartbeat(self.name, self.incarnation, len(self.batches), len(self.held), digest, self.unready)

    def answer(self, raw: bytes) -> bytes:
        message = to_server.decode(raw)
        if isinstance(message, PeerHello):
            welcome = PeerWelcome(message.op, self.name, self.incarnation, 1, self.layout, "", "", "", 1000)
            return to_client.encode(welcome)
        if isinstance(message, Replay):
            self.asked["replay"] += 1
            return to_client.encode(Replayed(message.op, self.batches[message.first - 1 : message.last]))
        if isinstance(message, Snapshot):
            self.asked["snapshot"] += 1
            keys = pack_keys(list(self.held))  # type: ignore[arg-type]
            count = len(self.held)
            return to_client.encode(
                SnapshotChunk(
                    message.op,
                    self.name,
                    self.incarnation,
                    len(self.batches),
                    keys,
                    bytes(8 * count),
                    bytes(4 * count),
                    -1,
                    self.heartbeat().digest,
                    count,
                )
            )
        return to_client.encode(PeerRefused(0, "version", "not here"))


async def serve_control(guard: FakeGuard, sock: zmq.asyncio.Socket) -> None:
    while True:
        *way_back, raw = await sock.recv_multipart()
        await sock.send_multipart([*way_back, guard.answer(raw)])


async def main(options: argparse.Namespace) -> None:
    guard = FakeGuard(options)
    sock = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    sock.bind(options.control)
    control = sock.getsockopt_string(zmq.LAST_ENDPOINT)
    bus = await nats.connect(os.environ["NATS_SERVER"])
    subject = inventory_subject(options.namespace, guard.name)
    etcd = await connect(os.environ["ETCD_ENDPOINTS"])
    # Longer than any test takes: nobody refreshes it.
    lease = await etcd.grant_lease(3600)
    record = InstanceRecord(
        name=guard.name,
        namespace=options.namespace,
        incarnation=guard.incarnation,
        pid=os.getpid(),
        host="test",
        control_endpoint=control,
        engine_namespace=options.key_namespace,
        layout=guard.layout,
        topology_domains={"rdma_domain": options.domain} if options.domain else {},
    )
    secret = options.secret.encode() or None
    await etcd.put(record_key(options.namespace, guard.name), encode(record, secret), lease=lease)

    async def beat() -> None:
        while True:
            if not guard.quiet:
                await bus.publish(subject, event.encode(guard.heartbeat()))
            await asyncio.sleep(HEARTBEAT_S)

    loop = asyncio.get_running_loop()
    background = [loop.create_task(serve_control(guard, sock)), loop.create_task(beat())]
    print(json.dumps({"kind": "up", "name": guard.name, "control": control}), flush=True)
    reader = asyncio.StreamReader(limit=1 << 24)
    loop.add_signal_handler(signal.SIGTERM, reader.feed_eof)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command: dict[str, Any] = msgspec.json.decode(line)
        if "store" in command or "lose" in command:
            stored = guard.keys(command.get("store") or command["lose"])
            guard.held.update(dict.fromkeys(stored))
            raw = guard.batch(stored, [])
            if "store" in command:
                await bus.publish(subject, raw)
        if "remove" in command:
            removed = [key for key in guard.keys(command["remove"]) if guard.held.pop(key, "") is None]
            await bus.publish(subject, guard.batch([], removed))
        guard.quiet = command.get("quiet", guard.quiet)
        guard.unready = tuple(command.get("unready", guard.unready))
        await bus.flush()
        print(json.dumps({"kind": "done", "held": len(guard.held), "asked": guard.asked}), flush=True)
    # The pipe was closed, or SIGTERM came: leave as a guard does.
    await etcd.revoke(lease)
    for task in background:
        task.cancel()
    await etcd.close()
    await bus.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--namespace", default="dynamo")
    parser.add_argument("--key-namespace", default="dynamo")
    parser.add_argument("--model", default="tiny@test+0")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--part-bytes", type=int, default=4096)
    parser.add_argument("--salt", default="")
    parser.add_argument("--domain", default="")
    parser.add_argument("--secret", default="", help="what the record is signed with")
    parser.add_argument("--incarnation", type=int, default=1)
    parser.add_argument("--control", default="tcp://127.0.0.1:0")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(arguments()))
