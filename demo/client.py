# SPDX-License-Identifier: Apache-2.0
"""A streaming client of the OpenAI chat API that measures the time to the first token.

Standard library only: what it does is what any client of the frontend can do.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class RequestFailed(Exception):
    """The server answered with an error, or ended the stream early; the message carries its words."""


class RequestHung(RequestFailed):
    """The server is silent: neither an answer nor an error."""


@dataclass(frozen=True)
class Answer:
    """One finished chat request."""

    text: str
    ttft_s: float
    """From sending the request to the first piece of text."""
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens the worker did not compute, as the engine reports them in ``usage``."""
    completion_tokens: int
    request_id: str
    """``id`` of the response."""


def chat_body(
    model: str, messages: Sequence[Mapping[str, str]], max_tokens: int, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON of a greedy, streamed chat request. ``extra`` adds or replaces top-level fields."""
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body.update(extra or {})
    return body


def ask(
    base_url: str,
    model: str,
    messages: Sequence[Mapping[str, str]],
    *,
    max_tokens: int,
    headers: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
    timeout_s: float = 180.0,
    on_text: Callable[[str], None] | None = None,
) -> Answer:
    """Send one chat request with temperature 0 and stream the answer. Raises :class:`RequestFailed`.

    ``on_text`` gets each piece of text as it comes. ``timeout_s`` is the longest silence of the server.
    """
    url = urlsplit(base_url)
    body = json.dumps(chat_body(model, messages, max_tokens, extra))
    connection = http.client.HTTPConnection(url.hostname or "127.0.0.1", url.port, timeout=timeout_s)
    try:
        started_s = time.perf_counter()
        connection.request(
            "POST", "/v1/chat/completions", body, {"Content-Type": "application/json", **(headers or {})}
        )
        response = connection.getresponse()
        if response.status != 200:
            words = response.read(2000).decode(errors="replace")
            raise RequestFailed(f"{base_url}/v1/chat/completions answered {response.status}: {words}")
        return _collect(_events(response), started_s, on_text)
    except TimeoutError as error:
        raise RequestHung(f"{base_url} said nothing for {timeout_s:g} s") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RequestFailed(f"request to {base_url} broke: {error!r}") from error
    finally:
        connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, until ``[DONE]``."""
    for line in response:
        kind, _, data = line.strip().partition(b":")
        if kind == b"event" and data.strip() == b"error":
            raise RequestFailed(
                f"the stream reported an error: {response.readline().decode(errors='replace')}"
            )
        if kind != b"data":
            continue
        data = data.strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise RequestFailed(f"the stream reported an error: {event['error']}")
        yield event
    raise RequestFailed("the stream ended without [DONE]")


def _collect(
    events: Iterator[dict[str, Any]], started_s: float, on_text: Callable[[str], None] | None
) -> Answer:
    pieces: list[str] = []
    ttft_s = 0.0
    usage: dict[str, Any] = {}
    request_id = ""
    for event in events:
        request_id = event.get("id") or request_id
        usage = event.get("usage") or usage
        for choice in event.get("choices") or []:
            piece = (choice.get("delta") or {}).get("content")
            if piece:
                ttft_s = ttft_s or time.perf_counter() - started_s
                pieces.append(piece)
                if on_text is not None:
                    on_text(piece)
    total_s = time.perf_counter() - started_s
    return Answer(
        text="".join(pieces),
        ttft_s=ttft_s or total_s,
        total_s=total_s,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        request_id=request_id,
    )
