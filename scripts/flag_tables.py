# SPDX-License-Identifier: Apache-2.0
"""Write the tables of command line flags that graph files are checked against.

Usage: ``python scripts/flag_tables.py [COMPONENT ...]``, with the locked environment active. The launcher
must refuse an unknown key at once, without the ten seconds that importing vLLM takes; so the flags of
every component it can start are kept as text, one option string a line, and refreshed with this script
when a version in the lock changes.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "components" / "kvcr" / "graph" / "flags"
MODULES = {
    "frontend": "dynamo.frontend",
    "guard": "kvcr.guard",
    "router": "router_hints",
    "vllm_worker": "kvcr.vllm.worker_main",
}


class _Seen(Exception):
    """Raised instead of parsing: every option was declared by then."""


def collect(module: str) -> set[str]:
    """All long option strings that ``python -m module`` declares, on every parser it builds."""
    options: set[str] = set()
    add_argument = argparse._ActionsContainer.add_argument

    def recording(self: Any, *args: Any, **kwargs: Any) -> argparse.Action:
        action = add_argument(self, *args, **kwargs)
        options.update(action.option_strings)
        return action

    def stop(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise _Seen

    argparse._ActionsContainer.add_argument = recording  # type: ignore[method-assign]
    saved = sys.argv
    sys.argv = [module, "--help"]
    argparse.ArgumentParser.print_help = stop  # type: ignore[method-assign]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except (_Seen, SystemExit):
        pass
    finally:
        sys.argv = saved
    return {option for option in options if option.startswith("--")} - {"--help", "--version"}


def main() -> None:
    """Rewrite the tables named on the command line, all of them by default. One process per table."""
    names = sys.argv[1:] or sorted(MODULES)
    if len(names) > 1:
        for name in names:
            status = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, __file__, name])
            if status:
                raise SystemExit(f"{name}: exit status {status}")
        return
    (name,) = names
    options = collect(MODULES[name])
    table = TABLES / f"{name}.txt"
    table.write_text("".join(f"{option}\n" for option in sorted(options)))
    print(f"{table.relative_to(ROOT)}: {len(options)} flags")


if __name__ == "__main__":
    main()
