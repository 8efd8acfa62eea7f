# SPDX-License-Identifier: Apache-2.0
"""A prompt's tokens as the frontend counts them, for tools that ask about prompts."""

from __future__ import annotations

from pathlib import Path

from kvcr.errors import ConfigError


def tokenize(text: str, model: str | Path, *, raw: bool = False) -> list[int]:
    """Token ids of ``text`` as one chat message of a user, or with ``raw`` as a prompt.

    ``model`` is a directory with a tokenizer; nothing is asked of a hub. Raises ConfigError.
    """
    from kvcr.vllm.torchvision_ops import declare_missing_operators

    try:
        # Or transformers cannot be imported beside a CPU-only torch.
        declare_missing_operators()
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError("counting tokens needs transformers, which vLLM brings") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model directory {str(model)!r} has no tokenizer that loads: {error}") from error
    if raw:
        return list(tokenizer.encode(text))
    chat = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
