# SPDX-License-Identifier: Apache-2.0
"""``python -m router_hints``: runs one router until SIGTERM or SIGINT; ``... explain`` asks running ones."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

import uvloop
from dynamo.runtime import DistributedRuntime

from kvcr.dynamo.environment import prepare_environment
from kvcr.errors import ConfigError
from router_hints.asking import explain
from router_hints.component import RouterComponent
from router_hints.settings import RouterSettings, parse

log = logging.getLogger("router_hints")

_RETRY_S = 1.0
_LONGEST_RETRY_S = 10.0


async def serve(settings: RouterSettings) -> bool:
    """Run one router on one runtime. True: asked to stop. False: the runtime ended by itself."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    runtime = await _runtime(settings, stopping)
    if runtime is None:
        return True

    async def stop() -> None:
        await stopping.wait()
        runtime.shutdown()

    stopper = loop.create_task(stop())
    try:
        await RouterComponent(settings, runtime).run(stopping)
    finally:
        stopper.cancel()
        runtime.shutdown()
    return stopping.is_set()


async def _runtime(settings: RouterSettings, stopping: asyncio.Event) -> DistributedRuntime | None:
    """A runtime, as soon as discovery and the event plane let us; None when asked to stop first."""
    retry_s, said = _RETRY_S, ""
    while not stopping.is_set():
        try:
            return DistributedRuntime(
                asyncio.get_running_loop(),
                settings.discovery_backend,
                settings.request_plane,
                event_plane=settings.event_plane,
            )
        except Exception as error:  # noqa: BLE001 - the binding raises bare Exception; being early is no error
            if str(error) != said:
                said = str(error)
                log.warning("the Dynamo runtime does not start yet: %s; trying until it does", said)
        try:
            await asyncio.wait_for(stopping.wait(), retry_s)
        except TimeoutError:
            retry_s = min(_LONGEST_RETRY_S, 2 * retry_s)
    return None


def main() -> None:
    logging.basicConfig(
        level=os.environ.get("KVCR_LOG", "INFO").upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    if sys.argv[1:2] == ["explain"]:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        sys.exit(explain(sys.argv[2:]))
    try:
        settings = parse(sys.argv[1:], os.environ)
    except ConfigError as error:
        sys.exit(f"router_hints: {error}")
    prepare_environment()
    try:
        if uvloop.run(serve(settings)):
            return
    except ConfigError as error:
        sys.exit(f"router_hints: {error}")
    # A runtime that lost its lease cannot be revived inside this process; nothing here is worth keeping,
    # the index comes back from the guards.
    log.warning("the Dynamo runtime ended by itself; starting over")
    os.execv(sys.executable, [sys.executable, "-m", "router_hints", *sys.argv[1:]])


if __name__ == "__main__":
    main()
