# SPDX-License-Identifier: Apache-2.0
"""The main job, shown: one long prompt computed on one worker, pulled by another."""
