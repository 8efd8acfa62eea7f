# SPDX-License-Identifier: Apache-2.0
"""NIXL itself: whichever wheel is installed, its errors, and agents over our regions."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcr.layout import Layout
from kvcr.transfer.nixl_messages import Peer

log = logging.getLogger(__name__)

_PEERS_OWN = frozenset({"nixlRemoteDisconnectError", "nixlNotFoundError", "nixlMismatchError"})
"""Errors that are about one peer. Any other is the agent's own: it is destroyed, and made anew at need."""

_making = threading.Lock()
"""UCX reads the environment of the process while an agent is made."""


@dataclass(slots=True)
class Remote:
    """A peer as one of our agents knows it."""

    name: str
    grid: Any
    """Over the peer's regions."""
    connected: bool = False
    """Something was read from it."""


@dataclass(slots=True, eq=False)
class Agent:
    """A nixl_agent with our regions registered, and the grids over them. Belongs to one thread."""

    agent: Any
    grid: Any
    remotes: dict[int, Remote] = field(default_factory=dict)
    """By peer id."""

    def drop(self, peer_id: int) -> None:
        """Forget a peer."""
        remote = self.remotes.pop(peer_id, None)
        if remote is not None:
            release(remote.grid)
            try:
                self.agent.remove_remote_agent(remote.name)
            except errors() as error:
                log.debug("removing NIXL agent %s: %s", remote.name, error)

    def destroy(self) -> None:
        """Afterwards nothing that it read lands any more. May hang, with the GIL."""
        for remote in self.remotes.values():
            release(remote.grid)
        self.remotes.clear()
        release(self.grid)
        self.grid = None
        self.agent = None


class AgentMaker:
    """Makes agents over the regions of one pool. Any thread."""

    def __init__(
        self,
        name: str,
        backend: str,
        params: dict[str, str],
        layout: Layout,
        arrays: Sequence[npt.NDArray[np.uint8]],
    ) -> None:
        """``backend`` of NIXL, with its parameters, for all agents. ``arrays``: [rows, slot_part_bytes] of
        each rank, writable."""
        self.layout = layout
        self.arrays = list(arrays)
        self.addresses = tuple(int(array.ctypes.data) for array in arrays)
        self._name = name
        self._backend = backend
        self._params = params
        self._made = 0

    @property
    def rows(self) -> int:
        """Of a region."""
        return len(self.arrays[0])

    def make(self, purpose: str, tls: str = "") -> Agent:
        """``tls`` holds the agent to some of UCX's transports. Raises what :func:`failures` names."""
        nixl_agent, nixl_agent_config = api()
        with _making:
            self._made += 1
            agent = nixl_agent(
                f"{self._name}-{purpose}-{self._made}",
                nixl_agent_config(
                    enable_prog_thread=False, enable_listen_thread=False, num_threads=0, backends=[]
                ),
            )
            with _ucx_tls(tls):
                agent.create_backend(self._backend, self._params)
        nbytes = self.rows * self.layout.slot_part_bytes
        agent.register_memory([(address, nbytes, 0, "") for address in self.addresses], "DRAM")
        grid = agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._grid(self.addresses, self.rows), "DRAM")
        return Agent(agent, grid)

    def meet(self, agent: Agent, peer: Peer) -> Remote:
        """The peer as ``agent`` knows it, from now on. Raises what :func:`failures` names."""
        remote = agent.remotes.get(peer.peer_id)
        if remote is None:
            name = agent.agent.add_remote_agent(peer.metadata)
            name = name.decode() if isinstance(name, bytes) else str(name)
            grid = agent.agent.prep_xfer_dlist(name, self._grid(peer.addresses, peer.slots), "DRAM")
            remote = agent.remotes[peer.peer_id] = Remote(name, grid)
        return remote

    def _grid(self, addresses: Sequence[int], rows: int) -> npt.NDArray[np.uint64]:
        layout = self.layout
        return np.array(
            [[address, layout.part_bytes, 0, layout.slot_part_bytes, rows] for address in addresses],
            np.uint64,
        )


def release(handle: Any) -> None:
    try:
        handle.release()
    except errors() as error:
        log.debug("releasing a NIXL handle: %s", error)


def is_agents_own(error: Exception) -> bool:
    """Whether an error says that the agent is broken, and not that one peer is."""
    return isinstance(error, errors()) and type(error).__name__ not in _PEERS_OWN


def api() -> tuple[Any, Any]:
    """The classes of an agent and of its configuration. Raises ImportError."""
    # UCX reads its environment when it is loaded. A READ of 32 MiB over loopback: 45 ms with segments of
    # 8 KiB, 23 ms with 64 KiB, 19 ms with 512 KiB, as long as a plain socket takes.
    os.environ.setdefault("UCX_TCP_TX_SEG_SIZE", "512k")
    os.environ.setdefault("UCX_TCP_RX_SEG_SIZE", "512k")
    module = _wheel("_api")
    return module.nixl_agent, module.nixl_agent_config


@functools.cache
def errors() -> tuple[type[Exception], ...]:
    """The exceptions NIXL raises; they share no base of their own."""
    try:
        bindings = _wheel("_bindings")
    except ImportError:
        return ()
    return tuple(
        value
        for name, value in vars(bindings).items()
        if name.startswith("nixl") and isinstance(value, type) and issubclass(value, Exception)
    )


@functools.cache
def failures() -> tuple[type[Exception], ...]:
    """What making an agent or meeting a peer may raise, NIXL being absent included."""
    return (ImportError, RuntimeError, *errors())


@contextlib.contextmanager
def _ucx_tls(tls: str) -> Iterator[None]:
    """UCX reads its environment for each context it makes."""
    before = os.environ.get("UCX_TLS")
    if tls:
        os.environ["UCX_TLS"] = tls
    try:
        yield
    finally:
        if tls and before is None:
            del os.environ["UCX_TLS"]
        elif tls and before is not None:
            os.environ["UCX_TLS"] = before


def _wheel(module: str) -> Any:
    """A module of whichever NIXL wheel is installed.

    Not through the ``nixl`` package where that can be helped: it imports torch, where there is one, to choose
    between wheels (3 s and 200 MB), and for DRAM they are all alike.
    """
    for wheel in ("nixl_cu12", "nixl_cu13", "nixl_rocm"):
        if importlib.util.find_spec(wheel) is not None:
            return importlib.import_module(f"{wheel}.{module}")
    return importlib.import_module(f"nixl.{module}")
