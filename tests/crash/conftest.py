# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the crash tests."""

from crew import crew, no_fork_server_is_left

__all__ = ["crew", "no_fork_server_is_left"]
