# SPDX-License-Identifier: Apache-2.0
"""Counting messages in a prompt's tokens."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from signal_desk import BLOCK, Router, World, tokens_of
from tokenizers import Tokenizer

from router_hints.messages import message_markers, message_starts
from tests.integration.tiny_tokenizer import write_model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny")


def with_template(model: Path, template: str, *special: str) -> Path:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(model / "tokenizer.json"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return model


def test_the_tokens_that_open_messages_are_found_in_the_template(model: Path) -> None:
    chatml = with_template(model, CHATML, "<|im_start|>", "<|im_end|>")
    tokenizer = Tokenizer.from_file(str(chatml / "tokenizer.json"))
    markers = message_markers(str(chatml))
    assert markers == {tokenizer.token_to_id("<|im_start|>")}
    prompt = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\ncd<|im_end|>\n<|im_start|>assistant\n"
    encoded = tokenizer.encode(prompt)
    starts = message_starts(encoded.ids, markers)
    assert [encoded.tokens[at] for at in starts] == ["<|im_start|>"] * 3


def test_a_template_without_them_or_that_fails_counts_nothing(model: Path, tmp_path: Path) -> None:
    plain = with_template(model, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert message_markers(str(plain)) == frozenset()
    assert message_markers(str(with_template(model, "{{ nothing.like.this }}"))) == frozenset()
    assert message_markers(str(tmp_path / "nowhere")) == frozenset()
    assert message_starts([1, 2, 3], frozenset()) == ()


@pytest.mark.parametrize(("keeps", "tokens"), [(1, 100), (2, 400), (3, 400)])
async def test_compaction_may_say_how_many_messages_are_kept(keeps: int, tokens: int) -> None:
    router = Router(World(2))
    router.visits.markers = frozenset({77_777})
    history = tokens_of(800)
    for start in (0, 100, 400):
        history[start] = 77_777
    await router.turn("main", history, pin="g1")
    router.world.store("g1", history)
    router.sent()
    await router.signal("compaction", "main", keeps_messages=keeps)
    ((_, payload),) = router.sent("kv.invalidate")
    assert base64.b64decode(payload["keys"]) == World.keys(history)[tokens // BLOCK * 16 :]


async def test_without_markers_messages_cannot_be_counted_and_nothing_is_dropped() -> None:
    router = Router(World(2))
    await router.turn("main", tokens_of(800), pin="g1")
    router.world.store("g1", tokens_of(800))
    reply = await router.signal("compaction", "main", keeps_messages=1)
    assert (reply.decision, router.sent("kv.invalidate")) == ("none", [])
