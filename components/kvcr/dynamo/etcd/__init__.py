# SPDX-License-Identifier: Apache-2.0
"""etcd as KVCR uses it: one interface, two libraries behind it.

``aio``    etcd3aio 0.3.0, asyncio and maintained; what every process of ours uses
``etcd3``  etcd3 0.12.0 (2020), threads; for environments that already depend on it

Both use the generated messages that etcd3aio carries: the ones in etcd3 0.12.0 fail to import with
protobuf above 3, and two copies of the same messages (aetcd beside etcd3aio, say) clash in one process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

from kvcr.dynamo.etcd.base import (
    Credentials,
    EtcdClient,
    EtcdError,
    EtcdUnavailable,
    KeyChanges,
    KeyValue,
    LeaseNotFound,
    Listing,
)
from kvcr.errors import ConfigError

__all__ = [
    "Credentials",
    "EtcdClient",
    "EtcdError",
    "EtcdUnavailable",
    "KeyChanges",
    "KeyValue",
    "LeaseNotFound",
    "Listing",
    "addresses_of",
    "connect",
    "credentials_from_environment",
    "endpoints_from_environment",
]

Backend = Literal["aio", "etcd3"]

DEFAULT_ENDPOINT = "http://127.0.0.1:2379"
NOBODY = Credentials()
_PEM = ("ETCD_AUTH_CA", "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY")


async def connect(
    endpoints: str | Sequence[str], backend: Backend = "aio", *, credentials: Credentials = NOBODY
) -> EtcdClient:
    """A client for one cluster, to be used in the running event loop only.

    ``endpoints``: ``http://host:port`` or ``host:port``, one or several (text separated by commas, or a
    sequence). Returns at once; an unreachable server, or one that does not know the user, shows at the first
    call. Raises ConfigError.
    """
    addresses = addresses_of(endpoints, credentials)
    # By name, as each library is only there where its backend is used.
    if backend == "aio":
        from kvcr.dynamo.etcd.aio import AioClient

        return await AioClient.open(addresses, credentials)
    if backend == "etcd3":
        from kvcr.dynamo.etcd.etcd3_compat import Etcd3CompatClient

        return Etcd3CompatClient(addresses, credentials)
    raise ConfigError(f"etcd backend {backend!r} is unknown; use 'aio' or 'etcd3'")


def endpoints_from_environment(environment: Mapping[str, str] = os.environ) -> str:
    """``ETCD_ENDPOINTS``, the variable Dynamo's own runtime reads."""
    return environment.get("ETCD_ENDPOINTS") or DEFAULT_ENDPOINT


def credentials_from_environment(environment: Mapping[str, str] = os.environ) -> Credentials:
    """What Dynamo's own runtime reads, so that one set of variables serves every process.

    ``ETCD_AUTH_USERNAME`` with ``ETCD_AUTH_PASSWORD``; or, for mutual TLS, the PEM texts (not paths)
    ``ETCD_AUTH_CA``, ``ETCD_AUTH_CLIENT_CERT`` and ``ETCD_AUTH_CLIENT_KEY``. The runtime (1.6.1) takes one or
    the other, and ignores TLS of which a part is missing. Raises ConfigError for what it would ignore: half
    of a deployment would be connected otherwise.
    """
    user, password = environment.get("ETCD_AUTH_USERNAME", ""), environment.get("ETCD_AUTH_PASSWORD", "")
    pem = {name: environment.get(name, "") for name in _PEM}
    given = [name for name, text in pem.items() if text]
    if bool(user) != bool(password):
        raise ConfigError("of ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD only one is set; set both")
    if user and given:
        raise ConfigError(
            f"ETCD_AUTH_USERNAME and {given[0]} are both set; Dynamo's runtime takes a user without TLS, or "
            "TLS without a user: unset one. With TLS the common name of the client's certificate is the user"
        )
    if given and len(given) < len(pem):
        missing = " and ".join(name for name in pem if name not in given)
        raise ConfigError(
            f"{given[0]} is set and {missing} is not; Dynamo's runtime uses TLS only with all three"
        )
    for name in given:
        # Its value is not shown: it may be a key all the same.
        if "-----BEGIN " not in pem[name]:
            raise ConfigError(
                f'{name} is no PEM text; Dynamo\'s runtime reads the text, not a path: {name}="$(cat FILE)"'
            )
    ca, certificate, key = pem.values()
    return Credentials(ca, certificate, key, user, password)


def addresses_of(endpoints: str | Sequence[str], credentials: Credentials) -> list[tuple[str, int]]:
    """Hosts and ports. Raises ConfigError for what is none, and for one with TLS that nothing is known of."""
    parts = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
    addresses = []
    for part in parts:
        scheme, _, place = part.strip().rpartition("://")
        host, separator, port = place.rpartition(":")
        if scheme not in ("", "http", "https") or not (separator and host and port.rstrip("/").isdigit()):
            raise ConfigError(f"etcd endpoint {part!r} is not http://host:port; check ETCD_ENDPOINTS")
        if scheme == "https" and not credentials.ca:
            raise ConfigError(
                f"etcd endpoint {part} has TLS and no CA is given; set ETCD_AUTH_CA, ETCD_AUTH_CLIENT_CERT "
                "and ETCD_AUTH_CLIENT_KEY to the PEM texts"
            )
        addresses.append((host, int(port.rstrip("/"))))
    return addresses
