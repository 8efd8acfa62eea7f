# SPDX-License-Identifier: Apache-2.0
"""Settings of vLLM this connector cannot work with. Each is refused at start, by name, with the fix."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvcr.errors import ConfigError

CONNECTOR = "KvcrConnector"


def require_supported(vllm_config: Any, kv_cache_config: Any, *, wrapper: str = "") -> None:
    """Raise ConfigError naming the first setting that does not fit, its value and what to set instead.

    ``wrapper`` is the class that constructs the connector, if that is another connector.
    """
    transfer = vllm_config.kv_transfer_config
    _refuse(
        wrapper == "MultiConnector" or transfer.kv_connector == "MultiConnector",
        "kv_connector is MultiConnector",
        f"use {CONNECTOR} alone: two connectors would both own the host's copy of a block",
    )
    offloading = vllm_config.cache_config.kv_offloading_size
    _refuse(
        offloading is not None or transfer.kv_connector != CONNECTOR,
        f"kv_offloading_size is {offloading} (kv_connector {transfer.kv_connector!r})",
        f"remove --kv-offloading-size and set kv_connector to {CONNECTOR}: one owner of host memory",
    )
    _refuse(
        transfer.kv_role != "kv_both",
        f"kv_role is {transfer.kv_role!r}",
        "set kv_role to kv_both: prefill/decode disaggregation is not supported yet",
    )
    _refuse(
        transfer.kv_load_failure_policy != "recompute",
        f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}",
        "set it to 'recompute' in --kv-transfer-config: else a block that does not arrive fails its request",
    )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        _refuse(getattr(parallel, name, 1) > 1, f"{name} is {getattr(parallel, name, 1)}", "set it to 1")
    unit = vllm_config.cache_config.prefix_match_unit
    block_size = vllm_config.cache_config.block_size
    _refuse(
        unit is not None and unit != block_size,
        f"prefix_match_unit is {unit}, block_size is {block_size}",
        "leave prefix_match_unit unset: KVCR keys whole blocks",
    )
    _require_one_full_attention_group(kv_cache_config)


def _require_one_full_attention_group(kv_cache_config: Any) -> None:
    groups = kv_cache_config.kv_cache_groups
    _refuse(
        len(groups) != 1,
        f"the model has {len(groups)} KV-cache groups",
        "serve a model with one full-attention group; hybrid models are not supported yet",
    )
    spec = groups[0].kv_cache_spec
    # Exactly this class: its subclasses (MLA, sinks, ...) keep other bytes in a block.
    _refuse(
        type(spec) is not FullAttentionSpec,
        f"the KV-cache group is {type(spec).__name__}",
        "serve a model with full attention; other kinds are not supported yet",
    )


def _refuse(bad: bool, found: str, fix: str) -> None:
    if bad:
        raise ConfigError(f"KVCR cannot serve this engine: {found}; {fix}")
