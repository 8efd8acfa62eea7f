# SPDX-License-Identifier: Apache-2.0
"""A Llama of less than a million weights, random but the same at every call, with a tokenizer; no network.

One token per byte (see :mod:`tests.integration.tiny_tokenizer`), so that a test can say how many tokens a
text has. Answers are printable ASCII and never end by themselves, so that one token is one character: equal
texts are equal tokens. ``python -m tests.e2e.tiny_model DIR`` writes it; :func:`tiny_model` does so once, in
a process of its own, as it needs torch and transformers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

BLOCK_SIZE = 32
"""Tokens; the smallest that vLLM's CPU back-end takes."""
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE = 2, 128, 4, 2, 32
"""vLLM's CPU attention takes head sizes of 32, 64, 80, 96, 112, 128 and up."""
VOCABULARY = 320
"""The tokenizer has 262 tokens; the rest is never asked for."""
MAX_TOKENS = 8192
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * HEAD_SIZE * 4 * BLOCK_SIZE
"""KV bytes of one block in float32."""


def tiny_model(directory: Path | None = None) -> Path:
    """The model's directory, written if it is not there yet; by default one kept in the checkout's cache."""
    if directory is None:
        version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
        directory = ROOT / ".cache" / f"tiny-model-{version}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_name(f"{directory.name}.lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            draft = directory.with_name(f"{directory.name}.{os.getpid()}")
            done = subprocess.run(
                [sys.executable, "-m", "tests.e2e.tiny_model", str(draft)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'components'}{os.pathsep}{ROOT}"},
                capture_output=True,
                text=True,
                timeout=400,
            )
            if done.returncode:
                shutil.rmtree(draft, ignore_errors=True)
                raise RuntimeError(f"the tiny model was not written:\n{done.stderr[-2000:]}")
            draft.rename(directory)
    return directory


def _write(directory: Path) -> None:
    from kvcr.vllm.torchvision_ops import declare_missing_operators

    declare_missing_operators()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.integration.tiny_tokenizer import write_model

    write_model(directory, context_length=MAX_TOKENS)
    ends = LlamaConfig.from_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_TOKENS,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        bos_token_id=ends.bos_token_id,
        eos_token_id=ends.eos_token_id,
        tie_word_embeddings=True,
        # Wide enough that greedy choices are not near-ties.
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    # The byte-level alphabet writes a space as "Ġ".
    shown = {
        i for token, i in vocabulary.items() if len(token) == 1 and ("!" <= token <= "~" or token == "Ġ")
    }
    hidden = [i for i in range(VOCABULARY) if i not in shown]
    with torch.no_grad():
        # A zero row (the output matrix is the same one) never wins over a hundred random ones.
        model.model.embed_tokens.weight[hidden] = 0
    model.save_pretrained(directory)


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
