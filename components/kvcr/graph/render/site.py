# SPDX-License-Identifier: Apache-2.0
"""Sites whose processes live in containers: every one has its own ports, and mounts instead of paths."""

from __future__ import annotations

from pathlib import PurePosixPath

from kvcr.errors import ConfigError
from kvcr.graph import models
from kvcr.graph.site import Site

ANY = "0.0.0.0"
CACHE = PurePosixPath("/cache")
"""``KVCR_CACHE`` in the image: prepared models."""

TOPOLOGY = PurePosixPath("/etc/dynamo/topology")


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

    def devices(self, what: str, each: int, index: int, count: int) -> str:
        # The container gets its devices, and no others, from whoever runs it.
        return ",".join(str(i) for i in range(each))
