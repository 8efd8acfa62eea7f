# SPDX-License-Identifier: Apache-2.0
"""What goes over the wire: requests as they are read, hints as they are written, events as they come."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvcr.errors import ConfigError, ProtocolError
from kvcr.keys import KeySpace, extend_chain, pack_keys
from kvcr.layout import Layout
from kvcr.protocol.events import FetchPayload, HintNotice, event, stream_name
from router_hints.cards import WorkerCard, parse_card
from router_hints.costs import CostModel
from router_hints.explain import PlanLog
from router_hints.guards import Guard, GuardDirectory
from router_hints.hints import build_envelope, build_notice
from router_hints.index import IndexView
from router_hints.kv_events import G1Batch, G1Change, decode_kv_events
from router_hints.ledger import Loads
from router_hints.overlap import decode_reports
from router_hints.planner import Holder, Plan, RequestView, SourceRun, Worker, plan
from router_hints.requests import read_prompt
from router_hints.settings import parse
from router_hints.topology import Link, Topology
from router_hints.workers import WorkerTable

KEYS = extend_chain(KeySpace("dynamo", "m@f+0").root(), list(range(160)), 16)


def made(*sources: SourceRun) -> Plan:
    view = RequestView("plan-1", 165, 16, b"")
    cold = plan(
        view, [Worker((7, 0), guard="t")], IndexView.empty(10), {}, Loads(), CostModel(), Topology(), 1.0
    )
    return replace(cold, sources=sources, give_up_ms=12.3456)


# --- hints -------------------------------------------------------------------------------------------


def test_a_hint_is_an_envelope_that_survives_json_and_decodes_as_its_payload() -> None:
    runs = (
        SourceRun("g1", "tcp://10.0.0.1:7100", 0, 4, 400),
        SourceRun("g2", "tcp://10.0.0.2:7100", 4, 3, 300),
    )
    hint = build_envelope(made(*runs), pack_keys(KEYS), deadline_ms=1500)
    assert hint is not None
    hint = json.loads(json.dumps(hint))
    assert (hint["protocol_version"], hint["message_id"]) == ("0.1", "plan-1")
    (action,) = hint["actions"]
    assert (action["action_type"], action["action_version"]) == ("kv.fetch", "2.0")
    payload = msgspec.convert(action["payload"], FetchPayload)
    assert [(s.guard, s.endpoint, s.first, s.count) for s in payload.sources] == [
        ("g1", "tcp://10.0.0.1:7100", 0, 4),
        ("g2", "tcp://10.0.0.2:7100", 4, 3),
    ]
    assert payload.last_key == KEYS[6].hex()
    assert (payload.mode, payload.no_retain) == ("copy", False)
    assert (payload.give_up_ms, payload.deadline_ms) == (12.346, 1500)


def test_a_copy_may_take_half_as_long_as_recomputing_if_that_is_more_than_the_setting() -> None:
    slow = replace(made(SourceRun("g1", "tcp://x:1", 0, 4, 4)), give_up_ms=14_000.0)
    hint = build_envelope(slow, pack_keys(KEYS), deadline_ms=2000)
    assert hint is not None
    assert hint["actions"][0]["payload"]["deadline_ms"] == 7000


def test_a_plan_without_copies_has_no_hint() -> None:
    assert build_envelope(made(), pack_keys(KEYS), deadline_ms=1) is None


def test_the_copy_on_nats_carries_the_same_envelope_and_the_request() -> None:
    hint = build_envelope(made(SourceRun("g1", "tcp://x:1", 0, 4, 4)), pack_keys(KEYS), deadline_ms=1)
    assert hint is not None
    raw = event.encode(build_notice(made(), hint, request_id="r1", router="router-1"))
    notice = event.decode(raw)
    assert isinstance(notice, HintNotice)
    assert (notice.plan_id, notice.request_id, notice.worker_id, notice.router) == (
        "plan-1",
        "r1",
        7,
        "router-1",
    )
    assert json.loads(notice.envelope) == hint


def test_a_hint_for_thousands_of_blocks_stays_small() -> None:
    run = SourceRun("g1", "tcp://10.0.0.1:7100", 0, 10, 10)
    hint = build_envelope(made(run), pack_keys(KEYS), deadline_ms=1)
    assert len(json.dumps(hint)) < 1000


# --- requests ----------------------------------------------------------------------------------------


def test_a_plain_request() -> None:
    prompt = read_prompt({"token_ids": [1, 2, 3], "routing": {"cache_salt": "t1"}}, {})
    assert (prompt.tokens, prompt.salt, prompt.keyed, prompt.pinned_worker) == ([1, 2, 3], "t1", True, None)
    view = prompt.view("p", 2)
    assert (view.prompt_tokens, view.reusable_blocks) == (3, 1)


def test_requests_whose_tokens_do_not_name_their_blocks_have_no_keys() -> None:
    assert read_prompt({"token_ids": [1], "routing": {"lora_name": "a"}}, {}).unkeyed_reason == "lora"
    assert read_prompt({"token_ids": [1], "multi_modal_data": {"image_url": ["x"]}}, {}).keyed is False
    assert read_prompt({"token_ids": [1], "multi_modal_data": None}, {}).keyed is True


@pytest.mark.parametrize(
    ("request_", "metadata"),
    [
        ({"routing": {"backend_instance_id": 42}}, {}),
        ({"annotations": ["x:1", "kvcr.worker:42"]}, {}),
        ({}, {"kvcr-worker": "42"}),
    ],
)
def test_the_three_ways_to_pin_a_worker(request_: dict[str, Any], metadata: dict[str, str]) -> None:
    assert read_prompt(request_, metadata).pinned_worker == 42


def test_a_pin_that_is_no_worker_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'w0'"):
        read_prompt({}, {"kvcr-worker": "w0"})


def test_affinity_depends_on_the_first_block_and_the_tenant_only() -> None:
    def affinity(tokens: list[int], salt: str = "") -> bytes:
        return read_prompt({"token_ids": tokens, "routing": {"cache_salt": salt}}, {}).view("p", 4).affinity

    assert affinity([1, 2, 3, 4, 5]) == affinity([1, 2, 3, 4, 9, 9])
    assert affinity([1, 2, 3, 4]) != affinity([1, 2, 3, 5])
    assert affinity([1, 2, 3, 4]) != affinity([1, 2, 3, 4], "tenant")


# --- cards, guards, workers ----------------------------------------------------------------------------


def card(worker_id: int = 5, **runtime: Any) -> bytes:
    return json.dumps(
        {
            "type": "Model",
            "instance_id": worker_id,
            "card_json": {
                "display_name": "tiny",
                "kv_cache_block_size": 16,
                "runtime_config": runtime,
                "x": 1,
            },
        }
    ).encode()


@pytest.mark.parametrize(
    "endpoints", [{"0": "tcp://h:1", "1": "tcp://h:2"}, '{"0": "tcp://h:1", "1": "tcp://h:2"}']
)
def test_a_card_names_its_guards_as_json_or_as_json_text(endpoints: Any) -> None:
    parsed = parse_card(
        card(
            max_num_seqs=8,
            data_parallel_size=2,
            taints=["gold"],
            runtime_data={"router_hint_source_control_endpoints": endpoints},
        )
    )
    assert (parsed.worker_id, parsed.block_size, parsed.ranks, parsed.max_requests) == (5, 16, 2, 8)
    assert parsed.control_endpoints == {0: "tcp://h:1", 1: "tcp://h:2"}
    assert parsed.taints == frozenset({"gold"})


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1]", b'{"instance_id": "x"}'])
def test_what_is_no_card_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_card(raw)


LAYOUT = Layout("m@f+0", "float32", 16, 2, 2, 16, part_bytes=8192, tp_size=2)


def test_guards_are_joined_to_ranks_by_control_endpoint() -> None:
    directory = GuardDirectory()
    directory.put(Guard("g1", 1, "tcp://h:1", "dynamo", LAYOUT, rdma_domain="A"))
    directory.put(Guard("g2", 1, "tcp://h:2", "dynamo", None, rdma_domain="B"))
    worker = WorkerCard(5, control_endpoints={0: "tcp://h:1", 1: "tcp://h:2", 2: "tcp://h:3"})
    assert [getattr(directory.beside(worker, rank), "name", None) for rank in range(4)] == [
        "g1",
        "g2",
        None,
        None,
    ]
    assert directory.holders == {"g1": Holder("g1", "tcp://h:1", LAYOUT.digest(), 16384)}
    assert directory.topology.link("g1", "g2") is Link.FAR
    assert directory.get("g2") is not None
    assert directory.drop("g1") is not None
    assert directory.beside(worker, 0) is None
    assert directory.drop("g1") is None


def test_keys_follow_tenant_and_model_of_the_guard() -> None:
    guard = Guard("g", 1, "tcp://h:1", "dynamo", LAYOUT)
    assert guard.key_space("t") == KeySpace("dynamo", "m@f+0", salt="t")
    assert Guard("g", 1, "tcp://h:1", "dynamo").key_space("t") is None


def test_a_worker_of_another_block_size_is_refused_by_name() -> None:
    table = WorkerTable(16)
    assert table.put_card(WorkerCard(1, "tiny", 16)) == ""
    refusal = table.put_card(WorkerCard(2, "tiny", 32))
    assert "32" in refusal
    assert "16" in refusal
    assert "--block-size" in refusal
    assert [c.worker_id for c in table.ready([1, 2, 3], 0.0)] == [1, 3]


def test_an_unreachable_worker_is_left_alone_for_longer_each_time_until_it_answers() -> None:
    table = WorkerTable(16)

    def down_for() -> float:
        table.mark_down(1, 0.0)
        return next(t for t in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0) if table.ready([1], t))

    assert [down_for() for _ in range(6)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    table.mark_up(1)
    assert down_for() == 1.0
    assert table.is_down(1, 0.5)
    assert table.ready([1, 2], 50.0, without=[1]) == [WorkerCard(2)]
    table.forget(1)
    assert not table.is_down(1, 0.5)


# --- Dynamo's events ------------------------------------------------------------------------------------


def enveloped(payload: Any) -> bytes:
    return msgspec.msgpack.encode(
        {
            "publisher_id": 1,
            "sequence": 1,
            "published_at": 1,
            "topic": "t",
            "payload": msgspec.msgpack.encode(payload),
        }
    )


def kv_event(data: Any, tier: str = "device") -> dict[str, Any]:
    return {
        "worker_id": 9,
        "storage_tier": tier,
        "residency_domain": "worker",
        "event": {"event_id": 1, "data": data, "dp_rank": 0},
    }


def test_kv_events_of_engine_memory() -> None:
    stored = {"stored": {"parent_hash": None, "blocks": [{"block_hash": 2**64 - 1, "tokens_hash": 1}]}}
    raw = enveloped(
        [
            kv_event(stored),
            kv_event(stored, "host_pinned"),
            kv_event({"removed": {"block_hashes": [3]}}),
            kv_event("cleared"),
        ]
    )
    assert decode_kv_events(raw) == G1Batch(
        publisher=1,
        sequence=1,
        changes=(
            G1Change((9, 0), stored=((2**64 - 1, 1),)),
            G1Change((9, 0), removed=(3,)),
            G1Change((9, 0), cleared=True),
        ),
    )
    with pytest.raises(ProtocolError):
        decode_kv_events(b"\x00")


def test_load_reports_alone_and_in_a_list() -> None:
    report = {"worker_id": 9, "dp_rank": 1, "active_decode_blocks": 4, "active_prefill_tokens": None}
    (alone,) = decode_reports(enveloped(report))
    assert (alone.worker_id, alone.dp_rank, alone.active_decode_blocks) == (9, 1, 4)
    assert len(decode_reports(enveloped([report, report]))) == 2
    with pytest.raises(ProtocolError):
        decode_reports(enveloped("x"))


def test_stream_names_have_no_dots() -> None:
    assert stream_name("a.b-c_1", "locations") == "kvcr-v1-a_b-c_1-locations"


# --- explain and settings ---------------------------------------------------------------------------------


def test_plans_can_be_asked_for_and_are_bounded() -> None:
    log = PlanLog(size=2)
    for number in range(3):
        log.record(replace(made(), plan_id=f"p{number}"), f"r{number}", 0, None)
    assert log.find(plan_id="p0") == []
    log.first_output("p2", 0.5)
    log.ended("p2", "ok")
    (entry,) = log.find(request_id="r2")
    assert (entry["outcome"], entry["first_output_s"], entry["reason"]) == ("ok", 0.5, "cold")
    assert entry["candidates"][0]["total_s"] > 0
    assert [e["plan_id"] for e in log.find(last=1)] == ["p2"]
    json.dumps(log.find())


REQUIRED = ["--model-path", "m", "--model-name", "n", "--block-size", "16"]


def test_settings_come_from_the_command_line_and_dynamos_environment() -> None:
    settings = parse(
        [*REQUIRED, "--decode-s", "0.5"], {"NATS_SERVER": "nats://h:1", "DYN_REQUEST_PLANE": "nats"}
    )
    assert (settings.namespace, settings.worker_component, settings.nats_url) == (
        "dynamo",
        "backend",
        "nats://h:1",
    )
    assert (settings.request_plane, settings.event_plane) == ("nats", "nats")
    assert (settings.costs.decode_s, settings.secret) == (0.5, None)


@pytest.mark.parametrize("flag", ["--block-size", "--index-blocks", "--far-bytes-per-s"])
def test_settings_out_of_range_are_named(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        parse([*REQUIRED, flag, "0"], {})


def test_a_system_port_that_dynamo_cannot_read_is_named() -> None:
    with pytest.raises(ConfigError, match="DYN_SYSTEM_PORT=51729"):
        parse(REQUIRED, {"DYN_SYSTEM_PORT": "51729"})
