# SPDX-License-Identifier: Apache-2.0
"""Blocks of no model: what benchmarks that need no engine store and move."""

from __future__ import annotations

from kvcr.layout import Layout


def layout(part_bytes: int) -> Layout:
    """One rank, blocks of ``part_bytes`` whatever the rest says."""
    return Layout(
        model="bench@0+0",
        dtype="bfloat16",
        block_size=16,
        layers=2,
        kv_heads=2,
        head_size=16,
        part_bytes=part_bytes,
        engine="bench",
    )
