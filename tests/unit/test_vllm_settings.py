# SPDX-License-Identifier: Apache-2.0
"""What the vLLM connector refuses at start, and how it knows one set of weights from another."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcr.vllm.torchvision_ops import declare_missing_operators

declare_missing_operators()
pytest.importorskip("vllm")

# ruff: noqa: E402
import torch
from prometheus_client import Counter, Gauge, Histogram, generate_latest
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvcr.config import EngineConfig
from kvcr.errors import ConfigError
from kvcr.vllm.checks import require_supported
from kvcr.vllm.identity import config_for_rank, engine_id_of, next_generation, weights_fingerprint
from kvcr.vllm.memory import block_memory
from kvcr.vllm.stats import KvcrPromMetrics, KvcrStats

SHAPE = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


def settings(**changes: Any) -> SimpleNamespace:
    """Settings that are fine; a change is ``section__name=value``."""
    made = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="KvcrConnector", kv_role="kv_both", kv_load_failure_policy="recompute", engine_id="e"
        ),
        cache_config=SimpleNamespace(kv_offloading_size=None, prefix_match_unit=None, block_size=32),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
        ),
        instance_id="abc",
    )
    for name, value in changes.items():
        section, key = name.split("__")
        setattr(getattr(made, section), key, value)
    return made


def groups(*specs: Any) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


FULL = FullAttentionSpec(**SHAPE)


def test_plain_settings_are_fine() -> None:
    require_supported(settings(), groups(FULL))


@pytest.mark.parametrize(
    ("changes", "specs", "words"),
    [
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, [FULL], "kv_load_failure_policy is 'fail'"),
        ({"kv_transfer_config__kv_role": "kv_producer"}, [FULL], "kv_role is 'kv_producer'"),
        ({"kv_transfer_config__kv_connector": "OffloadingConnector"}, [FULL], "OffloadingConnector"),
        ({"kv_transfer_config__kv_connector": "MultiConnector"}, [FULL], "MultiConnector"),
        ({"cache_config__kv_offloading_size": 4.0}, [FULL], "kv_offloading_size is 4.0"),
        ({"cache_config__prefix_match_unit": 16}, [FULL], "prefix_match_unit is 16"),
        ({"parallel_config__decode_context_parallel_size": 2}, [FULL], "decode_context_parallel_size is 2"),
        ({}, [FULL, FULL], "2 KV-cache groups"),
        ({}, [SlidingWindowSpec(**SHAPE, sliding_window=64)], "SlidingWindowSpec"),
    ],
)
def test_what_cannot_work_is_refused_with_the_setting_and_the_fix(changes, specs, words) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        require_supported(settings(**changes), groups(*specs))
    assert ";" in str(refused.value)


def test_a_connector_made_by_another_connector_is_refused() -> None:
    with pytest.raises(ConfigError, match="MultiConnector"):
        require_supported(settings(), groups(FULL), wrapper="MultiConnector")


# --- identity -----------------------------------------------------------------------------------


def write_model(directory: Path, weights: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}})
    raw = len(header).to_bytes(8, "little") + header.encode() + weights
    (directory / "model.safetensors").write_bytes(raw)
    return directory


def model(directory: Path, **hf: Any) -> SimpleNamespace:
    config = {"hidden_size": 8, "_name_or_path": str(directory), "transformers_version": "1", **hf}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(directory),
            revision=None,
            dtype="float32",
            quantization=None,
            seed=0,
            hf_config=SimpleNamespace(to_dict=lambda: config),
        ),
        load_config=SimpleNamespace(load_format="auto"),
    )


def test_the_same_weights_elsewhere_have_the_same_fingerprint(tmp_path: Path) -> None:
    one = write_model(tmp_path / "one", bytes(100_000))
    two = write_model(tmp_path / "two", bytes(100_000))
    assert weights_fingerprint(model(one)) == weights_fingerprint(model(two))


def test_other_weights_of_the_same_shape_have_another(tmp_path: Path) -> None:
    one = write_model(tmp_path / "one", bytes(1_000_000))
    two = write_model(tmp_path / "two", bytes(999_000) + b"\x01" * 1000)
    assert weights_fingerprint(model(one)) != weights_fingerprint(model(two))


@pytest.mark.parametrize("name", ["weights.gguf", "model/weights.gguf", "model/consolidated.00.pt"])
def test_new_weights_under_an_old_name_have_another_whatever_their_format(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    named = file.parent if "/" in name else file
    file.write_bytes(bytes(1000))
    before = weights_fingerprint(model(named))
    assert weights_fingerprint(model(named)) == before
    file.write_bytes(bytes(999) + b"\x01")
    assert weights_fingerprint(model(named)) != before


def test_overrides_of_the_model_configuration_change_the_fingerprint(tmp_path: Path) -> None:
    one = write_model(tmp_path / "one", bytes(1000))
    assert weights_fingerprint(model(one)) != weights_fingerprint(model(one, rope_theta=5.0))


def test_a_weights_generation_is_never_used_twice() -> None:
    first = next_generation("m@abc+0")
    assert first.startswith("m@abc+")
    assert int(next_generation(first).rpartition("+")[2]) >= int(first.rpartition("+")[2]) > 0


def test_an_engine_id_names_one_start_of_one_engine() -> None:
    made = settings(kv_transfer_config__engine_id="my/engine")
    assert engine_id_of(made) == "my_engine-abc"
    made.instance_id = "def"
    assert engine_id_of(made) == "my_engine-def"


def test_each_data_parallel_rank_has_a_guard_of_its_own() -> None:
    made = settings(parallel_config__data_parallel_size=2, parallel_config__data_parallel_index=1)
    config = EngineConfig(socket="/run/g{dp_rank}.sock", name="w", pool_dir="/dev/shm/p")
    ranked = config_for_rank(config, made)
    assert (ranked.socket, ranked.name, ranked.pool_dir) == ("/run/g1.sock", "w-dp1", "/dev/shm/p-dp1")
    with pytest.raises(ConfigError, match=r"write \{dp_rank\}"):
        config_for_rank(EngineConfig(socket="/run/g.sock", name="w"), made)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_ranks_of_a_dense_model_are_told_apart_though_each_believes_to_be_the_only_one(rank: int) -> None:
    made = settings(
        parallel_config__data_parallel_index=rank, kv_transfer_config__engine_id=f"engine_dp{rank}"
    )
    config = EngineConfig(socket="/run/g{dp_rank}.sock", name="w", pool_dir="/dev/shm/p")
    ranked = config_for_rank(config, made)
    assert (ranked.socket, ranked.name) == (f"/run/g{rank}.sock", f"w-dp{rank}")
    assert config_for_rank(config, settings(kv_transfer_config__engine_id="engine")) == config


# --- tensors ------------------------------------------------------------------------------------


def test_a_cpu_cache_of_blocks_first_is_one_run_a_layer() -> None:
    caches = {f"l{i}": torch.zeros(6, 2, 32, 64) for i in range(3)}
    memory = block_memory(caches, 6)
    assert (memory.blocks, memory.part_bytes) == (6, 3 * 2 * 32 * 64 * 4)


def test_a_cache_of_keys_and_values_apart_is_two_runs_a_layer() -> None:
    memory = block_memory({"l0": torch.zeros(2, 6, 32, 2, 32)}, 6)
    assert (memory.blocks, memory.part_bytes) == (6, 2 * 32 * 2 * 32 * 4)


def test_a_permuted_cache_is_taken_as_its_bytes_lie() -> None:
    memory = block_memory({"l0": torch.zeros(6, 32, 2, 32).permute(0, 2, 1, 3)}, 6)
    assert memory.part_bytes == 32 * 2 * 32 * 4


def test_a_block_that_is_not_one_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="not one run of bytes"):
        block_memory({"l0": torch.zeros(6, 2, 32, 64)[:, :, ::2]}, 6)
    with pytest.raises(ConfigError, match="has shape"):
        block_memory({"l0": torch.zeros(5, 2, 32, 64)}, 6)


def test_stats_add_up_over_ranks_and_steps() -> None:
    stats = KvcrStats({"loaded_blocks": 2, "failed_blocks": {"GONE": 1}})
    stats.aggregate(
        KvcrStats({"loaded_blocks": 3, "load_seconds": 0.5, "failed_blocks": {"GONE": 1, "MISS": 4}})
    )
    assert stats.reduce() == {
        "loaded_blocks": 5,
        "load_seconds": 0.5,
        "failed_blocks[GONE]": 2,
        "failed_blocks[MISS]": 4,
    }
    stats.reset()
    assert stats.is_empty()


def test_counters_appear_on_vllms_metrics_page_with_its_labels() -> None:
    page = KvcrPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    page.observe({"loaded_blocks": 3, "failed_blocks": {"GONE": 2}, "of_another_version": 1}, 0)
    lines = generate_latest().decode().splitlines()
    assert 'vllm:kvcr_loaded_blocks_total{engine="0",model_name="m"} 3.0' in lines
    assert 'vllm:kvcr_failed_blocks_total{engine="0",model_name="m",status="GONE"} 2.0' in lines
