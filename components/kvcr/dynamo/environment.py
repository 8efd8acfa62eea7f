# SPDX-License-Identifier: Apache-2.0
"""What Dynamo's runtime reads from the environment by itself, and what KVCR's processes set unless told."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, MutableMapping

from kvcr.config import LOOPBACK
from kvcr.dynamo.etcd import endpoints_from_environment
from kvcr.guard.addresses import is_loopback

LEASE_TTL_S = 120
"""Deaths are told by revoking leases. With the runtime's own 30 s an outage of etcd that is shorter than a
minute ends the runtime for good; with 5 s one of 20 s did (measured)."""

DEFAULTS = {
    "ETCD_LEASE_TTL": str(LEASE_TTL_S),
    # The runtime's own is every interface.
    "DYN_SYSTEM_HOST": LOOPBACK,
}

PATIENCE = {
    # The constructor of the runtime holds the interpreter lock while it tries to connect (dynamo 1.6.1,
    # measured): every thread of the process would wait, by default for up to 120 s.
    "ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS": "1",
    "NATS_STARTUP_CONNECT_TIMEOUT_SECONDS": "1",
}

COMMAND_PATIENCE = dict.fromkeys(PATIENCE, "5")
"""In a command nobody waits for that lock, and nobody tries again. On a busy machine an etcd with users,
which hashes their passwords, took more than a second to let one in (measured)."""


def prepare_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the defaults; call it before the first runtime of the process is made.

    The runtime (1.6.1) listens for requests, and for streams of answers, on the first network interface.
    Where etcd is on loopback the deployment is on this host alone, and so are those.
    """
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)
    if _on_this_host(environment):
        for name in ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST"):
            environment.setdefault(name, LOOPBACK)


def silence_runtime() -> None:
    """For commands: from here on only Python writes to stderr.

    The runtime (1.6.1) logs a line for every request it sends, whatever ``DYN_LOG`` says, and writes it to
    file descriptor 2. What is wrong comes back as an exception, and is told by whoever catches it.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if sys.stderr.fileno() == 2:
            sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            os.close(nowhere)


def _on_this_host(environment: Mapping[str, str]) -> bool:
    places = [part.rpartition("://")[2] for part in endpoints_from_environment(environment).split(",")]
    return all(is_loopback(place.rpartition(":")[0]) for place in places)
