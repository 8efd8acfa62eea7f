#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Render deploy/compose and deploy/kubernetes from deploy/graphs again, and the dashboards.
set -euo pipefail
cd "$(dirname "$0")/.."
render() { .venv/bin/python -m kvcr.cli graph render "$@"; }
compose=(cpu=deploy/graphs/agg.yaml cuda=deploy/graphs/agg_gpu.yaml)
render --to compose "${compose[@]}" -o deploy/compose/compose.yaml
render --to prometheus "${compose[@]}" -o deploy/compose/prometheus/prometheus.yml
for graph in deploy/graphs/*.yaml; do
    render --to dgd "$graph" -o "deploy/kubernetes/$(basename "$graph")"
done
.venv/bin/python scripts/gen_dashboards.py
