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
from pathlib import Path
from typing import Literal

from kvcr.dynamo.etcd.base import (
    Changes,
    EtcdClient,
    EtcdError,
    EtcdUnavailable,
    KeyValue,
    LeaseKeeper,
    LeaseNotFound,
    Listing,
    Tls,
)
from kvcr.errors import ConfigError

__all__ = [
    "Changes",
    "EtcdClient",
    "EtcdError",
    "EtcdUnavailable",
    "KeyValue",
    "LeaseKeeper",
    "LeaseNotFound",
    "Listing",
    "Tls",
    "connect",
    "endpoints_from_environment",
    "tls_from_environment",
]

Backend = Literal["aio", "etcd3"]

DEFAULT_ENDPOINT = "http://127.0.0.1:2379"


async def connect(
    endpoints: str | Sequence[str], backend: Backend = "aio", *, tls: Tls | None = None
) -> EtcdClient:
    """A client for one cluster, to be used in the running event loop only.

    ``endpoints``: ``http://host:port`` or ``host:port``, one or several (text separated by commas, or a
    sequence). Returns at once; an unreachable server shows at the first call. Raises ConfigError.
    """
    addresses = _addresses(endpoints)
    # By name, as each library is only there where its backend is used.
    if backend == "aio":
        from kvcr.dynamo.etcd.aio import AioClient

        return await AioClient.open(addresses, tls)
    if backend == "etcd3":
        from kvcr.dynamo.etcd.etcd3_compat import Etcd3CompatClient

        return Etcd3CompatClient(addresses, tls)
    raise ConfigError(f"etcd backend {backend!r} is unknown; use 'aio' or 'etcd3'")


def endpoints_from_environment(environment: Mapping[str, str] = os.environ) -> str:
    """``ETCD_ENDPOINTS``, the variable Dynamo's own runtime reads."""
    return environment.get("ETCD_ENDPOINTS") or DEFAULT_ENDPOINT


def tls_from_environment(environment: Mapping[str, str] = os.environ) -> Tls | None:
    """The files that Dynamo's own runtime uses, ``ETCD_AUTH_CA`` and its client pair, or None."""
    ca = environment.get("ETCD_AUTH_CA")
    if not ca:
        return None
    certificate, key = environment.get("ETCD_AUTH_CLIENT_CERT"), environment.get("ETCD_AUTH_CLIENT_KEY")
    return Tls(Path(ca), Path(certificate) if certificate else None, Path(key) if key else None)


def _addresses(endpoints: str | Sequence[str]) -> list[tuple[str, int]]:
    parts = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
    addresses = []
    for part in parts:
        host, separator, port = part.strip().removeprefix("http://").removeprefix("https://").rpartition(":")
        if not (separator and host and port.rstrip("/").isdigit()):
            raise ConfigError(f"etcd endpoint {part!r} is not http://host:port; check ETCD_ENDPOINTS")
        addresses.append((host, int(port.rstrip("/"))))
    return addresses
