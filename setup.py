# SPDX-License-Identifier: Apache-2.0
"""The one thing pyproject.toml cannot say: the optional C extensions."""

from setuptools import Extension, setup

# Functions of a module are called with the module, of which most have no use.
FLAGS = ["-O3", "-std=c11", "-Wall", "-Wextra", "-Wno-unused-parameter"]

# Optional: without a compiler the install goes on. kvcr.pool.native then uses numpy (x86-64 only),
# kvcr.keys, router_hints.table and router_hints.ways use Python. Without kvcr._shield, memory that is lost
# under a mapping ends the process.
setup(
    ext_modules=[
        Extension(
            "kvcr._native",
            sources=["components/kvcr/_native.c", "components/kvcr/_xxh3.c"],
            depends=["components/kvcr/_xxh3.h"],
            extra_compile_args=FLAGS,
            optional=True,
        ),
        Extension(
            "kvcr._chain",
            sources=["components/kvcr/_chain.c"],
            extra_compile_args=FLAGS,
            optional=True,
        ),
        Extension(
            "kvcr._shield",
            sources=["components/kvcr/_shield.c"],
            extra_compile_args=FLAGS,
            optional=True,
        ),
        Extension(
            "router_hints._native",
            sources=["components/router_hints/_native.c", "components/router_hints/_table.c"],
            depends=["components/router_hints/_table.h"],
            extra_compile_args=FLAGS,
            optional=True,
        ),
    ]
)
