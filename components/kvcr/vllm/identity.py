# SPDX-License-Identifier: Apache-2.0
"""What a vLLM engine is to the pool: its weights, the shape of its blocks, its name."""

from __future__ import annotations

import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import vllm

from kvcr.config import EngineConfig
from kvcr.errors import ConfigError
from kvcr.keys import model_identity
from kvcr.layout import Layout

SAMPLES = 32
SAMPLE_BYTES = 4096
"""Bytes of each weights file that are read for the fingerprint: 32 spots of 4 KiB, evenly spaced. Names,
sizes and headers alone are the same for every training run of one architecture."""

MAX_HEADER_BYTES = 64 << 20
DP_RANK = "{dp_rank}"

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.tensors")
"""Kinds of weights files; of several kinds in one directory vLLM loads the first."""

# Differ between hosts and versions for one and the same model.
_VOLATILE = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "name_or_path"})


def weights_fingerprint(vllm_config: Any) -> str:
    """24 hex digits over the weights and over what vLLM makes of them. Reads well under a megabyte a file.

    Covers the effective model configuration (with overrides), dtype, quantization, and for each weights
    file its name, size, header and :data:`SAMPLES` spots of its data. A model that is not on disk is
    known by name and revision.
    """
    model = vllm_config.model_config
    digest = hashlib.blake2b(digest_size=12, person=b"kvcr-weights")
    settings = {
        "config": {k: v for k, v in model.hf_config.to_dict().items() if k not in _VOLATILE},
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "load_format": str(vllm_config.load_config.load_format),
        "seed": model.seed if vllm_config.load_config.load_format == "dummy" else None,
    }
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    files = _weights_files(model)
    if not files:
        digest.update(f"{model.model}@{model.revision}".encode())
    for path in files:
        digest.update(_file_digest(path))
    return digest.hexdigest()


def _weights_files(model: Any) -> list[Path]:
    """In the order of their names; none for a model that is not on disk."""
    # A GGUF model is named by its file.
    if Path(model.model).is_file():
        return [Path(model.model)]
    directory = _model_dir(model)
    found = [] if directory is None else [sorted(directory.glob(pattern)) for pattern in _WEIGHTS]
    return next(filter(None, found), [])


def _model_dir(model: Any) -> Path | None:
    path = Path(model.model)
    if path.is_dir():
        return path
    # Imported here: only needed for models named by repository, whose files vLLM has put in the cache.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None


def _file_digest(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    digest.update(f"{path.name}:{size}".encode())
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            header_bytes = min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)
            digest.update(file.read(header_bytes))
        for sample in range(SAMPLES):
            file.seek(size * sample // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
        file.seek(max(0, size - SAMPLE_BYTES))
        digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def model_name(vllm_config: Any) -> str:
    """Last part of the model's path or repository name: the same wherever the files lie."""
    return Path(str(vllm_config.model_config.model).rstrip("/")).name


def identity_of(vllm_config: Any, generation: int = 0) -> str:
    """The model identity of this engine."""
    return model_identity(model_name(vllm_config), weights_fingerprint(vllm_config), generation)


def next_generation(identity: str) -> str:
    """``identity`` with a weights generation no engine had before.

    From the clock, not a counter: the pool outlives the engine, and a counter that starts again would meet
    blocks of an earlier engine's weights.
    """
    stem, _, _ = identity.rpartition("+")
    return f"{stem}+{time.time_ns() // 1000}"


def layout_of(vllm_config: Any, kv_cache_config: Any) -> Layout:
    """The layout of one block. The scheduler and every worker compute the same one from the same settings.

    Raises ConfigError when the layers do not divide by the pipeline size.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    layers = len(group.layer_names)
    pp_size = parallel.pipeline_parallel_size
    total = model.get_total_num_hidden_layers() if pp_size > 1 else layers
    if pp_size > 1 and total % pp_size:
        raise ConfigError(
            f"pipeline_parallel_size is {pp_size} and the model has {total} layers: ranks would have "
            "blocks of different sizes; choose a size that divides the layers"
        )
    return Layout(
        model=identity_of(vllm_config),
        dtype=str(spec.dtype).removeprefix("torch."),
        block_size=spec.block_size,
        layers=total if pp_size > 1 else layers,
        kv_heads=model.get_total_num_kv_heads(),
        head_size=spec.head_size,
        part_bytes=spec.page_size_bytes * layers,
        tp_size=parallel.tensor_parallel_size,
        pp_size=pp_size,
        group=0,
        attention_layout=_attention_layout(vllm_config, kv_cache_config, spec),
        engine=f"vllm-{vllm.__version__}",
    )


def _attention_layout(vllm_config: Any, kv_cache_config: Any, spec: Any) -> str:
    from vllm.platforms import current_platform

    backend = vllm_config.attention_config.backend
    parts = [
        current_platform.device_type,
        getattr(backend, "name", "auto"),
        str(kv_cache_config.kv_cache_layout),
        str(spec.kv_quant_mode.name),
    ]
    if current_platform.is_cpu():
        # The CPU kernels pack keys for the instruction set they run on.
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        parts.append(
            _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype)
        )
    return ":".join(parts)


def engine_id_of(vllm_config: Any) -> str:
    """An id that all processes of this engine share and no other engine, earlier or later, has."""
    given = f"{vllm_config.kv_transfer_config.engine_id}-{vllm_config.instance_id}"
    # It names a lock file: the pool takes up to 127 of these characters.
    return re.sub(r"[^A-Za-z0-9_.:-]", "_", given).lstrip(".:-")[-127:]


def config_for_rank(config: EngineConfig, vllm_config: Any) -> EngineConfig:
    """``config`` for this data-parallel rank: each rank is an engine of its own, with its own guard.

    Raises ConfigError when one ``socket`` is given for several ranks.
    """
    parallel = vllm_config.parallel_config
    rank = parallel.data_parallel_index
    # Ranks of a dense model know nothing of each other: vLLM sets their number to 1, and leaves a mark here.
    apart = vllm_config.kv_transfer_config.engine_id.endswith(f"_dp{rank}")
    if parallel.data_parallel_size <= 1 and not apart:
        return config
    if config.socket and DP_RANK not in config.socket:
        raise ConfigError(
            f"socket is {config.socket!r} for several data-parallel ranks; write {DP_RANK} where the rank's "
            "number goes, and start one guard a rank"
        )
    return msgspec.structs.replace(
        config,
        socket=config.socket.replace(DP_RANK, str(rank)),
        name=f"{config.name or model_name(vllm_config)}-dp{rank}",
        pool_dir=f"{config.pool_dir}-dp{rank}" if config.pool_dir else "",
    )
