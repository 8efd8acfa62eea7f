# SPDX-License-Identifier: Apache-2.0
"""What a worker says about itself: the part of its Dynamo model card that routing depends on."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from kvcr.errors import ProtocolError

CONTROL_ENDPOINTS = "router_hint_source_control_endpoints"
"""Key in a card's runtime data: control endpoint of the guard of each data-parallel rank. The stock
``dynamo.vllm`` publishes it from its connector's ``control_ports``."""


def card_prefix(namespace: str, component: str, endpoint: str) -> str:
    """etcd prefix of the cards of one endpoint's workers (dynamo 1.6.1)."""
    return f"v1/mdc/{namespace}/{component}/{endpoint}/"


class WorkerCard(msgspec.Struct, frozen=True):
    """One worker's card. Zero and empty mean that the card does not say."""

    worker_id: int
    model_name: str = ""
    block_size: int = 0
    first_rank: int = 0
    """Lowest data-parallel rank it serves."""
    ranks: int = 1
    max_requests: int = 0
    kv_blocks: int = 0
    """Blocks of its engine memory."""
    taints: frozenset[str] = frozenset()
    control_endpoints: dict[int, str] = {}
    """Control endpoint of the guard beside each rank."""


class _Runtime(msgspec.Struct):
    max_num_seqs: int | None = None
    total_kv_blocks: int | None = None
    data_parallel_start_rank: int = 0
    data_parallel_size: int = 1
    taints: list[str] = []
    runtime_data: dict[str, Any] = {}


class _Card(msgspec.Struct):
    display_name: str = ""
    kv_cache_block_size: int = 0
    runtime_config: _Runtime = msgspec.field(default_factory=_Runtime)


class _Record(msgspec.Struct):
    instance_id: int
    card_json: _Card


_decoder = msgspec.json.Decoder(_Record)


def parse_card(value: bytes) -> WorkerCard:
    """The card in an etcd value under :func:`card_prefix`. Raises ProtocolError when it is none."""
    try:
        record = _decoder.decode(value)
        endpoints = _control_endpoints(record.card_json.runtime_config.runtime_data)
    except (msgspec.MsgspecError, ValueError, AttributeError) as error:
        raise ProtocolError(f"worker card of {len(value)} bytes does not decode: {error}") from error
    runtime = record.card_json.runtime_config
    return WorkerCard(
        worker_id=record.instance_id,
        model_name=record.card_json.display_name,
        block_size=record.card_json.kv_cache_block_size,
        first_rank=runtime.data_parallel_start_rank,
        ranks=max(1, runtime.data_parallel_size),
        max_requests=runtime.max_num_seqs or 0,
        kv_blocks=runtime.total_kv_blocks or 0,
        taints=frozenset(runtime.taints),
        control_endpoints=endpoints,
    )


def _control_endpoints(runtime_data: dict[str, Any]) -> dict[int, str]:
    found = runtime_data.get(CONTROL_ENDPOINTS) or {}
    if isinstance(found, str):
        found = json.loads(found)
    return {int(rank): str(endpoint) for rank, endpoint in found.items()}
