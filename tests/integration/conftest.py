# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the integration tests."""

from deployment import deployment, runtimes_end

__all__ = ["deployment", "runtimes_end"]
