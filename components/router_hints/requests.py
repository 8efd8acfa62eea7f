# SPDX-License-Identifier: Apache-2.0
"""Reading a Dynamo ``PreprocessedRequest`` (1.6.1): only what routing needs, and nothing is changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from kvcr.errors import ConfigError
from kvcr.protocol.signals import METADATA_KEY
from router_hints.planner import RequestView

PIN_HEADER = "kvcr-worker"
"""Name in the context metadata; over HTTP the header is ``x-dynamo-meta-kvcr-worker``."""
PIN_ANNOTATION = "kvcr.worker:"
"""Prefix of an annotation; over HTTP ``nvext.annotations``."""

_CONTENT_BEYOND_TOKENS = ("multi_modal_data", "mm_routing_info", "prompt_embeds", "media")


class Prompt(msgspec.Struct, frozen=True):
    """One request as the router sees it."""

    tokens: list[int]
    salt: str
    lora_name: str
    keyed: bool
    """Whether token ids alone name its blocks: not with images, prompt embeddings or an adapter."""
    unkeyed_reason: str
    pinned_worker: int | None
    pinned_rank: int | None
    required_taints: frozenset[str]
    preferred_taints: dict[str, float]
    session: str = ""
    """As Dynamo read it off the headers of whichever harness sent it; empty for none."""
    parent: str = ""
    final: bool = False
    """The harness says that the session ends with it."""
    signal: str = ""
    """JSON of a :class:`kvcr.protocol.signals.Signal`, as it came; empty for none."""

    def view(self, plan_id: str, block_size: int) -> RequestView:
        """The planner's view of it."""
        return RequestView(
            plan_id=plan_id,
            prompt_tokens=len(self.tokens),
            block_size=block_size,
            affinity=self._affinity(block_size),
            pinned_worker=self.pinned_worker,
            pinned_rank=self.pinned_rank,
            required_taints=self.required_taints,
            preferred_taints=self.preferred_taints,
        )

    def _affinity(self, block_size: int) -> bytes:
        head = np.asarray(self.tokens[:block_size], dtype="<u4").tobytes()
        return hashlib.blake2b(head, digest_size=16, key=self.salt.encode()[:64]).digest()


def read_prompt(request: Mapping[str, Any], metadata: Mapping[str, str]) -> Prompt:
    """Read one request and its context metadata. Raises ConfigError for a pin that is no worker id."""
    routing: Mapping[str, Any] = request.get("routing") or {}
    constraints: Mapping[str, Any] = routing.get("routing_constraints") or {}
    agent: Mapping[str, Any] = request.get("agent_context") or {}
    lora_name = str(routing.get("lora_name") or request.get("lora_name") or "")
    reason = ""
    if lora_name:
        reason = "lora"
    elif any(request.get(name) for name in _CONTENT_BEYOND_TOKENS):
        reason = "multimodal"
    return Prompt(
        tokens=list(request.get("token_ids") or ()),
        salt=str(routing.get("cache_salt") or ""),
        lora_name=lora_name,
        keyed=not reason,
        unkeyed_reason=reason,
        pinned_worker=_pinned(request, routing, metadata),
        pinned_rank=routing.get("dp_rank"),
        required_taints=frozenset(constraints.get("required_taints") or ()),
        preferred_taints=dict(constraints.get("preferred_taints") or {}),
        session=str(agent.get("session_id") or ""),
        parent=str(agent.get("parent_session_id") or ""),
        final=bool(agent.get("session_final")),
        signal=metadata.get(METADATA_KEY) or "",
    )


def _pinned(
    request: Mapping[str, Any], routing: Mapping[str, Any], metadata: Mapping[str, str]
) -> int | None:
    """The worker a request asks for.

    ``routing.backend_instance_id`` is how Dynamo components say it. A stock frontend in round-robin mode
    looks that id up among the *routers* and answers 400, so HTTP clients use the annotation or the header.
    """
    if (instance := routing.get("backend_instance_id")) is not None:
        return int(instance)
    text = metadata.get(PIN_HEADER) or next(
        (
            a.removeprefix(PIN_ANNOTATION)
            for a in request.get("annotations") or ()
            if a.startswith(PIN_ANNOTATION)
        ),
        None,
    )
    if text is None:
        return None
    try:
        return int(text, 10)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is no worker to pin a request to; give its Dynamo instance id as a decimal number"
        ) from error
