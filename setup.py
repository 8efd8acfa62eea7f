# SPDX-License-Identifier: Apache-2.0
"""The one thing pyproject.toml cannot say: the optional C extension."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvcr._native",
            sources=["components/kvcr/_native.c", "components/kvcr/_xxh3.c"],
            depends=["components/kvcr/_xxh3.h"],
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra"],
            # Without a compiler the install goes on, and kvcr.pool.native uses numpy (x86-64 only).
            optional=True,
        )
    ]
)
