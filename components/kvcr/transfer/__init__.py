# SPDX-License-Identifier: Apache-2.0
"""Ways to get the bytes of blocks out of another guard's pool."""
