# SPDX-License-Identifier: Apache-2.0
"""The block keys of one vLLM request, computed once and extended while it decodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcr.keys import KEY_BYTES, BlockKey, KeySpace, extend_packed

UNBOUNDED = 1 << 62


class RequestChain:
    """Keys, engine hashes and limits of a request. Scheduler's thread only."""

    def __init__(self, request: Any, root: BlockKey, block_size: int) -> None:
        self._request = request
        self._root = root
        self._block_size = block_size
        self.keyed_blocks = keyed_tokens(request) // block_size
        """Blocks from here on have no key: not stored, not fetched."""
        self._blob: bytes = root
        """The root, and the keys so far."""

    def __len__(self) -> int:
        """Blocks keyed so far."""
        return len(self._blob) // KEY_BYTES - 1

    def extend(self) -> int:
        """Compute the keys of blocks that filled since the last call; returns the number of blocks keyed.

        Once a block in its life: a hash that needs the one before it.
        """
        full = min(len(self._request.block_hashes), self.keyed_blocks)
        done = len(self)
        if full > done:
            tokens = self._request.all_token_ids[done * self._block_size : full * self._block_size]
            self._blob += extend_packed(self.parent(done), tokens, self._block_size)
        return len(self)

    def end(self) -> None:
        """No key from here on, not even those computed: the weights have changed under the request."""
        self.keyed_blocks = 0
        self._blob = self._root

    def parent(self, position: int) -> BlockKey:
        """Key before the block at ``position``: the root for the first."""
        return BlockKey(self._blob[KEY_BYTES * position : KEY_BYTES * (position + 1)])

    def key(self, position: int) -> BlockKey:
        """Key of the block at ``position``, which is keyed."""
        return self.parent(position + 1)

    def blob(self, first: int, stop: int) -> bytes:
        """Keys of the blocks from ``first`` to before ``stop``, 16 bytes each."""
        return self._blob[KEY_BYTES * (first + 1) : KEY_BYTES * (stop + 1)]

    def rows(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        """Keys of the blocks at these positions."""
        return np.frombuffer(self._blob, f"V{KEY_BYTES}")[positions + 1]

    def parent_rows(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        """Keys before the blocks at these positions."""
        return np.frombuffer(self._blob, f"V{KEY_BYTES}")[positions]

    def engine_hashes(self, first: int, stop: int) -> npt.NDArray[np.uint64]:
        """uint64 hashes as vLLM's KV events and stock hints have them: the last 8 bytes, big-endian."""
        hashes = self._request.block_hashes[first:stop]
        if not hashes:
            return np.empty(0, np.uint64)
        rows = np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), -1)
        return np.ascontiguousarray(rows[:, -8:]).view(">u8").ravel().astype(np.uint64)


def keyed_tokens(request: Any) -> int:
    """Tokens from the start that token ids alone describe.

    From the first multimodal or prompt-embeds position on, equal token ids may mean different content. A
    streaming-input session rewrites its own tokens between turns, so none of it is keyed.
    """
    if request.resumable:
        return 0
    limit = UNBOUNDED
    if request.mm_features:
        limit = min(feature.mm_position.offset for feature in request.mm_features)
    if request.prompt_embeds is not None:
        flags = request.prompt_is_token_ids
        embedded = (
            0 if flags is None else next((i for i, is_token in enumerate(flags) if not is_token), limit)
        )
        limit = min(limit, embedded)
    return limit


def key_space(namespace: str, model: str, group: int, request: Any) -> KeySpace:
    """The key space of a request: its tenant's salt and its adapter included."""
    lora = request.lora_request
    return KeySpace(
        namespace=namespace,
        model=model,
        group=group,
        lora_name=lora.lora_name if lora is not None else "",
        lora_path=lora.lora_path if lora is not None else "",
        salt=request.cache_salt or "",
    )
