# SPDX-License-Identifier: Apache-2.0
"""What the two sides of the connector send each other through vLLM, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvcr.client import LoadSpec, SaveSpec


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to every worker. Blobs, not lists: this is pickled in every step."""

    loads: list[LoadSpec] = field(default_factory=list)
    saves: list[SaveSpec] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Requests whose blocks are reused from this step on: their saves must be over first."""
    delayed: list[str] = field(default_factory=list)
    """Finished requests whose blocks the scheduler holds until ``finished_sending`` names them."""


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler: save jobs that are over, with the number of ranks that said so."""

    saved: dict[int, int]
    corrupt: frozenset[bytes] = frozenset()
    """Keys of blocks in the pool that did not verify"""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        saved = dict(self.saved)
        for job_id, ranks in other.saved.items():
            saved[job_id] = saved.get(job_id, 0) + ranks
        return WorkerMetadata(saved, self.corrupt | other.corrupt)
