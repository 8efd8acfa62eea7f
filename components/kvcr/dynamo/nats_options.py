# SPDX-License-Identifier: Apache-2.0
"""Server, credentials and TLS of NATS, from the variables that Dynamo's own runtime reads."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client

from kvcr.errors import ConfigError, KvcrError
from kvcr.sources import is_true

DEFAULT_SERVER = "nats://127.0.0.1:4222"
CONNECT_S = 3


def nats_options(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Keyword arguments of ``nats.connect``: ``servers``, and what follows from the environment.

    Read are ``NATS_SERVER``, several separated by commas; ``NATS_AUTH_USERNAME`` with
    ``NATS_AUTH_PASSWORD``, or ``NATS_AUTH_TOKEN``, ``NATS_AUTH_NKEY`` (a seed), or
    ``NATS_AUTH_CREDENTIALS_FILE``; ``NATS_TLS_CA_CERT_PATH``, and for mutual TLS
    ``NATS_TLS_CLIENT_CERT_PATH`` with ``NATS_TLS_CLIENT_KEY_PATH``. Raises ConfigError for a file that
    cannot be read.
    """
    options: dict[str, Any] = {"servers": (environment.get("NATS_SERVER") or DEFAULT_SERVER).split(",")}
    if username := environment.get("NATS_AUTH_USERNAME"):
        options |= {"user": username, "password": environment.get("NATS_AUTH_PASSWORD", "")}
    elif token := environment.get("NATS_AUTH_TOKEN"):
        options["token"] = token
    elif seed := environment.get("NATS_AUTH_NKEY"):
        options["nkeys_seed_str"] = seed
    elif path := environment.get("NATS_AUTH_CREDENTIALS_FILE"):
        options["user_credentials"] = str(_readable(path, "NATS_AUTH_CREDENTIALS_FILE"))
    context = _tls(environment)
    if context is not None:
        options["tls"] = context
    return options


async def connect_briefly(server: str, name: str, errors: list[str]) -> Client:
    """A connection for a command: it is there within seconds, and does not come back.

    ``errors`` gets what goes wrong on it. Raises KvcrError.
    """

    async def trouble(error: Exception) -> None:
        # Or the library logs a traceback for each attempt.
        errors.append(str(error) or type(error).__name__)

    try:
        # The library would try for two minutes.
        async with asyncio.timeout(CONNECT_S):
            return await nats.connect(
                **{**nats_options(), "servers": server.split(",")},
                name=name,
                allow_reconnect=False,
                connect_timeout=CONNECT_S,
                error_cb=trouble,
            )
    except (nats.errors.Error, OSError, TimeoutError) as error:
        why = "; ".join(dict.fromkeys([*errors, f"{type(error).__name__} {error}".strip()]))
        raise KvcrError(
            f"{server}: {why}; start it, name it with --nats, or give its user in NATS_AUTH_USERNAME and "
            "NATS_AUTH_PASSWORD"
        ) from error


def _tls(environment: Mapping[str, str]) -> ssl.SSLContext | None:
    ca = environment.get("NATS_TLS_CA_CERT_PATH")
    certificate = environment.get("NATS_TLS_CLIENT_CERT_PATH")
    insecure = is_true(environment, "NATS_TLS_INSECURE")
    if not (ca or certificate or insecure):
        return None
    try:
        context = ssl.create_default_context(
            cafile=str(_readable(ca, "NATS_TLS_CA_CERT_PATH")) if ca else None
        )
        if certificate:
            key = environment.get("NATS_TLS_CLIENT_KEY_PATH")
            context.load_cert_chain(
                _readable(certificate, "NATS_TLS_CLIENT_CERT_PATH"),
                _readable(key, "NATS_TLS_CLIENT_KEY_PATH") if key else None,
            )
    except ssl.SSLError as error:
        raise ConfigError(f"the TLS files for NATS do not fit: {error}") from error
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _readable(path: str, variable: str) -> Path:
    try:
        with open(path, "rb"):
            return Path(path)
    except OSError as error:
        raise ConfigError(f"{variable}={path!r} cannot be read: {error.strerror}") from error
