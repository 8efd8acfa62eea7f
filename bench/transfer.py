# SPDX-License-Identifier: Apache-2.0
"""What moving blocks costs: pulls over every transport, deposits, loads, lookups, many pulls at once, idling.

Real guards and engines on this host. Each transfer follows a memcpy of the same blocks in the same process,
and everything is measured with NVIDIA's kvcr too, in turns with ours: its NIXL threads spin. Figures are
medians; ``rows`` has all of them, in microseconds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import _transfer_ours as ours
from bench import _transfer_proto as proto
from bench import _transfer_readv as readv
from bench import _transfer_socket as plain
from bench import peer_venv
from bench._common import run, say
from demo.table import print_table

ROOT = Path(__file__).resolve().parents[1]

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"256 KiB": 256 * KIB, "1 MiB": MIB, "2.5 MiB": 5 * MIB // 2}
LOOKUPS = (1, 16, 256, 2048)

REPS = {1: 60, 8: 12, 32: 9, 64: 5}
QUICK_REPS = {1: 40, 8: 8, 32: 6, 64: 1}
"""Blocks a pull -> pulls, in each round. One block is pulled three times as often where it is 256 KiB."""

LOCAL_REPS = {1: 100, 8: 12, 32: 5, 64: 3}
QUICK_LOCAL_REPS = {1: 100, 8: 8, 32: 3}
"""Of deposits and loads."""

ROUNDS = 3
CONCURRENT = {"block_bytes": 256 * KIB, "requests": 64, "blocks": 8}
FULL_POOL = {"block_bytes": 512, "slots": 100_000, "batch": 1000, "batches": 8}
QUICK_FULL_POOL = {"block_bytes": 512, "slots": 10_000, "batch": 1000, "batches": 4}

PEER_S = 300.0

GOALS = {
    "pull_1x256k_kvcr_over_ours": 15,
    "pull_1x256k_over_proto": 3,
    "pull_32x1m_over_memcpy": {"shm": 0.80, "cma": 0.55, "tcp": 0.45},
    "concurrent_kvcr_ratio": 5,
    "deposit_1x256k_kvcr_over_ours": 10,
    "deposit_full_pool_kvcr_over_ours": 10,
    "lookup_2048_kvcr_over_ours": 4,
    "idle_cpu_percent": 1.0,
}
"""All are "at least", but for the prototype ("at most" so many times its time) and idling ("at most")."""

Samples = dict[tuple[str, str, str, int], list[float]]
"""(who, what, block size, blocks) -> seconds. ``who``: a transport of ours, ``ours``, ``kvcr``, ``proto``, or
what bounds those on this machine: ``socket``, the same bytes over a TCP connection, and ``readv``, the same
blocks read and hashed by process_vm_readv alone."""


def measure(quick: bool) -> Mapping[str, Any]:
    """Measure everything, and print a table on stderr."""
    samples: Samples = {}
    peer = Peer()
    for number in range(1 if quick else ROUNDS):
        say(f"round {number + 1} of {1 if quick else ROUNDS}")
        for name, block_bytes in SIZES.items():
            _measure_size(samples, peer, name, block_bytes, quick)
        _measure_rest(samples, peer, quick)
    say("idling")
    idle = ours.idle_cpu_percent(4.0 if quick else 20.0)
    figures = {**_figures(samples), "idle_cpu_percent": max(idle.values()), "idle_cpu": idle}
    rows = _rows(samples)
    _print(figures, rows)
    return {
        "goals": GOALS,
        **figures,
        "kvcr": {"version": peer_venv.VERSION, "not_measured": peer.reasons},
        "rows": rows,
    }


class Peer:
    """NVIDIA's kvcr, in processes of its own. What cannot be measured is left out, with the reason."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def measure(self, what: str, **arguments: Any) -> dict[str, Any]:
        try:
            command = [
                str(peer_venv.interpreter()), "-m", "bench._peer_transfer", what, json.dumps(arguments)
            ]  # fmt: skip
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=peer_venv.environment(),
                stdout=subprocess.PIPE,
                timeout=PEER_S,
                check=True,
            )
            measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (peer_venv.PeerUnavailable, subprocess.SubprocessError, ValueError, IndexError) as error:
            self.reasons[f"{what} {arguments.get('block_bytes', '')}".strip()] = str(error)
            say(f"kvcr, {what}: not measured: {error}")
            return {}
        return measured


def _reps(block_bytes: int, quick: bool) -> dict[int, int]:
    reps = dict(QUICK_REPS if quick else REPS)
    if block_bytes == SIZES["256 KiB"]:
        reps[1] *= 3
    return reps


def _measure_size(samples: Samples, peer: Peer, name: str, block_bytes: int, quick: bool) -> None:
    reps = _reps(block_bytes, quick)
    say(f"{name}: kvcr")
    for count, row in peer.measure("pulls", block_bytes=block_bytes, reps=reps).items():
        _add(samples, "kvcr", row, name, int(count))
    for transport in ours.TRANSPORTS:
        say(f"{name}: {transport}")
        for blocks, times in ours.pulls(block_bytes, transport, reps).items():
            _add(samples, transport, times, name, blocks)
    for blocks, times in plain.pulls(block_bytes, reps).items():
        _add(samples, "socket", times, name, blocks)
    for blocks, times in readv.pulls(block_bytes, reps).items():
        _add(samples, "readv", times, name, blocks)
    if name == "256 KiB":
        _extend(samples, ("proto", "pull", name, 1), proto.pulls(block_bytes, 1, reps[1]))
    say(f"{name}: deposit and load")
    reps = QUICK_LOCAL_REPS if quick else LOCAL_REPS
    for count, row in peer.measure("local", block_bytes=block_bytes, reps=reps).items():
        _add(samples, "kvcr", row, name, int(count))
    for blocks, times in ours.local(block_bytes, reps).items():
        _add(samples, "ours", times, name, blocks)


def _measure_rest(samples: Samples, peer: Peer, quick: bool) -> None:
    say("64 pulls at a time")
    rounds = 2 if quick else 8
    many = f"{CONCURRENT['requests']} pulls"
    for who, times in (
        ("kvcr", peer.measure("concurrent", **CONCURRENT, rounds=rounds)),
        ("shm", ours.concurrent(**CONCURRENT, rounds=rounds)),
    ):
        _extend(samples, (who, many, "256 KiB", CONCURRENT["blocks"]), times.get("seconds", []))
    say("lookups")
    for count, row in peer.measure("lookups", counts=LOOKUPS, times=50).items():
        _add(samples, "kvcr", row, "", int(count))
    for blocks, times in ours.lookups(LOOKUPS, 200).items():
        _add(samples, "ours", times, "", blocks)
    say("deposits into a full pool")
    full = QUICK_FULL_POOL if quick else FULL_POOL
    for who, times in (("kvcr", peer.measure("full_pool", **full)), ("ours", ours.full_pool(**full))):
        _extend(samples, (who, "deposit, pool full", "512 B", full["batch"]), times.get("seconds", []))


def _add(samples: Samples, who: str, row: Mapping[str, Sequence[float]], size: str, blocks: int) -> None:
    for what, times in row.items():
        _extend(samples, (who, what, size, blocks), times)


def _extend(samples: Samples, key: tuple[str, str, str, int], times: Sequence[float]) -> None:
    samples.setdefault(key, []).extend(times)


def _figures(samples: Samples) -> dict[str, Any]:
    def median(who: str, what: str, size: str, blocks: int) -> float | None:
        times = samples.get((who, what, size, blocks))
        return statistics.median(times) if times else None

    def ratio(above: float | None, below: float | None) -> float | None:
        return round(above / below, 3) if above and below else None

    pull = median("shm", "pull", "256 KiB", 1)
    many = f"{CONCURRENT['requests']} pulls"
    full = next((key for key in samples if key[1] == "deposit, pool full"), ("", "", "", 0))[1:]
    return {
        "pull_1x256k_kvcr_over_ours": ratio(median("kvcr", "pull", "256 KiB", 1), pull),
        "pull_1x256k_over_proto": ratio(pull, median("proto", "pull", "256 KiB", 1)),
        "pull_32x1m_over_memcpy": {
            transport: _over_memcpy(samples, transport, "pull", "1 MiB", 32) for transport in ours.TRANSPORTS
        },
        # What bounds the ones over CMA and TCP on this machine.
        "pull_32x1m_readv_over_memcpy": _over_memcpy(samples, "readv", "pull", "1 MiB", 32),
        "pull_32x1m_cma_over_readv": ratio(
            median("readv", "pull", "1 MiB", 32), median("cma", "pull", "1 MiB", 32)
        ),
        "pull_32x1m_socket_over_memcpy": _over_memcpy(samples, "socket", "pull", "1 MiB", 32),
        "pull_32x1m_tcp_over_socket": ratio(
            median("socket", "pull", "1 MiB", 32), median("tcp", "pull", "1 MiB", 32)
        ),
        "concurrent_kvcr_ratio": ratio(
            median("kvcr", many, "256 KiB", CONCURRENT["blocks"]),
            median("shm", many, "256 KiB", CONCURRENT["blocks"]),
        ),
        "deposit_1x256k_kvcr_over_ours": ratio(
            median("kvcr", "deposit", "256 KiB", 1), median("ours", "deposit", "256 KiB", 1)
        ),
        "deposit_full_pool_kvcr_over_ours": ratio(median("kvcr", *full), median("ours", *full)),
        "lookup_2048_kvcr_over_ours": ratio(
            median("kvcr", "lookup", "", 2048), median("ours", "lookup", "", 2048)
        ),
    }


def _over_memcpy(samples: Samples, who: str, what: str, size: str, blocks: int) -> float | None:
    """Speed of a transfer over that of the memcpy before it, median of the pairs."""
    copies, times = samples.get((who, "memcpy", size, blocks)), samples.get((who, what, size, blocks))
    if not copies or not times or len(copies) != len(times):
        return None
    return round(statistics.median(c / t for c, t in zip(copies, times, strict=True)), 3)


def _rows(samples: Samples) -> list[dict[str, Any]]:
    rows = []
    for (who, what, size, blocks), times in sorted(samples.items(), key=_order):
        if times:
            rows.append(
                {
                    "what": what,
                    "block": size,
                    "blocks": blocks,
                    "who": who,
                    "median_us": round(1e6 * statistics.median(times), 1),
                    "min_us": round(1e6 * min(times), 1),
                    "max_us": round(1e6 * max(times), 1),
                    "samples": len(times),
                    "over_memcpy": None
                    if what == "memcpy"
                    else _over_memcpy(samples, who, what, size, blocks),
                }
            )
    return rows


def _order(item: tuple[tuple[str, str, str, int], list[float]]) -> tuple[Any, ...]:
    who, what, size, blocks = item[0]
    kind = "pull" if what == "memcpy" else what
    return kind, SIZES.get(size, 0), blocks, who, what


def _print(figures: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    columns = ("what", "who", "block", "blocks", "median", "min", "of memcpy")
    cells = [
        (
            row["what"],
            row["who"],
            row["block"],
            str(row["blocks"]),
            f"{row['median_us']:,.0f} us",
            f"{row['min_us']:,.0f} us",
            "" if row["over_memcpy"] is None else f"{row['over_memcpy']:.2f}",
        )
        for row in rows
        if row["what"] != "memcpy"
    ]
    print_table("Transfers", columns, cells, sys.stderr)
    found = [(key, str(figures[key]), str(goal)) for key, goal in GOALS.items()]
    bounds = (
        "pull_32x1m_readv_over_memcpy", "pull_32x1m_cma_over_readv",
        "pull_32x1m_socket_over_memcpy", "pull_32x1m_tcp_over_socket",
    )  # fmt: skip
    found += [(key, str(figures[key]), "") for key in bounds]
    print_table("Figures", ("figure", "measured", "goal"), found, sys.stderr)


if __name__ == "__main__":
    sys.exit(run("transfer", measure, __doc__ or ""))
