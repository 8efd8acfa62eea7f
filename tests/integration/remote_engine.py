# SPDX-License-Identifier: Apache-2.0
"""``python remote_engine.py SOCKET ENGINE_ID``: an engine that does what lines of JSON on stdin say."""

from __future__ import annotations

import json
import sys
import urllib.request
from types import SimpleNamespace
from typing import Any, cast

from engine_client import EngineClient, GuardProcess, chain

from kvcr.protocol.engine import Source


def main() -> None:
    """Answer each line with one, until stdin ends."""
    guard = cast(GuardProcess, SimpleNamespace(ready={"socket": sys.argv[1]}))
    with EngineClient(guard, sys.argv[2]) as client:
        for line in sys.stdin:
            print(json.dumps(answer(client, json.loads(line))), flush=True)


def answer(client: EngineClient, request: dict[str, Any]) -> Any:
    """Carry out one request."""
    if request["do"] == "metrics":
        with urllib.request.urlopen(request["url"], timeout=60) as response:
            lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    root, keys = chain(request["count"], request.get("salt", "tenant"))
    if request["do"] == "deposit":
        client.deposit(keys, root)
        return True
    if request["do"] == "right":
        return sum(client.right(keys))
    lease, progress = client.fetch(
        request["id"],
        keys,
        root,
        [Source(endpoint, 0, len(keys)) for endpoint in request["sources"]],
        deadline_ms=request.get("deadline_ms", 30_000),
    )
    return {
        "available": lease.available,
        "reason": progress.reason or lease.reason,
        "statuses": list(progress.statuses),
        "transport": progress.transport,
    }


if __name__ == "__main__":
    main()
