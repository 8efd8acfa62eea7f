# SPDX-License-Identifier: Apache-2.0
"""Labels of our metrics have few values, whatever clients send."""

from __future__ import annotations

import re
from pathlib import Path

from kvcr.guard import gauges
from kvcr.guard.meters import Meters
from kvcr.guard.transit import TransitSlots
from kvcr.guard.view import GuardState
from kvcr.protocol.events import PREFETCH, ActionCode
from router_hints.heat import HotPrefix
from router_hints.metrics import STATES, Metrics, RequestOutcome

REFERENCE = Path(__file__).parents[2] / "docs/reference/metrics.md"
FEW = {
    "action", "code", "estimate", "field", "how", "input", "kind", "message", "outcome", "rank", "rate",
    "reason", "result", "state", "status", "tier", "transport", "via", "where", "why",
}  # fmt: skip
"""Words that our code chooses."""
FLEET = {"guard", "peer"}
"""As many as there are guards now: those that are gone are forgotten. Instance ids, process ids, sessions and
requests are no labels: each restart would make new ones."""


def test_every_label_is_a_word_of_ours_or_a_part_of_the_fleet() -> None:
    rows = re.findall(r"^\| `((?:vllm:)?kvcr_\w+)` \| ([^|]*) \|", REFERENCE.read_text(), re.MULTILINE)
    assert len(rows) > 80
    for name, labels in rows:
        assert set(re.findall(r"`(\w+)`", labels)) <= FEW | FLEET, name


def test_a_router_forgets_the_guards_that_are_gone() -> None:
    metrics = Metrics()
    for number in range(100):
        name = f"pod-{number}"
        metrics.retain_guards({name, "stays"})
        for guard in (name, "stays", ""):
            metrics.ended(guard, RequestOutcome.OK)
        for gauge in (metrics.index_blocks, metrics.inventory_lag, metrics.unready_sources):
            gauge.labels(name).set(1)
    # One that went away while a request was on its way there.
    metrics.ended("late", RequestOutcome.LOST)
    metrics.retain_guards({"pod-99", "stays"})
    text = metrics.render()
    assert set(re.findall(r'guard="([^"]*)"', text)) == {"pod-99", "stays", ""}
    assert 'kvcr_router_requests_total{guard="stays",outcome="ok"} 100.0' in text


def test_a_router_knows_the_states_of_guards() -> None:
    assert set(STATES) == {state.value.lower() for state in GuardState}


def test_what_guards_call_their_states_and_answers_are_no_labels() -> None:
    metrics = Metrics()
    for number in range(100):
        metrics.state_changed(f"state-{number}")
        metrics.answered(f"action-{number}", f"code-{number}", 1, 2)
    metrics.answered(PREFETCH, ActionCode.DONE.value, 3, 4)
    text = metrics.render()
    assert 'kvcr_router_state_changes_total{state="unknown"} 100.0' in text
    assert 'kvcr_router_actions_total{action="unknown",code="unknown"} 100.0' in text
    assert f'kvcr_router_acted_blocks_total{{action="{PREFETCH}"}} 3.0' in text
    assert not re.search(r'"(state|action|code)-', text)


def test_a_guard_forgets_the_peers_that_are_gone() -> None:
    meters = Meters()
    peer = {"endpoint": "", "ready": True, "canary_bytes_per_s": 1.0, "transport": "nixl", "via": "tcp"}
    for number in range(100):
        name = f"pod-{number}"
        meters.count_pulled(name, "nixl", 1, 4096)
        meters.peer_rate.set(1.0, peer=name, transport="nixl", tier="2")
        gauges.refresh(
            meters,
            None,
            state=GuardState.STANDBY,
            peers=[{**peer, "name": name, "why": "it is far"}],
            lease_count=0,
            transit=TransitSlots(1, 0.5),
            sequence=0,
            nixl_restarts=0,
        )
    text = meters.registry.render()
    assert set(re.findall(r'peer="([^"]*)"', text)) == {"pod-99"}
    assert 'kvcr_peer_pulled_bytes_total{peer="pod-99"} 4096' in text


def test_names_that_a_client_makes_up_are_no_labels() -> None:
    metrics = Metrics()
    for number in range(1000):
        metrics.refused("header", f"field{number}")
    metrics.refused("header", "isl")
    lines = [
        line for line in metrics.render().splitlines() if line.startswith("kvcr_router_signals_refused_total")
    ]
    assert sorted(lines) == [
        'kvcr_router_signals_refused_total{field="isl",input="header"} 1.0',
        'kvcr_router_signals_refused_total{field="unknown",input="header"} 1000.0',
    ]


def test_hot_prefixes_are_told_by_rank_and_forgotten_when_they_cool() -> None:
    metrics = Metrics()
    metrics.show_hot([(HotPrefix(bytes(range(16)), 8, 2.5), 3), (HotPrefix(bytes(16), 4, 1.0), 0)])
    text = metrics.render()
    assert 'kvcr_router_hot_prefix_requests_per_second{rank="01"} 2.5' in text
    (key,) = re.findall(r'^kvcr_router_hot_prefix_key\{rank="01"\} (\S+)$', text, re.MULTILINE)
    assert float(key) == 0x000102030405
    assert 'kvcr_router_hot_prefix_guards{rank="02"} 0.0' in text
    metrics.show_hot([])
    assert 'rank="' not in metrics.render()
