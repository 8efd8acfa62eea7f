# SPDX-License-Identifier: Apache-2.0
"""Whose request it is: what the gateway says goes above what the client says, wherever an engine looks."""

from __future__ import annotations

from typing import Any

import pytest

from kvcr.errors import ConfigError
from router_hints.requests import read_prompt
from router_hints.tenants import metadata_key, of_tenant

KEY = "kvcr-tenant"


def _salts(request: dict[str, Any]) -> set[str]:
    """Every salt that router and engine (dynamo.vllm 1.6.1) would find in a request."""
    extra = request.get("extra_args") or {}
    places = (request.get("routing"), request.get("nvext"), extra.get("nvext"), extra.get("vllm_tito"))
    return {place["cache_salt"] for place in places if place and place.get("cache_salt")}


def test_without_tenants_a_request_is_as_it_came() -> None:
    request = {"token_ids": [1], "routing": {"cache_salt": "own"}}
    assert of_tenant(request, {KEY: "acme"}, "") is request


def test_the_tenant_is_the_salt() -> None:
    salted = of_tenant({"token_ids": [1]}, {KEY: "acme"}, KEY)
    assert read_prompt(salted, {}).salt == "acme"
    assert _salts(salted) == {"acme"}


def test_a_clients_own_salt_is_mixed_in_below_wherever_it_put_one() -> None:
    request = {
        "token_ids": [1],
        "routing": {"cache_salt": "own", "priority": 5},
        "nvext": {"cache_salt": "other"},
        "extra_args": {"nvext": {"cache_salt": "own", "x": 1}, "vllm_tito": {"cache_salt": "another"}},
    }
    salted = of_tenant(request, {KEY: "acme"}, KEY)
    assert _salts(salted) == {"acme/own"}
    assert salted["routing"]["priority"] == 5
    assert salted["extra_args"]["nvext"]["x"] == 1
    assert request["routing"] == {"cache_salt": "own", "priority": 5}, "the request itself is not changed"


def test_no_salt_of_a_client_makes_it_another_tenant() -> None:
    """Not even one that looks like a tenant and a salt."""
    found = {
        read_prompt(of_tenant({"routing": {"cache_salt": own}}, {KEY: tenant}, KEY), {}).salt
        for tenant in ("a", "b", "a.b")
        for own in ("", "b", "a/b", "/", "b/a")
    }
    assert len(found) == 15


@pytest.mark.parametrize("metadata", [{}, {KEY: ""}, {KEY: "a/b"}, {KEY: "x" * 257}, {"tenant": "acme"}])
def test_a_request_that_the_gateway_did_not_name_is_refused(metadata: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="the gateway has to set it"):
        of_tenant({"token_ids": [1]}, metadata, KEY)


def test_the_header_must_be_one_that_dynamo_passes_on() -> None:
    assert metadata_key("") == ""
    assert metadata_key("X-Dynamo-Meta-KVCR-Tenant") == KEY
    for header in ("x-tenant-id", "x-dynamo-meta-"):
        with pytest.raises(ConfigError, match="begin with x-dynamo-meta-"):
            metadata_key(header)
