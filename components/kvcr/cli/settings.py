# SPDX-License-Identifier: Apache-2.0
"""``kvcr config show``: every setting of a guard, its value, and where the value comes from."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvcr.cli.tables import table
from kvcr.config import GUARD_ENV_PREFIX, GuardConfig, cache_size, from_environment, load
from kvcr.errors import ConfigError


def add_parser(commands: Any) -> None:
    """Declare ``config show``."""
    config = commands.add_parser("config", help="settings of a guard: values and where they come from")
    verbs = config.add_subparsers(dest="verb", metavar="show", required=True)
    show = verbs.add_parser(
        "show",
        help="value and origin of every setting",
        description="What `python -m kvcr.guard` with these flags would use in this environment. A flag goes "
        "over the environment, and that over the default.",
    )
    show.add_argument("--json", action="store_true", help="one JSON object on stdout")
    show.add_argument("flags", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="flags of kvcr.guard")


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError as the guard would."""
    rows = explain(_flags(arguments.flags), os.environ)
    if arguments.json:
        print(json.dumps([{"setting": name, "value": value, "from": origin} for name, value, origin in rows]))
    else:
        print(
            table(
                ("SETTING", "VALUE", "FROM"), [(name, _text(value), origin) for name, value, origin in rows]
            )
        )
    return 0


def explain(flags: Mapping[str, Any], environment: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    """Name, value and origin of every setting, in the order of the reference page. Raises ConfigError."""
    found = from_environment(environment)
    needed = {
        field.name: _example(field.name)
        for field in msgspec.structs.fields(GuardConfig)
        if field.required and field.name not in found and field.name not in flags
    }
    config = load(GuardConfig, {**needed, **found, **flags}, "settings")
    size = cache_size(environment)
    rows: list[tuple[str, Any, str]] = []
    for name in GuardConfig.__struct_fields__:
        value = msgspec.to_builtins(getattr(config, name))
        if name in flags:
            origin = f"flag --{name.replace('_', '-')}"
        elif GUARD_ENV_PREFIX + name.upper() in environment:
            origin = GUARD_ENV_PREFIX + name.upper()
        elif name in found and size is not None:
            origin = size[0]
        elif name in needed:
            value, origin = None, "missing: required"
        else:
            origin = "default"
        rows.append((name, value, origin))
    return rows


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """``--pool-bytes 2GiB --cluster`` as settings; the guard's own parser checks them."""
    from kvcr.guard.__main__ import flags

    words = list(words)
    try:
        return flags(words[1:] if words[:1] == ["--"] else words)
    except SystemExit as error:
        raise ConfigError("these are no flags of kvcr.guard; see python -m kvcr.guard --help") from error


def _example(name: str) -> Any:
    return {"name": "example", "pool_dir": "/dev/shm/example", "pool_bytes": 1}[name]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return str(value) if not isinstance(value, list) else json.dumps(value)
