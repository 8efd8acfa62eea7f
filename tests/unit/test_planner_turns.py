# SPDX-License-Identifier: Apache-2.0
"""The situations of the field as golden scenarios: which plan, for what reason, and how many bytes move.

A model of 128 KiB of KV a token in blocks of 16 tokens, computed at 8,000 tokens a second; copies inside an
RDMA domain at 20 GB/s, 2 GB/s outside: what an 8B model sees on current hardware.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from router_hints.costs import CostModel, Settings
from router_hints.index import IndexView
from router_hints.ledger import Announced, Ledger, Load, Loads
from router_hints.planner import (
    Holder,
    Mode,
    Plan,
    Reason,
    RequestView,
    Worker,
    plan,
    release,
)
from router_hints.topology import Place, Topology
from router_hints.turns import Arriving, Kind, SessionView, Turn

BLOCK = 16
BLOCK_BYTES = BLOCK * 128 * 1024
SETTINGS = Settings(
    prefill_tokens_per_s=8000,
    load_bytes_per_s=5e10,
    domain_bytes_per_s=2e10,
    zone_bytes_per_s=5e9,
    far_bytes_per_s=2e9,
)
W1, W2, W3, W4 = (1, 0), (2, 0), (3, 0), (4, 0)
GUARDS = {W1: "g1", W2: "g2", W3: "g3", W4: "g4"}
BUSY = Load(prefill_tokens=40_000, requests=8, fast_tokens=40_000, slow_tokens=40_000)
SPIKE = Load(prefill_tokens=16_000, requests=4, fast_tokens=16_000, slow_tokens=500)


def situation(
    tokens: int,
    turn: Turn | None = None,
    *,
    held: dict[str, int] | None = None,
    loads: dict[tuple[int, int], Load] | None = None,
    workers: int = 2,
    kv_blocks: int = 0,
    topology: Topology | None = None,
    session: SessionView | None = None,
    costs: CostModel | None = None,
    everything: Loads | None = None,
    **request: object,
) -> Plan:
    """Plan one turn; ``held`` gives the leading tokens each guard has."""
    blocks = (tokens - 1) // BLOCK
    rows = {guard: np.arange(blocks) < n // BLOCK for guard, n in (held or {}).items()}
    view = RequestView(
        "p", tokens, BLOCK, b"head", turn=turn or Turn(), session=session or SessionView(), **request
    )  # type: ignore[arg-type]
    return plan(
        view,
        [Worker(rank, guard=GUARDS[rank], kv_blocks=kv_blocks) for rank in list(GUARDS)[:workers]],
        IndexView(tuple(rows), np.stack(list(rows.values()))) if rows else IndexView.empty(blocks),
        {g: Holder(g, f"tcp://{g}:1", "L", BLOCK_BYTES) for g in list(GUARDS.values())[:workers]},
        everything or Loads(loads or {}),
        costs or CostModel(SETTINGS),
        topology or Topology(),
        now_s=0.0,
    )


def kv(tokens: int) -> int:
    return tokens // BLOCK * BLOCK_BYTES


# --- the six of the field -------------------------------------------------------------------------------


def test_a_fork_of_a_busy_worker_is_copied_to_one_with_room() -> None:
    fork = Turn(kind=Kind.FORK, session="child", parent="main", isl=48_000, osl=2_000, runs_s=350.0)
    made = situation(48_500, fork, held={"g1": 48_000}, loads={W1: BUSY})
    assert (made.rank, made.mode, made.reason) == (W2, Mode.COPY, Reason.COPY)
    assert made.moved_bytes == kv(48_000)
    assert not any(run.frees for run in made.sources)


def test_a_copy_need_not_stay_at_its_source_but_for_what_others_use_there() -> None:
    turn = Turn(kind=Kind.TURN, session="s")

    def spare(**more: object) -> list[tuple[str, int, int]]:
        made = situation(48_500, turn, held={"g1": 48_000}, loads={W1: BUSY}, **more)  # type: ignore[arg-type]
        assert (made.rank, made.mode) == (W2, Mode.COPY)
        return [(run.guard, run.first, run.count) for run in made.spare]

    assert spare() == [("g1", 0, 3000)]
    assert spare(session=SessionView(shared_blocks=1000)) == [("g1", 1000, 2000)]
    assert spare(session=SessionView(shared_blocks=3000)) == []
    # What is asked for often is wanted in both places.
    assert spare(rates_per_s=(20.0,) * 13) == []
    # Of what the target does not keep, the source's is the only one.
    once = Turn(kind=Kind.ONE_OFF, session="s")
    assert situation(48_500, once, held={"g1": 48_000}, loads={W1: BUSY}).spare == ()


def test_a_compaction_invalidates_on_every_holder_and_spares_what_is_shared() -> None:
    blocks = 96_000 // BLOCK
    index = IndexView(("g1", "g2", "g3"), np.array([[True] * blocks] * 2 + [[True] * 400 + [False] * 5600]))
    holders = {g: Holder(g, "", "L", BLOCK_BYTES) for g in index.guards}
    turn = Turn(kind=Kind.COMPACTION, isl_before=96_000, isl_after=8_000, keeps=8_000, next_in_s=80.0)
    view = RequestView("p", 96_000, BLOCK, b"", turn=turn, ahead=True)
    made = release(view, index, holders, 0.0)
    assert (made.mode, made.reason, made.holders) == (Mode.INVALIDATE, Reason.COMPACTED, ("g1", "g2"))
    assert (made.first, made.end) == (500, 6000)
    shared = release(replace(view, session=SessionView(shared_blocks=2000)), index, holders, 0.0)
    assert (shared.first, shared.end, shared.holders) == (2000, 6000, ("g1", "g2"))
    # Nothing is copied ahead of a turn that comes in more than a minute.
    made_ahead = situation(
        8_000, Turn(starts_in_s=80.0), held={"g1": 8_000, "g2": 8_000}, loads={W1: BUSY}, ahead=True
    )
    assert (made_ahead.mode, made_ahead.moved_bytes) == (Mode.NONE, 0)


def test_a_one_off_stays_where_its_prefix_is_when_the_other_is_full_and_the_load_a_spike() -> None:
    full = Load(blocks=int(0.92 * 16_384), requests=2)
    one_off = Turn(kind=Kind.ONE_OFF, isl=30_000, osl=500)
    made = situation(30_500, one_off, held={"g1": 30_000}, loads={W1: SPIKE, W2: full}, kv_blocks=16_384)
    assert (made.rank, made.mode, made.reason) == (W1, Mode.NO_RETAIN, Reason.ONE_OFF)
    assert (made.moved_bytes, made.no_retain) == (0, True)
    # With room at the other, and a holder that is busy by trend, it is fetched once and kept nowhere.
    roomy = situation(30_500, one_off, held={"g1": 30_000}, loads={W1: BUSY}, kv_blocks=16_384)
    assert (roomy.rank, roomy.mode, roomy.moved_bytes) == (W2, Mode.NO_RETAIN, kv(30_000))


def test_a_session_that_wakes_up_moves_away_from_its_busy_worker() -> None:
    wake_up = Turn(kind=Kind.WAKE_UP, session="s", isl=120_000, osl=1_000, idle_s=2400.0)
    made = situation(120_500, wake_up, held={"g1": 120_000}, loads={W1: BUSY})
    assert (made.rank, made.mode, made.reason) == (W2, Mode.MOVE, Reason.WAKE_UP)
    assert made.moved_bytes == kv(120_000)
    assert all(run.frees for run in made.sources)
    # What another session shares is copied: only the session's own blocks leave the source.
    shared = situation(
        120_500,
        wake_up,
        held={"g1": 120_000},
        loads={W1: BUSY},
        session=SessionView(shared_blocks=1000),
    )
    assert [(run.first, run.count, run.frees) for run in shared.sources] == [
        (0, 1000, False),
        (1000, 6500, True),
    ]
    assert shared.moved_bytes == kv(120_000)


def test_the_next_turn_is_prefetched_to_a_worker_with_room() -> None:
    turn = Turn(session="s", isl=64_000, osl=1_000, starts_in_s=2.0)
    made = situation(64_000, turn, held={"g1": 64_000}, loads={W1: BUSY}, ahead=True)
    assert (made.rank, made.mode, made.reason) == (W2, Mode.PREFETCH, Reason.NEXT_TURN)
    assert made.moved_bytes == kv(63_999 // BLOCK * BLOCK)
    # It waits for no copy; what is in the pool by then is still to be loaded.
    assert 0 < made.copies_s < 2.0
    assert made.chosen.fetch_s == pytest.approx(made.moved_bytes / SETTINGS.load_bytes_per_s)


DOMAINS = Topology({g: Place(rdma_domain="A" if g in ("g1", "g2") else "B") for g in GUARDS.values()})


def test_a_fork_goes_to_the_idle_worker_in_the_same_rdma_domain() -> None:
    fork = Turn(kind=Kind.FORK, session="child", parent="main", isl=48_000, osl=2_000, runs_s=30.0)
    made = situation(48_500, fork, held={"g1": 48_000}, loads={W1: BUSY}, workers=4, topology=DOMAINS)
    assert (made.rank, made.mode, made.moved_bytes) == (W2, Mode.COPY, kv(48_000))


# --- each field of a turn alone changes a plan --------------------------------------------------------


def test_session_decides_between_equals_and_stays_together() -> None:
    ranks = {
        name: {situation(500 + n, Turn(session=name)).rank for n in range(3)} for name in map(str, range(12))
    }
    assert all(len(found) == 1 for found in ranks.values())
    assert set.union(*ranks.values()) == {W1, W2}


def test_parent_is_copied_from_and_never_moved() -> None:
    asleep = Turn(kind=Kind.WAKE_UP)
    modes = [
        situation(48_500, turn, held={"g1": 48_000}, loads={W1: BUSY}).mode
        for turn in (asleep, Turn(kind=Kind.WAKE_UP, parent="main"))
    ]
    assert modes == [Mode.MOVE, Mode.COPY]


def test_kind_alone() -> None:
    modes = {
        kind: situation(48_500, Turn(kind=kind), held={"g1": 48_000}, loads={W1: BUSY}).mode
        for kind in (Kind.TURN, Kind.FORK, Kind.ONE_OFF, Kind.WAKE_UP)
    }
    assert modes == {
        Kind.TURN: Mode.COPY,
        Kind.FORK: Mode.COPY,
        Kind.ONE_OFF: Mode.NO_RETAIN,
        Kind.WAKE_UP: Mode.MOVE,
    }


def test_isl_of_an_announced_turn_needs_room() -> None:
    half_full = Load(blocks=10_000, requests=2)
    # Both hold what there is; the second worker has less room left than the announced prompt needs.
    ranks = [
        situation(
            32_000,
            Turn(starts_in_s=2.0, isl=isl),
            held={"g1": 10_000, "g2": 32_000},
            loads={W2: half_full},
            kv_blocks=16_384,
            ahead=True,
            costs=CostModel(replace_settings(load_bytes_per_s=1e11)),
        ).rank
        for isl in (32_000, 200_000)
    ]
    assert ranks == [W2, W1]


def test_osl_needs_room_too() -> None:
    nearly_full = Load(blocks=13_000, requests=2)
    ranks = [
        situation(32_000, Turn(osl=osl), held={"g2": 31_990}, loads={W2: nearly_full}, kv_blocks=16_384).rank
        for osl in (100, 60_000)
    ]
    assert ranks == [W2, W1]


def test_starts_in_s_gives_a_copy_time_and_too_much_of_it_is_too_early() -> None:
    slow = CostModel(replace_settings(domain_bytes_per_s=2e9))
    busy = Load(prefill_tokens=12_000, requests=2, fast_tokens=12_000, slow_tokens=12_000)
    made = [
        situation(48_500, Turn(starts_in_s=s), held={"g1": 48_000}, loads={W1: busy}, ahead=True, costs=slow)
        for s in (0.1, 4.0, 600.0)
    ]
    # Now the copy (3 s) takes longer than the queue (1.5 s); begun 4 s ahead it costs nobody a wait.
    assert [(each.rank, each.mode) for each in made[:2]] == [(W1, Mode.NONE), (W2, Mode.PREFETCH)]
    assert (made[2].mode, made[2].reason) == (Mode.NONE, Reason.TOO_EARLY)
    assert made[2].again_in_s == pytest.approx(600 - 3.1 - 15, abs=1)


def test_runs_s_makes_the_trend_count_more_than_the_moment() -> None:
    loads = {
        W1: Load(prefill_tokens=0, requests=2, fast_tokens=8_000, slow_tokens=8_000),
        W2: Load(prefill_tokens=5_000, requests=2, fast_tokens=5_000, slow_tokens=100),
    }
    both = {"g1": 48_000, "g2": 48_000}
    ranks = [situation(48_500, Turn(runs_s=s), held=both, loads=loads).rank for s in (5.0, 600.0)]
    assert ranks == [W1, W2]


def test_next_in_s_soon_makes_the_trend_count_too() -> None:
    loads = {
        W1: Load(prefill_tokens=0, requests=2, fast_tokens=8_000, slow_tokens=8_000),
        W2: Load(prefill_tokens=1_000, requests=2, fast_tokens=1_000, slow_tokens=100),
    }
    both = {"g1": 48_000, "g2": 48_000}
    ranks = [situation(48_500, Turn(next_in_s=s), held=both, loads=loads).rank for s in (1.0, 3600.0)]
    assert ranks == [W2, W1]


def test_a_session_of_one_turn_keeps_nothing() -> None:
    made = [situation(48_500, Turn(last=last), held={"g1": 48_000}) for last in (False, True)]
    assert [(each.mode, each.no_retain) for each in made] == [(Mode.NONE, False), (Mode.NO_RETAIN, True)]


def _compaction(**fields: object) -> tuple[int, int, Mode]:
    turn = Turn(kind=Kind.COMPACTION, **fields)  # type: ignore[arg-type]
    index = IndexView(("g1",), np.ones((1, 600), dtype=np.bool_))
    made = release(
        RequestView("p", 9600, BLOCK, b"", turn=turn),
        index,
        {"g1": Holder("g1", "", "L", BLOCK_BYTES)},
        0.0,
    )
    return made.first, made.end, made.mode


def test_the_last_turn_of_a_session_that_had_others_is_kept_for_who_may_fork_from_it() -> None:
    made = situation(48_500, Turn(last=True), held={"g1": 48_000}, session=SessionView(home="g1"))
    assert (made.mode, made.reason, made.no_retain) == (Mode.NONE, Reason.RESIDENT, False)
    once = Turn(kind=Kind.ONE_OFF)
    made = situation(48_500, once, held={"g1": 48_000}, session=SessionView(home="g1"))
    assert made.no_retain, "a one-off is one, whoever sends it"


def test_keeps_and_isl_after_and_isl_before_bound_what_dies() -> None:
    assert _compaction() == (0, 600, Mode.INVALIDATE)
    assert _compaction(keeps=1000) == (62, 600, Mode.INVALIDATE)
    assert _compaction(isl_after=800) == (50, 600, Mode.INVALIDATE)
    assert _compaction(keeps=160, isl_after=800) == (10, 600, Mode.INVALIDATE)
    assert _compaction(isl_before=4800) == (0, 300, Mode.INVALIDATE)
    assert _compaction(keeps=9600)[2] is Mode.NONE
    assert _compaction(expires_in_s=-1.0)[2] is Mode.NONE


def test_idle_s_makes_a_turn_a_wake_up() -> None:
    modes = [
        situation(48_500, Turn(idle_s=s), held={"g1": 48_000}, loads={W1: BUSY}).mode for s in (5.0, 2400.0)
    ]
    assert modes == [Mode.COPY, Mode.MOVE]


def test_expires_in_s_forbids_what_would_be_late() -> None:
    made = [
        situation(
            48_500,
            Turn(starts_in_s=2.0, expires_in_s=s),
            held={"g1": 48_000},
            loads={W1: BUSY},
            ahead=True,
        )
        for s in (5.0, 0.1)
    ]
    assert [(each.mode, each.reason) for each in made] == [
        (Mode.PREFETCH, Reason.NEXT_TURN),
        (Mode.NONE, Reason.TOO_LATE),
    ]


def test_the_end_of_a_session_makes_its_own_blocks_first_to_go() -> None:
    index = IndexView(("g1", "g2"), np.array([[True] * 100, [True] * 40 + [False] * 60]))
    view = RequestView(
        "p",
        1600,
        BLOCK,
        b"",
        turn=Turn(kind=Kind.END, session="child", parent="main"),
        session=SessionView(shared_blocks=40),
    )
    made = release(view, index, {g: Holder(g, "", "L", 1) for g in index.guards}, 0.0)
    assert (made.mode, made.reason, made.first, made.end) == (Mode.DEMOTE, Reason.ENDED, 40, 100)
    assert made.holders == ("g1",)


# --- spikes and trends, homes, and copies under way -----------------------------------------------------


def test_a_spike_is_no_reason_to_move_a_session() -> None:
    asleep = Turn(kind=Kind.WAKE_UP)
    spike = Load(prefill_tokens=60_000, requests=8, fast_tokens=60_000, slow_tokens=1_000)
    made = situation(48_500, asleep, held={"g1": 48_000}, loads={W1: spike})
    assert (made.rank, made.mode) == (W2, Mode.COPY)


def test_a_short_spike_is_waited_out_where_a_trend_is_not() -> None:
    tokens = {"fast_tokens": 9_000, "prefill_tokens": 9_000, "requests": 2}
    slow = CostModel(replace_settings(domain_bytes_per_s=7e9))
    modes = [
        situation(
            48_500, held={"g1": 48_000}, loads={W1: Load(slow_tokens=slow_tokens, **tokens)}, costs=slow
        ).mode
        for slow_tokens in (500.0, 9_000.0)
    ]
    assert modes == [Mode.NONE, Mode.COPY]


@pytest.mark.parametrize("ready_in_s", [0.05, 0.0], ids=["soon", "overdue"])
def test_a_request_during_its_prefetch_goes_to_the_target_and_joins(ready_in_s: float) -> None:
    arriving = Arriving(guard="g2", first=0, count=3000, ready_in_s=ready_in_s)
    session = SessionView(home="g2", arriving=(arriving,))
    made = situation(48_500, Turn(session="s"), held={"g1": 48_000}, session=session, loads={W1: BUSY})
    assert (made.rank, made.reason, made.moved_bytes) == (W2, Reason.JOIN, 0)
    assert [(run.guard, run.count) for run in made.sources] == [("g1", 3000)]
    # Also when its old home is idle again: a session has one home, and half of it is there already.
    loads_s = kv(48_000) / SETTINGS.load_bytes_per_s
    assert made.chosen.fetch_s == pytest.approx(ready_in_s + loads_s)


def test_a_session_that_moved_has_one_home() -> None:
    both = {"g1": 48_000, "g2": 48_000}
    for home, rank in (("g1", W1), ("g2", W2)):
        made = situation(48_500, Turn(session="s"), held=both, session=SessionView(home=home))
        assert made.rank == rank


# --- load that is announced --------------------------------------------------------------------------------


def test_announced_turns_are_part_of_the_load() -> None:
    both = {"g1": 48_000, "g2": 48_000}
    soon = Loads(announced=(Announced(W1, 0.01, 40_000),))
    assert situation(48_500, held=both, everything=soon).rank == W2
    # One that comes when this one has long been answered is nobody's business.
    later = Loads(announced=(Announced(W1, 60.0, 40_000), Announced(W2, 0.01, 4_000)))
    assert situation(48_500, held=both, everything=later).rank == W1


def test_with_signals_the_turns_after_the_first_run_beside_it_and_without_them_they_queue() -> None:
    """t1 to t4 of one prefix at A, with 2.5 s of queue for minutes; B is idle, a copy takes 3.5 s."""
    costs = CostModel(replace_settings(domain_bytes_per_s=1.8e9))
    prefix, suffix = 48_000, 400

    def run(signals: bool) -> list[tuple[tuple[int, int], Mode, float]]:
        ledger, log, held = Ledger(), [], {"g1": prefix}
        for at_s in range(300):
            # Other routers' requests, as the worker reports them.
            ledger.report(W1, prefill_tokens=20_000, blocks=0, now_s=float(at_s))
            ledger.loads(float(at_s))

        def turn(number: int, now_s: float, announced: Turn | None = None, **session: object) -> Plan:
            return situation(
                prefix + suffix,
                announced or Turn(session=f"t{number}"),
                held=held,
                everything=ledger.loads(now_s),
                costs=costs,
                ahead=announced is not None,
                session=SessionView(**session),  # type: ignore[arg-type]
            )

        def start(number: int, now_s: float) -> None:
            ledger.withdraw(f"t{number}")
            made = turn(number, now_s)
            ledger.book(
                f"t{number}",
                made.rank,
                prefill_tokens=made.prefill_tokens,
                blocks=0,
                copies=made.byte_counts,
            )
            log.append((made.rank, made.mode, made.chosen.ttft_s))

        start(1, 300.0)
        if signals:
            # All three are known when t1 begins. One copy serves them; the later ones join it.
            arriving: tuple[Arriving, ...] = ()
            for number in (2, 3, 4):
                announced = Turn(session=f"t{number}", starts_in_s=4.0 + 0.1 * number, isl=prefix + suffix)
                ahead = turn(number, 300.0, announced, arriving=arriving)
                assert (ahead.rank, ahead.mode) == (W2, Mode.PREFETCH)
                assert ahead.moved_bytes == (0 if arriving else kv(prefix))
                arriving = (Arriving(guard="g2", first=0, count=prefix // BLOCK, ready_in_s=ahead.copies_s),)
                ledger.announce(
                    f"t{number}",
                    ahead.rank,
                    starts_at_s=300.0 + announced.starts_in_s,
                    prefill_tokens=ahead.prefill_tokens,
                )
            held["g2"] = prefix
        for number in (2, 3, 4):
            start(number, 304.0 + 0.1 * number)
        return log

    with_signals, without = run(True), run(False)
    assert [(rank, mode) for rank, mode, _ in with_signals] == [(W1, Mode.NONE)] + [(W2, Mode.NONE)] * 3
    assert [(rank, mode) for rank, mode, _ in without] == [(W1, Mode.NONE)] * 4
    assert max(ttft_s for _, _, ttft_s in with_signals[1:]) < 0.5
    assert min(ttft_s for _, _, ttft_s in without[1:]) > 2.5


def replace_settings(**changes: float) -> Settings:
    fields = {name: getattr(SETTINGS, name) for name in SETTINGS.__struct_fields__}
    return Settings(**(fields | changes))


# --- many ask for one prefix --------------------------------------------------------------------------------


def test_a_hot_prefix_is_replicated_before_its_holder_queues() -> None:
    made = {rate: situation(48_500, held={"g1": 48_000}, rates_per_s=(rate,) * 12) for rate in (0.5, 12.0)}
    assert (made[0.5].rank, made[0.5].mode) == (W1, Mode.NONE)
    assert made[12.0].chosen.wait_s == 0.0
    assert (made[12.0].rank, made[12.0].mode, made[12.0].reason) == (W2, Mode.COPY, Reason.SPREAD)
    # Only the first blocks are hot: a system prompt that everybody has is no reason to copy a session.
    shallow = situation(48_500, held={"g1": 48_000}, rates_per_s=(12.0,) * 6 + (0.01,) * 6)
    assert (shallow.rank, shallow.mode) == (W1, Mode.NONE)


def test_beyond_the_replica_budget_a_prefix_is_fetched_but_not_kept() -> None:
    costs = CostModel(replace_settings(max_replicas=2))
    held = {"g1": 48_000, "g2": 48_000}
    made = situation(48_500, held=held, loads={W1: BUSY, W2: BUSY}, workers=3, costs=costs)
    assert (made.rank, made.mode, made.no_retain) == (W3, Mode.NO_RETAIN, True)
    roomy = situation(48_500, held=held, loads={W1: BUSY, W2: BUSY}, workers=3)
    assert (roomy.rank, roomy.mode) == (W3, Mode.COPY)


def test_copies_stop_when_their_bytes_are_used_up() -> None:
    costs = CostModel(replace_settings(copy_budget_bytes_per_s=1e9))
    for spent, mode in ((0.0, Mode.COPY), (1e9, Mode.NONE)):
        loads = Loads({W1: BUSY}, copied_bytes_per_s=spent)
        made = situation(48_500, held={"g1": 48_000}, everything=loads, costs=costs)
        assert made.mode is mode
    assert made.reason is Reason.BUDGET


# --- topology ----------------------------------------------------------------------------------------


def test_a_copy_outside_the_domain_only_when_it_beats_computing() -> None:
    places = Topology({"g1": Place(rdma_domain="A"), "g2": Place(rdma_domain="B")})
    ok = situation(48_500, held={"g1": 48_000}, loads={W1: BUSY}, topology=places)
    assert (ok.rank, ok.mode) == (W2, Mode.COPY)
    slow = CostModel(replace_settings(far_bytes_per_s=5e8))
    refused = situation(48_500, held={"g1": 48_000}, loads={W1: BUSY}, topology=places, costs=slow)
    assert refused.mode is Mode.NONE


def test_required_domains_never_copy_outside() -> None:
    places = {"g1": Place(rdma_domain="A"), "g2": Place(rdma_domain="B"), "g3": Place(rdma_domain="A")}
    for required, rank, count in ((False, {W2, W3}, 1), (True, {W3}, 1)):
        made = situation(
            48_500,
            held={"g1": 48_000},
            loads={W1: BUSY},
            workers=3,
            topology=Topology(places, required),
            costs=CostModel(replace_settings(far_bytes_per_s=3e10)),
        )
        assert made.rank in rank
        assert len(made.sources) == count
    alone = situation(
        48_500, held={"g1": 48_000}, loads={W1: BUSY}, topology=Topology({"g1": places["g1"]}, True)
    )
    assert alone.mode is Mode.NONE


def test_a_measured_link_counts_more_than_its_class() -> None:
    places = Topology({g: Place(rdma_domain="A") for g in GUARDS.values()})
    costs = CostModel(SETTINGS)
    for _ in range(40):
        costs.observe_copy("g1", "g2", places.link("g1", "g2"), 100_000_000, 1.0)
    made = situation(48_500, held={"g1": 48_000}, loads={W1: BUSY}, workers=3, topology=places, costs=costs)
    assert made.rank == W3


def test_ranks_of_one_server_copy_over_shared_memory() -> None:
    places = Topology({"g1": Place("boot"), "g2": Place("boot"), "g3": Place("other")})
    costs = CostModel(replace_settings(host_bytes_per_s=1e10, domain_bytes_per_s=3e9))
    blocks = 48_499 // BLOCK
    made = plan(
        RequestView("p", 48_500, BLOCK, b""),
        [Worker((1, 0), guard="g1"), Worker((1, 1), guard="g2"), Worker((2, 0), guard="g3")],
        IndexView(("g1",), (np.arange(blocks) < 3000)[None]),
        {g: Holder(g, "", "L", BLOCK_BYTES) for g in ("g1", "g2", "g3")},
        Loads({(1, 0): BUSY}),
        costs,
        places,
        0.0,
    )
    assert (made.rank, made.sources[0].guard) == ((1, 1), "g1")


def test_zones_lie_between_domains_and_far() -> None:
    places = Topology(
        {
            "g1": Place(rdma_domain="A", zone="z1"),
            "g2": Place(rdma_domain="B", zone="z1"),
            "g3": Place(rdma_domain="C", zone="z2"),
        }
    )
    made = situation(48_500, held={"g1": 48_000}, loads={W1: BUSY}, workers=3, topology=places)
    assert made.rank == W2


# --- several routers --------------------------------------------------------------------------------


def test_routers_with_stale_loads_do_not_all_pick_the_same_worker() -> None:
    """Four routers see each other's bookings every 2 s; sixteen workers of which one looks idle."""

    def spread(jitter: bool) -> float:
        true = dict.fromkeys(range(16), 2000)
        true[5] = 0
        seen = dict(true)
        for at in range(80):
            router = f"r{at % 4}"
            loads = Loads(
                {(n, 0): Load(prefill_tokens=tokens, requests=1) for n, tokens in seen.items()},
                unseen_tokens=20 * 500 if jitter else 0,
            )
            made = plan(
                RequestView(f"p{at}", 500, BLOCK, b"%d" % at, router=router),
                [Worker((n, 0)) for n in range(16)],
                IndexView.empty(31),
                {},
                loads,
                CostModel(SETTINGS),
                Topology(),
                0.0,
            )
            true[made.rank[0]] += 500
        return max(true.values()) / (sum(true.values()) / 16)

    assert spread(jitter=False) > 5
    assert spread(jitter=True) < 2.5
