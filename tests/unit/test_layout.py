# SPDX-License-Identifier: Apache-2.0
"""Layouts: any field that differs is seen, and named with both values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvcr.errors import LayoutMismatch
from kvcr.layout import PAGE_BYTES, Layout
from tests.unit.pools import layout

OTHER: dict[str, Any] = {
    "model": "tiny@0+1",
    "dtype": "bfloat16",
    "block_size": 32,
    "layers": 3,
    "kv_heads": 4,
    "head_size": 32,
    "part_bytes": 8192,
    "tp_size": 2,
    "pp_size": 2,
    "group": 1,
    "attention_layout": "FLASH_ATTN/NHD",
    "engine": "vllm-0.31.0",
}


def test_these_tests_know_every_field() -> None:
    assert set(OTHER) == set(Layout.__struct_fields__)


@pytest.mark.parametrize("field", OTHER)
def test_a_field_that_differs_is_named_with_both_values(field: str) -> None:
    ours, theirs = layout(), layout(**{field: OTHER[field]}) if field != "tp_size" else layout(ranks=2)
    assert ours.digest() != theirs.digest()
    with pytest.raises(LayoutMismatch) as caught:
        ours.require_same(theirs, ours="the pool", theirs="the engine")
    assert f"{field}: the pool has {getattr(ours, field)!r}, the engine has {OTHER[field]!r}" in str(
        caught.value
    )


def test_equal_layouts_pass_and_have_one_digest() -> None:
    layout().require_same(layout(), ours="a", theirs="b")
    assert layout().digest() == layout().digest()
    assert len(layout().digest()) == 32


def test_the_digest_survives_the_wire() -> None:
    shape = layout(attention_layout="x", engine="y")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(shape), type=Layout).digest() == shape.digest()


@pytest.mark.parametrize(("part_bytes", "pages"), [(1, 1), (4095, 1), (4096, 1), (4097, 2), (65536, 16)])
def test_a_slot_is_whole_pages(part_bytes: int, pages: int) -> None:
    assert layout(part_bytes=part_bytes).slot_part_bytes == pages * PAGE_BYTES


def test_ranks_are_all_processes_with_a_part_of_a_block() -> None:
    assert layout(ranks=4, pp_size=2).ranks == 8
