# SPDX-License-Identifier: Apache-2.0
"""``python -m kvcr.guard``: run a guard in the foreground.

Prints one line of JSON on stdout when it is ready; everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import resource
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from kvcr.config import GuardConfig, guard_settings, load
from kvcr.errors import ConfigError, KvcrError, PoolError
from kvcr.guard.priority import go_first
from kvcr.sources import Parser

if TYPE_CHECKING:
    from kvcr.guard.authority import Guard

log = logging.getLogger("kvcr.guard")

SWITCH_S = 0.0005
"""The default, 5 ms, is fifty round trips of the Unix socket."""

MIN_DESCRIPTORS = 1024
"""512 connections, the peers it maps and talks to, and 60 of its own."""

EXIT_S = 1.7
"""A SIGTERM ends the process within 2 s, whatever hangs; the pool's files are consistent at every moment."""


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT. Returns 0, 2 for bad settings, or 1 for a pool it cannot have, or lost."""
    logging.basicConfig(
        level=os.environ.get("KVCR_LOG_LEVEL", "INFO").upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    try:
        config = load(GuardConfig, _settings(arguments), "settings")
        go_first(config.nice)
        _allow_descriptors()
        # After that: where engines keep every core busy, importing takes longer than attaching to the pool.
        from kvcr.guard.addresses import set_ucx_devices
        from kvcr.guard.authority import Guard

        guard = Guard(config)
        set_ucx_devices(guard.addresses.interface, os.environ)
    except (KvcrError, OSError) as error:
        print(f"kvcr.guard: {error}", file=sys.stderr)
        return 2 if isinstance(error, KvcrError) and not isinstance(error, PoolError) else 1

    def stop(*_: object) -> None:
        watchdog = threading.Timer(EXIT_S, os._exit, (0,))
        watchdog.daemon = True
        watchdog.start()
        guard.stop()

    # Movers hold the interpreter for up to this long while the authority thread has a message to answer.
    sys.setswitchinterval(SWITCH_S)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    cluster = _Cluster(guard) if config.cluster else None
    print(
        json.dumps(
            {
                "ready": True,
                "name": guard.name,
                "socket": guard.unix_socket,
                "control": guard.control_endpoint,
                "metrics": guard.metrics_endpoint,
                "public_key": guard.public_key.hex(),
                "boot_id": guard.place.boot_id,
                "net_namespace": guard.place.net_namespace,
                "pid": os.getpid(),
            }
        ),
        flush=True,
    )
    if cluster is not None:
        guard.post(cluster.start)
    guard.run()
    if cluster is not None:
        cluster.stop()
    return int(guard.pool_lost)


class _Cluster:
    """The cluster thread, imported and started beside a guard that serves already."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._running: Any = None

    def start(self) -> None:
        threading.Thread(target=self._load, name="kvcr-cluster-import", daemon=True).start()

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()

    def _load(self) -> None:
        from kvcr.guard.view import GuardView

        try:
            # By name, as the core does not depend on Dynamo. It takes a second, most of it for the runtime.
            cluster = importlib.import_module("kvcr.dynamo.cluster")
            self._running = cluster.start(GuardView(self._guard, os.getpid()))
        except Exception:
            # A missing package, or whatever Dynamo raises: the pool is of use without the cluster.
            log.exception("the guard serves its engine and static peers, and does not join the cluster")


def _allow_descriptors() -> None:
    """As many as are ours for the asking: the default of 1,024 is little for a guard with many peers.

    Raises ConfigError when that is too few: a guard without descriptors serves, and is blind and deaf.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < MIN_DESCRIPTORS:
        raise ConfigError(
            f"{hard} files may be open here, a guard needs {MIN_DESCRIPTORS}: raise the limit (ulimit -Hn, "
            "LimitNOFILE of systemd, docker --ulimit nofile)"
        )
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _settings(arguments: list[str] | None) -> dict[str, Any]:
    """File first, environment over it, flags over both."""
    given = flags(arguments)
    found = guard_settings(os.environ, given, given.pop("config", None))
    return {name: setting.value for name, setting in found.items()}


def flags(arguments: list[str] | None) -> dict[str, Any]:
    """The settings given on a command line."""
    parser = Parser(prog="kvcr.guard", description=__doc__, argument_default=argparse.SUPPRESS)
    flag = parser.add_argument
    flag("--name", help="unique in the namespace, stable over restarts")
    flag("--pool-dir", help="directory of the pool, on tmpfs")
    flag("--pool-bytes", help="size of a new pool, e.g. 2GiB")
    flag("--socket", help="Unix socket for engines and peers (default: guard.sock in the pool's directory)")
    flag("--control", help="ZMQ endpoint to bind (default: tcp://127.0.0.1:0)")
    flag("--advertise", help="host or host:port that peers connect to, if it differs from --control")
    flag("--interface", help="network interface, by name or address, for control and KV bytes")
    flag("--metrics-host")
    flag("--metrics-port", help="0: any free port, -1: no metrics")
    flag("--namespace", help="Dynamo namespace (default: dynamo)")
    flag("--peers", help="JSON file of peer records, or endpoints separated by commas")
    flag("--transport", help="auto, shm, nixl or an installed plugin")
    flag("--nixl-backend", help="NIXL back-end between hosts (default: UCX)")
    flag("--nixl-params", help="its parameters, name=value separated by commas")
    flag("--linger-s", help="leave after this long without an engine (default: stay)")
    flag("--secret-file", help="the deployment's secret; needed for binds beyond loopback")
    flag("--policy", help="package.module:Class of a kvcr.policy.Policy")
    flag("--on-mismatch", help="pool of another layout than the engine's: cold, discard or fail")
    flag("--lease-ms", help="longest lease asked or granted for a pull")
    flag("--transit-slots", help="most slots with blocks for one request alone (default: 1024)")
    flag("--transit-share", help="and the most of the pool those may take (default: 0.125)")
    flag("--fence-after-s", help="SIGKILL an engine that is silent for this long (default: never)")
    flag("--scrub-bytes-per-s", help="verify payloads in the background this fast, e.g. 8MiB; 0: not at all")
    flag("--nice", help="niceness, -20 to 19, if allowed (default: -10)")
    flag("--cluster", action="store_true", help="join Dynamo: registration, events, discovery")
    flag("--remove-pool-on-exit", action="store_true")
    return vars(parser.parse_args(arguments))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: destructors of NIXL agents may wait for peers that do not answer.
    os._exit(status)
