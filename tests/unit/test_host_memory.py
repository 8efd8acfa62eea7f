# SPDX-License-Identifier: Apache-2.0
"""HostBlockMemory: blocks made of pieces arrive in slots in order, and come back the same."""

from __future__ import annotations

import numpy as np
import pytest

from kvcr.client import HostBlockMemory

BLOCKS, LAYERS, LAYER_BYTES, SLOTS, SLOT_BYTES = 6, 3, 40, 5, 4096


def random_bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)


def layers_apart() -> list[np.ndarray]:
    """Layers allocated one after the other, as vLLM's CPU back-end does."""
    storage = random_bytes(LAYERS, BLOCKS, LAYER_BYTES)
    return [storage[layer] for layer in range(LAYERS)]


def layers_interleaved() -> list[np.ndarray]:
    """All layers of a block beside each other."""
    storage = random_bytes(BLOCKS, LAYERS, LAYER_BYTES)
    return [storage[:, layer] for layer in range(LAYERS)]


def layers_unequal() -> list[np.ndarray]:
    return [random_bytes(BLOCKS, 24), random_bytes(BLOCKS, 40), random_bytes(BLOCKS, 8)]


def layers_unordered() -> list[np.ndarray]:
    return layers_apart()[::-1]


@pytest.mark.parametrize("make", [layers_apart, layers_interleaved, layers_unequal, layers_unordered])
def test_a_block_is_its_segments_in_order_and_survives_the_round_trip(make) -> None:
    segments = make()
    memory = HostBlockMemory(segments)
    slots = np.zeros((SLOTS, SLOT_BYTES), np.uint8)
    before = [segment.copy() for segment in segments]
    slot_ids, block_ids = np.array([4, 0, 2], np.int32), np.array([1, 5, 3], np.int32)

    memory.store(slots, slot_ids, block_ids)
    for slot, block in zip(slot_ids, block_ids, strict=True):
        expected = np.concatenate([segment[block] for segment in before])
        assert (slots[slot, : memory.part_bytes] == expected).all()
        assert not slots[slot, memory.part_bytes :].any()

    for segment in segments:
        segment[:] = 0
    memory.load(slots, slot_ids, block_ids)
    for segment, old in zip(segments, before, strict=True):
        assert (segment[block_ids] == old[block_ids]).all()
        untouched = np.setdiff1d(np.arange(BLOCKS), block_ids)
        assert not segment[untouched].any()


def test_part_bytes_is_the_sum_over_segments() -> None:
    memory = HostBlockMemory(layers_unequal())
    assert (memory.blocks, memory.part_bytes) == (BLOCKS, 72)


def test_segments_that_are_not_rows_of_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="segment 0 must be uint8"):
        HostBlockMemory([np.zeros((4, 8), np.float32)])
    with pytest.raises(ValueError, match="segment 1 has 5 blocks, segment 0 has 4"):
        HostBlockMemory([np.zeros((4, 8), np.uint8), np.zeros((5, 8), np.uint8)])
    with pytest.raises(ValueError, match="at least one segment"):
        HostBlockMemory([])


def test_slots_too_small_for_a_block_are_refused() -> None:
    with pytest.raises(ValueError, match="a slot part has 64 bytes, a block needs 120"):
        HostBlockMemory(layers_apart()).attach(np.zeros((2, 64), np.uint8))
