# SPDX-License-Identifier: Apache-2.0
"""Who may send signals over HTTP, and for which tenant."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from pathlib import Path

from kvcr.errors import ConfigError
from kvcr.protocol.signals import TENANT_HEADER

MIN_TOKEN = 16


class Tokens:
    """Who may send signals, and for which tenant."""

    def __init__(self, tenants: Mapping[str, str] | None) -> None:
        """``tenants`` by token; an empty tenant may name any. None: nobody needs a token."""
        self._tenants = tenants

    @classmethod
    def read(cls, path: str) -> Tokens:
        """From a file of lines ``token`` or ``token tenant``; none for an empty path. Raises ConfigError."""
        if not path:
            return cls(None)
        try:
            lines = Path(path).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--signals-token-file {path!r} cannot be read: {error}") from error
        tenants: dict[str, str] = {}
        for number, line in enumerate(lines, start=1):
            words = line.split("#", 1)[0].split()
            if len(words) > 2 or (words and len(words[0]) < MIN_TOKEN):
                raise ConfigError(
                    f"--signals-token-file {path!r} line {number}: expected a token of at least {MIN_TOKEN} "
                    "characters, and a tenant if it may act for that one only"
                )
            if words:
                tenants[words[0]] = words[1] if len(words) == 2 else ""
        if not tenants:
            raise ConfigError(f"--signals-token-file {path!r} has no token")
        return cls(tenants)

    @property
    def needed(self) -> bool:
        return self._tenants is not None

    def tenant(self, authorization: str, named: str) -> str:
        """The tenant a request acts for. Raises PermissionError: no or an unknown token; ValueError: a
        tenant that is not the token's."""
        if self._tenants is None:
            return named
        given = authorization.removeprefix("Bearer ").strip()
        bound = None
        for token, tenant in self._tenants.items():
            if hmac.compare_digest(token.encode(), given.encode()):
                bound = tenant
        if bound is None:
            raise PermissionError
        if bound and named not in ("", bound):
            raise ValueError(f"the token is of tenant {bound!r}, {TENANT_HEADER} says {named!r}")
        return bound or named


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
