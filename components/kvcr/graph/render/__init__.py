# SPDX-License-Identifier: Apache-2.0
"""A graph as files for others to run: docker compose, and Dynamo's operator on Kubernetes.

Both start from the plan that ``kvcr serve`` starts processes from, made for another site: the same flags,
with names of services instead of loopback.
"""
