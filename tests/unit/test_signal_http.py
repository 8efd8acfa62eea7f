# SPDX-License-Identifier: Apache-2.0
"""The signal API over HTTP, with the client for harness authors; behind it a router without processes."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import AsyncIterator, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from signal_desk import Router, World, tokens_of

from kvcr.errors import ConfigError
from kvcr.harness import Harness, HarnessError, NotAllowed, RouterAway, SignalRefused, headers
from kvcr.protocol.signals import MAX_SIGNAL_BYTES, Signal, check
from router_hints.http import SignalServer
from router_hints.intake import Intake, Unavailable
from router_hints.settings import parse
from router_hints.tokens import Tokens

HISTORY = tokens_of(4000)
TOKEN, BOUND = "operator-token-0123", "tenant-one-token-0123"


class Served:
    """A router whose signal API listens."""

    def __init__(self, router: Router, tokens: Tokens) -> None:
        self.router = router
        self.others: dict[str, Intake] = {}
        self.owner = ""
        self.intake = Intake(
            router.handler, router.metrics, lambda _: self.owner, lambda: list(self.others), self._ask
        )
        self.server = SignalServer("127.0.0.1", 0, tokens, self.intake, router.metrics)
        self.port = 0

    async def _ask(self, router: str, payload: bytes, timeout_s: float) -> bytes:
        if router not in self.others:
            raise Unavailable(f"router {router} does not answer")
        return await self.others[router].answer(payload)

    def client(self, **options: Any) -> Harness:
        return Harness(f"http://127.0.0.1:{self.port}", **options)

    async def call(self, work: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(work)

    async def raw(
        self, method: str, path: str, body: bytes | None = None, **header: str
    ) -> tuple[int, dict[str, Any]]:
        def work() -> tuple[int, dict[str, Any]]:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            try:
                connection.request(method, path, body, header)
                response = connection.getresponse()
                return response.status, json.loads(response.read() or b"{}")
            finally:
                connection.close()

        found: tuple[int, dict[str, Any]] = await asyncio.to_thread(work)
        return found


async def serve(tokens: Tokens | None = None) -> Served:
    router = Router(World(2))
    await router.turn("main", HISTORY, pin="g1")
    router.world.store("g1", HISTORY)
    served = Served(router, tokens or Tokens(None))
    served.port = await served.server.start()
    return served


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = await serve()
    yield made
    await made.server.close()


@pytest.fixture
async def guarded() -> AsyncIterator[Served]:
    made = await serve(Tokens({TOKEN: "", BOUND: "one"}))
    yield made
    await made.server.close()


# --- the client of harness authors --------------------------------------------------------------------------


async def test_a_harness_follows_a_session_from_fork_to_end(served: Served) -> None:
    kv, router = served.client(), served.router
    router.busy("g1")
    reply = await served.call(lambda: kv.fork("child", parent="main", isl=4040, starts_in_s=1.0, wait_s=0))
    assert (reply.decision, reply.guard, reply.result) == ("prefetch", "g2", "pending")
    router.answer(reply.plan_id, blocks=250, byte_count=99)
    again = await served.call(lambda: kv.signal(reply.signal_id))
    assert (again.result, again.blocks, again.bytes, again.plan_id) == ("done", 250, 99, reply.plan_id)
    assert again.actions[0].guard == "g2"
    info = await served.call(lambda: kv.session("child"))
    assert (info.parent, info.home, info.announced[0].state) == ("main", "g2", "ready")
    main = await served.call(lambda: kv.session("main"))
    assert (main.places[0].guard, main.places[0].blocks, main.children) == ("g1", 250, ["child"])
    for call in (
        lambda: kv.next_turn("main", starts_in_s=1.0, wait_s=0),
        lambda: kv.wake_up("main", idle_s=2400, wait_s=0),
        lambda: kv.one_off("once", isl=100),
        lambda: kv.pin("main", ttl_s=5.0, wait_s=0),
        lambda: kv.compaction("main", keeps=160, next_in_s=None, wait_s=0),
        lambda: kv.sub_agent_done("child"),
        lambda: kv.session_end("main", wait_s=0),
    ):
        assert (await served.call(call)).plan_id
    assert await served.call(lambda: kv.session("main")) is None
    assert await served.call(lambda: kv.signal("nobody's")) is None
    assert await served.call(lambda: kv.withdraw("nobody's")) is None


async def test_a_withdrawn_turn(served: Served) -> None:
    kv = served.client()
    served.router.busy("g1")
    reply = await served.call(lambda: kv.next_turn("main", starts_in_s=1.0, wait_s=0))
    gone = await served.call(lambda: kv.withdraw(reply.signal_id, wait_s=0))
    assert (gone.result, gone.plan_id) == ("withdrawn", reply.plan_id)
    assert [action.action for action in gone.actions] == ["kv.prefetch", "kv.cancel"]


def test_a_bad_signal_is_refused_before_it_is_sent() -> None:
    kv = Harness("http://127.0.0.1:1")
    with pytest.raises(SignalRefused, match=r"'isl' is -4; expected `int` >= 0") as refused:
        kv.fork("child", parent="main", isl=-4)
    assert (refused.value.field, refused.value.value) == ("isl", "-4")
    with pytest.raises(SignalRefused, match="no such field"):
        kv.next_turn("main", colour="red")
    with pytest.raises(RouterAway, match="no router at"):
        kv.next_turn("main")
    for url in ("127.0.0.1:80", "ftp://x", "", "http://x:99999", "http://[::1"):
        with pytest.raises(ConfigError):
            Harness(url)


def test_headers_for_a_request() -> None:
    signal = check({"kind": "one_off", "session": "a", "signal_id": "s"})
    built = headers("a", parent="b", signal=signal)
    assert built["x-dynamo-session-id"] == "a"
    assert built["x-dynamo-parent-session-id"] == "b"
    assert msgspec.json.decode(built["x-dynamo-meta-kvcr"], type=Signal) == signal
    assert "x-dynamo-meta-kvcr" not in headers("a")


# --- HTTP itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b'{"kind": "fork", "session": "a", "parent": "b", "isl": -1}', 400, "isl"),
        (b'{"kind": "explode", "session": "a"}', 400, "kind"),
        (b"not json", 400, ""),
        (b"", 400, ""),
        (b"[" * 5000, 400, ""),
        (b"x" * (MAX_SIGNAL_BYTES + 1), 413, None),
    ],
)
async def test_a_bad_body_is_refused_and_named(
    served: Served, body: bytes, status: int, field: str | None
) -> None:
    got, answer = await served.raw("POST", "/v1/kv/signals", body)
    assert got == status
    assert answer["error"]["message"]
    if field is not None:
        assert answer["error"]["field"] == field
        assert answer["error"]["limit"]
    assert (await served.raw("GET", "/v1/kv/sessions/main"))[0] == 200


async def test_paths_and_parameters_that_do_not_exist(served: Served) -> None:
    signal = b'{"kind": "next_turn", "session": "main"}'
    assert (await served.raw("GET", "/v1/kv/nothing"))[0] == 404
    assert (await served.raw("PUT", "/v1/kv/signals", signal))[0] == 405
    assert (await served.raw("GET", "/v1/kv/sessions/nobody"))[0] == 404
    for wait in ("x", "-1", "1e9", "nan"):
        status, answer = await served.raw("POST", f"/v1/kv/signals?wait_s={wait}", signal)
        assert (status, answer["error"]["field"]) == (400, "wait_s")
    assert (await served.raw("POST", "/v1/kv/signals?wait_s=0", signal))[0] == 200


async def test_names_may_hold_anything(served: Served) -> None:
    name = "a/b?c=ü#%20 d"
    await served.router.turn(name, HISTORY)
    info = await served.call(lambda: served.client().session(name))
    assert info.session == name


async def test_a_port_that_is_taken_is_a_clear_error(served: Served) -> None:
    second = SignalServer("127.0.0.1", served.port, Tokens(None), served.intake, served.router.metrics)
    with pytest.raises(ConfigError, match=f"--signals-port {served.port}"):
        await second.start()


# --- who may -----------------------------------------------------------------------------------------------


async def test_without_a_token_nothing_is_said(guarded: Served) -> None:
    for token in ("", "wrong-token-0123456", TOKEN[:-1]):
        kv = guarded.client(token=token)
        with pytest.raises(NotAllowed):
            await guarded.call(lambda kv=kv: kv.session("main"))
    kv = guarded.client(token=TOKEN)
    assert (await guarded.call(lambda: kv.session("main"))).session == "main"


async def test_a_tenants_token_is_good_for_that_tenant_only(guarded: Served) -> None:
    router = guarded.router
    for tenant in ("one", "two"):
        await router.turn("own", HISTORY, tenant=tenant)
    mine = guarded.client(token=BOUND)
    assert (await guarded.call(lambda: mine.session("own"))).tokens == 4000
    assert await guarded.call(lambda: mine.session("main")) is None, "a session without a tenant is not its"
    with pytest.raises(NotAllowed, match="403"):
        await guarded.call(lambda: guarded.client(token=BOUND, tenant="two").session("own"))
    await guarded.call(lambda: mine.session_end("own", wait_s=0))
    operator = guarded.client(token=TOKEN, tenant="two")
    assert (await guarded.call(lambda: operator.session("own"))).tokens == 4000
    assert await guarded.call(lambda: mine.session("own")) is None


def test_the_token_file(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_text("# operators\nfirst-token-012345678\n\nsecond-token-01234567 one # a tenant\n")
    tokens = Tokens.read(str(good))
    assert tokens.tenant("Bearer first-token-012345678", "any") == "any"
    assert tokens.tenant("Bearer second-token-01234567", "") == "one"
    for text, what in (("short", "line 1"), ("a-token-0123456789 one two", "line 1"), ("#", "has no token")):
        bad = tmp_path / "bad"
        bad.write_text(text)
        with pytest.raises(ConfigError, match=what):
            Tokens.read(str(bad))
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokens.read(str(tmp_path / "missing"))


def test_beyond_loopback_a_token_is_required(tmp_path: Path) -> None:
    required = ["--model-path", "m", "--model-name", "n", "--block-size", "16"]
    file = tmp_path / "tokens"
    file.write_text("first-token-012345678\n")
    for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1"):
        assert not parse([*required, "--signals-host", host], {}).signals_tokens.needed
    for host in ("0.0.0.0", "::", "10.0.0.4", "router.example"):
        with pytest.raises(ConfigError, match="--signals-token-file"):
            parse([*required, "--signals-host", host], {})
        options = [*required, "--signals-host", host, "--signals-token-file", str(file)]
        assert parse(options, {}).signals_tokens.needed


# --- replicas behind it ----------------------------------------------------------------------------------


async def test_a_signal_goes_to_the_owner_of_its_session(served: Served) -> None:
    owner = Router(World(2), "router-2")
    await owner.turn("main", HISTORY, pin="g1")
    served.others["router-2"] = Intake(owner.handler, owner.metrics, lambda _: "", list, served._ask)
    served.owner = "router-2"
    kv = served.client()
    reply = await served.call(lambda: kv.next_turn("main", signal_id="s1", starts_in_s=30.0))
    assert owner.handler.reply("", "s1") is not None
    assert served.router.handler.reply("", "s1") is None
    assert (await served.call(lambda: kv.signal("s1"))).plan_id == reply.plan_id
    assert (await served.call(lambda: kv.session("main"))).announced[0].signal_id == "s1"
    assert (await served.call(lambda: kv.withdraw("s1"))).result == "withdrawn"


async def test_an_owner_that_does_not_answer_is_done_without(served: Served) -> None:
    served.owner = "router-gone"
    kv = served.client()
    await served.call(lambda: kv.next_turn("main", signal_id="s1"))
    assert served.router.handler.reply("", "s1") is not None
    assert (await served.call(lambda: kv.session("main"))).session == "main"


async def test_over_nats_the_answer_is_the_same_and_a_bad_signal_names_its_field(served: Served) -> None:
    good = b'{"kind": "next_turn", "session": "main", "signal_id": "n1"}'
    answer = json.loads(await served.intake.message(good, {}))
    assert (answer["signal_id"], answer["session"]) == ("n1", "main")
    other = json.loads(await served.intake.message(good, {"X-Tenant-Id": "one"}))
    assert other["plan_id"] != answer["plan_id"], "another tenant's signal"
    bad = json.loads(await served.intake.message(b'{"kind": "next_turn", "session": "main", "isl": -1}', {}))
    assert bad["error"]["field"] == "isl"


def test_one_error_tree() -> None:
    assert issubclass(SignalRefused, HarnessError)
    assert issubclass(NotAllowed, HarnessError)
    assert issubclass(RouterAway, HarnessError)


class Replies(BaseHTTPRequestHandler):
    """Answers like a router that knows nothing, and closes each connection after three requests, unasked."""

    protocol_version = "HTTP/1.1"
    ports: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        port = self.client_address[1]
        self.ports.append(port)
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.close_connection = self.ports.count(port) == 3


def test_signals_share_a_connection_and_outlive_its_end() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Replies) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        client = Harness(f"http://127.0.0.1:{server.server_port}")
        assert [client.signal("s") for _ in range(9)] == [None] * 9
        client.close()
        server.shutdown()
        serving.join()
    assert len(Replies.ports) == 9
    assert len(set(Replies.ports)) == 3
