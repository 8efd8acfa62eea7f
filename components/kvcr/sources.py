# SPDX-License-Identifier: Apache-2.0
"""Where the settings of a process come from: a file, the environment, its command line; later ones win.

The file is TOML with one section for each kind of process, so that a deployment may have one for all::

    [guard]
    pool_bytes = "64GiB"

    [router]
    prefill_tokens_per_s = 20000

    [engine]
    on_mismatch = "discard"

It is named by ``--config FILE`` or ``KVCR_CONFIG``. In the environment a setting of the guard is
``KVCR_GUARD_...``, of the router ``KVCR_ROUTER_...``, of the engine ``KVCR_ENGINE_...``.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, NoReturn

from kvcr.errors import ConfigError

CONFIG_ENV = "KVCR_CONFIG"
PREFIXES = {"guard": "KVCR_GUARD_", "router": "KVCR_ROUTER_", "engine": "KVCR_ENGINE_"}
"""Sections of the file, and what variables of theirs begin with."""
_OTHERS = {"KVCR_ROUTER_URL"}
"""Variables that begin like settings and are none: this one tells the command line where a router is."""


class Setting(NamedTuple):
    value: Any
    origin: str
    """For people: a flag, a variable, or a file and its section."""


class Parser(argparse.ArgumentParser):
    """Flags are written out; an unknown one is answered with the nearest there is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.add_argument("--config", metavar="FILE", help=f"TOML file of settings; or {CONFIG_ENV}")

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0].split("=")[0]
        known = [flag for action in self._actions for flag in action.option_strings]
        super().error(message + nearest(unknown, known) if unknown else message)


def gather(
    section: str,
    known: Collection[str],
    environment: Mapping[str, str],
    flags: Mapping[str, Any],
    *,
    path: str | None = None,
    flag: str = "flag --{}",
) -> dict[str, Setting]:
    """Every setting that is given anywhere, and by what. ``path``: of the file, if a flag named one.

    ``flags`` are taken as they are. Raises ConfigError for a file that cannot be read, and for a setting in
    the file or the environment that is not ``known``, with the nearest one that is.
    """
    found: dict[str, Setting] = {}
    path = path or environment.get(CONFIG_ENV, "")
    if path:
        for name, value in read_file(path).get(section, {}).items():
            if name not in known:
                raise ConfigError(f"{path}: unknown setting {section}.{name}{nearest(name, known)}")
            found[name] = Setting(value, f"{path} [{section}]")
    prefix = PREFIXES[section]
    for variable, text in environment.items():
        if variable.startswith(prefix) and variable not in _OTHERS:
            name = variable.removeprefix(prefix).lower()
            if name not in known:
                others = [prefix + other.upper() for other in known]
                raise ConfigError(f"environment: unknown setting {variable}{nearest(variable, others)}")
            found[name] = Setting(text, variable)
    for name, value in flags.items():
        found[name] = Setting(value, flag.format(name.replace("_", "-")))
    return found


def read_file(path: str) -> dict[str, dict[str, Any]]:
    """The sections of a settings file. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"settings file {path!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"settings file {path!r} is not TOML: {error}") from error
    for name, body in document.items():
        if name not in PREFIXES:
            raise ConfigError(f"{path}: unknown section [{name}]{nearest(name, PREFIXES)}")
        if not isinstance(body, dict):
            raise ConfigError(f"{path}: {name} is {body!r}; write a section [{name}] with settings in it")
    return document


def nearest(name: str, known: Collection[str]) -> str:
    """``; did you mean ...?`` or what is known, for the end of a message."""
    return meant(name, known) or f"; known: {', '.join(sorted(known))}"


def meant(name: str, known: Collection[str]) -> str:
    """``; did you mean ...?``, or nothing where no name is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def is_true(environment: Mapping[str, str], name: str) -> bool:
    """Whether this variable says yes."""
    return environment.get(name, "").strip().lower() in ("1", "true", "yes", "on")
