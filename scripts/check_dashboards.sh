#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Type-check dashboards against Grafana's published schema. `scripts/check_dashboards.sh [FOLDER]`, by default
# deploy/grafana/dashboards. Needs node and npm, and once the npm registry; without them it says so and passes.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-deploy/grafana/dashboards}
work=.cache/dashboards

skip() {
    echo "dashboards: types not checked, $*"
    exit 0
}
command -v node >/dev/null && command -v npm >/dev/null || skip "node and npm are not installed"
mkdir -p "$work"
exec 9>"$work/.lock"
flock 9
wanted=$(sha256sum scripts/dashboards/package-lock.json | cut -d' ' -f1)
if [ "$(cat "$work/.stamp" 2>/dev/null)" != "$wanted" ]; then
    cp scripts/dashboards/package.json scripts/dashboards/package-lock.json "$work"
    (cd "$work" && timeout 120 npm ci --ignore-scripts --no-audit --no-fund --silent --fetch-retries=1) || skip "npm could not install"
    printf '%s\n' "$wanted" >"$work/.stamp"
fi

# The result depends on these files alone.
inputs=$(cat "$folder"/*.json scripts/dashboards/* | sha256sum | cut -d' ' -f1)
if [ "$(cat "$work/.checked" 2>/dev/null)" != "$inputs" ]; then
    rm -f "$work"/*.ts
    cp scripts/dashboards/shapes.ts "$work"
    node scripts/dashboards/generate.mjs "$folder" "$work"
    (cd "$work" && node_modules/.bin/tsc --noEmit --strict --skipLibCheck --target es2022 --module esnext \
        --moduleResolution bundler ./*.ts)
    printf '%s\n' "$inputs" >"$work/.checked"
fi
echo "dashboards: $(ls "$folder"/*.json | wc -l) conform to @grafana/schema" \
    "$(node -p 'require("./scripts/dashboards/package.json").dependencies["@grafana/schema"]')"
