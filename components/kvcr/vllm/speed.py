# SPDX-License-Identifier: Apache-2.0
"""How fast this engine computes prompts, measured on the scheduler's thread for microseconds a step."""

from __future__ import annotations

MIN_TOKENS = 64
"""Steps with fewer prompt tokens say more about the cost of a step than about prefill."""

SLACK_S = 5.0
"""A step that took longer is not one: the engine was idle, stopped or suspended in between."""


class PrefillSpeed:
    """Tokens per second. A step takes at least as long as its work, so each is a lower bound of the speed:
    the estimate follows the fastest ones, and forgets them slowly."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """0 while nothing was measured."""
        self._began_s = 0.0
        self._tokens = 0

    def step(self, now_s: float, prompt_tokens: int) -> None:
        """A step begins that computes this many prompt tokens: the one before it has ended by now."""
        self.ended(now_s)
        self._began_s, self._tokens = now_s, prompt_tokens

    def ended(self, now_s: float) -> None:
        """The step that began last is over."""
        tokens, self._tokens = self._tokens, 0
        seconds = now_s - self._began_s
        if tokens < MIN_TOKENS or not 0.0 < seconds < SLACK_S:
            return
        sample = tokens / seconds
        self.tokens_per_s = max(sample, 0.9 * self.tokens_per_s + 0.1 * sample)

    def recompute_ms(self, tokens: int) -> float:
        """What computing this many tokens takes; 0 while nothing was measured."""
        return 1000.0 * tokens / self.tokens_per_s if self.tokens_per_s else 0.0
