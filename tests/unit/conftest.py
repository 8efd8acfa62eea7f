# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the unit tests."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator

import pytest

from kvcr.pool import native


@pytest.fixture(params=["native", "fallback"])
def backend_name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs a test with the C extension and again with its numpy twin; child processes follow."""
    name: str = request.param
    if name == "native" and importlib.util.find_spec("kvcr._native") is None:
        pytest.skip("the extension kvcr._native is not built")
    if name == "fallback" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("numpy may not stand in for the extension on this machine")
    monkeypatch.setenv("KVCR_NO_NATIVE", "1" if name == "fallback" else "0")
    native.backend.cache_clear()
    yield name
    native.backend.cache_clear()
