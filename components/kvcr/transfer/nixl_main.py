# SPDX-License-Identifier: Apache-2.0
"""``python -m kvcr.transfer.nixl_main``: the NIXL process of a guard, started by it.

A process of its own, because destroying an agent holds Python's GIL and a hang there would stop the guard,
and because the end of a process is the one proof that works against everything: when it is gone, nothing of
it writes to the pool.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from kvcr.errors import KvcrError
from kvcr.pool import DataRegion, FileLock, PoolReader
from kvcr.transfer.nixl_agents import NixlAgents
from kvcr.transfer.nixl_api import AgentMaker
from kvcr.transfer.nixl_messages import LOCK, Settings

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29

_SWITCH_S = 0.0005
"""How long a thread may keep the GIL that another waits for. With Python's own 5 ms, one that polls would
hold up the copies of the others."""

log = logging.getLogger("kvcr.transfer.nixl_main")


def main(arguments: str) -> int:
    """Serve until the guard closes the socket, or is gone."""
    logging.basicConfig(
        level=os.environ.get("KVCR_LOG_LEVEL", "INFO").upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    settings = msgspec.json.decode(arguments, type=Settings)
    # A terminal's Ctrl-C is for the guard, which closes the socket when it is through.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Threads inherit it. A nap of 50 us would last 100 otherwise.
    prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    sys.setswitchinterval(_SWITCH_S)
    if settings.parent and os.getppid() != settings.parent:
        return 1
    directory = Path(settings.pool_dir)
    try:
        # Kept for life, and taken before anything is mapped: it says that this process may write to the pool.
        FileLock(directory / LOCK).acquire()
        reader = PoolReader.open(directory)
        if reader.incarnation != settings.incarnation:
            return 1
        ranks = range(reader.layout.ranks)
        regions = [DataRegion.open(directory, reader, rank, writable=True, populate=False) for rank in ranks]
    except (KvcrError, OSError) as error:
        log.error("cannot map the pool in %s: %s", directory, error)
        return 1
    for region in regions:
        # Aside: 0.1 s a GiB, and the guard waits.
        region.populate_aside()
    arrays = [region.rows for region in regions]
    with socket.socket(fileno=settings.fd) as sock:
        sock.setblocking(True)
        maker = AgentMaker(settings.name, settings.backend, settings.params, reader.layout, arrays)
        agents = NixlAgents(maker, sock)
        try:
            agents.run()
        except OSError as error:
            log.info("the guard is gone: %s", error)
    # Not through the interpreter's end: destroying agents there may hang, and the kernel does it as well.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
