# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, one module per name: ``make bench NAME=e2e QUICK=1``, or ``python -m bench.e2e --quick``.

Each prints one JSON object as its last line on stdout; progress and tables go to stderr.
"""
