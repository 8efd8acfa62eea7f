# SPDX-License-Identifier: Apache-2.0
"""``kvcr config show``: every setting of a guard, router or engine, its value, and where that comes from."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvcr.config import EngineConfig, GuardConfig, engine_settings, guard_settings, load
from kvcr.errors import ConfigError
from kvcr.sources import PREFIXES, Setting
from kvcr.tables import table

Row = tuple[str, Any, str]
"""Name, value and origin."""


def add_parser(commands: Any) -> None:
    """Declare ``config show``."""
    config = commands.add_parser("config", help="settings: values and where they come from")
    verbs = config.add_subparsers(dest="verb", metavar="show", required=True)
    show = verbs.add_parser(
        "show",
        help="value and origin of every setting",
        description="What a guard, router or engine would use in this environment. A flag goes over the "
        "environment, that over the settings file, and that over the default.",
    )
    show.add_argument("--of", choices=tuple(PREFIXES), default="guard", help="whose (default: guard)")
    show.add_argument("--json", action="store_true", help="one JSON object on stdout")
    show.add_argument(
        "flags",
        nargs=argparse.REMAINDER,
        metavar="-- FLAGS",
        help="flags of it; of an engine, one kv_connector_extra_config as JSON",
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError as the process would."""
    words = arguments.flags[1:] if arguments.flags[:1] == ["--"] else arguments.flags
    explain = {"guard": explain_guard, "router": explain_router, "engine": explain_engine}[arguments.of]
    rows = explain(words, os.environ)
    if arguments.json:
        print(json.dumps([{"setting": name, "value": value, "from": origin} for name, value, origin in rows]))
    else:
        print(
            table(
                ("SETTING", "VALUE", "FROM"), [(name, _text(value), origin) for name, value, origin in rows]
            )
        )
    return 0


def explain_guard(words: Sequence[str], environment: Mapping[str, str]) -> list[Row]:
    """In the order of the reference page. Raises ConfigError."""
    from kvcr.guard.__main__ import flags

    given = _parsed(lambda: flags(list(words)), "kvcr.guard")
    return _rows(GuardConfig, guard_settings(environment, given, given.pop("config", None)))


def explain_router(words: Sequence[str], environment: Mapping[str, str]) -> list[Row]:
    """In the order of its ``--help``. Raises ConfigError."""
    # By name: the command line runs where there is no router.
    settings = importlib.import_module("router_hints.settings")
    found = _parsed(lambda: settings.sources(words, environment), "router_hints")
    return [
        (name, setting.value, "missing: required" if _is_missing(name, setting, settings) else setting.origin)
        for name, setting in found.items()
    ]


def explain_engine(words: Sequence[str], environment: Mapping[str, str]) -> list[Row]:
    """Raises ConfigError."""
    try:
        given = json.loads(words[0]) if words else {}
    except ValueError as error:
        raise ConfigError(f"kv_connector_extra_config {words[0]!r} is not JSON: {error}") from error
    return _rows(EngineConfig, engine_settings(environment, given))


def _rows(cls: Any, found: Mapping[str, Setting]) -> list[Row]:
    fields = msgspec.structs.fields(cls)
    missing = {f.name: _EXAMPLES[f.name] for f in fields if f.required and f.name not in found}
    config = load(cls, {**missing, **{name: one.value for name, one in found.items()}}, "settings")
    rows: list[Row] = []
    for field in fields:
        value = msgspec.to_builtins(getattr(config, field.name))
        if field.name in missing:
            rows.append((field.name, None, "missing: required"))
        else:
            rows.append((field.name, value, found[field.name].origin if field.name in found else "default"))
    return rows


_EXAMPLES = {"name": "example", "pool_dir": "/dev/shm/example", "pool_bytes": 1}


def _is_missing(name: str, setting: Setting, settings: Any) -> bool:
    return name in settings.REQUIRED and setting.value is None


def _parsed(parse: Any, program: str) -> Any:
    """The program's own parser checks its flags."""
    try:
        return parse()
    except SystemExit as error:
        raise ConfigError(f"these are no flags of it; see python -m {program} --help") from error


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return str(value) if not isinstance(value, list) else json.dumps(value)
