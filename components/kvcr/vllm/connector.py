# SPDX-License-Identifier: Apache-2.0
"""``KvcrConnector``: KVCR as a KV connector of vLLM 0.31, loaded by module path.

::

    --kv-transfer-config '{"kv_connector": "KvcrConnector",
        "kv_connector_module_path": "kvcr.vllm.connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {...}}'

The extra config is an :class:`kvcr.config.EngineConfig`. vLLM makes one connector in the scheduler's
process and one in every worker; this class only routes its calls to the two halves.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvcr.client import SchedulerHandle, WorkerHandle
from kvcr.config import EngineConfig, engine_settings, load
from kvcr.errors import MustFail
from kvcr.vllm.checks import CONNECTOR, require_supported
from kvcr.vllm.identity import config_for_rank, engine_id_of, layout_of, next_generation
from kvcr.vllm.memory import block_memory
from kvcr.vllm.metadata import StepMetadata
from kvcr.vllm.scheduler import ConnectorScheduler
from kvcr.vllm.stats import KvcrPromMetrics, KvcrStats
from kvcr.vllm.worker import ConnectorWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

START_WAIT_S = 15.0
"""How long start-up waits for the guard before it goes on cold. Starting one takes about a second."""


class KvcrConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Raises ConfigError at construction for settings KVCR cannot serve, and MustFail when the pool has
    another layout and ``on_mismatch`` is ``fail``. Whatever else goes wrong means a cold request."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # MultiConnector gives its children a configuration that looks as if each were alone; only the
        # caller tells.
        wrapper = type(sys._getframe(1).f_locals.get("self")).__name__
        require_supported(vllm_config, kv_cache_config, wrapper=wrapper)
        found = engine_settings(os.environ, self._kv_transfer_config.kv_connector_extra_config)
        given = load(
            EngineConfig,
            {name: setting.value for name, setting in found.items()},
            f"kv_connector_extra_config of {CONNECTOR}",
        )
        self._config = config_for_rank(given, vllm_config)
        self._layout = layout_of(vllm_config, kv_cache_config)
        self._engine_id = engine_id_of(vllm_config)
        self._model = self._layout.model
        self._num_blocks = kv_cache_config.num_blocks
        self._rank = vllm_config.parallel_config.rank % self._layout.ranks
        self._worker: ConnectorWorker | None = None
        self._scheduler: ConnectorScheduler | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler(vllm_config.scheduler_config.max_num_batched_tokens)

    def _make_scheduler(self, step_tokens: int) -> ConnectorScheduler:
        handle = SchedulerHandle(
            self._config,
            self._layout,
            engine_id=self._engine_id,
            standing_blocks=2 * -(-step_tokens // self._layout.block_size),
        )
        self._settle(handle)
        return ConnectorScheduler(
            handle,
            self._config,
            model=self._model,
            block_size=self._layout.block_size,
            group=self._layout.group,
            ranks=self._layout.ranks,
        )

    def _settle(self, handle: SchedulerHandle | WorkerHandle) -> None:
        handle.wait_connected(START_WAIT_S)
        try:
            handle.require_start()
        except MustFail:
            handle.close()
            raise

    # --- worker ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        memory = block_memory(kv_caches, self._num_blocks)
        handle = WorkerHandle(self._config, self._layout, memory, engine_id=self._engine_id, rank=self._rank)
        self._settle(handle)
        self._worker = ConnectorWorker(handle)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._on_worker.before_step(_step(kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._on_worker.bind(_step(connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._on_worker.start_loads(_step(self._get_connector_metadata()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request is not scheduled before all its layers are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Saves are whole blocks, after the step."""

    def wait_for_save(self) -> None:
        self._on_worker.start_saves(_step(self._get_connector_metadata()))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._on_worker.get_finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._on_worker.take_invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._on_worker.build_metadata()

    # --- scheduler ------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a save that is dropped is a miss later on, nothing more."""
        return False

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._on_scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._on_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._on_scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._on_scheduler.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._on_scheduler.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._on_scheduler.take_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._on_scheduler.finished(request, block_ids), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._on_scheduler.finished(request, block_ids[self._layout.group]), None

    def reset_cache(self) -> bool:
        """New weights generation: no block stored so far is found again by this engine."""
        self._model = next_generation(self._model)
        self._on_scheduler.reset(self._model)
        logger.info("cache reset; blocks are now keyed for %s", self._model)
        return True

    def take_events(self) -> Iterable[Any]:
        return ()

    # --- both -----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._worker is not None:
            stats = KvcrStats.of_worker(self._worker.take_counters())
        elif self._scheduler is not None:
            stats = KvcrStats.of_scheduler(self._scheduler.take_counters())
        else:
            return None
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KvcrStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvcrPromMetrics:
        return KvcrPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    @property
    def _on_worker(self) -> ConnectorWorker:
        assert self._worker is not None, "vLLM called a worker method before register_kv_caches"
        return self._worker

    @property
    def _on_scheduler(self) -> ConnectorScheduler:
        assert self._scheduler is not None, "vLLM called a scheduler method on a worker's connector"
        return self._scheduler


def _step(metadata: KVConnectorMetadata) -> StepMetadata:
    assert isinstance(metadata, StepMetadata)
    return metadata
