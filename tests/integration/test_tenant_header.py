# SPDX-License-Identifier: Apache-2.0
"""A router behind a gateway that names the tenant: what a client says of its salt stays below that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.router_stack import Stack, Worker
from tests.integration.tiny_tokenizer import write_model

pytestmark = pytest.mark.timeout(240)

HEADER = "x-dynamo-meta-kvcr-tenant"


@pytest.fixture(scope="module")
def behind_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Worker]]:
    folder = tmp_path_factory.mktemp("tenants")
    stack = Stack(folder, write_model(folder / "tiny"))
    try:
        stack.frontend()
        stack.router("--tenant-header", HEADER)
        worker = stack.worker("w0")
        # Nothing here names a tenant, so that being refused is being served.
        stack.ready(status=400)
        yield stack, worker
    finally:
        stack.close()


def _salts(worker: Worker) -> set[str]:
    """What the engine could take for the salt of the next request it gets."""
    request: dict[str, Any] = worker.expect("request")["request"]
    extra = request.get("extra_args") or {}
    return {place["cache_salt"] for place in (request["routing"], extra["nvext"]) if "cache_salt" in place}


def test_a_request_of_no_tenant_is_refused_and_says_why(behind_gateway: tuple[Stack, Worker]) -> None:
    stack, worker = behind_gateway
    for headers in ({}, {"x-tenant-id": "acme"}, {HEADER: "a/b"}):
        assert stack.ask("who am I?", headers=headers)[0] == 400
    assert worker.silent("request")
    assert f"header {HEADER} is ''; the gateway has to set it" in (stack.directory / "router.log").read_text()


def test_a_clients_own_salt_does_not_make_it_another_tenant(behind_gateway: tuple[Stack, Worker]) -> None:
    stack, worker = behind_gateway
    for own, salt in (({}, "acme"), ({"nvext": {"cache_salt": "bob"}}, "acme/bob")):
        status, _ = stack.ask("whose is it?", headers={HEADER: "acme"}, **own)
        assert status == 200
        assert _salts(worker) == {salt}
    status, _ = stack.ask("whose is it?", headers={HEADER: "acme", "x-tenant-id": "bob"})
    assert status == 200
    assert _salts(worker) == {"acme/bob"}
