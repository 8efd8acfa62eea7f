# SPDX-License-Identifier: Apache-2.0
"""The routers that bench/replay compares: four without a shared cache, and ours."""

from __future__ import annotations

import abc
import hashlib
from collections import Counter
from functools import lru_cache

from bench._replay_sim import BLOCK_BYTES, COPY_LATENCY_S, LOAD_BYTES_PER_S, Choice, Simulation
from bench._replay_traces import TOKENS, Notice, Request
from kvcr.protocol.events import Inventory
from router_hints.costs import CostModel, Settings
from router_hints.heat import Heat
from router_hints.index import LocationIndex
from router_hints.ledger import Ledger
from router_hints.planner import Holder, Mode, Plan, RequestView, Worker, plan, release
from router_hints.topology import Link, Topology
from router_hints.turns import Arriving, Kind, SessionView, Turn
from router_hints.underway import Underway


class _Deaf:
    """What happens makes no difference to it."""

    def first_output(self, number: int, seconds: float, sim: Simulation) -> None: ...
    def ended(self, number: int, sim: Simulation) -> None: ...
    def changed(self, worker: int, stored: list[int], removed: list[int], sim: Simulation) -> None: ...
    def lost(self, worker: int, sim: Simulation) -> None: ...
    def added(self, worker: int, sim: Simulation) -> None: ...
    def notice(self, notice: Notice, sim: Simulation) -> None: ...


class _Plain(_Deaf, abc.ABC):
    """A router that only chooses a worker."""

    name = ""

    def choose(self, request: Request, number: int, sim: Simulation) -> Choice:
        return Choice(self.pick(request, number, sim))

    @abc.abstractmethod
    def pick(self, request: Request, number: int, sim: Simulation) -> int: ...


class RoundRobin(_Plain):
    name = "round_robin"

    def pick(self, request: Request, number: int, sim: Simulation) -> int:
        return sim.alive[number % len(sim.alive)]


class Greedy(_Plain):
    """The longest prefix wins; of equals the one with the fewest requests."""

    name = "greedy"

    def pick(self, request: Request, number: int, sim: Simulation) -> int:
        return max(
            sim.alive,
            key=lambda name: (sim.workers[name].overlap(request.blocks), -_busy(sim, name), -name),
        )


class OverlapLoad(_Plain):
    """The cost of Dynamo's KV router: blocks to compute, queued ones included, plus blocks being decoded."""

    name = "overlap_load"

    def __init__(self) -> None:
        self._decoding: dict[int, int] = {}
        self._of: dict[int, tuple[int, int]] = {}

    def pick(self, request: Request, number: int, sim: Simulation) -> int:
        def cost(name: int) -> float:
            worker = sim.workers[name]
            new = request.tokens - worker.overlap(request.blocks) * TOKENS
            return (new + worker.queued_tokens) / TOKENS + self._decoding.get(name, 0)

        chosen = min(sim.alive, key=lambda name: (cost(name), name))
        self._decoding[chosen] = self._decoding.get(chosen, 0) + len(request.blocks)
        self._of[number] = (chosen, len(request.blocks))
        return chosen

    def ended(self, number: int, sim: Simulation) -> None:
        chosen, blocks = self._of.pop(number)
        self._decoding[chosen] -= blocks


class Sticky(_Plain):
    """A session stays on the worker that its hash picks among those alive."""

    name = "sticky"

    def pick(self, request: Request, number: int, sim: Simulation) -> int:
        return max(
            sim.alive,
            key=lambda name: hashlib.blake2b(b"%d/%d" % (request.session, name), digest_size=8).digest(),
        )


def _busy(sim: Simulation, name: int) -> float:
    worker = sim.workers[name]
    return worker.running + worker.queued_tokens / 4096


@lru_cache(maxsize=1 << 20)
def key_of(block: int) -> bytes:
    return hashlib.blake2b(block.to_bytes(8, "little", signed=True), digest_size=16).digest()


def keys_of(blocks: tuple[int, ...] | list[int]) -> bytes:
    return b"".join(map(key_of, blocks))


class Ours:
    """The planner, the index, the ledger and the cost model of the live router, and nothing else."""

    def __init__(self, *, signals: bool = True) -> None:
        self.name = "ours" if signals else "ours_without_signals"
        self._signals = signals
        self._index = LocationIndex(max_blocks=1_000_000)
        self._sequences: dict[int, int] = {}
        self._ledger = Ledger()
        self._heat = Heat()
        self._underway = Underway()
        # Defaults that are wrong: what the engines and links do is learnt.
        self._costs = CostModel(
            Settings(
                prefill_tokens_per_s=10_000,
                domain_bytes_per_s=5e9,
                load_bytes_per_s=LOAD_BYTES_PER_S,
                copy_latency_s=COPY_LATENCY_S,
            )
        )
        self._topology = Topology()
        self._plans: dict[int, Plan] = {}
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._arriving: dict[str, tuple[float, Arriving]] = {}
        self._homes: dict[str, str] = {}
        self._chains: dict[str, tuple[int, ...]] = {}
        self._users: Counter[int] = Counter()
        """sessions by block"""

    def choose(self, request: Request, number: int, sim: Simulation) -> Choice:
        turn = request.turn if self._signals else Turn()
        self._ledger.withdraw(turn.session)
        self._follow(turn.session, request.blocks)
        made = self._plan(request.blocks, request.tokens, turn, sim, str(number))
        if turn.session:
            self._homes[turn.session] = f"g{made.rank[0]}"
        self._plans[number] = made
        self._blocks[number] = request.blocks
        if not made.no_retain:
            self._underway.begin(str(number), made.rank, keys_of(request.full_blocks))
        self._ledger.book(
            str(number),
            made.rank,
            prefill_tokens=made.prefill_tokens,
            blocks=made.blocks,
            copies=made.byte_counts,
            copied_by_s=sim.now_s + made.copies_s,
        )
        copies = {} if made.chosen.joined else self._copies(made, request.blocks)
        self._free(made, request.blocks, sim)
        return Choice(made.rank[0], copies, keep=not made.no_retain)

    def first_output(self, number: int, seconds: float, sim: Simulation) -> None:
        made = self._plans[number]
        self._ledger.first_output(str(number))
        self._underway.end(str(number))
        for run in made.spare:
            sim.demote(int(run.guard[1:]), self._blocks[number][run.first : run.first + run.count])
        chosen = made.chosen
        if chosen.wait_s > 0 and not made.sources:
            alone_s = chosen.fetch_s + chosen.prefill_s + chosen.load_s
            self._costs.observe_wait(made.rank, chosen.wait_s, seconds - alone_s)
        if chosen.wait_s > 0:
            return
        seconds -= chosen.load_s
        if not made.sources:
            self._costs.observe_prefill(made.rank, made.prefill_tokens, seconds - chosen.fetch_s)
        elif len(made.byte_counts) == 1:
            ((source, byte_count),) = made.byte_counts.items()
            spent_s = chosen.prefill_s + byte_count / LOAD_BYTES_PER_S
            self._costs.observe_copy(source, f"g{made.rank[0]}", Link.DOMAIN, byte_count, seconds - spent_s)

    def ended(self, number: int, sim: Simulation) -> None:
        self._ledger.release(str(number))
        self._underway.end(str(number))
        self._plans.pop(number, None)
        self._blocks.pop(number, None)

    def changed(self, worker: int, stored: list[int], removed: list[int], sim: Simulation) -> None:
        if not stored and not removed:
            return
        name = f"g{worker}"
        self._index.admit(name, 1)
        self._sequences[worker] = self._sequences.get(worker, 0) + 1
        self._index.apply(
            Inventory(name, 1, self._sequences[worker], 2, keys_of(stored), b"", b"", keys_of(removed))
        )

    def lost(self, worker: int, sim: Simulation) -> None:
        """The engine is gone. Its guard is not: the pool goes on as a source."""
        self._ledger.forget_worker(worker)
        self._costs.forget((worker, 0))

    def added(self, worker: int, sim: Simulation) -> None:
        self._ledger.admit([(worker, 0)], [(name, 0) for name in sim.alive])

    def notice(self, notice: Notice, sim: Simulation) -> None:
        if not self._signals:
            return
        turn = notice.turn
        if turn.kind in (Kind.COMPACTION, Kind.END):
            self._release(notice, sim)
            return
        tokens = max(1, min(turn.isl or 1 << 40, len(notice.blocks) * TOKENS))
        made = self._plan(notice.blocks, tokens, turn, sim, f"ahead {turn.session}", ahead=True)
        self._ledger.announce(
            turn.session,
            made.rank,
            starts_at_s=sim.now_s + turn.starts_in_s,
            prefill_tokens=made.prefill_tokens,
        )
        if made.mode is not Mode.PREFETCH or made.chosen.joined:
            return
        copies = self._copies(made, notice.blocks)
        ready_in_s = sim.copy(copies)
        end = max(run.first + run.count for run in made.sources)
        guard = f"g{made.rank[0]}"
        self._homes[turn.session] = guard
        self._arriving[turn.session] = (
            sim.now_s + ready_in_s,
            Arriving(guard=guard, first=0, count=end, ready_in_s=ready_in_s),
        )
        sim.at(sim.now_s + ready_in_s, "landed", (made.rank[0], tuple(notice.blocks[:end])))
        self._free(made, notice.blocks, sim)

    # --- the planner's inputs --------------------------------------------------------------------

    def _plan(
        self,
        blocks: tuple[int, ...],
        tokens: int,
        turn: Turn,
        sim: Simulation,
        plan_id: str,
        *,
        ahead: bool = False,
    ) -> Plan:
        keys = keys_of(blocks)
        rates = () if ahead else self._heat.seen(keys, sim.now_s)
        usable = max(0, tokens - 1) // TOKENS
        view = RequestView(
            plan_id,
            tokens,
            TOKENS,
            affinity=keys[-16:],
            turn=turn,
            session=self._session(turn.session, sim.now_s),
            ahead=ahead,
            rates_per_s=rates,
        )
        holders = {f"g{n}": Holder(f"g{n}", f"tcp://g{n}", "L", BLOCK_BYTES) for n in sim.workers}
        room = {
            f"g{name}": max(0, worker.capacity - self._index.blocks(f"g{name}"))
            for name, worker in sim.workers.items()
        }
        coming = {} if ahead else self._underway.leading(keys)
        workers = [
            Worker((name, 0), g1_blocks=coming.get((name, 0), 0), guard=f"g{name}") for name in sim.alive
        ]
        found = self._index.lookup(keys[: 16 * usable])
        return plan(
            view,
            workers,
            found,
            holders,
            self._ledger.loads(sim.now_s, free_blocks=room),
            self._costs,
            self._topology,
            sim.now_s,
        )

    def _session(self, session: str, now_s: float) -> SessionView:
        ready_s, part = self._arriving.get(session, (0.0, None))
        shared = self._shared(self._chains.get(session, ()))
        if part is None or ready_s <= now_s:
            return SessionView(home=self._homes.get(session, ""), shared_blocks=shared)
        under_way = Arriving(guard=part.guard, first=part.first, count=part.count, ready_in_s=ready_s - now_s)
        return SessionView(home=part.guard, arriving=(under_way,), shared_blocks=shared)

    def _follow(self, session: str, blocks: tuple[int, ...]) -> None:
        """The session's chain is this now; empty: it is over."""
        if session:
            self._users.subtract(self._chains.pop(session, ()))
            self._users.update(blocks)
            if blocks:
                self._chains[session] = blocks

    def _shared(self, blocks: tuple[int, ...]) -> int:
        """Leading blocks that another session uses, too."""
        return next((at for at, block in enumerate(blocks) if self._users[block] < 2), len(blocks))

    def _free(self, made: Plan, blocks: tuple[int, ...], sim: Simulation) -> None:
        """What is moved leaves its source."""
        for run in made.sources:
            if run.frees:
                sim.drop(int(run.guard[1:]), blocks[run.first : run.first + run.count])

    def _copies(self, made: Plan, blocks: tuple[int, ...]) -> dict[int, list[int]]:
        copies: dict[int, list[int]] = {}
        for run in made.sources:
            copies.setdefault(int(run.guard[1:]), []).extend(blocks[run.first : run.first + run.count])
        return copies

    def _release(self, notice: Notice, sim: Simulation) -> None:
        view = RequestView(
            "release",
            len(notice.blocks) * TOKENS,
            TOKENS,
            b"",
            turn=notice.turn,
            session=SessionView(shared_blocks=self._shared(notice.blocks)),
        )
        holders = {f"g{n}": Holder(f"g{n}", "", "L", BLOCK_BYTES) for n in sim.workers}
        made = release(view, self._index.lookup(keys_of(notice.blocks)), holders, sim.now_s)
        dead = notice.blocks[made.first : made.end]
        kept = 0 if notice.turn.kind is Kind.END else made.first
        self._follow(notice.turn.session, notice.blocks[:kept])
        for holder in made.holders:
            if made.mode is Mode.INVALIDATE:
                sim.drop(int(holder[1:]), dead)
            elif made.mode is Mode.DEMOTE:
                sim.demote(int(holder[1:]), dead)


POLICIES = (RoundRobin, Greedy, OverlapLoad, Sticky, Ours)
