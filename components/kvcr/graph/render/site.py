# SPDX-License-Identifier: Apache-2.0
"""Sites whose processes live in containers: every one has its own ports, and mounts instead of paths."""

from __future__ import annotations

from pathlib import PurePosixPath

from kvcr.config import parse_size
from kvcr.errors import ConfigError
from kvcr.graph import models
from kvcr.graph.config import Graph, Kind
from kvcr.graph.planning import DEFAULT_POOL_BYTES
from kvcr.graph.site import Site

ANY = "0.0.0.0"
CACHE = PurePosixPath("/cache")
"""``KVCR_CACHE`` in the image: prepared models."""

TOPOLOGY = PurePosixPath("/etc/dynamo/topology")

_TMPFS_OVERHEAD = 1.05
"""Directory and index beside the blocks: 200 bytes for a block of 1.5 MB, more for smaller ones."""


def pool_bytes(graph: Graph) -> int:
    """Size of each guard's pool; 0 without guards. Raises ConfigError."""
    guard = graph.get(Kind.GUARD)
    return 0 if guard is None else parse_size(guard.params.get("pool-bytes", DEFAULT_POOL_BYTES))


def tmpfs_mib(size: int) -> int:
    """MiB of a tmpfs that holds pools of ``size`` bytes, all together."""
    return int(size * _TMPFS_OVERHEAD) // 2**20 + 64


class ContainerSite(Site):
    """Each process in a container, or a pod, of its own that others reach by name.

    ``hosts`` maps names of processes to what reaches them where that is not the name itself.
    """

    def __init__(self, pools: str, secret: str, hosts: dict[str, str] | None = None) -> None:
        self._hosts = hosts or {}
        self.python = "python"
        self.run_id = "kvcr"
        self.pools = PurePosixPath(pools)
        self.secret = PurePosixPath(secret)
        self.run_dir = PurePosixPath("/tmp/kvcr")
        self.bind = ANY

    def host(self, name: str) -> str:
        return self._hosts.get(name, name)

    def port(self, usual: int, given: int, index: int, owner: str, host: str | None = None) -> int:
        # No index: containers do not share ports.
        return given or usual

    def check_model(self, model: str) -> None:
        if model not in models.known_models() and not PurePosixPath(model).is_absolute():
            raise ConfigError(
                f"model {model!r} is neither one of {models.known_models()} nor an absolute path; in a "
                "container write where it is mounted, e.g. /models/llama-3.1-8b"
            )

    def model_path(self, model: str) -> str:
        return str(CACHE / "models" / model) if model in models.known_models() else model

    def topology(self, name: str) -> PurePosixPath:
        return TOPOLOGY

    def check_pools(self, what: str, pools: int, pool_bytes: int) -> None:
        # The volume is made as large as the pools.
        return None

    def check_ranks(self, what: str, ranks: int) -> None:
        # Dynamo names one host for the guards of all ranks; here each guard has its own.
        if ranks > 1:
            raise ConfigError(f"{what} is {ranks}: only `kvcr serve` starts a guard for each rank")

    def devices(self, what: str, each: int, index: int, count: int) -> str:
        # The container gets its devices, and no others, from whoever runs it.
        return ",".join(str(i) for i in range(each))
