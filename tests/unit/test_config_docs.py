# SPDX-License-Identifier: Apache-2.0
"""The configuration page says what the code accepts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kvcr.config import EngineConfig, GuardConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_config_docs", ROOT / "scripts/gen_config_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(generator: ModuleType) -> None:
    assert (ROOT / "docs/configuration.md").read_text() == generator.render(generator.SOURCE.read_text())


def test_every_setting_has_a_row(generator: ModuleType) -> None:
    page = generator.render(generator.SOURCE.read_text())
    for name in GuardConfig.__struct_fields__:
        assert f"| `--{name.replace('_', '-')}` |" in page
    for name in EngineConfig.__struct_fields__:
        assert f"| `{name}` |" in page


def test_text_under_a_field_becomes_its_meaning(generator: ModuleType) -> None:
    source = "\n".join(
        [
            "class GuardConfig:",
            "    size: int | None = 3",
            '    """How many; see :class:`kvcr.x.Y`',
            '    and ``z``."""',
            "class EngineConfig:",
            "    a: str",
            "class PeerRecord:",
            "    b: str",
        ]
    )
    page = generator.render(source)
    assert "| `--size` | int \\| None | `3` | How many; see `kvcr.x.Y` and `z`. |" in page
    assert "| `a` | str | required |  |" in page
