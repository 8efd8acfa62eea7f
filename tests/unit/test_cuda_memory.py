# SPDX-License-Identifier: Apache-2.0
"""Engine memory on a CUDA device. What needs one is skipped without; pinning is tried on a fake runtime."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402
from kvcr.vllm.memory import CudaBlockMemory, block_memory, pin, unpin

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: the CUDA copies of kvcr.vllm.memory are not run here"
)
BLOCKS, LAYERS, LAYER_SHAPE, SLOTS = 80, 3, (2, 16, 4, 8), 100


class FakeRuntime:
    """cudart's registration calls; refuses the one that is named."""

    def __init__(self, refuse: int = -1) -> None:
        self.refuse = refuse
        self.registered: dict[int, int] = {}
        self.calls = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        if self.calls - 1 == self.refuse:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_memory_is_registered_in_chunks_that_cover_it_once() -> None:
    runtime = FakeRuntime()
    chunks = pin(runtime, 1000, 2500, chunk_bytes=1024)
    assert runtime.registered == {1000: 1024, 2024: 1024, 3048: 452}
    unpin(runtime, chunks)
    assert runtime.registered == {}


@pytest.mark.parametrize("refuse", [0, 1, 2])
def test_a_refused_chunk_gives_those_before_it_back(refuse: int) -> None:
    runtime = FakeRuntime(refuse)
    assert pin(runtime, 1000, 2500, chunk_bytes=1024) == []
    assert runtime.registered == {}


def caches() -> dict[str, object]:
    generator = torch.Generator(device="cuda").manual_seed(7)
    return {
        f"layer.{n}": torch.randn((BLOCKS, *LAYER_SHAPE), device="cuda", generator=generator)
        for n in range(LAYERS)
    }


@needs_gpu
def test_blocks_come_back_as_they_were_stored() -> None:
    tensors = caches()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    memory = block_memory(tensors, BLOCKS)
    assert isinstance(memory, CudaBlockMemory)
    slots = np.zeros((SLOTS, memory.part_bytes + 64), np.uint8)
    memory.attach(slots)
    try:
        block_ids = np.random.default_rng(1).permutation(BLOCKS)[:70].astype(np.int32)
        slot_ids = np.random.default_rng(2).permutation(SLOTS)[:70].astype(np.int32)
        memory.store(slots, slot_ids, block_ids, memory.fence())
        for tensor in tensors.values():
            tensor.zero_()
        memory.load(slots, slot_ids, block_ids, memory.fence())
        torch.cuda.synchronize()
        chosen = torch.from_numpy(block_ids.astype(np.int64)).cuda()
        others = torch.from_numpy(np.setdiff1d(np.arange(BLOCKS), block_ids)).cuda()
        for name, tensor in tensors.items():
            assert torch.equal(tensor[chosen], before[name][chosen])
            assert not tensor[others].any()
    finally:
        memory.detach(slots)


@needs_gpu
def test_a_store_waits_for_the_work_that_was_issued_before_it() -> None:
    tensors = caches()
    memory = block_memory(tensors, BLOCKS)
    slots = np.zeros((SLOTS, memory.part_bytes), np.uint8)
    one = np.zeros(1, np.int32)
    # Long enough that a copy that does not wait would see the old bytes.
    busy = torch.randn((4096, 4096), device="cuda")
    for _ in range(20):
        busy = busy @ busy
    for tensor in tensors.values():
        tensor[0] = 1.0
    memory.store(slots, one, one, memory.fence())
    assert (slots[0].view(np.float32) == 1.0).all()


@needs_gpu
def test_a_read_only_pool_of_another_guard_can_be_loaded_from() -> None:
    tensors = caches()
    memory = block_memory(tensors, BLOCKS)
    slots = np.ones((4, memory.part_bytes // 4), np.float32).view(np.uint8)
    slots.flags.writeable = False
    memory.load(slots, np.array([3], np.int32), np.array([5], np.int32), memory.fence())
    torch.cuda.synchronize()
    assert all(bool((tensor[5] == 1.0).all()) for tensor in tensors.values())
