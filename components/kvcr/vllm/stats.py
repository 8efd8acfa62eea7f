# SPDX-License-Identifier: Apache-2.0
"""Connector counters through vLLM's own statistics: its log line and its ``/metrics``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from kvcr.client import WorkerCounters
from kvcr.vllm.requests import SchedulerCounters

COUNTERS = {
    "loaded_blocks": "KV blocks copied from the pool into engine memory",
    "loaded_bytes": "Bytes copied from the pool into engine memory",
    "load_seconds": "Seconds spent copying and verifying loads",
    "saved_blocks": "KV blocks copied from engine memory into the pool",
    "saved_bytes": "Bytes copied from engine memory into the pool",
    "save_seconds": "Seconds spent copying saves",
    "corrupt_blocks": "Blocks that did not match their checksum at load",
    "queried_blocks": "Prompt blocks that G1 did not have and pools were asked for, once a request",
    "asked_blocks": "Blocks that requests loaded or waited for",
    "local_blocks": "Of those, blocks that were in the local pool",
    "fetched_blocks": "Of those, blocks that were still on their way from a peer",
    "fetches": "Fetches asked from the guard",
    "lease_timeouts": "Requests that went on without the lease reply of their fetch",
    "keyless_blocks": "Prompt blocks without a key (multimodal or prompt embeddings)",
    "short_of_slots": "Times a step had more blocks to save than granted slots",
}
LABELLED = {
    "failed_blocks": ("status", "Blocks of loads that did not arrive, by BlockStatus"),
    "skipped_hints": ("reason", "Hints, or parts of hints, that were not used, by reason"),
}


@dataclass
class KvcrStats(KVConnectorStats):  # type: ignore[misc]
    """``data``: counter name to number; for ``failed_blocks`` and ``skipped_hints`` a map by label."""

    @classmethod
    def of_worker(cls, counters: WorkerCounters) -> KvcrStats:
        return cls._from(
            loaded_blocks=counters.loaded_blocks,
            loaded_bytes=counters.loaded_bytes,
            load_seconds=counters.load_seconds,
            saved_blocks=counters.saved_blocks,
            saved_bytes=counters.saved_bytes,
            save_seconds=counters.save_seconds,
            corrupt_blocks=counters.corrupt_blocks,
            failed_blocks=dict(counters.failed_blocks),
        )

    @classmethod
    def of_scheduler(cls, counters: SchedulerCounters) -> KvcrStats:
        return cls._from(
            queried_blocks=counters.queried_blocks,
            asked_blocks=counters.asked_blocks,
            local_blocks=counters.local_blocks,
            fetched_blocks=counters.fetched_blocks,
            fetches=counters.fetches,
            lease_timeouts=counters.lease_timeouts,
            keyless_blocks=counters.keyless_blocks,
            short_of_slots=counters.short_of_slots,
            skipped_hints=dict(counters.skipped),
        )

    @classmethod
    def _from(cls, **values: Any) -> KvcrStats:
        return cls({name: value for name, value in values.items() if value})

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KvcrStats:
        for name, value in other.data.items():
            if isinstance(value, dict):
                mine = self.data.setdefault(name, {})
                for label, count in value.items():
                    mine[label] = mine.get(label, 0) + count
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        flat: dict[str, int | float] = {}
        for name, value in self.data.items():
            if isinstance(value, dict):
                flat.update({f"{name}[{label}]": count for label, count in value.items()})
            else:
                flat[name] = round(value, 4) if isinstance(value, float) else value
        return flat


class KvcrPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``vllm:kvcr_<counter>_total`` on vLLM's metrics page, with vLLM's labels.

    With vLLM's prefix, as a Dynamo worker serves no other metrics of its engine (1.6.1).
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._plain = {
            name: counter(name=f"vllm:kvcr_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        for metric in self._plain.values():
            for values in per_engine_labelvalues.values():
                # There from the first scrape on: an increase is only seen from a zero.
                metric.labels(*values)
        self._labelled = {
            name: counter(name=f"vllm:kvcr_{name}", documentation=text, labelnames=[*labelnames, label])
            for name, (label, text) in LABELLED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._plain:
                self._plain[name].labels(*values).inc(value)
            elif name in self._labelled:
                for label, count in value.items():
                    self._labelled[name].labels(*values, label).inc(count)
