# SPDX-License-Identifier: Apache-2.0
"""Going first: the guard needs the CPU rarely and briefly, and others wait for it when it does.

Engines keep cores busy even while they wait (vLLM's workers spin for a second after each message). On two
cores with two engines, a pull of 93 MB took 0.7 to 1.0 s, of which its threads ran 0.06 s and waited for a
core the rest; with this it took 0.12 to 0.2 s.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)


def go_first(nice: int) -> None:
    """Ask the kernel to prefer this process by ``nice`` (-20 to 19; 0 leaves everything as it is).

    Where the kernel groups processes by session (autogroup), niceness counts only inside a session, so
    the session's own is set too, if this process leads one. Without CAP_SYS_NICE only values above 0 have an
    effect, and nothing is lost. Call before threads are started: they inherit it.
    """
    if nice == 0:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
        if os.getsid(0) == os.getpid():
            Path("/proc/self/autogroup").write_text(str(nice))
    except PermissionError:
        log.info("not allowed to set niceness %d; pulls are slower while engines keep all cores busy", nice)
    except OSError as error:
        # No autogroups in this kernel, or too many changes in a short time: the niceness itself is set.
        log.debug("autogroup is not set: %s", error)
