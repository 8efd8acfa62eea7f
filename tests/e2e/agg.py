# SPDX-License-Identifier: Apache-2.0
"""A whole graph through ``kvcr serve``, with the tiny model, for tests of what a user gets."""

from __future__ import annotations

import contextlib
import random
import string
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from tokenizers import Tokenizer

from demo import graph as graphs
from demo.metrics import Page, growth, scrape
from demo.scenes.share import warm_up
from kvcr.graph.processes import processes_with_env
from kvcr.graph.runs import RUN_DIR_VARIABLE
from kvcr.keys import BlockKey, KeySpace, extend_chain
from kvcr.pool import PoolReader
from tests.e2e.processes import PATIENCE, SHM, leaked_shared_memory, shared_memory_names
from tests.e2e.tiny_model import BLOCK_SIZE, tiny_model
from tests.integration.waiting import PATIENCE_S

PROMPT_BLOCKS = 12
"""Blocks that a prompt of :func:`messages` fills."""


@dataclass
class Agg:
    """A running graph, and what /dev/shm had before it."""

    graph: graphs.Graph
    serving: graphs.Serving
    shm_before: set[str] = field(default_factory=set)

    def guard_page(self, worker: graphs.Worker) -> Page:
        return scrape(worker.guard_metrics_url)

    def worker_page(self, worker: graphs.Worker) -> Page:
        return scrape(worker.metrics_url)

    def leftovers(self) -> list[str]:
        """What a graph that was stopped should not have left behind."""
        pids = processes_with_env(RUN_DIR_VARIABLE, str(self.graph.run_dir))
        paths = [SHM / name for name in sorted(leaked_shared_memory(self.shm_before))]
        paths += {worker.pool_dir.parent for worker in self.graph.workers if worker.pool_dir.parent.exists()}
        return [f"process {pid}" for pid in pids] + [str(path) for path in paths]


@contextlib.contextmanager
def running(
    run_dir: Path, overrides: Sequence[str] = (), graph_file: Path = graphs.AGG_GRAPH
) -> Iterator[Agg]:
    """The graph, warmed up, for the time of the block."""
    before = shared_memory_names()
    small = [
        f"--Common.model={tiny_model()}",
        "--VllmWorker.max-model-len=2048",
        "--VllmWorker.max-num-seqs=4",
        f"--VllmWorker.kv-cache-memory-bytes={64 << 20}",
        "--Guard.pool-bytes=64MiB",
        # Or the scrubber may find a block that a test damaged before the pull that should.
        "--Guard.scrub-bytes-per-s=0",
        # The tiny model computes faster than a busy machine copies; the router must not know.
        "--Router.prefill-tokens-per-s=50",
        "--Router.deadline-ms=20000",
        *(f"--VllmWorker.kv-transfer-config.kv_connector_extra_config.{k}={v}" for k, v in PATIENCE.items()),
    ]
    serving = graphs.serve(run_dir, graph_file, [*small, *overrides], quiet=True)
    try:
        agg = Agg(graphs.load(run_dir), serving, before)
        warm_up(agg.graph, lambda _what: contextlib.nullcontext())
        yield agg
    finally:
        serving.stop()


def without_our_router(directory: Path) -> Path:
    """A graph file like the shipped one, with the stock KV router in the frontend instead of ours."""
    document = yaml.safe_load(graphs.AGG_GRAPH.read_text())
    del document["Router"]
    document["Frontend"] |= {"router-mode": "kv", "kv-cache-block-size": BLOCK_SIZE}
    path = directory / "stock.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def messages(seed: int) -> list[Mapping[str, str]]:
    """A chat of one message that fills a little more than :data:`PROMPT_BLOCKS` blocks; one per seed."""
    draw = random.Random(seed)
    text = "".join(draw.choices(string.ascii_letters + " ", k=PROMPT_BLOCKS * BLOCK_SIZE + 5))
    return [{"role": "user", "content": text}]


def prompt_tokens(chat: Sequence[Mapping[str, str]]) -> list[int]:
    """What the frontend makes of a chat, with the tiny model's template and tokenizer."""
    text = "".join(f"<|{message['role']}|>{message['content']}" for message in chat) + "<|assistant|>"
    encoded: list[int] = Tokenizer.from_file(str(tiny_model() / "tokenizer.json")).encode(text).ids
    return encoded


def keys_of(reader: PoolReader, chat: Sequence[Mapping[str, str]], namespace: str) -> list[BlockKey]:
    """Block keys of a chat in the key space of a pool."""
    root = KeySpace(namespace, reader.layout.model).root()
    return extend_chain(root, prompt_tokens(chat), reader.layout.block_size)


def damage(worker: graphs.Worker, chat: Sequence[Mapping[str, str]], position: int, namespace: str) -> None:
    """Flip a byte of one block of ``chat`` in the worker's pool, as bad memory would: nobody is told."""
    reader = PoolReader.open(worker.pool_dir)
    try:
        slots, _ = reader.lookup(keys_of(reader, chat, namespace)[position])
        assert slots[0] >= 0, f"block {position} of the chat is not in {worker.pool_dir}"
        offset = int(slots[0]) * reader.slot_part_bytes + reader.layout.part_bytes // 2
    finally:
        reader.close()
    with (worker.pool_dir / "data").open("r+b") as data:
        data.seek(offset)
        (byte,) = data.read(1)
        data.seek(offset)
        data.write(bytes([byte ^ 0x55]))


def grown(
    before: Page, url: str, name: str, at_least: float, timeout_s: float = PATIENCE_S, **labels: str
) -> float:
    """Growth of a counter since ``before``, waiting until it is ``at_least`` that much."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = growth(before, scrape(url)).total(name, **labels)
        if value >= at_least or time.monotonic() > deadline_s:
            return value
        time.sleep(0.05)
