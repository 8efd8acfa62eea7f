# SPDX-License-Identifier: Apache-2.0
"""A prompt's tokens as the frontend counts them, for commands that ask about prompts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvcr.errors import ConfigError


def tokenize(text: str, model: str | Path, *, raw: bool = False) -> list[int]:
    """Token ids of ``text`` as one chat message of a user, or with ``raw`` as a prompt.

    ``model`` is a directory with a tokenizer; nothing is asked of a hub. For a process that needs no torch:
    where it is not imported yet, it cannot be afterwards. Raises ConfigError.
    """
    # Tokenizers of transformers do without torch, whose import takes most of the time of a command.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
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
