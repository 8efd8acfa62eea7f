# SPDX-License-Identifier: Apache-2.0
"""``kvcr pin|demote|invalidate|prefetch|move`` on real guards, through real etcd and NATS."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command
import nats
import pytest
from deployment import Deployment, deployment
from engine_client import EngineClient, GuardProcess, chain
from waiting import eventually

from kvcr.dynamo.acting import act
from kvcr.protocol.events import (
    UNPIN,
    Act,
    ActionResult,
    UnpinPayload,
    actions_subject,
    event,
    results_subject,
)

__all__ = ["deployment"]


@pytest.fixture
def guards(deployment: Deployment) -> Iterator[tuple[GuardProcess, GuardProcess]]:
    with deployment.guard("g0") as first, deployment.guard("g1") as second:
        yield first, second


@pytest.fixture
def kvcr(deployment: Deployment, tmp_path: Path) -> Any:
    return functools.partial(
        command.kvcr,
        {
            **deployment.environment,
            "DYN_NAMESPACE": deployment.namespace,
            "KVCR_CACHE": str(tmp_path),
        },
    )


async def _held(kvcr: Any, key: str) -> dict[str, bool]:
    report = kvcr("where", key, code=0)
    return {guard["guard"]: bool(guard["held"]) for guard in report["guards"]}


async def test_by_hand(deployment: Deployment, guards: tuple[GuardProcess, GuardProcess], kvcr: Any) -> None:
    """One life of a prefix: copied ahead, pinned, moved, and dropped everywhere."""
    await deployment.registered("g0")
    await deployment.registered("g1")
    root, keys = chain(6, "by hand")
    names = ",".join(key.hex() for key in keys)
    last = keys[-1].hex()
    with EngineClient(guards[0], "engine-0") as first, EngineClient(guards[1], "engine-1"):
        first.deposit(keys, root)

        copied = kvcr("prefetch", names, "--to", "g1")["actions"]
        assert [(a["guard"], a["result"], a["blocks"]) for a in copied] == [("g1", "done", 6)]
        assert await _held(kvcr, last) == {"g0": True, "g1": True}

        pinned = kvcr("pin", names, "--guard", "g1", "--ttl-s", "60")
        assert [(a["guard"], a["result"]) for a in pinned["actions"]] == [("g1", "done")]
        unpinned = kvcr("unpin", pinned["plan_id"], code=1)["actions"]
        assert {a["guard"]: a["result"] for a in unpinned} == {"g0": "miss", "g1": "done"}

        demoted = kvcr("demote", names)["actions"]
        assert {a["guard"]: (a["result"], a["blocks"]) for a in demoted} == {
            "g0": ("done", 6),
            "g1": ("done", 6),
        }

        dropped = kvcr("invalidate", names, "--guard", "g1")["actions"]
        assert dropped[0]["result"] in ("done", "deferred")
        assert await _held(kvcr, last) == {"g0": True, "g1": False}

        root2, keys2 = chain(4, "moved")
        first.deposit(keys2, root2)
        moved = kvcr("move", ",".join(key.hex() for key in keys2), "--to", "g1")["actions"]
        assert (moved[0]["guard"], moved[0]["result"], moved[0]["blocks"]) == ("g1", "done", 4)

        async def gone() -> bool:
            return await _held(kvcr, keys2[-1].hex()) == {"g0": False, "g1": True}

        await eventually(gone, "the source to drop what was moved")


async def test_more_blocks_than_a_message_carries(
    deployment: Deployment, guards: tuple[GuardProcess, GuardProcess], kvcr: Any, tmp_path: Path
) -> None:
    await deployment.registered("g0")
    await deployment.registered("g1")
    (first_root, first), (last_root, last) = chain(3, "among the first"), chain(3, "among the last")
    others = [f"{number:032x}" for number in range(100_000)]
    names = tmp_path / "keys"
    names.write_text("\n".join([*(key.hex() for key in first), *others, *(key.hex() for key in last)]))
    with EngineClient(guards[0], "engine-0") as engine:
        engine.deposit(first, first_root)
        engine.deposit(last, last_root)
        (dropped,) = kvcr("invalidate", f"@{names}", "--guard", "g0")["actions"]
        assert (dropped["result"], dropped["blocks"]) == ("deferred", 6)
        for key in (first[0], last[-1]):
            found = kvcr("where", key.hex(), code=1)["guards"]
            assert {guard["guard"]: guard["held"] for guard in found} == {"g0": 0, "g1": 0}


async def test_a_guard_that_hangs_does_not_keep_the_others_from_acting(
    deployment: Deployment, guards: tuple[GuardProcess, GuardProcess], kvcr: Any
) -> None:
    await deployment.registered("g0")
    await deployment.registered("g1")
    root, keys = chain(4, "beside one that hangs")
    names = ",".join(key.hex() for key in keys)
    with EngineClient(guards[0], "engine-0") as first:
        first.deposit(keys, root)
        os.kill(guards[1].process.pid, signal.SIGSTOP)
        try:
            pinned = kvcr("pin", names, code=1)["actions"]
            demoted = kvcr("demote", names, "--guard", "g0")["actions"]
            dropped = kvcr("invalidate", names, "--timeout-s", "4", code=1)["actions"]
        finally:
            os.kill(guards[1].process.pid, signal.SIGCONT)
        assert {a["guard"]: (a["result"], a["blocks"]) for a in pinned} == {
            "g0": ("done", 4),
            "g1": ("no answer", 0),
        }
        assert [(a["guard"], a["result"]) for a in demoted] == [("g0", "done")]
        assert {a["guard"]: a["result"] for a in dropped} == {"g0": "partial", "g1": "no answer"}


async def test_a_result_that_cannot_be_read_is_passed_over(deployment: Deployment) -> None:
    subject = results_subject(deployment.namespace)

    async def answer(message: Any) -> None:
        order = event.decode(message.data)
        assert isinstance(order, Act)
        await client.publish(subject, b"of a release to come")
        await client.publish(
            subject, event.encode(ActionResult("g0", 1, "p", "p.0", UNPIN, "done", blocks=3))
        )

    client = await nats.connect(deployment.nats_url)
    try:
        await client.subscribe(actions_subject(deployment.namespace, "g0"), cb=answer)
        await client.flush()
        orders = [("g0", UNPIN, UnpinPayload(plan_id="p", pin_id="x"))]
        (result,) = await act(deployment.nats_url, deployment.namespace, orders, "p", 30.0)
        assert result is not None
        assert (result.code, result.blocks) == ("done", 3)
    finally:
        await client.close()


async def test_mistakes_are_told(
    deployment: Deployment, guards: tuple[GuardProcess, GuardProcess], kvcr: Any
) -> None:
    await deployment.registered("g0")
    await deployment.registered("g1")
    nowhere = "ab" * 16
    assert "no guard holds" in kvcr("pin", nowhere, code=1)["error"]
    assert "no guard holds" in kvcr("invalidate", nowhere, code=1)["error"]
    assert "no other guard holds" in kvcr("prefetch", nowhere, "--to", "g1", code=1)["error"]
    assert (
        "no guard 'g7' is registered; there are: g0, g1"
        in kvcr("move", nowhere, "--to", "g7", code=2)["error"]
    )
    assert "--router" in kvcr("pin", "some-session", code=2)["error"]
