# SPDX-License-Identifier: Apache-2.0
"""Whose request it is. A tenant's salt keeps its blocks to itself, so it must not be the client who says it.

A gateway in front of the frontend authenticates, and puts the tenant into a header that it takes from nobody
else. Here the tenant becomes the head of the request's salt, wherever the engine would read one; a salt of
the client's own is only mixed in below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcr.errors import ConfigError

HEADER_PREFIX = "x-dynamo-meta-"
"""Dynamo hands headers of such names to components as metadata, without the prefix."""
SEPARATOR = "/"
"""Between tenant and the client's own salt. No tenant's name has it, so that none is the head of another."""
MAX_TENANT = 256
"""characters"""


def metadata_key(header: str) -> str:
    """The key in the metadata for the setting ``--tenant-header``; empty for none. Raises ConfigError."""
    name = header.lower()
    if not name:
        return ""
    if not name.removeprefix(HEADER_PREFIX) or not name.startswith(HEADER_PREFIX):
        raise ConfigError(
            f"--tenant-header {header!r}: Dynamo passes on headers that begin with {HEADER_PREFIX}, "
            f"e.g. {HEADER_PREFIX}kvcr-tenant"
        )
    return name.removeprefix(HEADER_PREFIX)


def header_of(key: str) -> str:
    """The header of :func:`metadata_key`; empty for none."""
    return f"{HEADER_PREFIX}{key}" if key else ""


def of_tenant(request: dict[str, Any], metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    """The request with its tenant's salt, and the client's below it; as it is when ``key`` is empty.

    Raises ConfigError when the gateway named no tenant: it must not pass for one.
    """
    if not key:
        return request
    tenant = metadata.get(key) or ""
    if not tenant or SEPARATOR in tenant or len(tenant) > MAX_TENANT:
        raise ConfigError(
            f"header {HEADER_PREFIX}{key} is {tenant[:MAX_TENANT]!r}; the gateway has to set it to the "
            f"tenant: 1 to {MAX_TENANT} characters, no {SEPARATOR!r}"
        )
    routing = dict(request.get("routing") or {})
    own = str(routing.get("cache_salt") or "")
    salt = f"{tenant}{SEPARATOR}{own}" if own else tenant
    extra = dict(request.get("extra_args") or {})
    extra["nvext"] = {**(extra.get("nvext") or {}), "cache_salt": salt}
    # dynamo.vllm 1.6.1 takes the first salt it finds: in nvext, in extra_args.nvext, in extra_args.vllm_tito.
    if isinstance(extra.get("vllm_tito"), dict):
        extra["vllm_tito"] = {**extra["vllm_tito"], "cache_salt": salt}
    salted = {**request, "routing": {**routing, "cache_salt": salt}, "extra_args": extra}
    if isinstance(request.get("nvext"), dict):
        salted["nvext"] = {**request["nvext"], "cache_salt": salt}
    return salted
