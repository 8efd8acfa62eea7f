# SPDX-License-Identifier: Apache-2.0
"""The shape of a block, as engine, guard and peers must agree on it before a byte moves."""

from __future__ import annotations

import hashlib

import msgspec

from kvcr.errors import LayoutMismatch

PAGE_BYTES = 4096


class Layout(msgspec.Struct, frozen=True):
    """What the bytes of a block depend on besides its key. Compared as a whole, by :meth:`digest`."""

    model: str
    """Model identity, see :func:`kvcr.keys.model_identity`."""
    dtype: str
    """Element type of the KV cache, e.g. ``float32``, ``bfloat16``, ``fp8_e4m3``."""
    block_size: int
    """Tokens per block."""
    layers: int
    kv_heads: int
    """KV heads of the whole model, before tensor parallelism."""
    head_size: int
    part_bytes: int
    """Bytes of one block on one rank, all layers, unpadded."""
    tp_size: int = 1
    pp_size: int = 1
    group: int = 0
    attention_layout: str = ""
    """Attention back-end and its block layout (and ISA on CPU): bytes are only portable within one."""
    engine: str = ""
    """Engine name and version, e.g. ``vllm-0.31.0``."""

    @property
    def ranks(self) -> int:
        """Processes that each hold a part of every block."""
        return self.tp_size * self.pp_size

    @property
    def slot_part_bytes(self) -> int:
        """Bytes of one rank's part of a slot: :attr:`part_bytes` rounded up to a page."""
        return -(-self.part_bytes // PAGE_BYTES) * PAGE_BYTES

    def digest(self) -> str:
        """32 hex digits over every field."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16, person=b"kvcr-layout").hexdigest()

    def require_same(self, other: Layout, *, ours: str, theirs: str) -> None:
        """Raise :class:`LayoutMismatch` naming each field that differs, with both values."""
        differing = [
            f"{name}: {ours} has {getattr(self, name)!r}, {theirs} has {getattr(other, name)!r}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]
        if differing:
            raise LayoutMismatch("KV block layouts differ; " + "; ".join(differing))
