# SPDX-License-Identifier: Apache-2.0
"""Questions to a started process: whether it is ready, which instance it is, and how it ended."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from kvcr.graph.processes import Child

_TIMEOUT_S = 1.0
_LOG_TAIL_BYTES = 2500
_INSTANCE_ID = re.compile(rb'^dynamo_component_[^\n]*worker_id="([0-9a-f]+)"', re.MULTILINE)


def page(url: str) -> bytes | None:
    """Body of a 200 answer, None for anything else."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
            return bytes(response.read()) if response.status == 200 else None
    except (urllib.error.URLError, OSError, ValueError):
        return None


def instance_of(metrics_url: str) -> str | None:
    """Instance id of a Dynamo component in hex, which labels its metrics once it serves; None before."""
    found = _INSTANCE_ID.search(page(metrics_url) or b"")
    return found[1].decode() if found else None


def refuses_well(url: str, model: str | None) -> bool:
    """Whether a chat without messages is refused as such (400), so that one with messages would be served."""
    body = json.dumps({"model": model, "messages": []}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        return error.code == 400
    except (urllib.error.URLError, OSError):
        return False


def ready_line(child: Child) -> dict[str, Any] | None:
    """The line of JSON by which a process without a health page says that it is ready, None before."""
    for line in child.output().splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                announced = json.loads(line)
                if isinstance(announced, dict) and announced.get("ready") is True:
                    return announced
    return None


def exit_words(code: int) -> str:
    """An exit code as people say it: of a signal, its name."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def tail(log: Path) -> str:
    """The end of a log, for a message."""
    with contextlib.suppress(OSError):
        return log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    return ""
