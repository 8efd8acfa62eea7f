# SPDX-License-Identifier: Apache-2.0
"""The vLLM adapter: the only part of KVCR, with its launcher, that imports vLLM and torch."""
