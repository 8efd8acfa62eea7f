# SPDX-License-Identifier: Apache-2.0
"""KVCR-Guard: the process that owns the pool, moves the bytes and serves peers."""
