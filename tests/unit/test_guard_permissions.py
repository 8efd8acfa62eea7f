# SPDX-License-Identifier: Apache-2.0
"""What is lost without a permission is said by name, and only where it is lost."""

from __future__ import annotations

import errno
import resource

from kvcr.guard import permissions

GIB = 1 << 30


def test_a_low_memory_lock_limit_costs_rdma_and_nothing_where_there_is_none() -> None:
    said = permissions.memory_lock_loss(64 << 10, False, 2 * GIB, ["mlx5_0", "mlx5_1"])
    assert "limited to 65536 bytes" in said
    assert str(2 * GIB) in said
    assert "mlx5_0, mlx5_1 cannot register it" in said
    assert "memlock=-1" in said
    assert not permissions.memory_lock_loss(64 << 10, False, 2 * GIB, [])
    assert not permissions.memory_lock_loss(64 << 10, True, 2 * GIB, ["mlx5_0"])
    assert not permissions.memory_lock_loss(2 * GIB, False, 2 * GIB, ["mlx5_0"])
    assert not permissions.memory_lock_loss(resource.RLIM_INFINITY, False, 2 * GIB, ["mlx5_0"])


def test_cma_is_refused_by_a_profile_or_by_yama() -> None:
    assert "Operation not permitted" in permissions.memory_access_loss(errno.EPERM, 0, True)
    assert "Function not implemented" in permissions.memory_access_loss(errno.ENOSYS, 0, False)
    assert "ptrace_scope is 2" in permissions.memory_access_loss(0, 2, False)
    assert not permissions.memory_access_loss(0, 2, True)
    assert not permissions.memory_access_loss(0, 1, False)


def test_this_process_can_be_asked() -> None:
    assert permissions.read_own_memory() in (0, errno.EPERM, errno.ENOSYS)
    assert permissions.ptrace_scope() in range(4)
    assert isinstance(permissions.may(19), bool)
