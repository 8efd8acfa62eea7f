# SPDX-License-Identifier: Apache-2.0
"""Telling the deployment that a process is dead, without waiting two minutes for its lease to expire.

Every Dynamo process holds one etcd lease, to which all it registered is bound; its instance id is the id
of that lease. Revoking it removes the process from every client's view at once, and ends its Dynamo
runtime if it was alive after all. Who revokes must know that the process is dead: the launcher that
reaped it, the guard that has proof of its engine's death, a process that takes its predecessor's place.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from typing import Any

from kvcr.dynamo.etcd import EtcdClient
from kvcr.dynamo.records import decode, guards_prefix
from kvcr.errors import ProtocolError

log = logging.getLogger(__name__)

CARDS_PREFIX = "v1/mdc/"
"""Where Dynamo 1.6.1 keeps the cards of workers: ``v1/mdc/{namespace}/{component}/{endpoint}/{id}``."""

CONTROL_ENDPOINTS = "router_hint_source_control_endpoints"
"""In a card's runtime data: JSON of data-parallel rank to control endpoint of the guard beside it."""


async def revoke_for_pid(etcd: EtcdClient, namespace: str, host: str, pid: int) -> list[int]:
    """Remove the guards that ran as process ``pid`` of ``host`` (the host name in their records).

    Returns the ids of the leases revoked, normally one or none. Raises EtcdError.
    """
    leases = []
    for entry in (await etcd.get_prefix(guards_prefix(namespace))).values:
        try:
            # The signature does not matter: who could forge the record could revoke the lease as well.
            record = decode(entry.key, entry.value, None)
        except ProtocolError:
            continue
        if (record.host, record.pid) == (host, pid):
            leases.append(entry.lease)
    return await _revoke(etcd, leases, f"process {pid} of {host}")


async def revoke_worker(
    etcd: EtcdClient,
    namespace: str,
    control_endpoint: str,
    still_dead: Callable[[], bool] = lambda: True,
) -> list[int]:
    """Remove the workers beside the guard at ``control_endpoint``, whose engine is dead.

    ``still_dead`` is asked after the workers were listed: a successor of the dead engine registers only
    after it has attached to the guard, so that no lease of a successor is among those revoked. Returns the
    ids of the leases revoked. Raises EtcdError.
    """
    leases = await workers_beside(etcd, namespace, control_endpoint)
    if not leases or not still_dead():
        return []
    return await _revoke(etcd, leases, f"worker beside {control_endpoint}")


async def workers_beside(etcd: EtcdClient, namespace: str, control_endpoint: str) -> list[int]:
    """Ids (of lease and instance) of the workers whose cards name this guard, the newest last.

    Raises EtcdError.
    """
    listing = await etcd.get_prefix(f"{CARDS_PREFIX}{namespace}/")
    found = [entry for entry in listing.values if control_endpoint in _control_endpoints(entry.value)]
    return [entry.lease for entry in sorted(found, key=lambda entry: entry.revision)]


async def revoke_lease(etcd: EtcdClient, lease: int, whose: str) -> bool:
    """End one lease. False when it was gone already. Raises EtcdError."""
    return bool(await _revoke(etcd, [lease], whose))


async def _revoke(etcd: EtcdClient, leases: Iterable[int], whose: str) -> list[int]:
    revoked = [lease for lease in dict.fromkeys(leases) if lease and await etcd.revoke(lease)]
    for lease in revoked:
        log.warning("revoked lease %x of the %s", lease, whose)
    return revoked


def _control_endpoints(card: bytes) -> set[str]:
    """Control endpoints that a card names; empty for cards that name none or are of another shape."""
    try:
        data: Any = json.loads(card)["card_json"]["runtime_config"]["runtime_data"][CONTROL_ENDPOINTS]
        # Runtime data holds JSON as text.
        by_rank = json.loads(data) if isinstance(data, str) else data
        return {str(endpoint) for endpoint in by_rank.values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()
