#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write docs/configuration.md from the settings in components/kvcr/config.py.

``gen_config_docs.py`` writes the file, ``gen_config_docs.py --check`` fails when it is out of date.
The source is read, not imported: names, types, defaults and the text under each field.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "components/kvcr/config.py"
TARGET = ROOT / "docs/configuration.md"

_HEAD = """# Configuration

This page is generated from `components/kvcr/config.py` by `scripts/gen_config_docs.py`. Do not edit it.

Guard, router and engine read settings from a file, from the environment and from their command line. The
environment goes over the file, and the command line over both. The file is TOML, with one section for each
kind of process; `--config FILE` or `KVCR_CONFIG` names it:

```toml
[guard]
pool_bytes = "64GiB"

[router]
prefill_tokens_per_s = 20000

[engine]
on_mismatch = "discard"
```

In the environment these are `KVCR_GUARD_POOL_BYTES`, `KVCR_ROUTER_PREFILL_TOKENS_PER_S` and
`KVCR_ENGINE_ON_MISMATCH`. An engine's command line is the `kv_connector_extra_config` of vLLM. An unknown
setting is an error that names the nearest known one, wherever it stands. `kvcr config show --of
guard|router|engine -- FLAGS` prints every value and where it comes from.

Sizes may be written in bytes or with a unit: `512MB` (decimal), `2GiB` (binary). Every duration carries its
unit in its name. The router's settings are its flags, in the [reference](reference/cli.md).
"""

_SECTIONS = {
    "GuardConfig": (
        "The guard",
        "Flags of `python -m kvcr.guard`. Each has a twin in the environment: `--pool-dir` is\n"
        "`KVCR_GUARD_POOL_DIR`.",
    ),
    "EngineConfig": (
        "The engine",
        "Keys of `kv_connector_extra_config` in vLLM's `--kv-transfer-config`, and arguments of the same\n"
        "names for code that embeds KVCR.",
    ),
    "PeerRecord": (
        "A peer",
        "One entry of the JSON list in a peers file (`--peers FILE`).",
    ),
}


def render(source: str) -> str:
    """The whole page for the text of a config module."""
    body = ast.parse(source).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    choices = _choices(body)
    parts = [_HEAD]
    for name, (title, words) in _SECTIONS.items():
        if name not in classes:
            raise SystemExit(f"{SOURCE}: class {name} is gone; change _SECTIONS in {Path(__file__).name}")
        parts.append(f"\n## {title}\n\n{words}\n\n{_table(name, classes[name], choices)}")
    return "".join(parts)


def _choices(body: list[ast.stmt]) -> dict[str, str]:
    """Aliases of ``Literal[...]``, with the values they allow."""
    return {
        target.id: " or ".join(f"`{value}`" for value in ast.literal_eval(node.value.slice))
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript)
        for target in node.targets
        if isinstance(target, ast.Name) and ast.unparse(node.value.value) == "Literal"
    }


def _table(class_name: str, node: ast.ClassDef, choices: dict[str, str]) -> str:
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    for field in fields:
        name = ast.unparse(field.target)
        shown = f"--{name.replace('_', '-')}" if class_name == "GuardConfig" else name
        default = "required" if field.value is None else f"`{_default(field.value)}`"
        kind = ast.unparse(field.annotation)
        rows.append(f"| `{shown}` | {choices.get(kind, _cell(kind))} | {default} | {_meaning(node, field)} |")
    return "\n".join(rows) + "\n"


def _default(value: ast.expr) -> str:
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.LShift):
        return str(ast.literal_eval(value.left) << ast.literal_eval(value.right))
    return ast.unparse(value).replace("'", '"')


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _meaning(node: ast.ClassDef, field: ast.AnnAssign) -> str:
    """The string under the field, on one line, with Sphinx roles turned into plain code marks."""
    position = node.body.index(field) + 1
    if position == len(node.body):
        return ""
    follower = node.body[position]
    if not (isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant)):
        return ""
    text = " ".join(str(follower.value.value).split())
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return _cell(re.sub(r"``([^`]+)``", r"`\1`", text))


def main() -> int:
    parser = argparse.ArgumentParser(description="write docs/configuration.md")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail when the page is out of date"
    )
    check = parser.parse_args().check
    page = render(SOURCE.read_text())
    if not check:
        TARGET.write_text(page)
        return 0
    if TARGET.exists() and TARGET.read_text() == page:
        return 0
    print(f"{TARGET} is out of date; run scripts/gen_config_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
