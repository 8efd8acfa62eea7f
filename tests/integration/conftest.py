# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the integration tests."""

from pathlib import Path

import pytest
from deployment import deployment, runtimes_end

__all__ = ["deployment", "runtimes_end"]


@pytest.fixture
def directory(shm_dir: Path) -> Path:
    """Where the pools of a test's guards are."""
    return shm_dir
