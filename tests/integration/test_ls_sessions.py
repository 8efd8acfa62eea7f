# SPDX-License-Identifier: Apache-2.0
"""``kvcr ls`` names sessions as a live router knows them; ``kvcr doctor`` finds router and guards agreed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live import Live
from tests.integration.router_stack import BLOCK, ROOT

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    running = Live(tmp_path)
    yield running
    running.close()


def kvcr(live: Live, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "kvcr.cli", *words, "--json"],
        env={**os.environ, **live.stack.environment, "PYTHONPATH": str(ROOT / "components")},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_chains_are_named_after_their_sessions_and_all_agree(live: Live) -> None:
    live.ran("first-session", "one thing. ".ljust(8 * BLOCK, "x"), "a")
    live.ran("second-session", "another. ".ljust(12 * BLOCK, "y"), "b", tenant="t1")
    rows = {row["session"]: row for row in kvcr(live, "ls")["chains"]}
    assert {"first-session", "second-session"} <= set(rows)
    assert (rows["first-session"]["guard"], rows["second-session"]["guard"]) == ("a", "b")
    assert rows["first-session"]["tenant"] != rows["second-session"]["tenant"]
    worker = live.b.worker
    assert worker is not None
    there = kvcr(live, "ls", "--worker", f"{worker.worker_id:x}")["chains"]
    assert {row["guard"] for row in there} == {"b"}

    checks = {check["name"]: check for check in kvcr(live, "doctor")["checks"]}
    for name in ("etcd", "NATS", "guards", "routers", "clocks", "releases", "block keys", "inventory"):
        assert checks[name]["outcome"] == "ok", checks[name]
    assert (checks["guards"]["detail"], checks["routers"]["detail"]) == ("2 answer", "1 answer")
    assert "2 pairs" in checks["inventory"]["detail"]
    assert "of 2 chains are of requests without a tenant" in checks["tenants"]["detail"]
