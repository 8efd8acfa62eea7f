# SPDX-License-Identifier: Apache-2.0
"""Block keys: the name of one KV block, the same on every router, engine and guard.

A key is 16 bytes, ``blake2b-128(parent key || token ids as little-endian u32)``, chained from a root
that pins everything else the bytes of the block depend on: namespace, model identity (with a
fingerprint and generation of the weights), KV-cache group, LoRA adapter and tenant salt. Layout
(dtype, block shape, TP) is not in the key; it is checked when an engine or a peer attaches.

The golden vectors in ``tests/unit/golden_keys.json`` pin the function: a change there is a new key
version, and no two versions may share a pool.
"""

from __future__ import annotations

import array
import hashlib
import sys
from collections.abc import Sequence
from typing import NewType

import msgspec
import numpy as np
import numpy.typing as npt

from kvcr.layout import Layout

try:
    from kvcr import _chain
except ImportError:  # built without a compiler
    _chain = None  # type: ignore[assignment]

KEY_BYTES = 16
_PERSON = b"kvcr-block"
KEY_VERSION = 1

BlockKey = NewType("BlockKey", bytes)
"""16 bytes naming one block of one chain."""

# Dynamo's vLLM worker hands the salt to the engine under this tag and the router sees it bare
# (dynamo 1.6.1, dynamo/vllm/handlers.py); both sides must hash the bare salt.
_DYNAMO_SALT_TAG = "dynamo-cache-salt:"


class KeySpace(msgspec.Struct, frozen=True):
    """Everything but the tokens that decides which chain a block belongs to."""

    namespace: str
    model: str
    """Model identity: name, weights fingerprint and generation, as :func:`model_identity` writes it."""
    group: int = 0
    """KV-cache group id of the engine; 0 for models with one full-attention group."""
    lora_name: str = ""
    lora_path: str = ""
    salt: str = ""
    """Tenant salt, bare. Tenants with different salts never share a block."""

    def root(self) -> BlockKey:
        """The parent of the first block of every chain in this space."""
        salt = self.salt.removeprefix(_DYNAMO_SALT_TAG)
        parts = msgspec.msgpack.encode(
            [
                KEY_VERSION,
                self.namespace,
                self.model,
                self.group,
                self.lora_name,
                self.lora_path,
                hashlib.blake2b(salt.encode(), digest_size=16).digest() if salt else b"",
            ]
        )
        return BlockKey(hashlib.blake2b(parts, digest_size=KEY_BYTES, person=b"kvcr-root").digest())


def probe_key(namespace: str, layout: Layout) -> BlockKey:
    """Key of the second block of a prompt that everybody knows, without a tenant: who computes another one
    names blocks differently, and finds none."""
    root = KeySpace(namespace, layout.model, layout.group).root()
    return extend_chain(root, list(range(2 * layout.block_size)), layout.block_size)[-1]


def model_identity(name: str, weights_fingerprint: str, weights_generation: int = 0) -> str:
    """The string that stands for one set of weights. New weights under an old name must differ."""
    return f"{name}@{weights_fingerprint}+{weights_generation}"


def extend_chain(
    parent: BlockKey, tokens: Sequence[int] | npt.NDArray[np.uint32], block_size: int
) -> list[BlockKey]:
    """Keys of the full blocks of ``tokens``, which follow ``parent``.

    ``tokens`` starts at a block boundary; a trailing partial block has no key.
    """
    return unpack_keys(extend_packed(parent, tokens, block_size))


def extend_packed(parent: BlockKey, tokens: Sequence[int] | npt.NDArray[np.uint32], block_size: int) -> bytes:
    """The same as one blob of 16 bytes a key."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1 token, got {block_size}")
    if isinstance(tokens, list) and sys.byteorder == "little":
        # Engines have lists: 14 ns a token here, 39 ns through numpy.
        raw = array.array("I", tokens).tobytes()
    else:
        raw = np.ascontiguousarray(tokens, dtype="<u4").tobytes()
    if _chain is None:
        return extend_in_python(parent, raw, 4 * block_size)
    return _chain.extend(parent, raw, 4 * block_size, _PERSON)


def extend_in_python(parent: bytes, raw: bytes, block_bytes: int) -> bytes:
    """What ``kvcr._chain.extend`` does, with hashlib: about 1 us a block."""
    keys = []
    # A loop, because each key needs the one before it.
    for start in range(0, len(raw) - block_bytes + 1, block_bytes):
        block = parent + raw[start : start + block_bytes]
        parent = hashlib.blake2b(block, digest_size=KEY_BYTES, person=_PERSON).digest()
        keys.append(parent)
    return b"".join(keys)


def pack_keys(keys: Sequence[BlockKey]) -> bytes:
    """Keys as one blob of 16 bytes each: the form they travel and are looked up in."""
    return b"".join(keys)


def unpack_keys(blob: bytes) -> list[BlockKey]:
    """The inverse of :func:`pack_keys`."""
    if len(blob) % KEY_BYTES:
        raise ValueError(f"a blob of keys has {KEY_BYTES} bytes a key, got {len(blob)} bytes")
    return [BlockKey(blob[i : i + KEY_BYTES]) for i in range(0, len(blob), KEY_BYTES)]
