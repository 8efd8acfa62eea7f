# SPDX-License-Identifier: Apache-2.0
"""What bytes can be moved with while a guard has one pool: its memory, canary, plugins, NIXL process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from kvcr.config import GuardConfig
from kvcr.guard.addresses import Place
from kvcr.guard.canary import Canary
from kvcr.guard.choosing import PeerContext
from kvcr.guard.loop import Loop
from kvcr.guard.meters import Meters
from kvcr.pool import Pool
from kvcr.transfer import plugins
from kvcr.transfer.base import LocalRegions
from kvcr.transfer.mover import MoverPool
from kvcr.transfer.nixl import NixlProcess

if TYPE_CHECKING:
    import importlib.metadata

log = logging.getLogger(__name__)


class Transports:
    """Of one pool, and closed before it. Belongs to the authority thread."""

    def __init__(
        self,
        pool: Pool,
        config: GuardConfig,
        *,
        loop: Loop,
        zmq_context: zmq.Context[Any],
        incarnation: int,
        place: Place,
        secret: bytes | None,
        movers: MoverPool,
        meters: Meters,
        plugin_entries: dict[str, importlib.metadata.EntryPoint],
    ) -> None:
        ranks = range(pool.layout.ranks)
        self._config = config
        self._loop = loop
        self._incarnation = incarnation
        self._place = place
        self._nixl: NixlProcess | None = None
        self.local = LocalRegions(
            pool.layout,
            [pool.data(rank).rows for rank in ranks],
            [pool.region(rank).address for rank in ranks],
        )
        self.canary = Canary(self.local, pool.slots, incarnation)
        self.plugins = plugins.load(plugin_entries, self.local, movers, loop.post)
        self.peer_context = PeerContext(
            loop=loop,
            zmq=zmq_context,
            name=config.name,
            incarnation=incarnation,
            place=place,
            secret=secret,
            choice=config.transport,
            local=self.local,
            canary=self.canary,
            layout_digest=pool.layout.digest(),
            movers=movers,
            meters=meters,
            nixl_backend=config.nixl_backend,
            nixl=self.nixl,
            plugins=self.plugins,
        )

    def nixl(self) -> NixlProcess:
        """Made at the first call."""
        if self._nixl is None:
            self._nixl = NixlProcess(
                f"{self._config.name}-{self._incarnation:x}",
                Path(self._config.pool_dir).absolute(),
                self._incarnation,
                self.local,
                self._loop,
                self._config.nixl_backend,
                self._config.nixl_params,
            )
        return self._nixl

    def warm_up(self, boot_ids: set[str]) -> None:
        """Make NIXL agents ahead when it is sure that peers of these hosts need them; empty: not known."""
        remote = bool(boot_ids - {"", self._place.boot_id})
        if self._config.transport == "nixl" or (remote and self._config.transport != "shm"):
            self.nixl().warm_up()

    def nixl_status(self) -> dict[str, Any] | None:
        """JSON-ready; None while nobody needed NIXL."""
        return self._nixl.status() if self._nixl is not None else None

    @property
    def nixl_restarts(self) -> int:
        return self._nixl.restarts if self._nixl is not None else 0

    def close(self, wait_s: float, *, unlink: bool = False) -> None:
        """``wait_s``: for the NIXL process to end; ``unlink``: its files too."""
        for plugin in self.plugins.values():
            try:
                plugin.close()
            except Exception:
                # Code of others; the guard ends all the same.
                log.exception("closing a transport plugin failed")
        if self._nixl is not None:
            self._nixl.close(wait_s, unlink=unlink)
