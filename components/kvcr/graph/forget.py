# SPDX-License-Identifier: Apache-2.0
"""Revoke the Dynamo lease of a child that the launcher has just reaped: ``python -m kvcr.graph.forget``.

Leases last two minutes so that a pause of etcd ends nobody; whoever knows of a death tells it. A process of
its own, because the launcher forks, and a gRPC client does not survive that.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys

from kvcr.dynamo.etcd import connect, credentials_from_environment
from kvcr.dynamo.leases import revoke_for_pid, revoke_worker
from kvcr.errors import KvcrError

TIMEOUT_S = 10.0


async def forget(
    etcd_endpoints: str, namespace: str, pid: int, worker_control: str | None, instance: int | None
) -> list[int]:
    """Revoke what the dead process held; returns the ids of the leases. Raises EtcdError.

    ``pid`` finds a guard by its record, ``worker_control`` a worker by the guard beside it; ``instance``
    is a lease itself, which is how a router is found.
    """
    async with await connect(etcd_endpoints, credentials=credentials_from_environment()) as etcd:
        host = os.environ.get("KVCR_HOST") or socket.gethostname()
        revoked = await revoke_for_pid(etcd, namespace, host, pid)
        if worker_control is not None:
            revoked += await revoke_worker(etcd, namespace, worker_control)
        if instance is not None and instance not in revoked and await etcd.revoke(instance):
            revoked.append(instance)
        return revoked


def main() -> int:
    """0 when etcd answered, whether or not anything was registered."""
    parser = argparse.ArgumentParser(prog="kvcr.graph.forget", description=__doc__)
    parser.add_argument("--etcd", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--pid", type=int, required=True, help="of the dead process, on this host")
    parser.add_argument("--worker-control", help="control endpoint of the guard beside the dead worker")
    parser.add_argument("--instance", type=lambda text: int(text, 16), help="its Dynamo instance id, in hex")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    work = forget(
        arguments.etcd, arguments.namespace, arguments.pid, arguments.worker_control, arguments.instance
    )
    try:
        revoked = asyncio.run(asyncio.wait_for(work, TIMEOUT_S))
    except (KvcrError, TimeoutError) as error:
        print(
            f"process {arguments.pid}: leases not revoked, they expire by themselves: {error}",
            file=sys.stderr,
        )
        return 1
    print(f"process {arguments.pid}: revoked {[f'{lease:x}' for lease in revoked] or 'nothing'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
