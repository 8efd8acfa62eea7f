# SPDX-License-Identifier: Apache-2.0
"""What a guard says and does when it starts: small mounts, lacking permissions, leftovers of the dead.

All with real processes; what is forbidden is forbidden by the kernel.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_client import COMPONENTS, EngineClient, GuardProcess, chain
from waiting import until

from kvcr.pool import WriterLock

MIB = 1 << 20


def start(
    pool_dir: Path, *arguments: str, before: Callable[[], None] | None = None, prefix: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    command = [
        *prefix,
        sys.executable,
        "-m",
        "kvcr.guard",
        "--name",
        pool_dir.name,
        "--pool-dir",
        str(pool_dir),
    ]
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
        env={**os.environ, "PYTHONPATH": str(COMPONENTS)},
    )


# --- room --------------------------------------------------------------------------------------------------


def test_a_pool_that_the_mount_cannot_hold_is_refused_at_once_with_the_size_it_needs(shm_dir: Path) -> None:
    needed = 1 << 50
    process = start(shm_dir / "big", "--pool-bytes", str(needed))
    _, complaint = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"needs {needed} bytes" in complaint
    assert "docker --shm-size" in complaint


def test_the_64_mb_that_a_container_has_by_default_are_refused_by_name(shm_dir: Path) -> None:
    """In a mount namespace of its own, on a tmpfs of that size."""
    mount = shm_dir / "mount"
    mount.mkdir()
    script = f'mount -t tmpfs -o size=64m tmpfs {mount} && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", script, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    process = start(mount / "pool", "--pool-bytes", "1GiB", prefix=prefix)
    _, complaint = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"needs {1 << 30} bytes for the pool, {64 * MIB} are available" in complaint


# --- descriptors -------------------------------------------------------------------------------------------


def test_a_limit_of_open_files_that_is_too_low_is_refused_with_the_fix(shm_dir: Path) -> None:
    process = start(
        shm_dir / "g0",
        *("--pool-bytes", "16MiB"),
        before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
    )
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "256 files may be open here, a guard needs 1024: raise the limit (ulimit -Hn" in complaint


# --- permissions -------------------------------------------------------------------------------------------


def forbid_process_vm_readv() -> None:
    """A seccomp filter as some container runtimes have it: EPERM for this one system call."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    load, jump_equal, give = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | 1
    process_vm_readv = 310
    instructions = b"".join(
        struct.pack("HBBI", *one)
        for one in (
            (load, 0, 0, 0),
            (jump_equal, 0, 1, process_vm_readv),
            (give, 0, 0, refuse),
            (give, 0, 0, allow),
        )
    )
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = Program(4, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, filter_mode, ctypes.byref(program), 0, 0) == 0


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of the system call is of x86-64")
def test_without_cma_it_says_what_is_lost_and_serves(shm_dir: Path) -> None:
    process = start(shm_dir / "g0", "--pool-bytes", "16MiB", before=forbid_process_vm_readv)
    try:
        assert process.stdout is not None
        assert '"ready": true' in process.stdout.readline()
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        said = next(line for line in lines if "CMA" in line)
        assert "process_vm_readv is refused (Operation not permitted)" in said
        assert "copy over TCP instead" in said
        assert process.poll() is None
    finally:
        process.terminate()
        process.communicate(timeout=10)


# --- leftovers ---------------------------------------------------------------------------------------------


def test_half_a_pool_in_its_own_directory_is_removed(shm_dir: Path) -> None:
    pool = shm_dir / "g0"
    pool.mkdir()
    for name in ("data", "data.new", "meta.new"):
        (pool / name).write_bytes(bytes(MIB))
    (pool / "guard.sock").touch()
    (pool / "guard.sock").unlink()
    with GuardProcess(shm_dir, "g0", slots=16) as guard, EngineClient(guard, "engine") as engine:
        assert not (pool / "data.new").exists()
        assert not (pool / "meta.new").exists()
        root, keys = chain(4, "x")
        engine.deposit(keys, root)
        assert all(engine.right(keys))


def test_a_killed_guards_socket_and_a_dead_engines_writer_file_are_taken_over(shm_dir: Path) -> None:
    with GuardProcess(shm_dir, "g0", slots=16) as first:
        with EngineClient(first, "engine") as engine:
            root, keys = chain(4, "x")
            engine.deposit(keys, root)
        first.process.kill()
        first.process.wait()
        # As an engine leaves it that is killed together with its guard.
        (first.pool_dir / "writers" / "dead-engine.0").touch()
        assert (first.pool_dir / "guard.sock").exists()
        with GuardProcess(shm_dir, "g0", slots=16) as second, EngineClient(second, "another") as engine:
            assert all(engine.right(keys))
            assert not (second.pool_dir / "writers" / "dead-engine.0").exists()
            # Its death is one that a guard found, though nobody saw it.
            assert second.metrics()["kvcr_failovers_total"] == 1


def test_a_second_guard_takes_nothing_of_a_live_one(shm_dir: Path) -> None:
    with GuardProcess(shm_dir, "g0", slots=16) as guard, EngineClient(guard, "engine") as engine:
        root, keys = chain(4, "x")
        engine.deposit(keys, root)
        (guard.pool_dir / "data.new").write_bytes(b"what a guard is making")
        rival = start(guard.pool_dir, "--pool-bytes", "1MiB")
        _, complaint = rival.communicate(timeout=30)
        assert rival.returncode == 1
        assert f"held by pid {guard.pid}" in complaint
        assert (guard.pool_dir / "data.new").exists()
        assert all(engine.right(keys))


def test_directories_of_guards_that_engines_started_are_taken_from_the_dead_only(shm_dir: Path) -> None:
    def spawned(name: str) -> GuardProcess:
        (shm_dir / f"{name}.spawn").touch()
        guard = GuardProcess(shm_dir, name, slots=16)
        with EngineClient(guard, f"engine-of-{name}") as engine:
            root, keys = chain(4, name)
            engine.deposit(keys, root)
        return guard

    def kill(guard: GuardProcess) -> None:
        guard.process.send_signal(signal.SIGKILL)
        guard.process.wait()

    dead, revived, engine_lives = (spawned(name) for name in ("dead", "revived", "engine-lives"))
    with spawned("alive"), GuardProcess(shm_dir, "deployed", slots=16) as deployed:
        for guard in (dead, revived, engine_lives, deployed):
            kill(guard)
            guard.close()
        lock = WriterLock(engine_lives.pool_dir, "an-engine-that-lives", 0)
        lock.acquire()
        try:
            with (
                GuardProcess(shm_dir, "starts", "--linger-s", "4", slots=16, env={}) as starts,
                EngineClient(starts, "engine"),
            ):
                until(lambda: "dead is of a dead guard" in starts.log_path.read_text(), "the dead are found")
                # Somebody comes for one of them in time.
                with GuardProcess(shm_dir, "revived", slots=16):
                    until(lambda: not dead.pool_dir.exists(), "the dead guard's directory is removed")
                    time.sleep(0.5)
                    for kept in ("revived", "alive", "engine-lives", "deployed"):
                        assert (shm_dir / kept / "guard.lock").exists(), kept
                until(lambda: "removed" in starts.log_path.read_text(), "it says what it removed")
        finally:
            lock.release()
