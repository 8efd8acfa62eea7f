# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV-cache tensors as numbered blocks, in host memory or on a CUDA device."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from kvcr.client.memory import I32, U8, BlockMemory, HostBlockMemory
from kvcr.errors import ConfigError

logger = logging.getLogger(__name__)

PIN_CHUNK_BYTES = 1 << 30
STAGING_BLOCKS = 32
"""Blocks gathered on the device per copy step, at most."""


def block_memory(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> BlockMemory:
    """The registered tensors of one rank as a :class:`kvcr.client.BlockMemory`, in order of registration.

    Raises ConfigError for a tensor whose blocks are not each one dense run of bytes (or one for K and one
    for V), and for a device that is neither CPU nor CUDA.
    """
    segments = [s for name, t in kv_caches.items() for s in _segments(name, t, num_blocks)]
    device = segments[0].device
    if any(segment.device != device for segment in segments):
        raise ConfigError("KVCR cannot serve this engine: its KV cache lies on several devices of one rank")
    if device.type == "cpu":
        return HostBlockMemory([segment.numpy() for segment in segments])
    if device.type == "cuda":
        return CudaBlockMemory(segments)
    raise ConfigError(
        f"KVCR cannot serve this engine: its KV cache is on {device.type}; supported devices are cpu and cuda"
    )


def _segments(name: str, tensor: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """uint8 views [blocks, bytes] of ``tensor``: one, or two when it is [2, blocks, ...]."""
    if tensor.shape[0] == num_blocks:
        return [_rows(name, tensor)]
    if tensor.ndim > 1 and tensor.shape[0] == 2 and tensor.shape[1] == num_blocks:
        return [_rows(name, tensor[0]), _rows(name, tensor[1])]
    raise ConfigError(
        f"KVCR cannot serve this engine: KV-cache tensor {name} has shape {tuple(tensor.shape)}, expected "
        f"[{num_blocks} blocks, ...] or [2, {num_blocks} blocks, ...]; choose another attention back-end"
    )


def _rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    block = tensor[0]
    # Dense in some order of the dimensions, e.g. NHD or HND: the bytes are copied, never interpreted.
    span = 1 + sum((size - 1) * stride for size, stride in zip(block.shape, block.stride(), strict=True))
    if span != block.numel():
        raise ConfigError(
            f"KVCR cannot serve this engine: a block of KV-cache tensor {name} is not one run of bytes "
            f"(shape {tuple(tensor.shape)}, strides {tensor.stride()}); choose another attention back-end"
        )
    item = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * item,
        (tensor.shape[0], block.numel() * item),
        (tensor.stride(0) * item, 1),
    )
    return flat


class CudaBlockMemory:
    """Blocks on a CUDA device, copied on a stream of their own.

    Blocks are gathered on the device into a staging buffer in slot order, so that each slot is one DMA of
    ``part_bytes`` to or from the pool, which is page-locked chunk by chunk when the pool is mapped.
    """

    def __init__(self, segments: list[torch.Tensor]) -> None:
        self._segments = segments
        self._device = segments[0].device
        self._blocks = int(segments[0].shape[0])
        self._part_bytes = sum(int(segment.shape[1]) for segment in segments)
        self._stream = torch.cuda.Stream(device=self._device)
        self._staging = torch.empty(
            (STAGING_BLOCKS, self._part_bytes), dtype=torch.uint8, device=self._device
        )
        self._pinned: dict[int, list[int]] = {}

    @property
    def part_bytes(self) -> int:
        return self._part_bytes

    @property
    def blocks(self) -> int:
        return self._blocks

    def attach(self, slots: U8) -> None:
        """Page-lock the pool's region. Where the driver refuses, copies are pageable, and slower."""
        base = int(slots.ctypes.data)
        with torch.cuda.device(self._device):
            self._pinned[base] = pin(torch.cuda.cudart(), base, slots.nbytes)

    def detach(self, slots: U8) -> None:
        with torch.cuda.device(self._device):
            unpin(torch.cuda.cudart(), self._pinned.pop(int(slots.ctypes.data), []))

    def fence(self) -> Any:
        """An event on the engine's current stream, after the writes of this step."""
        with torch.cuda.device(self._device):
            event = torch.cuda.Event()
            event.record()
        return event

    def store(self, slots: U8, slot_ids: I32, block_ids: I32, fence: Any) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(fence)
            for start in range(0, len(slot_ids), STAGING_BLOCKS):
                part = slice(start, start + STAGING_BLOCKS)
                index = self._index(block_ids[part])
                offset = 0
                for segment in self._segments:
                    end = offset + segment.shape[1]
                    self._staging[: len(index), offset:end] = segment.index_select(0, index)
                    offset = end
                # A loop over blocks: one DMA each, megabytes long.
                for row, slot in enumerate(slot_ids[part].tolist()):
                    self._host(slots, slot).copy_(self._staging[row], non_blocking=True)
                # Within the loop: the staging buffer is used again in the next step.
                self._stream.synchronize()

    def load(self, slots: U8, slot_ids: I32, block_ids: I32, fence: Any) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # A step that was launched before may still read, or write, what these blocks held.
            self._stream.wait_event(fence)
            for start in range(0, len(slot_ids), STAGING_BLOCKS):
                part = slice(start, start + STAGING_BLOCKS)
                index = self._index(block_ids[part])
                for row, slot in enumerate(slot_ids[part].tolist()):
                    self._staging[row].copy_(self._host(slots, slot), non_blocking=True)
                offset = 0
                for segment in self._segments:
                    end = offset + segment.shape[1]
                    segment.index_copy_(0, index, self._staging[: len(index), offset:end])
                    offset = end
                self._stream.synchronize()

    def _index(self, block_ids: I32) -> torch.Tensor:
        return torch.from_numpy(block_ids.astype(np.int64)).to(self._device)

    def _host(self, slots: U8, slot: int) -> torch.Tensor:
        # By address: torch takes no read-only array without a warning, and another guard's pool is one.
        address = int(slots.ctypes.data) + slot * int(slots.strides[0])
        return torch.frombuffer((ctypes.c_uint8 * self._part_bytes).from_address(address), dtype=torch.uint8)


def pin(runtime: Any, base: int, nbytes: int, chunk_bytes: int = PIN_CHUNK_BYTES) -> list[int]:
    """Page-lock memory chunk by chunk; returns the address of each chunk, for :func:`unpin`.

    All or nothing: where one chunk is refused, those before it are given back and the list is empty.
    ``runtime``: ``torch.cuda.cudart()``.
    """
    done: list[int] = []
    for offset in range(0, nbytes, chunk_bytes):
        size = min(chunk_bytes, nbytes - offset)
        code = int(runtime.cudaHostRegister(base + offset, size, 0))
        if code != 0:
            logger.warning(
                "cudaHostRegister of %d bytes of the pool failed with code %d; copying without page lock. "
                "Raise the memlock limit to fix.",
                size,
                code,
            )
            unpin(runtime, done)
            return []
        done.append(base + offset)
    return done


def unpin(runtime: Any, addresses: list[int]) -> None:
    """Undo :func:`pin`."""
    for address in addresses:
        runtime.cudaHostUnregister(address)
