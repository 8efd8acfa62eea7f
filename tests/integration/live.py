# SPDX-License-Identifier: Apache-2.0
"""A deployment whose guards are real: etcd, NATS, frontend, router, guards with pools, and for each guard an
engine client that deposits and fetches as a connector does, beside a fake worker that answers requests."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from engine_client import LAYOUT, EngineClient, GuardProcess, M
from waiting import PATIENCE_S

from kvcr.dynamo.etcd import connect
from kvcr.dynamo.records import decode, record_key
from kvcr.errors import ProtocolError
from kvcr.harness import Harness, headers
from kvcr.keys import BlockKey, KeySpace, extend_chain, pack_keys
from kvcr.protocol.engine import (
    BlockStatus,
    DropG1,
    DroppedG1,
    Granted,
    Source,
    ToEngine,
    to_engine,
)
from kvcr.protocol.events import FetchPayload
from tests.integration.router_stack import BLOCK, Stack, Worker, at_once, until
from tests.integration.test_router import prompt_of
from tests.integration.tiny_tokenizer import tokenize, write_model

ANSWER = [72, 73, 74]
"""What a fake worker decodes."""


class Engine(EngineClient):
    """An engine that always reads its socket, and drops from G1 what it is told to."""

    def __init__(self, guard: GuardProcess, engine_id: str) -> None:
        super().__init__(guard, engine_id)
        self.dropped: list[int] = []
        """engine hashes that the guard asked to drop from G1"""
        self._inbox: queue.Queue[ToEngine] = queue.Queue()
        self._closed = False
        self.scheduler.settimeout(0.2)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def receive(self, sock: socket.socket, kind: type[M]) -> M:
        """As in :class:`EngineClient`; others than this kind are dropped."""
        if sock is not self.scheduler or not hasattr(self, "_listener"):
            return super().receive(sock, kind)
        while True:
            message = self._inbox.get(timeout=PATIENCE_S)
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        self._closed = True
        self._listener.join(5)
        super().close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                message = to_engine.decode(self.scheduler.recv(1 << 20))
            except TimeoutError:
                continue
            except (OSError, ProtocolError):
                return
            if isinstance(message, DropG1):
                hashes = np.frombuffer(message.engine_hashes, "<u8").tolist()
                self.dropped += hashes
                self.send(self.scheduler, DroppedG1(message.drop_id, len(hashes)))
            else:
                self._inbox.put(message)


class Node:
    """One worker with its guard: what a test looks at."""

    def __init__(self, live: Live, name: str, *arguments: str) -> None:
        self.name = name
        self.guard = GuardProcess(
            live.pools,
            name,
            *("--cluster", "--namespace", "dynamo", *arguments),
            slots=live.slots,
            env=live.stack.environment | live.topology(name),
        )
        self.engine = Engine(self.guard, f"engine-{name}")
        self.worker: Worker | None = None

    def has(self, tokens: Sequence[int], salt: str = "") -> list[bool]:
        """Which blocks of these tokens are in its pool, byte for byte."""
        return self.engine.right(keys_of(tokens, salt))

    def fetch(self, hint: dict[str, Any], tokens: Sequence[int]) -> list[BlockStatus]:
        """What a connector does with the hint of a request: fetch, wait, load, finish."""
        payload = msgspec.convert(hint["actions"][0]["payload"], FetchPayload)
        keys = keys_of(tokens)
        last = max(source.first + source.count for source in payload.sources)
        assert keys[last - 1].hex() == payload.last_key, "router and engine name other blocks"
        self.engine.start_fetch(
            "request",
            keys[:last],
            root_of(),
            [Source(s.endpoint, s.first, s.count) for s in payload.sources],
            deadline_ms=payload.deadline_ms,
            give_up_ms=payload.give_up_ms,
            no_retain=payload.no_retain,
            move=payload.mode == "move",
        )
        return [BlockStatus(value) for value in self.engine.end_of_fetch().statuses]

    def close(self) -> None:
        self.engine.close()
        self.guard.close()


class Live:
    """Nodes ``a``, ``b``, ... behind one router. Ended by :meth:`close`."""

    def __init__(
        self,
        directory: Path,
        *router: str,
        nodes: str = "ab",
        slots: int = 384,
        tokens_per_s: float = 1000.0,
        bytes_per_s: float = 2e8,
        lease_s: int = 20,
        prepare: Callable[[Stack], None] = lambda _: None,
        places: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """``prepare`` sees the stack when nothing but its servers runs. ``tokens_per_s`` and ``bytes_per_s``
        are what computing and copying take, for the router too. ``places``: Dynamo's topology domains of a
        node; the host is one of them."""
        self._places, self._directory = places or {}, directory
        self.tokens_per_s = tokens_per_s
        self.slots = slots
        self.pools = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvcr-live-"))
        self.stack = Stack(directory, write_model(directory / "tiny"), lease_s=lease_s)
        prepare(self.stack)
        self.nodes: dict[str, Node] = {}
        self._busy_since_s = 0.0
        self._blocked: list[http.client.HTTPConnection] = []
        try:
            self.stack.frontend()
            prices = ["--prefill-tokens-per-s", f"{tokens_per_s}", "--host-bytes-per-s", f"{bytes_per_s}"]
            self.stack.router(*prices, *router)
            at_once(*(partial(self._start, name) for name in nodes))
            self.nodes = {name: self.nodes[name] for name in nodes}
            asyncio.run(self._registered())
            at_once(*(partial(self.start_worker, name) for name in nodes))
            self.stack.ready()
            self.kv: Harness = self.stack.harness()
            until(self.joined, "the router knows every guard and its worker")
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Node:
        try:
            return self.__dict__["nodes"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(name) from None

    def close(self) -> None:
        for connection in self._blocked:
            connection.close()
        if self.nodes:
            at_once(*(node.close for node in self.nodes.values()))
        self.stack.close()
        shutil.rmtree(self.pools, ignore_errors=True)

    def topology(self, node: str) -> dict[str, str]:
        """Where this node is, as Dynamo's processes are told."""
        if node not in self._places:
            return {}
        mount = self._directory / f"topology of {node}"
        mount.mkdir()
        for domain, name in self._places[node].items():
            (mount / domain).write_text(name)
        return {"DYN_TOPOLOGY_ENABLED": "true", "DYN_TOPOLOGY_MOUNT_PATH": str(mount)}

    # --- as a harness -------------------------------------------------------------------------------

    def tokens(self, prompt: str) -> list[int]:
        return tokenize(self.stack.model, prompt)

    def ran(self, session: str, prompt: str, node: str, *, parent: str = "", tenant: str = "") -> list[int]:
        """A turn of a session on ``node``, whose engine deposits prompt and answer; returns its tokens."""
        tokens = self.tokens(prompt)
        nvext = self.pin(node)
        if tenant:
            nvext["cache_salt"] = tenant
        header = headers(session, parent=parent) | self.computing(len(tokens))
        status, answer = self.stack.ask(prompt, headers=header, nvext=nvext)
        assert status == 200, answer
        tokens += ANSWER
        self.deposit(node, tokens, tenant)
        return tokens

    def computing(self, tokens: int) -> dict[str, str]:
        """A header that makes a fake worker take as long as computing so many tokens would."""
        return {"x-dynamo-meta-prefill": f"{tokens / self.tokens_per_s:.3f}"}

    def deposit(self, node: str, tokens: Sequence[int], tenant: str = "") -> None:
        """The engine of ``node`` stores these tokens' blocks, and the router knows."""
        engine, keys = self.nodes[node].engine, keys_of(tokens, tenant)
        missing = [i for i, there in enumerate(engine.right(keys)) if not there]
        if missing:
            first = missing[0]
            parent = bytes(keys[first - 1]) if first else root_of(tenant)
            before = self.stack.indexed(node)
            engine.deposit(keys[first:], parent, first=first)
            until(lambda: self.stack.indexed(node) >= before + len(missing), f"{node} is indexed")

    def press(self, node: str, blocks: int, seed: str) -> None:
        """The engine of ``node`` stores so many blocks of something else, whatever has to go for it."""
        engine, keys = self.nodes[node].engine, keys_of(self.tokens(prompt_of(blocks, seed)))

        def granted() -> Granted | None:
            found = engine.reserve(len(keys))
            if len(found.slots) == 4 * len(keys):
                return found
            # Evicted slots cool down for two seconds.
            engine.give_back(found)
            return None

        engine.deposit(keys, root_of(), granted=until(granted, "slots are granted", every_s=0.3))

    def keep_busy(self, node: str, blocks: int = 400, seed: str = "long") -> None:
        """A long prompt hangs on ``node`` until the end."""
        self._blocked.append(self._hang(node, blocks, seed))

    def trending(self) -> None:
        """Wait until what :meth:`keep_busy` began is no spike any more: the slow average is of a minute."""
        time.sleep(max(0.0, self._busy_since_s + 50.0 - time.monotonic()))

    @contextlib.contextmanager
    def busy(self, node: str, blocks: int = 400) -> Iterator[None]:
        """A long prompt hangs on ``node`` for so long."""
        connection = self._hang(node, blocks)
        try:
            yield
        finally:
            connection.close()

    def _hang(self, node: str, blocks: int, seed: str = "long") -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.stack.http_port, timeout=600)
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": prompt_of(blocks, seed)}],
            "nvext": self.pin(node),
        }
        header = {"content-type": "application/json", "x-dynamo-meta-behaviour": "hang"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), header)
        worker = self.nodes[node].worker
        assert worker is not None
        while len(worker.expect("request")["request"]["token_ids"]) < blocks * BLOCK:
            pass  # of an earlier one
        self._busy_since_s = time.monotonic()
        return connection

    def pin(self, node: str) -> dict[str, Any]:
        worker = self.nodes[node].worker
        assert worker is not None
        return {"annotations": [f"kvcr.worker:{worker.worker_id}"]}

    def _start(self, name: str) -> None:
        self.nodes[name] = Node(self, name)

    def start_worker(self, name: str) -> None:
        """The fake worker beside the guard of this node."""
        node = self.nodes[name]
        node.worker = self.stack.worker(f"w{name}", "--control", node.guard.endpoint)

    async def _registered(self) -> None:
        """Every guard's record names the layout of its engine."""
        async with await connect(self.stack.etcd.url) as etcd:
            deadline = time.monotonic() + 60.0
            for name in self.nodes:
                key = record_key("dynamo", name)
                while (found := await etcd.get(key)) is None or decode(key, found.value, None).layout is None:
                    assert time.monotonic() < deadline, f"guard {name} does not register"
                    await asyncio.sleep(0.1)

    def joined(self) -> bool:
        """Whether the router knows every guard, and the worker beside it."""
        metrics = self.stack.metrics()
        return (
            metrics.get('kvcr_router_workers{state="ready"}') == len(self.nodes)
            and metrics.get("kvcr_router_ranks_without_guard") == 0
            and all(f'kvcr_router_index_blocks{{guard="{name}"}}' in metrics for name in self.nodes)
        )

    def ask(self, session: str, prompt: str, **options: Any) -> tuple[Node, dict[str, Any] | None]:
        """One request of a session: the node it went to, and its hint."""
        workers = {node: node.worker for node in self.nodes.values() if node.worker is not None}
        for worker in workers.values():
            worker.silent("-")
        extra = options.pop("headers", {})
        status, answer = self.stack.ask(prompt, headers=headers(session) | extra, **options)
        assert status == 200, answer

        def seen() -> tuple[Node, dict[str, Any] | None] | None:
            for node, worker in workers.items():
                if not worker.silent("request"):
                    return node, worker.said[-1]["request"].get("kv_hint")
            return None

        found: tuple[Node, dict[str, Any] | None] = until(seen, "a worker says that it got the request")
        return found

    def settled(self, signal_id: str, result: str = "done") -> Any:
        """The reply to a signal, once it has this result."""

        def look() -> Any:
            reply = self.kv.signal(signal_id)
            return reply if reply is not None and reply.result == result else None

        try:
            return until(look, f"signal {signal_id} is {result}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.kv.signal(signal_id)}") from None


def root_of(salt: str = "") -> bytes:
    """Engine clients are in the key namespace ``test``."""
    return KeySpace("test", LAYOUT.model, salt=salt).root()


def keys_of(tokens: Sequence[int], salt: str = "") -> list[BlockKey]:
    return extend_chain(BlockKey(root_of(salt)), list(tokens), BLOCK)


def engine_hashes(keys: Sequence[BlockKey]) -> list[int]:
    """What the engine client calls these blocks."""
    hashes: list[int] = np.frombuffer(pack_keys(keys), "<u8")[::2].tolist()
    return hashes
