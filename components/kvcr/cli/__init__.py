# SPDX-License-Identifier: Apache-2.0
"""The ``kvcr`` command: ``serve``, ``doctor``, ``version``."""
