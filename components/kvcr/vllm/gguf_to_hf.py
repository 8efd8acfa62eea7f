# SPDX-License-Identifier: Apache-2.0
"""Turn one GGUF file into a Hugging Face model: ``python -m kvcr.vllm.gguf_to_hf SRC_DIR FILE OUT_DIR``.

A process of its own because it needs torch and transformers, which the caller (:mod:`kvcr.graph.models`)
must not import, and because the memory of the dequantised weights should go back when it is done.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

# The GGUF metadata of SmolLM2-Instruct names <|im_start|> as end of sequence; a chat turn ends with this.
CHAT_END = "<|im_end|>"


def convert(source_dir: Path, gguf_file: str, out_dir: Path) -> None:
    """Write ``out_dir`` as a bfloat16 Llama checkpoint with tokenizer and chat template.

    Raises whatever transformers raises for a file it cannot read; ``out_dir`` is then incomplete.
    """
    from kvcr.vllm.torchvision_ops import declare_missing_operators

    declare_missing_operators()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source_dir), gguf_file=gguf_file)
    end_id = tokenizer.convert_tokens_to_ids(CHAT_END)
    if end_id is None or end_id == tokenizer.unk_token_id:
        raise SystemExit(f"{gguf_file}: the vocabulary has no {CHAT_END!r}; not a SmolLM2 instruct model")
    tokenizer.eos_token = CHAT_END
    tokenizer.pad_token = CHAT_END

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(source_dir), gguf_file=gguf_file, dtype=torch.bfloat16
    )
    # transformers keeps calling dequantised weights "quantized by GGUF" and refuses to save them as such.
    model.hf_quantizer = None
    model.quantization_method = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = end_id
        settings.pad_token_id = end_id

    model.save_pretrained(str(out_dir))
    tokenizer.save_pretrained(str(out_dir))


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="kvcr.vllm.gguf_to_hf", description=__doc__)
    parser.add_argument("source_dir", type=Path)
    parser.add_argument("gguf_file")
    parser.add_argument("out_dir", type=Path)
    arguments = parser.parse_args()
    convert(arguments.source_dir, arguments.gguf_file, arguments.out_dir)


if __name__ == "__main__":
    main()
