# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of the vLLM connector, against a pool that is a set and a guard that is a script."""

from __future__ import annotations

import pickle
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcr.vllm.torchvision_ops import declare_missing_operators

declare_missing_operators()
pytest.importorskip("vllm")

# ruff: noqa: E402
from kvcr.client import FetchState, Grants
from kvcr.config import EngineConfig
from kvcr.keys import BlockKey, KeySpace, extend_chain, unpack_keys
from kvcr.protocol.engine import BlockStatus, DropG1, FetchLease, FetchProgress
from kvcr.protocol.events import (
    ACTION_VERSION,
    DEMOTE,
    UNPIN,
    DemotePayload,
    FetchPayload,
    FetchSource,
    UnpinPayload,
    action,
    envelope,
    fetch_action,
)
from kvcr.vllm.metadata import StepMetadata, WorkerMetadata
from kvcr.vllm.scheduler import ConnectorScheduler

BLOCK = 4
MODEL = "tiny@abc+0"
PEER = "tcp://10.0.0.6:7100"


class FakeHandle:
    """The pool as a set of keys, standing grants as a counter, fetches as the test fills them in."""

    def __init__(self, grants: int = 100) -> None:
        self.resident: set[BlockKey] = set()
        self.grants_available = grants
        self.connected = True
        self.own_endpoint = "tcp://10.0.0.5:7100"
        self.fetches: dict[str, FetchState] = {}
        self.sent: list[dict[str, Any]] = []
        self.finished: list[str] = []
        self.drops: list[DropG1] = []
        self.dropped_counts: list[tuple[int, int]] = []
        self.acts: list[tuple[str, dict[str, Any]]] = []
        self.now = 100.0
        self._next_slot = 0

    def poll(self) -> None: ...
    def use(self, keys: bytes) -> None: ...
    def close(self) -> None: ...

    def lookup(self, keys: bytes) -> np.ndarray:
        return np.array([key in self.resident for key in unpack_keys(keys)], np.bool_)

    def take_grants(self, count: int) -> Grants:
        assert count <= self.grants_available
        self.grants_available -= count
        slots = np.arange(self._next_slot, self._next_slot + count, dtype=np.int32)
        self._next_slot += count
        return Grants(slots, np.ones(count, np.uint64), 7, 1)

    def give_back(self, grants: Grants) -> None: ...

    def fetch(self, request_id: str, **asked: Any) -> FetchState:
        self.sent.append({"request_id": request_id, **asked})
        state = FetchState(request_id, asked["first"], len(asked["keys"]) // 16, self.now)
        self.fetches[request_id] = state
        return state

    def fetch_state(self, request_id: str) -> FetchState | None:
        return self.fetches.get(request_id)

    def act(self, request_id: str, envelope: bytes) -> None:
        self.acts.append((request_id, msgspec.json.decode(envelope)))

    def take_drops(self) -> list[DropG1]:
        drops, self.drops = self.drops, []
        return drops

    def dropped(self, drop: DropG1, count: int) -> None:
        self.dropped_counts.append((drop.drop_id, count))

    def finish(self, request_id: str) -> None:
        self.fetches.pop(request_id, None)
        self.finished.append(request_id)


def request(tokens: int, request_id: str = "r", first_token: int = 0, **changes: Any) -> SimpleNamespace:
    ids = list(range(first_token, first_token + tokens))
    made = SimpleNamespace(
        request_id=request_id,
        all_token_ids=ids,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        block_hashes=[bytes(24) + (1000 + i).to_bytes(8, "big") for i in range(tokens // BLOCK)],
        mm_features=[],
        prompt_embeds=None,
        prompt_is_token_ids=None,
        lora_request=None,
        cache_salt=None,
        kv_hints=None,
        kv_transfer_params=None,
        skip_reading_prefix_cache=False,
        resumable=False,
        trace_headers=None,
    )
    vars(made).update(changes)
    return made


def keys_of(made: SimpleNamespace, **space: str) -> list[BlockKey]:
    return extend_chain(KeySpace("dynamo", MODEL, **space).root(), made.all_token_ids, BLOCK)


def make(handle: FakeHandle, **config: Any) -> ConnectorScheduler:
    return ConnectorScheduler(
        handle, EngineConfig(**config), model=MODEL, block_size=BLOCK, clock=lambda: handle.now
    )


def step(
    scheduled: dict[str, tuple[int, int]], tables: dict[str, list[int]], preempted: set[str] | None = None
) -> SimpleNamespace:
    """A scheduler output: request id -> (computed before, scheduled now)."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r, num_computed_tokens=computed) for r, (computed, _) in scheduled.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={r: n for r, (_, n) in scheduled.items()},
        preempted_req_ids=preempted or set(),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda r: (tables[r],)),
    )


def output(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "invalid_block_ids": set(),
            "finished_recving": None,
            "kv_connector_worker_meta": None,
            **changes,
        }
    )


def blocks(ids: list[int]) -> SimpleNamespace:
    return SimpleNamespace(get_block_ids=lambda: (ids,))


def hint_of(made: SimpleNamespace, count: int, **changes: Any) -> dict[str, Any]:
    payload = FetchPayload(
        plan_id="p",
        sources=[FetchSource(PEER, 0, count)],
        last_key=keys_of(made)[count - 1].hex(),
        **changes,
    )
    return envelope("m", [fetch_action("a", payload)])


# --- loads --------------------------------------------------------------------------------------


def test_resident_prefix_is_offered_but_one_token_is_left_to_compute() -> None:
    handle = FakeHandle()
    made = request(16)
    handle.resident.update(keys_of(made))
    scheduler = make(handle)
    scheduler.on_new_request(made)
    assert scheduler.matched_tokens(made, 0) == (12, True)
    assert scheduler.matched_tokens(made, 8) == (4, True)
    assert scheduler.matched_tokens(made, 12) == (0, False)


def test_a_hole_ends_the_offer() -> None:
    handle = FakeHandle()
    made = request(21)
    keys = keys_of(made)
    handle.resident.update([keys[0], keys[1], keys[3]])
    scheduler = make(handle)
    scheduler.on_new_request(made)
    assert scheduler.matched_tokens(made, 0) == (8, True)


def test_the_load_names_the_blocks_after_the_local_prefix() -> None:
    handle = FakeHandle()
    made = request(21)
    keys = keys_of(made)
    handle.resident.update(keys)
    scheduler = make(handle)
    scheduler.on_new_request(made)
    assert scheduler.matched_tokens(made, 4) == (16, True)
    scheduler.after_alloc(made, blocks([9, 10, 11, 12, 13]), 16)
    (load,) = scheduler.build_metadata(step({}, {})).loads
    assert (load.first, load.fetching) == (1, False)
    assert unpack_keys(load.keys) == keys[1:5]
    assert np.frombuffer(load.block_ids, "<i4").tolist() == [10, 11, 12, 13]


def test_only_a_positive_allocation_starts_a_load() -> None:
    handle = FakeHandle()
    made = request(16)
    handle.resident.update(keys_of(made))
    scheduler = make(handle)
    scheduler.on_new_request(made)
    scheduler.matched_tokens(made, 0)
    scheduler.after_alloc(made, blocks([1, 2, 3]), 12)
    assert len(scheduler.build_metadata(step({}, {})).loads) == 1
    scheduler.after_alloc(made, blocks([1, 2, 3, 4]), 0)
    assert scheduler.build_metadata(step({}, {})).loads == []


def test_no_more_is_offered_than_fits_g1() -> None:
    handle = FakeHandle()
    made = request(41)
    handle.resident.update(keys_of(made))
    scheduler = make(handle)
    scheduler.bind_block_pool(
        SimpleNamespace(get_num_free_blocks=lambda: 3, get_cached_block=lambda *_: None, blocks=[])
    )
    scheduler.on_new_request(made)
    assert scheduler.matched_tokens(made, 0) == (12, True)


def test_a_request_that_may_not_read_the_cache_gets_nothing_and_asks_nobody() -> None:
    handle = FakeHandle()
    made = request(16, skip_reading_prefix_cache=True)
    handle.resident.update(keys_of(made))
    scheduler = make(handle, peers=[PEER])
    scheduler.on_new_request(made)
    assert scheduler.matched_tokens(made, 0) == (0, False)
    assert handle.sent == []


def test_after_a_failed_load_the_request_is_not_offered_again() -> None:
    handle = FakeHandle()
    made = request(16)
    handle.resident.update(keys_of(made))
    scheduler = make(handle)
    scheduler.on_new_request(made)
    scheduler.matched_tokens(made, 0)
    scheduler.after_alloc(made, blocks([1, 2, 3]), 12)
    scheduler.take_output(output(invalid_block_ids={2, 3}, finished_recving={"r"}))
    assert scheduler.matched_tokens(made, 0) == (0, False)


# --- fetches ------------------------------------------------------------------------------------


def test_a_hint_becomes_a_fetch_of_what_is_missing_here() -> None:
    handle = FakeHandle()
    made = request(21)
    keys = keys_of(made)
    handle.resident.update(keys[:2])
    made.kv_hints = hint_of(made, 5, give_up_ms=70.0, deadline_ms=600.0)
    scheduler = make(handle)
    scheduler.on_new_request(made)
    (sent,) = handle.sent
    assert (sent["first"], sent["parent"], unpack_keys(sent["keys"])) == (2, keys[1], keys[2:5])
    assert sent["engine_hashes"].tolist() == [1002, 1003, 1004]
    assert (sent["give_up_ms"], sent["deadline_ms"], sent["plan_id"]) == (70.0, 600.0, "p")


def test_nothing_is_fetched_that_g1_or_the_pool_has() -> None:
    handle = FakeHandle()
    made = request(13)
    handle.resident.add(keys_of(made)[2])
    in_g1 = set(made.block_hashes[:2])
    made.kv_hints = hint_of(made, 3)
    scheduler = make(handle)
    scheduler.bind_block_pool(
        SimpleNamespace(
            blocks=[],
            get_num_free_blocks=lambda: 99,
            get_cached_block=lambda block_hash, groups: [object()] if block_hash in in_g1 else None,
        )
    )
    scheduler.on_new_request(made)
    assert handle.sent == []


def test_the_answer_waits_for_the_lease_then_counts_what_it_vouches_for() -> None:
    handle = FakeHandle()
    made = request(21)
    handle.resident.add(keys_of(made)[0])
    made.kv_hints = hint_of(made, 5)
    scheduler = make(handle, lease_wait_ms=50)
    scheduler.on_new_request(made)
    assert scheduler.matched_tokens(made, 0) == (None, False)
    handle.fetches["r"].leased(FetchLease("r", 1, 4))
    assert scheduler.matched_tokens(made, 0) == (20, True)
    scheduler.after_alloc(made, blocks([1, 2, 3, 4, 5]), 20)
    (load,) = scheduler.build_metadata(step({}, {})).loads
    assert (load.fetching, load.fetch_first, load.fetch_count, load.first) == (True, 1, 4, 0)


def test_a_lease_reply_that_leaves_blocks_open_is_waited_out_but_not_longer_than_allowed() -> None:
    for settles in (True, False):
        handle = FakeHandle()
        made = request(21)
        made.kv_hints = hint_of(made, 5)
        scheduler = make(handle, lease_wait_ms=50)
        scheduler.on_new_request(made)
        handle.fetches["r"].leased(FetchLease("r", 0, 2, "its source has not answered yet"))
        assert scheduler.matched_tokens(made, 0) == (None, False)
        if settles:
            pending, miss = BlockStatus.PENDING, BlockStatus.MISS
            statuses = bytes([BlockStatus.OK, pending, miss, miss, miss])
            handle.fetches["r"].progressed(FetchProgress("r", statuses, final=False))
        else:
            handle.now += 0.06
        assert scheduler.matched_tokens(made, 0) == (8, True)
        assert scheduler.take_counters().lease_timeouts == 0


def test_the_longer_recomputing_takes_the_longer_a_lease_reply_is_waited_for() -> None:
    handle = FakeHandle()
    made = request(21)
    made.kv_hints = hint_of(made, 5, give_up_ms=14_000.0, deadline_ms=7_000.0)
    scheduler = make(handle, lease_wait_ms=50, load_deadline_ms=2000)
    scheduler.on_new_request(made)
    handle.now += 0.69
    assert scheduler.matched_tokens(made, 0) == (None, False)
    handle.fetches["r"].leased(FetchLease("r", 0, 0, "its source has not answered yet"))
    assert scheduler.matched_tokens(made, 0) == (None, False)
    handle.fetches["r"].leased(FetchLease("r", 0, 5))
    assert scheduler.matched_tokens(made, 0) == (20, True)
    scheduler.after_alloc(made, blocks([1, 2, 3, 4, 5]), 20)
    (load,) = scheduler.build_metadata(step({}, {})).loads
    assert load.deadline_s == pytest.approx(7.0 - 0.69), "the hint's deadline, less what has passed"


def test_a_hint_without_an_estimate_is_held_to_our_own_deadline() -> None:
    handle = FakeHandle()
    made = request(21)
    made.kv_hints = hint_of(made, 5, give_up_ms=0.0, deadline_ms=7_000.0)
    scheduler = make(handle, load_deadline_ms=2000)
    scheduler.on_new_request(made)
    (sent,) = handle.sent
    assert sent["deadline_ms"] == 2000


def test_without_a_lease_in_time_it_goes_on_with_what_is_local() -> None:
    handle = FakeHandle()
    made = request(21)
    handle.resident.add(keys_of(made)[0])
    made.kv_hints = hint_of(made, 5)
    scheduler = make(handle, lease_wait_ms=50)
    scheduler.on_new_request(made)
    assert scheduler.matched_tokens(made, 0) == (None, False)
    handle.now += 0.06
    assert scheduler.matched_tokens(made, 0) == (4, True)


def test_after_a_missed_lease_reply_other_requests_do_not_wait_for_the_guard() -> None:
    handle = FakeHandle()
    scheduler = make(handle, peers=[PEER], lease_wait_ms=50)
    first, second, third = (request(13, name) for name in "abc")
    scheduler.on_new_request(first)
    handle.now += 0.06
    assert scheduler.matched_tokens(first, 0) == (0, False)
    scheduler.on_new_request(second)
    assert scheduler.matched_tokens(second, 0) == (0, False)
    handle.now += 1.1
    scheduler.on_new_request(third)
    assert scheduler.matched_tokens(third, 0) == (None, False)


def test_a_finished_fetch_counts_only_what_arrived() -> None:
    handle = FakeHandle()
    made = request(21)
    made.kv_hints = hint_of(made, 5)
    scheduler = make(handle)
    scheduler.on_new_request(made)
    state = handle.fetches["r"]
    state.leased(FetchLease("r", 0, 5))
    ok, failed = BlockStatus.OK, BlockStatus.FAILED
    state.progressed(FetchProgress("r", bytes([ok, ok, failed, ok, ok]), final=True))
    assert scheduler.matched_tokens(made, 0) == (8, True)


def test_static_peers_are_asked_when_there_is_no_hint_but_not_ourselves() -> None:
    handle = FakeHandle()
    made = request(13)
    scheduler = make(handle, peers=[PEER, handle.own_endpoint])
    scheduler.on_new_request(made)
    (sent,) = handle.sent
    assert [(s.endpoint, s.first, s.count) for s in sent["sources"]] == [(PEER, 0, 3)]


def test_the_guard_is_told_when_a_request_ends_before_it_was_admitted() -> None:
    handle = FakeHandle()
    made = request(21)
    made.kv_hints = hint_of(made, 5)
    scheduler = make(handle)
    scheduler.on_new_request(made)
    assert scheduler.finished(made, []) is False
    assert handle.finished == ["r"]


# --- keys ---------------------------------------------------------------------------------------


def test_tenants_and_adapters_do_not_share_blocks() -> None:
    handle = FakeHandle()
    plain = request(16)
    handle.resident.update(keys_of(plain))
    scheduler = make(handle)
    lora = SimpleNamespace(lora_name="a", lora_path="/a")
    for number, changes in enumerate([{"cache_salt": "dynamo-cache-salt:t"}, {"lora_request": lora}]):
        other = request(16, f"r{number}", **changes)
        scheduler.on_new_request(other)
        assert scheduler.matched_tokens(other, 0) == (0, False)
    handle.resident.update(keys_of(plain, salt="t"))
    again = request(16, "r9", cache_salt="dynamo-cache-salt:t")
    scheduler.on_new_request(again)
    assert scheduler.matched_tokens(again, 0) == (12, True)


@pytest.mark.parametrize(
    ("changes", "keyed"),
    [
        ({"mm_features": [SimpleNamespace(mm_position=SimpleNamespace(offset=9))]}, 2),
        ({"prompt_embeds": object()}, 0),
        ({"prompt_embeds": object(), "prompt_is_token_ids": [True] * 5 + [False] * 11}, 1),
        ({"resumable": True}, 0),
    ],
)
def test_blocks_from_the_first_content_without_tokens_on_have_no_key(changes, keyed) -> None:
    handle = FakeHandle()
    made = request(16, **changes)
    scheduler = make(handle)
    scheduler.on_new_request(made)
    saves = scheduler.build_metadata(step({"r": (0, 16)}, {"r": [0, 1, 2, 3]})).saves
    assert sum(len(save.slots) // 4 for save in saves) == keyed


def test_reset_means_nothing_stored_before_is_found_and_running_requests_are_not_saved() -> None:
    handle = FakeHandle()
    running, later = request(16), request(16, "later")
    handle.resident.update(keys_of(running))
    scheduler = make(handle)
    scheduler.on_new_request(running)
    scheduler.reset("tiny@abc+1")
    assert scheduler.matched_tokens(running, 0) == (0, False)
    assert scheduler.build_metadata(step({"r": (0, 16)}, {"r": [0, 1, 2, 3]})).saves == []
    scheduler.on_new_request(later)
    assert scheduler.matched_tokens(later, 0) == (0, False)


# --- saves --------------------------------------------------------------------------------------


def test_blocks_that_are_full_after_the_step_are_saved_once() -> None:
    handle = FakeHandle()
    made = request(14)
    scheduler = make(handle)
    scheduler.on_new_request(made)
    (first,) = scheduler.build_metadata(step({"r": (0, 10)}, {"r": [5, 6, 7, 8]})).saves
    assert unpack_keys(first.keys) == keys_of(made)[:2]
    assert np.frombuffer(first.block_ids, "<i4").tolist() == [5, 6]
    assert np.frombuffer(first.engine_hashes, "<u8").tolist() == [1000, 1001]
    root = KeySpace("dynamo", MODEL).root()
    assert unpack_keys(first.parents) == [root, keys_of(made)[0]]
    (second,) = scheduler.build_metadata(step({"r": (10, 4)}, {"r": [5, 6, 7, 8]})).saves
    assert np.frombuffer(second.positions, "<u4").tolist() == [2]
    assert scheduler.build_metadata(step({"r": (14, 1)}, {"r": [5, 6, 7, 8]})).saves == []


def test_tokens_of_speculation_are_not_saved_before_they_are_hashed() -> None:
    handle = FakeHandle()
    made = request(6)
    scheduler = make(handle)
    scheduler.on_new_request(made)
    (save,) = scheduler.build_metadata(step({"r": (0, 12)}, {"r": [5, 6, 7]})).saves
    assert len(save.slots) // 4 == 1


def test_decoded_blocks_are_saved_unless_told_otherwise() -> None:
    for deposit_decode, blocks_saved in ((True, 2), (False, 1)):
        handle = FakeHandle()
        made = request(6)
        scheduler = make(handle, deposit_decode=deposit_decode)
        scheduler.on_new_request(made)
        made.all_token_ids += [50, 51]
        made.num_tokens = 8
        made.block_hashes.append(bytes(32))
        (save,) = scheduler.build_metadata(step({"r": (0, 8)}, {"r": [5, 6]})).saves
        assert len(save.slots) // 4 == blocks_saved


def test_what_the_pool_has_or_another_request_is_saving_is_not_saved_again() -> None:
    handle = FakeHandle()
    one, two = request(16, "one"), request(16, "two")
    handle.resident.add(keys_of(one)[0])
    scheduler = make(handle)
    scheduler.on_new_request(one)
    scheduler.on_new_request(two)
    tables = {"one": [1, 2, 3, 4], "two": [5, 6, 7, 8]}
    (save,) = scheduler.build_metadata(step({"one": (0, 16), "two": (0, 16)}, tables)).saves
    assert (save.request_id, np.frombuffer(save.positions, "<u4").tolist()) == ("one", [1, 2, 3])


def test_blocks_without_a_granted_slot_wait_for_the_next_step_in_prefix_order() -> None:
    handle = FakeHandle(grants=2)
    made = request(16)
    scheduler = make(handle)
    scheduler.on_new_request(made)
    (save,) = scheduler.build_metadata(step({"r": (0, 16)}, {"r": [1, 2, 3, 4]})).saves
    assert np.frombuffer(save.positions, "<u4").tolist() == [0, 1]
    assert scheduler.build_metadata(step({"r": (16, 1)}, {"r": [1, 2, 3, 4]})).saves == []
    handle.grants_available = 9
    (save,) = scheduler.build_metadata(step({"r": (17, 1)}, {"r": [1, 2, 3, 4]})).saves
    assert np.frombuffer(save.positions, "<u4").tolist() == [2, 3]


def test_a_one_off_turn_leaves_nothing_in_the_pool() -> None:
    handle = FakeHandle()
    made = request(16)
    made.kv_hints = hint_of(made, 3, no_retain=True)
    scheduler = make(handle)
    scheduler.on_new_request(made)
    assert scheduler.build_metadata(step({"r": (0, 16)}, {"r": [1, 2, 3, 4]})).saves == []


def test_what_an_invalidation_ended_is_not_saved_and_later_requests_say_that_they_came_after_it() -> None:
    handle = FakeHandle()
    old, other = request(16, "old"), request(16, "other", first_token=500)
    other.block_hashes = [bytes(24) + (2000 + i).to_bytes(8, "big") for i in range(4)]
    scheduler = make(handle)
    scheduler.on_new_request(old)
    scheduler.on_new_request(other)
    handle.drops = [DropG1(7, np.array([1002, 1003], "<u8").tobytes())]
    tables = {"old": [1, 2, 3, 4], "other": [5, 6, 7, 8]}
    saves = scheduler.build_metadata(step({"old": (0, 16), "other": (0, 16)}, tables)).saves
    positions = {save.request_id: np.frombuffer(save.positions, "<u4").tolist() for save in saves}
    assert positions == {"old": [0, 1], "other": [0, 1, 2, 3]}
    assert {save.drops for save in saves} == {0}
    assert handle.dropped_counts == [(7, 0)]

    # The socket of an idle engine is read when its next request comes, before anything else.
    handle.drops = [DropG1(9, b"")]
    later = request(16, "later")
    scheduler.on_new_request(later)
    (save,) = scheduler.build_metadata(step({"later": (0, 16)}, {"later": [1, 2, 3, 4]})).saves
    assert np.frombuffer(save.positions, "<u4").tolist() == [2, 3], "the others are still being saved"
    assert save.drops == 9


def test_actions_that_ride_beside_a_fetch_go_to_the_guard_and_a_fetch_stays_here() -> None:
    handle = FakeHandle()
    made = request(21)
    made.kv_hints = hint_of(made, 5, mode="move")
    unpin = action("b", UNPIN, ACTION_VERSION, UnpinPayload(plan_id="p", pin_id="x"))
    made.kv_hints["actions"].append(unpin)
    scheduler = make(handle)
    scheduler.on_new_request(made)
    (sent,) = handle.sent
    assert (sent["move"], sent["plan_id"], sent["action_id"]) == (True, "p", "a")
    assert handle.acts == [("r", {**made.kv_hints, "actions": [unpin]})]
    assert not scheduler.take_counters().skipped


def test_actions_too_long_for_a_message_are_counted_and_the_request_runs() -> None:
    handle = FakeHandle()
    made = request(21)
    long = DemotePayload(plan_id="p", keys=bytes(16 * 9000))
    made.kv_hints = envelope("p", [action("0", DEMOTE, ACTION_VERSION, long)])
    scheduler = make(handle)
    scheduler.on_new_request(made)
    assert handle.acts == []
    assert scheduler.take_counters().skipped == {"actions over the size limit": 1}


def test_blocks_of_a_finished_request_are_held_only_while_it_is_being_saved() -> None:
    handle = FakeHandle()
    made = request(8)
    scheduler = make(handle)
    scheduler.on_new_request(made)
    (save,) = scheduler.build_metadata(step({"r": (0, 8)}, {"r": [1, 2]})).saves
    assert scheduler.finished(made, []) is True
    assert scheduler.build_metadata(step({}, {})).delayed == ["r"]
    assert scheduler.build_metadata(step({}, {})).delayed == []

    again = request(8, "r2", first_token=100)
    scheduler.on_new_request(again)
    (save,) = scheduler.build_metadata(step({"r2": (0, 8)}, {"r2": [1, 2]})).saves
    scheduler.take_output(output(kv_connector_worker_meta=WorkerMetadata({save.job_id: 1})))
    assert scheduler.finished(again, []) is False


def test_a_block_that_did_not_verify_is_saved_again_though_the_directory_lists_it() -> None:
    handle = FakeHandle()
    scheduler = make(handle)
    made = request(12)
    scheduler.on_new_request(made)
    keys = scheduler._requests["r"].chain.blob(0, 3)
    handle.resident.update(unpack_keys(keys))
    scheduler.take_output(output(kv_connector_worker_meta=WorkerMetadata({}, frozenset([keys[16:32]]))))
    (save,) = scheduler.build_metadata(step({"r": (0, 12)}, {"r": [1, 2, 3]})).saves
    assert save.keys == keys[16:32]
    scheduler.on_new_request(request(12, "r2"))
    assert scheduler.build_metadata(step({"r2": (0, 12)}, {"r2": [4, 5, 6]})).saves == []


def test_a_job_is_over_when_every_rank_said_so() -> None:
    handle = FakeHandle()
    made = request(8)
    scheduler = ConnectorScheduler(handle, EngineConfig(), model=MODEL, block_size=BLOCK, ranks=2)
    scheduler.on_new_request(made)
    (save,) = scheduler.build_metadata(step({"r": (0, 8)}, {"r": [1, 2]})).saves
    done = WorkerMetadata({save.job_id: 1})
    scheduler.take_output(output(kv_connector_worker_meta=done))
    assert scheduler.finished(made, []) is True
    assert WorkerMetadata({1: 1, 2: 1}).aggregate(WorkerMetadata({2: 1, 3: 1})).saved == {1: 1, 2: 2, 3: 1}


def test_a_late_report_of_a_save_before_preemption_does_not_free_blocks_saved_after_it() -> None:
    handle = FakeHandle()
    made = request(16)
    scheduler = make(handle)
    scheduler.on_new_request(made)
    (before,) = scheduler.build_metadata(step({"r": (0, 8)}, {"r": [1, 2]})).saves
    metadata = scheduler.build_metadata(step({}, {}, preempted={"r"}))
    assert metadata.preempted == ["r"]
    (_after,) = scheduler.build_metadata(step({"r": (8, 8)}, {"r": [3, 4, 5, 6]})).saves
    scheduler.take_output(output(kv_connector_worker_meta=WorkerMetadata({before.job_id: 1})))
    assert scheduler.finished(made, []) is True


def test_metadata_pickles_to_about_the_size_of_its_blobs() -> None:
    handle = FakeHandle(grants=2000)
    made = request(4 * 1024)
    scheduler = make(handle)
    scheduler.on_new_request(made)
    metadata = scheduler.build_metadata(step({"r": (0, 4 * 1024)}, {"r": list(range(1024))}))
    raw = pickle.dumps(metadata)
    assert len(raw) < 1024 * 60 + 2000
    back = pickle.loads(raw)
    assert isinstance(back, StepMetadata)
    assert back.saves == metadata.saves


def test_counters_say_what_was_not_used() -> None:
    handle = FakeHandle()
    made = request(16)
    made.kv_hints = envelope("m", [{"action_type": "kv.dance", "action_version": "1", "payload": {}}])
    scheduler = make(handle)
    scheduler.on_new_request(made)
    counters = scheduler.take_counters()
    assert counters.skipped == Counter({"unknown action": 1})
    assert scheduler.take_counters().skipped == Counter()


# --- estimates and one-off turns -----------------------------------------------------------------


def prefill_at(scheduler: ConnectorScheduler, handle: FakeHandle, tokens_per_s: float) -> None:
    """Let it see a step of 100 prompt tokens that took as long as that."""
    scheduler.prefill.step(handle.now, 100)
    scheduler.prefill.ended(handle.now + 100 / tokens_per_s)


def test_without_a_planners_estimate_the_engines_own_speed_is_the_estimate() -> None:
    handle = FakeHandle()
    scheduler = make(handle, peers=[PEER])
    prefill_at(scheduler, handle, tokens_per_s=40.0)
    scheduler.on_new_request(request(41))
    (sent,) = handle.sent
    # Ten blocks of four tokens.
    assert (sent["give_up_ms"], sent["local_estimate"]) == (1000.0, True)


def test_a_pull_gets_some_time_however_fast_the_engine_is() -> None:
    handle = FakeHandle()
    scheduler = make(handle, peers=[PEER])
    prefill_at(scheduler, handle, tokens_per_s=1e6)
    scheduler.on_new_request(request(41))
    assert handle.sent[0]["give_up_ms"] == 200.0


def test_the_planners_estimate_goes_before_the_engines_own() -> None:
    handle = FakeHandle()
    scheduler = make(handle)
    prefill_at(scheduler, handle, tokens_per_s=40.0)
    made = request(41)
    made.kv_hints = hint_of(made, 10, give_up_ms=123.0)
    scheduler.on_new_request(made)
    assert (handle.sent[0]["give_up_ms"], handle.sent[0]["local_estimate"]) == (123.0, False)


def test_the_engines_own_estimate_can_be_turned_off() -> None:
    handle = FakeHandle()
    scheduler = make(handle, peers=[PEER], local_estimate=False)
    prefill_at(scheduler, handle, tokens_per_s=40.0)
    scheduler.on_new_request(request(41))
    assert (handle.sent[0]["give_up_ms"], handle.sent[0]["local_estimate"]) == (0.0, False)


def test_a_hint_that_only_says_not_to_retain_fetches_nothing_and_saves_nothing() -> None:
    handle = FakeHandle()
    scheduler = make(handle, peers=[PEER])
    made = request(12)
    made.kv_hints = envelope(
        "m", [fetch_action("a", FetchPayload(plan_id="p", sources=[], last_key="", no_retain=True))]
    )
    scheduler.on_new_request(made)
    assert handle.sent == []
    assert scheduler.build_metadata(step({"r": (0, 12)}, {"r": [1, 2, 3]})).saves == []


def test_what_came_for_one_request_alone_is_not_offered_to_it_twice() -> None:
    handle = FakeHandle()
    scheduler = make(handle)
    made = request(13)
    made.kv_hints = hint_of(made, 3, no_retain=True)
    scheduler.on_new_request(made)
    handle.fetches["r"].progressed(FetchProgress("r", bytes([BlockStatus.OK] * 3), final=True))
    assert scheduler.matched_tokens(made, 0) == (12, True)
    scheduler.after_alloc(made, blocks([1, 2, 3]), 12)
    scheduler.take_output(output(finished_recving={"r"}))
    # Preempted, and asked again: the blocks are nowhere any more.
    assert scheduler.matched_tokens(made, 0) == (0, False)
