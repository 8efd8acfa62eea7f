# SPDX-License-Identifier: Apache-2.0
"""The router's index beside Dynamo's ``RadixTree``: ingest, lookup, memory, and rebuild after a restart.

Both get the same chains on the same workers and the same queries, in one process, in turns. Ingest is from
the bytes of an event to the index, one event a chain: MessagePack for ours, JSON for ``apply_event``; in
processor time, which a busy machine does not stretch. Our lookup is by 16-byte keys and gives every holder's
blocks; the tree's is by 64-bit hashes and gives the depth each worker reaches.

The rebuild is what a router does that starts: it reads the snapshots of eight guards over their control
sockets, here served by another process with the guards' own messages, and has the whole index.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing as mp
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq

from bench import _common
from kvcr.guard.serving import SNAPSHOT_BLOCKS
from kvcr.protocol.events import Heartbeat, Inventory, event
from kvcr.protocol.peer import PeerHello, PeerWelcome, Snapshot, SnapshotChunk, to_client, to_server
from router_hints.guards import Guard, GuardDirectory
from router_hints.index import LocationIndex
from router_hints.inventory import InventoryClient
from router_hints.metrics import Metrics
from router_hints.table import BlockTable, DictTable, fold

WORKERS = 8
CHAIN = 177
"""Blocks of a chain, and of a query."""
HEAD = 16
"""Blocks of a chain that many others share."""
BLOCKS = 2_000_000
QUERIES = 3000

Chains = list[tuple[int, np.ndarray, int]]
"""worker, 64-bit hashes, and how many of the leading ones that worker has already"""


def make_chains() -> Chains:
    """Chains with shared heads, each on one worker, and every tenth on all of them."""
    rng = np.random.default_rng(7)
    heads = rng.integers(1, 2**63, (64, HEAD), dtype=np.uint64)
    present: set[tuple[int, int]] = set()
    chains: Chains = []
    distinct = 0
    while distinct < BLOCKS:
        head = int(rng.integers(64))
        chain = np.concatenate([heads[head], rng.integers(1, 2**63, CHAIN - HEAD, dtype=np.uint64)])
        distinct += CHAIN - HEAD
        first = int(rng.integers(WORKERS))
        everywhere = distinct // (CHAIN - HEAD) % 10 == 0
        for worker in range(WORKERS) if everywhere else [first]:
            chains.append((worker, chain, HEAD if (worker, head) in present else 0))
            present.add((worker, head))
    return chains


def keys_of(hashes: np.ndarray) -> bytes:
    """Our 16-byte keys that stand for these hashes."""
    words = np.stack([hashes * np.uint64(0x9E3779B97F4A7C15), hashes], axis=1)
    return words.astype("<u8").tobytes()


def queries_of(chains: Chains, holders: int) -> list[np.ndarray]:
    """Chains on so many workers that go on with something new for their last tenth, in random order."""
    rng = np.random.default_rng(8)
    counts = Counter(id(hashes) for _, hashes, _ in chains)
    known = [hashes for _, hashes, _ in chains if counts[id(hashes)] == holders]
    queries = [known[at].copy() for at in rng.integers(len(known), size=QUERIES)]
    for query in queries:
        query[-CHAIN // 10 :] = rng.integers(1, 2**63, CHAIN // 10 + 1, dtype=np.uint64)
    return queries


# --- ours and theirs ---------------------------------------------------------------------------------


def our_events(chains: Chains) -> list[bytes]:
    sequences = [0] * WORKERS
    raw = []
    for worker, hashes, known in chains:
        sequences[worker] += 1
        new = hashes[known:]
        raw.append(
            event.encode(
                Inventory(
                    f"g{worker}",
                    1,
                    sequences[worker],
                    2,
                    keys_of(new),
                    new.tobytes(),
                    np.arange(known, CHAIN, dtype="<u4").tobytes(),
                    b"",
                )
            )
        )
    return raw


def their_events(chains: Chains) -> list[tuple[int, bytes]]:
    raw = []
    for number, (worker, hashes, known) in enumerate(chains):
        blocks = [{"block_hash": h, "tokens_hash": h} for h in hashes[known:].tolist()]
        parent = int(hashes[known - 1]) if known else None
        stored = {"stored": {"parent_hash": parent, "blocks": blocks}}
        raw.append((worker, json.dumps({"event_id": number, "data": stored, "dp_rank": 0}).encode()))
    return raw


def our_ingest(raw: list[bytes]) -> tuple[LocationIndex, float]:
    index = LocationIndex(max_blocks=2 * BLOCKS)
    for worker in range(WORKERS):
        index.admit(f"g{worker}", 1)
    begun = time.process_time()
    for message in raw:
        index.apply(event.decode(message))  # type: ignore[arg-type]
    return index, time.process_time() - begun


def their_ingest(raw: list[tuple[int, bytes]]) -> tuple[Any, float]:
    from dynamo.llm import RadixTree

    tree = RadixTree()
    begun = time.process_time()
    for worker, message in raw:
        tree.apply_event(worker, message)
    return tree, time.process_time() - begun


def lookups(find: Callable[[Any], Any], queries: list[Any]) -> list[float]:
    """Microseconds of each query."""
    taken = []
    for query in queries:
        begun = time.perf_counter()
        find(query)
        taken.append(1e6 * (time.perf_counter() - begun))
    return taken


def p99(samples: list[float]) -> float:
    return sorted(samples)[int(0.99 * len(samples))]


# --- rebuild ------------------------------------------------------------------------------------------


def serve_snapshots(pipe: Connection) -> None:
    """Another process: the control sockets of eight guards with 250,000 blocks each."""
    context = zmq.Context()
    per_guard = BLOCKS // WORKERS
    guards = []
    poller = zmq.Poller()
    for worker in range(WORKERS):
        hashes = np.random.default_rng(worker).integers(1, 2**63, per_guard, dtype=np.uint64)
        keys = keys_of(hashes)
        sock = context.socket(zmq.ROUTER)
        sock.bind("tcp://127.0.0.1:*")
        poller.register(sock, zmq.POLLIN)
        guards.append((sock, f"g{worker}", keys, hashes, fold(keys)))
    pipe.send([(name, s.getsockopt_string(zmq.LAST_ENDPOINT), d) for s, name, _, _, d in guards])
    while not pipe.poll():
        ready = dict(poller.poll(100))
        for sock, name, keys, hashes, digest in guards:
            if sock in ready:
                way_back, raw = sock.recv_multipart()
                sock.send_multipart([way_back, answer(raw, name, keys, hashes, digest)])
    context.destroy(linger=0)


def answer(raw: bytes, name: str, keys: bytes, hashes: np.ndarray, digest: int) -> bytes:
    message = to_server.decode(raw)
    if isinstance(message, PeerHello):
        return to_client.encode(PeerWelcome(message.op, name, 1, 1, None, "", "", "", len(hashes)))
    assert isinstance(message, Snapshot)
    first, end = message.cursor, message.cursor + SNAPSHOT_BLOCKS
    return to_client.encode(
        SnapshotChunk(
            op=message.op,
            guard=name,
            incarnation=1,
            sequence=1,
            keys=keys[16 * first : 16 * end],
            engine_hashes=hashes[first:end].tobytes(),
            positions=np.arange(first, min(end, len(hashes)), dtype="<u4").tobytes(),
            next_cursor=end if end < len(hashes) else -1,
            digest=digest,
            count=len(hashes),
        )
    )


def rebuild() -> float:
    """Seconds from a router's start to its whole index."""
    ours, theirs = mp.Pipe()
    server = mp.get_context("spawn").Process(target=serve_snapshots, args=(theirs,), daemon=True)
    server.start()
    try:
        return asyncio.run(_read_snapshots(ours.recv()))
    finally:
        ours.send(None)
        server.join(10)


async def _read_snapshots(guards: list[tuple[str, str, int]]) -> float:
    directory, index = GuardDirectory(), LocationIndex(max_blocks=2 * BLOCKS)
    client = InventoryClient(
        index,
        directory,
        Metrics(),
        "bench",
        None,
        on_batch=lambda batch: None,
        on_snapshot=lambda chunk, first: None,
    )
    begun = time.perf_counter()
    client.start()
    for name, endpoint, _ in guards:
        guard = Guard(name, 1, endpoint, "bench")
        directory.put(guard)
        client.admit(guard)
    while index.complete[0] < len(guards):
        await asyncio.sleep(0.005)
        if time.perf_counter() - begun > 120:
            raise SystemExit("the snapshots were not read within 120 s")
    seconds = time.perf_counter() - begun
    for name, _, digest in guards:
        outcome = index.beat(Heartbeat(name, 1, 1, BLOCKS // WORKERS, digest))
        assert outcome == "applied", f"{name}: {outcome}, {index.blocks(name)} blocks"
    await client.close()
    return seconds


# --- the whole ----------------------------------------------------------------------------------------


def measure(quick: bool) -> dict[str, Any]:
    if BlockTable is DictTable:
        raise SystemExit("no C extension: python setup.py build_ext --inplace")
    rounds = 2 if quick else 5
    chains = make_chains()
    queries = {WORKERS: queries_of(chains, WORKERS), 1: queries_of(chains, 1)}
    blocks = sum(CHAIN - known for _, _, known in chains)
    _common.say(f"{len(chains)} chains, {blocks} blocks on {WORKERS} workers")
    ours, theirs = our_events(chains), their_events(chains)
    figures: dict[str, list[float]] = {name: [] for name in _NAMES}
    gc.disable()
    for _ in range(rounds):
        tree, their_s = their_ingest(theirs)
        index, our_s = our_ingest(ours)
        figures["radixtree_blocks_per_s"].append(blocks / their_s)
        figures["blocks_per_s"].append(blocks / our_s)
        for holders, asked in (*queries.items(), *queries.items()):
            suffix = "" if holders == WORKERS else "_one_holder"
            for find, name, translated in (
                (tree.find_matches, "radixtree_", [query.tolist() for query in asked]),
                (index.lookup, "", [keys_of(query) for query in asked]),
            ):
                taken = lookups(find, translated)
                figures[f"{name}lookup_p50_us{suffix}"].append(statistics.median(taken))
                figures[f"{name}lookup_p99_us{suffix}"].append(p99(taken))
        bytes_per_block = index.nbytes / len(index)
        for asked in queries.values():
            check(tree, index, asked)
        del tree, index
        gc.collect()
    rebuilds = [rebuild() for _ in range(rounds)]
    median = {name: statistics.median(samples) for name, samples in figures.items()}
    for name, value in median.items():
        _common.say(f"{name:38} {value:14,.1f}")
    _common.say(f"{'rebuild':38} {statistics.median(rebuilds):14.2f} s")
    return {
        "ingest_over_radixtree": round(median["blocks_per_s"] / median["radixtree_blocks_per_s"], 2),
        "radixtree_p50_over_ours": round(median["radixtree_lookup_p50_us"] / median["lookup_p50_us"], 2),
        "radixtree_p99_over_ours": round(median["radixtree_lookup_p99_us"] / median["lookup_p99_us"], 2),
        "bytes_per_block": round(bytes_per_block, 1),
        "rebuild_2m_s": round(statistics.median(rebuilds), 3),
        "keys": BLOCKS,
        **{name: _common.summary(samples) for name, samples in figures.items()},
        "rebuild_s": _common.summary(rebuilds),
    }


_NAMES = [
    f"{tree}{what}"
    for tree in ("", "radixtree_")
    for what in (
        "blocks_per_s",
        "lookup_p50_us",
        "lookup_p99_us",
        "lookup_p50_us_one_holder",
        "lookup_p99_us_one_holder",
    )
]


def check(tree: Any, index: LocationIndex, queries: list[np.ndarray]) -> None:
    """Both must say the same of every hundredth query: which worker has how many leading blocks."""
    for query in queries[::100]:
        theirs = {worker: depth for (worker, _), depth in _scores(tree.find_matches(query.tolist()))}
        view = index.lookup(keys_of(query))
        ours = {}
        for guard, row in zip(view.guards, view.held, strict=True):
            depth = len(row) if row.all() else int(row.argmin())
            if depth:
                ours[int(guard[1:])] = depth
        assert ours == theirs, f"the indexes disagree: {ours} against {theirs}"


def _scores(found: Any) -> Iterator[tuple[tuple[int, int], int]]:
    for worker, depth in found.scores.items():
        yield (worker if isinstance(worker, tuple) else (worker, 0)), depth


if __name__ == "__main__":
    raise SystemExit(_common.run("index", measure, (__doc__ or "").splitlines()[0]))
