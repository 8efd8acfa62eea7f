# SPDX-License-Identifier: Apache-2.0
"""Where the messages of a chat prompt begin, told from its tokens alone: by those that open a message."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np

from router_hints.chains import Tokens

log = logging.getLogger(__name__)

_USER = {"role": "user", "content": "one"}
_ASSISTANT = {"role": "assistant", "content": "two"}
_SYSTEM = {"role": "system", "content": "three"}


def message_markers(model_path: str) -> frozenset[int]:
    """Ids of the special tokens that open a message in this model's chat template.

    Found by rendering chats that grow by a message: each message begins where the longer one goes on. Empty
    when the template has no such token, or cannot be read here: messages are then not counted.
    """
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from tokenizers import Tokenizer

        directory = Path(model_path)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        config = json.loads((directory / "tokenizer_config.json").read_text())
        file = directory / "chat_template.jinja"
        text = file.read_text() if file.exists() else config["chat_template"]
        template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(text)
        names = {key: _text(config.get(key)) for key in ("bos_token", "eos_token")}

        def tokens(*chat: dict[str, str]) -> list[int]:
            rendered = template.render(messages=list(chat), add_generation_prompt=False, **names)
            ids: list[int] = tokenizer.encode(rendered, add_special_tokens=False).ids
            return ids

        special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        markers = set()
        for chat in ([_USER, _ASSISTANT], [_USER, _ASSISTANT, _USER], [_SYSTEM, _USER]):
            shorter, longer = tokens(*chat[:-1]), tokens(*chat)
            if longer[: len(shorter)] == shorter and len(longer) > len(shorter):
                markers.add(longer[len(shorter)])
        return frozenset(markers & special)
    except Exception as error:  # noqa: BLE001 - whatever a template does, routing goes on without
        log.info("messages are not counted (%s: %s); signals give tokens", type(error).__name__, error)
        return frozenset()


def message_starts(tokens: Tokens, markers: frozenset[int]) -> tuple[int, ...]:
    """Token positions at which messages begin, that of an answer still to come included."""
    if not markers:
        return ()
    return tuple(np.flatnonzero(np.isin(np.asarray(tokens), list(markers))).tolist())


def _text(token: object) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
