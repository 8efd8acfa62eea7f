# SPDX-License-Identifier: Apache-2.0
"""The connector inside a vLLM worker: hands jobs to the copy thread and reports what is over.

vLLM calls every method on the worker's thread, once a step and in the order they have here.
"""

from __future__ import annotations

from kvcr.client import WorkerCounters, WorkerHandle
from kvcr.vllm.metadata import StepMetadata, WorkerMetadata


class ConnectorWorker:
    """Per rank. Each load is reported once, by its deadline; each delayed request once, after its saves."""

    def __init__(self, handle: WorkerHandle) -> None:
        self._handle = handle
        self._delayed: set[str] = set()
        self._finished: set[str] = set()
        self._invalid: set[int] = set()
        self._corrupt: set[bytes] = set()

    def before_step(self, metadata: StepMetadata) -> None:
        """``handle_preemptions``: blocks of preempted requests are about to be overwritten."""
        if metadata.preempted:
            self._handle.wait_saves(metadata.preempted)

    def bind(self, metadata: StepMetadata) -> None:
        """``bind_connector_metadata``."""
        self._delayed.update(metadata.delayed)

    def start_loads(self, metadata: StepMetadata) -> None:
        """``start_load_kv``."""
        for load in metadata.loads:
            self._handle.submit_load(load)

    def start_saves(self, metadata: StepMetadata) -> None:
        """``wait_for_save``: the step's writes to G1 were issued. Nothing is waited for."""
        for save in metadata.saves:
            self._handle.submit_save(save)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose saves are over, and requests whose loads are.

        A load of a request that is gone ends here at once: vLLM holds its blocks until it is reported.
        """
        for request_id in finished_req_ids:
            self._handle.cancel_load(request_id)
            if request_id in self._delayed:
                self._delayed.discard(request_id)
                self._finished.add(request_id)
        sent = {request_id for request_id in self._finished if not self._handle.saving(request_id)}
        self._finished -= sent
        received = set()
        for result in self._handle.take_loads():
            received.add(result.request_id)
            self._invalid.update(result.failed_block_ids)
            self._corrupt |= result.corrupt_keys
        return sent or None, received or None

    def take_invalid_blocks(self) -> set[int]:
        """``get_block_ids_with_load_errors``, called right after :meth:`get_finished`."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def build_metadata(self) -> WorkerMetadata | None:
        """``build_connector_worker_meta``: save jobs that are over on this rank, and what did not verify."""
        jobs, corrupt = self._handle.take_saved_jobs(), frozenset(self._corrupt)
        self._corrupt.clear()
        return WorkerMetadata(dict.fromkeys(jobs, 1), corrupt) if jobs or corrupt else None

    def take_counters(self) -> WorkerCounters:
        return self._handle.take_counters()

    def close(self) -> None:
        self._handle.close()
