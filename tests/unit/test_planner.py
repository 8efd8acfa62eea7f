# SPDX-License-Identifier: Apache-2.0
"""Golden cases of the planner: a scenario each, and what must be decided in it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from router_hints.costs import CostModel, Settings
from router_hints.index import IndexView
from router_hints.ledger import Announced, Load, Loads
from router_hints.planner import Holder, NoWorker, Plan, Reason, RequestView, Worker, plan
from router_hints.topology import Link, Place, Topology
from router_hints.turns import Kind, Turn

BLOCK = 16
BLOCKS = 100
BLOCK_BYTES = 64 * 1024
SETTINGS = Settings(prefill_tokens_per_s=8000, overhead_s=0.01)


def request(blocks: int = BLOCKS) -> RequestView:
    return RequestView("p1", blocks * BLOCK + 5, BLOCK, affinity=b"prefix")


PLACES = {"g0": Place("h1", "A"), "g1": Place("h1", "A"), "g2": Place("h2", "A")}


def workers(count: int = 3, **of_each: object) -> list[Worker]:
    return [Worker((100 + n, 0), guard=f"g{n}", **of_each) for n in range(count)]  # type: ignore[arg-type]


def holders(count: int = 3, block_bytes: int = BLOCK_BYTES, layout: str = "L") -> dict[str, Holder]:
    return {f"g{n}": Holder(f"g{n}", f"tcp://10.0.0.{n}:7100", layout, block_bytes) for n in range(count)}


def held(blocks: int = BLOCKS, **runs: list[range]) -> IndexView:
    rows = np.zeros((len(runs), blocks), dtype=np.bool_)
    for row, ranges in enumerate(runs.values()):
        for each in ranges:
            rows[row, each.start : each.stop] = True
    return IndexView(tuple(runs), rows)


def decide(
    index: IndexView | None = None,
    *,
    view: RequestView | None = None,
    candidates: list[Worker] | None = None,
    sources: dict[str, Holder] | None = None,
    loads: Loads | None = None,
    costs: CostModel | None = None,
    topology: Topology | None = None,
) -> Plan:
    view = view or request()
    return plan(
        view,
        candidates if candidates is not None else workers(),
        index or IndexView.empty(view.reusable_blocks),
        sources if sources is not None else holders(),
        loads or Loads(),
        costs or CostModel(SETTINGS),
        topology or Topology(),
        now_s=5.0,
    )


def test_nothing_cached_runs_cold_on_the_least_loaded_worker() -> None:
    loads = Loads({(100, 0): Load(2000, 1), (102, 0): Load(500, 1)})
    made = decide(loads=loads)
    assert (made.rank, made.reason, made.sources) == ((101, 0), Reason.COLD, ())
    assert made.prefill_tokens == BLOCKS * BLOCK + 5
    assert made.blocks == BLOCKS + 1


def test_equal_workers_are_told_apart_by_the_prefix_and_always_alike() -> None:
    chosen = {decide(view=replace(request(), affinity=b"%d" % n)).rank for n in range(50)}
    assert chosen == {(100, 0), (101, 0), (102, 0)}
    again = {decide(view=replace(request(), affinity=b"7")).rank for _ in range(5)}
    assert len(again) == 1
    reordered = decide(view=replace(request(), affinity=b"7"), candidates=workers()[::-1]).rank
    assert again == {reordered}


def test_an_idle_holder_runs_the_request_itself() -> None:
    made = decide(held(g1=[range(BLOCKS)]))
    assert (made.rank, made.reason, made.sources) == ((101, 0), Reason.RESIDENT, ())
    assert made.chosen.local_blocks == BLOCKS
    assert made.prefill_tokens == 5


def test_blocks_in_engine_memory_count_for_their_worker_only() -> None:
    candidates = workers()
    candidates[2] = msgspec.structs.replace(candidates[2], g1_blocks=BLOCKS)
    made = decide(candidates=candidates)
    assert (made.rank, made.reason) == ((102, 0), Reason.RESIDENT)
    busy = decide(candidates=candidates, loads=Loads({(102, 0): Load(50_000, 4)}))
    assert busy.rank != (102, 0)
    assert busy.sources == ()


def test_a_busy_holder_is_copied_from() -> None:
    made = decide(held(g1=[range(BLOCKS)]), loads=Loads({(101, 0): Load(20_000, 8)}))
    assert made.reason is Reason.COPY
    assert made.rank in {(100, 0), (102, 0)}
    (run,) = made.sources
    assert (run.guard, run.endpoint, run.first, run.count) == ("g1", "tcp://10.0.0.1:7100", 0, BLOCKS)
    assert made.give_up_ms == pytest.approx(1e3 * BLOCKS * BLOCK / 8000)
    assert made.byte_counts == {"g1": BLOCKS * BLOCK_BYTES}


def test_a_pinned_worker_gets_the_request_and_a_hint_for_what_it_lacks() -> None:
    made = decide(held(g1=[range(BLOCKS)]), view=replace(request(), pinned_worker=100))
    assert (made.rank, made.reason) == ((100, 0), Reason.PINNED)
    assert [(run.guard, run.first, run.count) for run in made.sources] == [("g1", 0, BLOCKS)]


def test_a_pin_to_a_worker_that_is_not_there_says_so() -> None:
    with pytest.raises(NoWorker, match="pinned to worker 999"):
        decide(view=replace(request(), pinned_worker=999))


def test_blocks_the_target_has_are_not_fetched() -> None:
    target = [Worker((100, 0), guard="g0", g1_blocks=10)]
    made = decide(held(g0=[range(20, 30)], g1=[range(60)]), candidates=target)
    assert [(run.first, run.count) for run in made.sources] == [(10, 10), (30, 30)]
    assert (made.chosen.g1_blocks, made.chosen.local_blocks, made.chosen.copied_blocks) == (10, 10, 40)
    assert made.prefill_tokens == (BLOCKS - 60) * BLOCK + 5


def test_several_sources_together_make_the_prefix() -> None:
    made = decide(held(g1=[range(40)], g2=[range(40, 100)]), candidates=workers(1))
    assert [(run.guard, run.first, run.count) for run in made.sources] == [("g1", 0, 40), ("g2", 40, 60)]


def test_a_hole_ends_what_can_be_reused() -> None:
    made = decide(held(g1=[range(40), range(41, 100)]), candidates=workers(1))
    assert [(run.first, run.count) for run in made.sources] == [(0, 40)]


def test_what_is_copied_while_the_request_waits_for_its_turn_costs_it_nothing() -> None:
    """A link slower than computing is worth it where the request waits anyhow, and is given that time."""
    slow = CostModel(Settings(prefill_tokens_per_s=8000, domain_bytes_per_s=20e6))
    pinned = replace(request(), pinned_worker=100)
    recompute_s = BLOCKS * BLOCK / 8000
    at_once, waiting = (
        decide(held(g1=[range(BLOCKS)]), view=pinned, costs=slow, loads=Loads({(100, 0): Load(tokens, 1)}))
        for tokens in (0, 80_000)
    )
    assert at_once.sources == ()
    (run,) = waiting.sources
    assert run.count == BLOCKS
    assert waiting.chosen.wait_s == pytest.approx(10.0)
    assert recompute_s < waiting.copies_s < 10.0
    loads_s = run.byte_count / slow.settings.load_bytes_per_s
    assert waiting.chosen.fetch_s == pytest.approx(loads_s), "what is left to wait for"
    assert waiting.give_up_ms == pytest.approx(1e3 * (recompute_s + 10.0))
    # What is not kept goes into engine memory, which a request gets when it is its turn.
    once = replace(pinned, turn=Turn(kind=Kind.ONE_OFF))
    loads = Loads({(100, 0): Load(80_000, 1)})
    assert decide(held(g1=[range(BLOCKS)]), view=once, costs=slow, loads=loads).sources == ()


def test_a_slow_link_is_not_used() -> None:
    costs = CostModel(Settings(domain_bytes_per_s=20e6))
    made = decide(held(g1=[range(BLOCKS)]), candidates=workers(1), costs=costs)
    assert (made.reason, made.sources) == (Reason.COLD, ())


def test_a_slow_second_source_is_left_out() -> None:
    topology = Topology(
        {"g0": Place(rdma_domain="A"), "g1": Place(rdma_domain="A"), "g2": Place(rdma_domain="B")}
    )
    costs = CostModel(Settings(far_bytes_per_s=10e6))
    index = held(g1=[range(40)], g2=[range(40, 100)])
    made = decide(index, candidates=workers(1), costs=costs, topology=topology)
    assert [run.guard for run in made.sources] == ["g1"]


def test_a_source_in_the_same_rdma_domain_is_preferred() -> None:
    topology = Topology(
        {"g0": Place(rdma_domain="B"), "g1": Place(rdma_domain="A"), "g2": Place(rdma_domain="B")}
    )
    made = decide(held(g1=[range(BLOCKS)], g2=[range(BLOCKS)]), candidates=workers(1), topology=topology)
    assert [run.guard for run in made.sources] == ["g2"]


def test_the_target_itself_is_chosen_inside_the_domain_of_a_busy_holder() -> None:
    places = {"g0": Place(rdma_domain="A"), "g1": Place(rdma_domain="B"), "g2": Place(rdma_domain="A")}
    made = decide(
        held(g0=[range(BLOCKS)]),
        loads=Loads({(100, 0): Load(20_000, 8)}),
        topology=Topology(places),
    )
    assert made.rank == (102, 0)


def test_a_hot_source_is_spared_when_another_has_the_blocks() -> None:
    loads = Loads(outgoing_bytes={"g1": 500_000_000})
    made = decide(held(g1=[range(BLOCKS)], g2=[range(BLOCKS)]), candidates=workers(1), loads=loads)
    assert [run.guard for run in made.sources] == ["g2"]


def test_another_layout_is_no_source() -> None:
    sources = holders()
    sources["g1"] = replace(sources["g1"], layout_digest="other")
    made = decide(held(g1=[range(BLOCKS)]), candidates=workers(1), sources=sources)
    assert made.sources == ()


def test_a_source_that_its_target_cannot_read_is_not_named_and_others_are() -> None:
    index = held(g1=[range(BLOCKS)], g2=[range(BLOCKS)])
    for shut, named in (({}, ["g1"]), ({"g0": ("g1",)}, ["g2"]), ({"g0": ("g1", "g2")}, [])):
        made = decide(index, candidates=workers(1), topology=Topology(PLACES, unready=shut))
        assert [run.guard for run in made.sources] == named
    # What another target cannot read is nothing to this one, and what nobody knows of shuts nothing.
    shut = {"g2": ("g0", "g1"), "g0": ("gone",), "gone": ("g1",)}
    made = decide(index, candidates=workers(1), topology=Topology(PLACES, unready=shut))
    assert [run.guard for run in made.sources] == ["g1"]


def test_a_worker_without_kvcr_gets_no_hint() -> None:
    made = decide(held(g1=[range(BLOCKS)]), candidates=[Worker((100, 0))])
    assert (made.reason, made.sources) == (Reason.COLD, ())


def test_required_taints_exclude_and_preferred_ones_tip_the_scales() -> None:
    candidates = workers(2)
    candidates[0] = msgspec.structs.replace(candidates[0], taints=frozenset({"gold"}))
    assert decide(
        view=replace(request(), required_taints=frozenset({"gold"})), candidates=candidates
    ).rank == (100, 0)
    assert decide(view=replace(request(), preferred_taints={"gold": 0.5}), candidates=candidates).rank == (
        100,
        0,
    )
    assert decide(view=replace(request(), preferred_taints={"gold": -0.5}), candidates=candidates).rank == (
        101,
        0,
    )
    with pytest.raises(NoWorker, match="iron"):
        decide(view=replace(request(), required_taints=frozenset({"iron"})), candidates=candidates)


def test_no_worker_at_all() -> None:
    with pytest.raises(NoWorker, match="no worker is ready"):
        decide(candidates=[])


def test_a_full_batch_is_waited_for() -> None:
    candidates = workers(2, max_requests=4)
    loads = Loads({(100, 0): Load(0, 4), (101, 0): Load(100, 3)})
    assert decide(candidates=candidates, loads=loads).rank == (101, 0)


def test_prompts_shorter_than_a_block_and_whole_blocks() -> None:
    short = decide(view=RequestView("p", 7, BLOCK, b""), candidates=workers(1))
    assert (short.prefill_tokens, short.blocks, short.sources) == (7, 1, ())
    assert short.reason is Reason.SHORT
    whole = RequestView("p", 4 * BLOCK, BLOCK, b"")
    assert whole.reusable_blocks == 3
    assert RequestView("p", 0, BLOCK, b"").reusable_blocks == 0


def test_many_requests_with_one_prefix_do_not_all_queue_at_its_holder() -> None:
    index, ranks = held(g0=[range(BLOCKS)]), dict[tuple[int, int], Load]()
    for _ in range(60):
        made = decide(index, loads=Loads(ranks))
        known = ranks.get(made.rank, Load())
        ranks[made.rank] = Load(known.prefill_tokens + made.prefill_tokens, known.requests + 1)
    counts = [ranks[(100 + n, 0)].requests for n in range(3)]
    assert max(counts) / (sum(counts) / 3) <= 1.5


def test_the_same_inputs_give_the_same_plan() -> None:
    index = held(g1=[range(BLOCKS)], g2=[range(50)])
    assert decide(index) == decide(index)


def test_what_is_compared_is_what_is_explained() -> None:
    view = replace(
        request(), rates_per_s=(3.0,) * 7, router="r", turn=Turn(session="s"), preferred_taints={"gold": 0.5}
    )
    candidates = workers(8, max_requests=2, kv_blocks=200)
    candidates[2] = msgspec.structs.replace(candidates[2], taints=frozenset({"gold"}), g1_blocks=30)
    loads = Loads(
        {worker.rank: Load(1000 * n, n, 50 * n, 900.0, 700.0 * n) for n, worker in enumerate(candidates)},
        announced=(Announced((101, 0), 0.5, 4000), Announced((103, 0), 0.1, 300)),
        free_blocks={f"g{n}": 10 * n for n in range(8)},
        unseen_tokens=5000.0,
    )
    index = held(g0=[range(80)], g3=[range(BLOCKS)])
    made = decide(index, view=view, candidates=candidates, loads=loads, sources=holders(8))
    assert len(made.candidates) == 8
    assert [estimate.total_s for estimate in made.candidates] == made.candidates.total_s
    assert made.chosen in list(made.candidates)


# --- the cost model ----------------------------------------------------------------------------------


def test_prefill_speed_is_learnt_from_first_outputs() -> None:
    costs = CostModel(SETTINGS)
    for tokens in (500, 1000, 2000, 4000) * 10:
        costs.observe_prefill((1, 0), tokens, 0.05 + tokens / 2000)
    learnt = costs.prefill((1, 0))
    assert learnt.tokens_per_s == pytest.approx(2000, rel=0.15)
    assert learnt.overhead_s == pytest.approx(0.05, abs=0.05)
    # A worker not seen yet is taken to be like the others, not like the default.
    assert costs.prefill((2, 0)).tokens_per_s == pytest.approx(2000, rel=0.15)
    for tokens in (500, 1000, 2000, 4000) * 10:
        costs.observe_prefill((2, 0), tokens, 0.05 + tokens / 500)
    assert costs.prefill((2, 0)).tokens_per_s == pytest.approx(500, rel=0.15)
    assert costs.prefill((1, 0)).tokens_per_s == pytest.approx(2000, rel=0.15)
    costs.forget((1, 0))
    assert costs.prefill((1, 0)).tokens_per_s == pytest.approx(500, rel=0.3)


def test_a_worker_that_just_came_is_priced_as_those_that_were_there() -> None:
    """Short prompts that wait for the steps of others: all of their time is overhead, which a line through so
    few tokens took for prefill. A worker that came back looked four times as fast, and got every session."""
    costs = CostModel(SETTINGS)
    for number in range(40):
        costs.observe_prefill((2, 0), 30 + number % 20, 1.2)
    new, known = costs.prefill((3, 0)), costs.prefill((2, 0))
    for tokens in (16, 40, 500):
        assert new.overhead_s + new.seconds(tokens) == pytest.approx(
            known.overhead_s + known.seconds(tokens), rel=0.02
        )


def test_a_worker_that_is_never_idle_is_taken_to_be_like_the_others() -> None:
    """It gave one output when nothing was known of anybody. Nothing it does later measures it, as all of it
    waits; it looked a third faster than the rest, and got every long prompt."""
    costs = CostModel(SETTINGS)
    costs.observe_prefill((1, 0), 100, 0.05)
    for tokens in (500, 1000, 2000, 4000) * 10:
        costs.observe_prefill((2, 0), tokens, 0.05 + tokens / 2000)
    assert costs.prefill((1, 0)).tokens_per_s == pytest.approx(costs.prefill((2, 0)).tokens_per_s, rel=0.15)


def test_the_first_worker_measured_does_not_become_the_favourite() -> None:
    costs = CostModel(SETTINGS)
    chosen = set()
    for number in range(60):
        view = replace(request(8), affinity=b"%d" % number)
        made = decide(view=view, costs=costs)
        chosen.add(made.rank)
        costs.observe_prefill(made.rank, made.prefill_tokens, 0.002 + 0.001 * (number % 3))
    assert len(chosen) == 3


def test_equal_prompts_still_give_a_usable_speed() -> None:
    costs = CostModel(SETTINGS)
    for _ in range(40):
        costs.observe_prefill((1, 0), 1000, 1.0)
    learnt = costs.prefill((1, 0))
    assert learnt.overhead_s + learnt.seconds(1000) == pytest.approx(1.0, rel=0.15)


def test_a_link_is_learnt_and_never_given_up_for_one_late_output() -> None:
    costs = CostModel(SETTINGS)
    for _ in range(30):
        costs.observe_copy("a", "b", Link.DOMAIN, 100_000_000, 1.0)
    assert costs.copy("a", "b", Link.DOMAIN).bytes_per_s == pytest.approx(1e8, rel=0.05)
    costs.observe_copy("a", "b", Link.DOMAIN, 100_000_000, 1000.0)
    assert costs.copy("a", "b", Link.DOMAIN).bytes_per_s > 5e7
    costs.relax(600)
    assert costs.copy("a", "b", Link.DOMAIN).bytes_per_s == pytest.approx(1e9, rel=0.01)
    costs.observe_copy("a", "b", Link.DOMAIN, 100_000_000, -1.0)
    assert costs.copy("a", "b", Link.DOMAIN).bytes_per_s < 1.3e9
    costs.forget_guard("a")
    assert costs.copy("a", "b", Link.DOMAIN).bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_distances() -> None:
    topology = Topology({"a": Place("h1", "A"), "b": Place("h1", "B"), "c": Place("h2", "A"), "d": Place()})
    assert topology.link("a", "b") is Link.HOST
    assert topology.link("a", "c") is Link.DOMAIN
    assert topology.link("b", "c") is Link.FAR
    assert topology.link("a", "d") is Link.FAR
    # A guard without a domain is the only one in its own, and the same goes for one that is not known.
    assert topology.link("x", "d") is Link.FAR
    # What the deployment calls hosts goes before what they run on.
    named = {
        "a": Place("h1", host="x"),
        "b": Place("h1", host="y"),
        "c": Place("h2", host="x"),
        "d": Place("h1"),
    }
    apart = Topology(named)
    assert [apart.link("a", other) is Link.HOST for other in "bcd"] == [False, True, True]
