# SPDX-License-Identifier: Apache-2.0
"""Tokens are counted without torch, and are those that a process with torch counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_tokenizer import write_model

TEXT = "Which boat comes today, héllo 世界?"
OURS = """
import json, sys
from kvcr.vllm.tokens import tokenize
print(json.dumps([tokenize(sys.argv[1], sys.argv[2], raw=raw) for raw in (False, True)]))
assert sys.modules["torch"] is None
"""
WITH_TORCH = """
import json, sys
from kvcr.vllm.torchvision_ops import declare_missing_operators
declare_missing_operators()
from transformers import AutoTokenizer
import torch
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
chat = [{"role": "user", "content": sys.argv[1]}]
templated = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
print(json.dumps([list(templated), list(tokenizer.encode(sys.argv[1]))]))
"""


def test_tokens_without_torch_are_those_with_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = write_model(tmp_path / "tiny")
    ours, theirs = (
        subprocess.run(
            [sys.executable, "-c", program, TEXT, str(model)], capture_output=True, check=True, timeout=120
        )
        for program in (OURS, WITH_TORCH)
    )
    assert json.loads(ours.stdout) == json.loads(theirs.stdout)
    assert len(json.loads(ours.stdout)[0]) > 0
    assert not ours.stderr, ours.stderr
