# SPDX-License-Identifier: Apache-2.0
"""KVCR: a KV cache that outlives the engine and is shared by the whole deployment.

Importing this package is cheap and starts nothing. The public surface is :mod:`kvcr.api`; the command
line is ``kvcr`` (:mod:`kvcr.cli`); the sidecar is ``python -m kvcr.guard``.
"""

from kvcr.distribution import warn_about_clash

__version__ = "0.1.0"

__all__ = ["__version__"]

warn_about_clash()
