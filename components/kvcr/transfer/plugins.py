# SPDX-License-Identifier: Apache-2.0
"""Transports of other makers, found through the entry points of group ``kvcr.transports``.

An entry point names a class that follows :class:`Plugin`; its name is the transport's, in the setting
``transport``, in status and in metrics. ``docs/plugins.md`` shows a whole one.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Protocol, cast

from kvcr.errors import ConfigError
from kvcr.protocol.peer import PeerWelcome
from kvcr.transfer.base import LocalRegions, Post, Transport
from kvcr.transfer.mover import MoverPool

if TYPE_CHECKING:
    import importlib.metadata

log = logging.getLogger(__name__)

GROUP = "kvcr.transports"
BUILT_IN = ("shm", "nixl")


class Plugin(Protocol):
    """One kind of transport in one guard. Every method is called by the authority thread and must not wait:
    what takes time belongs on a mover (``movers.submit``) or a thread of the plugin's own (``post`` brings
    its results back)."""

    def __init__(self, local: LocalRegions, movers: MoverPool, post: Post) -> None:
        """``local``: our pool's memory, to register; made anew when the guard gets another pool."""

    def offer(self) -> bytes:
        """What a peer needs to read from us: a key, an address. At most 64 KiB, sent as it is."""

    def reach(self, peer: PeerWelcome) -> str:
        """Why this peer cannot be read, from what it says of itself; empty when it may be tried."""

    def open(self, peer: PeerWelcome, offer: bytes) -> Transport:
        """The way to one peer, whose plugin offered ``offer``. Its ``name`` is the plugin's.

        Raises OSError or KvcrError when there is none.
        """

    def close(self) -> None:
        """Let go of the memory; transports are closed already."""


def find() -> dict[str, importlib.metadata.EntryPoint]:
    """Installed plugins by name, not imported yet. A name that is taken is refused, with a warning."""
    found: dict[str, importlib.metadata.EntryPoint] = {}
    if not _declared():
        return found
    import importlib.metadata

    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name in BUILT_IN or entry.name in found:
            log.warning("transport plugin %s (%s) ignored: the name is taken", entry.name, entry.value)
        else:
            found[entry.name] = entry
    return found


def _declared() -> bool:
    """Whether any installed package declares one. In most deployments none does, and importlib.metadata
    takes longer to import and to ask than a guard's own modules; its successor is waited for."""
    for directory in sys.path:
        try:
            names = os.listdir(directory or ".")
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                try:
                    with open(os.path.join(directory, name, "entry_points.txt"), encoding="utf-8") as file:
                        if GROUP in file.read():
                            return True
                except OSError:
                    continue
    return False


def load(
    entries: dict[str, importlib.metadata.EntryPoint], local: LocalRegions, movers: MoverPool, post: Post
) -> dict[str, Plugin]:
    """Import and make them. One that fails is left out, with its error in the log: the others still work."""
    plugins: dict[str, Plugin] = {}
    for name, entry in entries.items():
        try:
            plugins[name] = cast(type[Plugin], entry.load())(local, movers, post)
        except Exception:
            # Code of others, which may raise anything.
            log.exception("transport plugin %s (%s) cannot be used", name, entry.value)
    return plugins


def require_known(transport: str, entries: dict[str, importlib.metadata.EntryPoint]) -> None:
    """Raises ConfigError unless ``transport`` is ``auto``, one of ours, or a plugin that is installed."""
    known = ["auto", *BUILT_IN, *entries]
    if transport not in known:
        raise ConfigError(
            f"transport {transport!r} is not known; there are {', '.join(known)}, and what packages declare "
            f"under the entry point group {GROUP}"
        )
