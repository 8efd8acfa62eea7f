# SPDX-License-Identifier: Apache-2.0
"""NATS with users, tokens, keys and TLS: what the environment names gets in, a stranger does not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

import nats
import pytest
from nkeys import encode_seed, from_seed

from kvcr.dynamo.nats_options import nats_options
from kvcr.dynamo.polling import poll
from kvcr.dynamo.publisher import Publisher
from kvcr.errors import ConfigError
from kvcr.graph import infra
from kvcr.metrics import Registry
from router_hints.bus import Bus
from tests.certificates import make_certificates

SEED = encode_seed(bytes(range(32)), 20 << 3)
"""of a user; a test's key, known to all the world"""


def _server(tmp_path: Path, text: str) -> infra.Server:
    config = tmp_path / "nats.conf"
    config.write_text(text)
    return infra.start_nats(tmp_path / "js", tmp_path / "nats.log", config=config)


async def _talk(environment: dict[str, str]) -> None:
    refused: list[Exception] = []

    async def trouble(error: Exception) -> None:
        refused.append(error)

    connection = await nats.connect(
        **nats_options(environment), allow_reconnect=False, connect_timeout=5, error_cb=trouble
    )
    try:
        inbox = await connection.subscribe("hello")
        await connection.publish("hello", b"x")
        assert (await inbox.next_msg(5)).data == b"x"
    finally:
        await connection.close()


CASES = {
    "user": (
        'authorization { users: [{user: "guard", password: "right-one"}] }',
        {"NATS_AUTH_USERNAME": "guard", "NATS_AUTH_PASSWORD": "right-one"},
        {"NATS_AUTH_USERNAME": "guard", "NATS_AUTH_PASSWORD": "wrong-one"},
    ),
    "token": (
        'authorization { token: "right-one" }',
        {"NATS_AUTH_TOKEN": "right-one"},
        {"NATS_AUTH_TOKEN": "wrong-one"},
    ),
    "nkey": (
        f'authorization {{ users: [{{nkey: "{from_seed(SEED).public_key.decode()}"}}] }}',
        {"NATS_AUTH_NKEY": SEED.decode()},
        {},
    ),
}


@pytest.mark.parametrize("kind", CASES)
async def test_the_right_credentials_get_in_and_others_do_not(tmp_path: Path, kind: str) -> None:
    config, good, bad = CASES[kind]
    server = _server(tmp_path, config)
    try:
        await _talk({"NATS_SERVER": server.url, **good})
        with pytest.raises(Exception, match=r"(?i)auth"):
            await _talk({"NATS_SERVER": server.url, **bad})
    finally:
        server.stop()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


async def test_tls_is_checked_on_both_sides(tmp_path: Path, certificates: Path) -> None:
    server = _server(
        tmp_path,
        f"""tls {{
          cert_file: "{certificates}/server.pem", key_file: "{certificates}/server.key"
          ca_file: "{certificates}/ca.pem", verify: true
        }}""",
    )
    url = server.url.replace("nats://", "tls://")
    ca = {"NATS_SERVER": url, "NATS_TLS_CA_CERT_PATH": str(certificates / "ca.pem")}
    client = {
        "NATS_TLS_CLIENT_CERT_PATH": str(certificates / "client.pem"),
        "NATS_TLS_CLIENT_KEY_PATH": str(certificates / "client.key"),
    }
    try:
        await _talk({**ca, **client})
        with pytest.raises(Exception, match=r"(?i)ssl|tls|pipe|closed|eof|lost"):
            await _talk(ca)
        with pytest.raises(Exception, match=r"(?i)verify"):
            await _talk({"NATS_SERVER": url, **client})
    finally:
        server.stop()


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"NATS_TLS_CA_CERT_PATH='/nowhere/ca.pem'"):
        nats_options({"NATS_TLS_CA_CERT_PATH": "/nowhere/ca.pem"})
    with pytest.raises(ConfigError, match=r"NATS_AUTH_CREDENTIALS_FILE='/nowhere/u.creds'"):
        nats_options({"NATS_AUTH_CREDENTIALS_FILE": "/nowhere/u.creds"})


BAD = {"NATS_AUTH_NKEY": "nonsense", "NATS_TLS_CA_CERT_PATH": "/nowhere/ca.pem"}


@pytest.mark.parametrize("variable", BAD)
async def test_credentials_that_are_wrong_are_told_and_taken_once_they_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    server = _server(tmp_path, CASES["nkey"][0])
    monkeypatch.setenv("NATS_SERVER", server.url)
    monkeypatch.setenv("NATS_AUTH_NKEY", SEED.decode())
    monkeypatch.setenv(variable, BAD[variable])
    registry = Registry()
    counters = [registry.counter(f"{what}_total", ".") for what in ("published", "dropped", "connects")]
    publisher = Publisher("dynamo", "g0", *counters)
    bus = Bus(server.url, "router", lambda: None)
    publishing = asyncio.create_task(publisher.run())
    try:
        with caplog.at_level(logging.WARNING):
            bus.start()
            for logger in ("kvcr.dynamo.publisher", "router_hints.bus"):
                told = await poll(lambda name=logger: [r for r in caplog.records if r.name == name], 10)  # type: ignore[misc]
                assert told, f"{logger} says nothing"
        monkeypatch.delenv(variable)
        monkeypatch.setenv("NATS_AUTH_NKEY", SEED.decode())
        assert await poll(lambda: publisher.connected and bus.connected, 10)
        assert counters[2].value() == 1
    finally:
        publishing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await publishing
        await bus.close()
        server.stop()
