# SPDX-License-Identifier: Apache-2.0
"""Every plan can be told to a person and made again from its log, with the same result."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_hints.asking import explain
from router_hints.costs import CostModel, Settings
from router_hints.explain import PlanLog, replay, tell
from router_hints.index import IndexView
from router_hints.inputs import PlanInputs
from router_hints.ledger import Announced, Load, Loads
from router_hints.planner import Holder, Plan, RequestView, Worker, plan
from router_hints.plans import Reason
from router_hints.topology import Link, Place, Topology
from router_hints.turns import Arriving, Kind, SessionView, Turn


def make(seed: int) -> tuple[Plan, PlanInputs]:
    """A plan of some situation, with everything in it that a plan can depend on."""
    rng = np.random.default_rng(seed)
    names = [f"g{n}" for n in range(4)]
    ranks = [(10 + n // 2, n % 2) for n in range(4)]
    costs = CostModel(Settings(max_replicas=2, copy_budget_bytes_per_s=1e9))
    for rank in ranks:
        costs.observe_prefill(rank, int(rng.integers(100, 5000)), float(rng.random() + 0.01))
        costs.observe_wait(rank, 1.0, float(rng.random() * 3))
    costs.observe_copy("g0", "g1", Link.DOMAIN, 10_000_000, float(rng.random() / 10))
    blocks = int(rng.integers(1, 300))
    kinds = [Kind.TURN, Kind.FORK, Kind.ONE_OFF, Kind.WAKE_UP]
    arguments = (
        RequestView(
            f"p{seed}",
            blocks * 16 + 5,
            16,
            affinity=rng.bytes(16),
            required_taints=frozenset({"gold"}) if rng.random() < 0.3 else frozenset(),
            preferred_taints={"gold": 0.5},
            turn=Turn(
                session="s",
                kind=kinds[int(rng.integers(4))],
                osl=500,
                starts_in_s=float(rng.random()),
                runs_s=float(rng.random() * 100),
            ),
            session=SessionView(
                home="g2",
                arriving=(Arriving(guard="g1", first=0, count=blocks, ready_in_s=0.01),),
                shared_blocks=3,
            ),
            ahead=bool(rng.random() < 0.3),
            rates_per_s=(5.0, 3.0, 2.0, 0.1),
            router="r1",
        ),
        [
            Worker(r, guard=n, taints=frozenset({"gold"}), max_requests=8, kv_blocks=500)
            for r, n in zip(ranks, names, strict=True)
        ],
        IndexView(tuple(names), rng.random((4, blocks)) < 0.9),
        {n: Holder(n, f"tcp://{n}", "L", 2_000_000) for n in names},
        Loads(
            {r: Load(int(rng.integers(0, 5000)), 3, 200, 100.0, 50.0) for r in ranks},
            {"g0": 1_000_000},
            (Announced(ranks[0], 0.2, 300),),
            float(rng.random() * 1.5e9),
            {"g1": 100, "g2": 0},
            float(rng.integers(0, 2) * 500),
        ),
        costs,
        Topology({"g0": Place(rdma_domain="A"), "g1": Place(rdma_domain="A"), "g2": Place("boot")}),
        1234.5,
    )
    return plan(*arguments), PlanInputs.taken(*arguments)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6))
def test_a_plan_made_again_from_its_log_is_the_same(seed: int) -> None:
    made, inputs = make(seed)
    log = PlanLog()
    log.record(made, "r", 0, None, inputs)
    (entry,) = log.find(request_id="r", inputs=True)
    assert PlanInputs.from_text(inputs.to_text()).plan() == made
    assert replay(json.loads(json.dumps(entry))) == (True, [])


def test_a_log_that_was_tampered_with_is_told_apart() -> None:
    made, inputs = make(1)
    log = PlanLog()
    log.record(made, "r", 0, None, inputs)
    (entry,) = log.find(plan_id="p1", inputs=True)
    same, different = replay(entry | {"worker_id": 77})
    assert not same
    assert different == [f"worker_id: logged 77, now {made.rank[0]}"]
    with pytest.raises(ValueError, match="without its inputs"):
        replay(log.find(plan_id="p1")[0])


def test_a_plan_is_told_with_every_candidate_and_the_winner() -> None:
    made, inputs = make(2)
    log = PlanLog()
    log.record(made, "request-7", 1, None, inputs)
    log.first_output("p2", 0.25)
    log.ended("p2", "ok")
    text = tell(log.find(plan_id="p2")[0])
    assert "request-7" in text
    assert "0.250 s" in text
    assert text.count("\n->") == 1
    assert all(f"{rank[0]:x}.{rank[1]}" in text for rank in ((10, 0), (10, 1), (11, 0), (11, 1)))
    assert made.reason.value in text
    # With the inputs each worker has the name of its guard, as in `kvcr status`.
    named = tell(log.find(plan_id="p2", inputs=True)[0])
    assert all(f" {guard}  " in named for guard in ("g0", "g1", "g2", "g3"))


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_told_in_words(reason: Reason) -> None:
    made, _ = make(2)
    log = PlanLog()
    log.record(dataclasses.replace(made, reason=reason), "r", 0, None)
    assert f"reason {reason.value}" in tell(log.find()[0])


def test_the_command_reads_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = PlanLog()
    for seed in (1, 2, 3):
        made, inputs = make(seed)
        log.record(made, f"r{seed}", 0, None, inputs)
    path = tmp_path / "plans"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in log.find(inputs=True)))
    assert explain(["r2", "--log", str(path), "--replay"]) == 0
    assert "replay: equal" in capsys.readouterr().out
    assert explain(["--last", "3", "--log", str(path), "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert explain(["r1", "--log", str(path), "--json", "--replay"]) == 0
    assert json.loads(capsys.readouterr().out)["differs"] == []
    assert explain(["nobody", "--log", str(path)]) == 1


def test_the_log_is_bounded() -> None:
    log = PlanLog(size=2)
    for seed in range(5):
        made, inputs = make(seed)
        log.record(made, "r", 0, None, inputs)
    assert [entry["plan_id"] for entry in log.find()] == ["p3", "p4"]
