# SPDX-License-Identifier: Apache-2.0
"""Where the processes of a graph run, as far as their command lines tell: this machine, or containers."""

from __future__ import annotations

import abc
import os
import sys
from dataclasses import dataclass
from pathlib import Path, PurePath

from kvcr.config import LOOPBACK
from kvcr.errors import ConfigError
from kvcr.graph import models
from kvcr.graph.config import count_gpus
from kvcr.graph.ports import PortBook

SHM = Path("/dev/shm")
CONTROL_PORT = 7100
METRICS_PORT = 9400
SYSTEM_PORT = 9090
HTTP_PORT = 8000
SIGNALS_PORT = 8490
ETCD_PORT = 2379
NATS_PORT = 4222


@dataclass(frozen=True)
class RunPaths:
    """Where one run of a graph on this machine keeps its things."""

    run_id: str
    run_dir: Path
    """Logs, graph.json, the secret, the data of etcd and NATS."""

    @property
    def logs(self) -> Path:
        return self.run_dir / "logs"

    @property
    def secret(self) -> Path:
        return self.run_dir / "secret"

    @property
    def pools(self) -> Path:
        """Root of the pools, on tmpfs; removed when the graph goes down."""
        return SHM / f"kvcr-{self.run_id}"


class Site(abc.ABC):
    """What a planner asks about the place it plans for."""

    python: str
    """Interpreter in the command lines."""
    run_id: str
    """Makes names of guards unique where several graphs share an etcd."""
    pools: PurePath
    """Root of the pools, as the processes see it."""
    secret: PurePath
    """File with the deployment's secret, as the processes see it."""
    run_dir: PurePath
    bind: str
    """Address that servers listen on."""
    request_host: str = ""
    """Address of Dynamo's request plane; empty: the first interface, which Dynamo finds by itself."""

    @abc.abstractmethod
    def host(self, name: str) -> str:
        """Under what name or address the others reach the process ``name``."""

    @abc.abstractmethod
    def port(self, usual: int, given: int, index: int, owner: str, host: str | None = None) -> int:
        """The port of the ``index``-th process. ``given`` is the graph's for the first one, 0 without.

        Raises ConfigError when it cannot be had."""

    @abc.abstractmethod
    def check_model(self, model: str) -> None:
        """Raises ConfigError when the processes will not find it."""

    @abc.abstractmethod
    def model_path(self, model: str) -> str:
        """Its directory, as the processes see it."""

    @abc.abstractmethod
    def topology(self, name: str) -> PurePath:
        """Folder with the topology domains of the process ``name``, one file each."""

    @abc.abstractmethod
    def check_pools(self, what: str, pools: int, pool_bytes: int) -> None:
        """Raises ConfigError when they do not fit."""

    @abc.abstractmethod
    def check_ranks(self, what: str, ranks: int) -> None:
        """Raises ConfigError when a worker cannot have so many data-parallel ranks here."""

    @abc.abstractmethod
    def devices(self, what: str, each: int, index: int, count: int) -> str:
        """``CUDA_VISIBLE_DEVICES`` of the ``index``-th of ``count`` processes with ``each`` GPUs."""


class LocalSite(Site):
    """This machine: loopback, ports that are free, pools in ``/dev/shm``."""

    def __init__(self, paths: RunPaths, ports: PortBook) -> None:
        self._ports = ports
        self.python = sys.executable
        self.run_id = paths.run_id
        self.pools = paths.pools
        self.secret = paths.secret
        self.run_dir = paths.run_dir
        self.bind = self.request_host = LOOPBACK

    def host(self, name: str) -> str:
        return LOOPBACK

    def port(self, usual: int, given: int, index: int, owner: str, host: str | None = None) -> int:
        return self._ports.take(given + index, owner, host or LOOPBACK) if given else self._ports.free()

    def check_model(self, model: str) -> None:
        models.check_model(model)

    def model_path(self, model: str) -> str:
        return str(models.model_path(model))

    def topology(self, name: str) -> PurePath:
        return self.run_dir / "topology" / name

    def check_pools(self, what: str, pools: int, pool_bytes: int) -> None:
        free_bytes = shm_free_bytes()
        if pools * pool_bytes > free_bytes:
            raise ConfigError(
                f"{what}: pools for {pools} x {gib(pool_bytes)} do not fit into {SHM}, which has "
                f"{gib(free_bytes)} free; make the pools smaller, or the mount larger "
                "(docker run --shm-size, mount -o remount,size=)"
            )

    def check_ranks(self, what: str, ranks: int) -> None:
        return None

    def devices(self, what: str, each: int, index: int, count: int) -> str:
        wanted, found = each * count, count_gpus()
        if wanted > found:
            raise ConfigError(
                f"{what} asks for {wanted} GPUs ({each} for each process), this machine has {found}; "
                "lower workers or resources.gpu"
            )
        return ",".join(str(index * each + i) for i in range(each))


def shm_free_bytes() -> int:
    """Room for pools."""
    mount = os.statvfs(SHM)
    return mount.f_bavail * mount.f_frsize


def gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
