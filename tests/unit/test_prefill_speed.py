# SPDX-License-Identifier: Apache-2.0
"""How fast an engine computes prompts, from what its scheduler sees."""

from __future__ import annotations

import pytest

from kvcr.vllm.torchvision_ops import declare_missing_operators

declare_missing_operators()
pytest.importorskip("vllm")

# ruff: noqa: E402
from kvcr.vllm.speed import PrefillSpeed


def test_nothing_is_known_before_a_prompt_was_computed() -> None:
    speed = PrefillSpeed()
    speed.step(0.0, 1)
    speed.step(0.1, 1)
    assert (speed.tokens_per_s, speed.recompute_ms(1000)) == (0.0, 0.0)


def test_a_step_ends_with_its_output_or_with_the_next_step() -> None:
    speed = PrefillSpeed()
    speed.step(0.0, 1000)
    speed.ended(0.5)
    assert speed.tokens_per_s == 2000.0
    assert speed.recompute_ms(4000) == 2000.0
    speed.step(10.0, 1000)
    speed.step(10.25, 0)
    assert speed.tokens_per_s == 4000.0


def test_slow_steps_are_forgotten_slowly_and_pauses_at_once() -> None:
    speed = PrefillSpeed()
    speed.step(0.0, 1000)
    speed.ended(0.1)
    # Idle for a minute: no step took that long.
    speed.step(1.0, 1000)
    speed.step(61.0, 1000)
    assert speed.tokens_per_s == 10_000.0
    speed.ended(62.0)
    assert speed.tokens_per_s == pytest.approx(9_100.0)
