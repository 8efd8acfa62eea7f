# SPDX-License-Identifier: Apache-2.0
"""A model directory without weights, built offline: enough for the stock frontend to tokenize for it.

One token per byte, plus the markers of the chat template, so that a test can say how many tokens a
prompt has by counting its characters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_MARKERS = ["<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

READY = "ready?"
"""What is asked until it is answered. On a busy machine one that was given up reaches a worker later: workers
do not tell of it."""


def tokenize(model: Path, prompt: str) -> list[int]:
    """Of one message of a user, as the stock frontend sends it to workers."""
    encoder = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = encoder.encode(f"<|user|>{prompt}<|assistant|>").ids
    return ids


def write_model(directory: Path, *, context_length: int = 8192) -> Path:
    """Write the directory (created when missing) and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_MARKERS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_MARKERS)
    tokenizer.save(str(directory / "tokenizer.json"))

    ends: dict[str, Any] = {"bos_token_id": vocabulary["<s>"], "eos_token_id": vocabulary["</s>"]}
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "model_max_length": context_length,
            "chat_template": _TEMPLATE,
        },
    )
    _write(directory / "generation_config.json", ends)
    _write(
        directory / "config.json",
        ends
        | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": 64,
            "head_dim": 16,
            "intermediate_size": 128,
            "max_position_embeddings": context_length,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "vocab_size": len(vocabulary),
        },
    )
    return directory


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))
