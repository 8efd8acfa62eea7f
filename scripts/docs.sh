#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Regenerate what is generated and build the site into build/site. `--check`: fail where generated files are stale.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
if [ "${1:-}" = --check ]; then
    "$python" scripts/gen_config_docs.py --check
    "$python" scripts/gen_reference.py --check
else
    "$python" scripts/gen_config_docs.py
    "$python" scripts/gen_reference.py
    bash scripts/render.sh
fi
"$python" scripts/check_links.py

# In an environment of its own: none of it is needed to run or test KVCR.
venv=.venv-docs
lock=requirements/lock-docs.txt
wanted=$(sha256sum "$lock" | cut -d' ' -f1)
if [ "$(cat "$venv/.stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "docs: installing mkdocs into $venv (once)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/pip" install -qq --disable-pip-version-check --no-deps -r "$lock"
    printf '%s\n' "$wanted" >"$venv/.stamp"
fi
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --strict --quiet
echo "docs: $(find build/site -name '*.html' | wc -l) pages, from file://$PWD/build/site/index.html on"
