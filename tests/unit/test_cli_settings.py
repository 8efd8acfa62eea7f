# SPDX-License-Identifier: Apache-2.0
"""Where a setting comes from, and which origin wins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcr.cli.main import main
from kvcr.cli.settings import explain_engine, explain_guard, explain_router
from kvcr.config import cache_size
from kvcr.errors import ConfigError
from kvcr.graph.config import Kind, load_graph

AGG = Path(__file__).parents[2] / "deploy/graphs/agg.yaml"
NEEDED = ["--name", "g0", "--pool-dir", "/dev/shm/g0"]


def origins(
    words: list[str], environment: dict[str, str], explain: Any = explain_guard
) -> dict[str, tuple[object, str]]:
    return {name: (value, origin) for name, value, origin in explain(words, environment)}


def test_a_flag_goes_over_the_environment_and_that_over_the_default() -> None:
    environment = {"KVCR_GUARD_LEASE_MS": "700", "KVCR_GUARD_NICE": "3", "KVCR_GUARD_POOL_BYTES": "1GiB"}
    found = origins([*NEEDED, "--lease-ms", "900"], environment)
    assert found["lease_ms"] == (900, "flag --lease-ms")
    assert found["nice"] == (3, "KVCR_GUARD_NICE")
    assert found["pool_bytes"] == (1 << 30, "KVCR_GUARD_POOL_BYTES")
    assert found["namespace"] == ("dynamo", "default")


def test_what_is_required_and_missing_is_shown_as_such() -> None:
    found = origins([], {})
    assert {name for name, (_, origin) in found.items() if origin.startswith("missing")} == {
        "name",
        "pool_dir",
        "pool_bytes",
    }


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"KVCR_CPU_CACHE_GB": "2"}, 2 * 10**9),
        ({"DYN_KVBM_CPU_CACHE_GB": "0.5"}, 5 * 10**8),
        ({"KVCR_CPU_CACHE_GB": "2", "DYN_KVBM_CPU_CACHE_GB": "7"}, 2 * 10**9),
        ({"KVCR_CPU_CACHE_GB": "2", "KVCR_GUARD_POOL_BYTES": "1GiB"}, 1 << 30),
    ],
)
def test_the_size_of_a_pool_may_be_given_in_gb(environment: dict[str, str], expected: int) -> None:
    assert origins(NEEDED, environment)["pool_bytes"][0] == expected


@pytest.mark.parametrize("text", ["-1", "0", "much", "inf", "nan"])
def test_a_size_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="KVCR_CPU_CACHE_GB"):
        cache_size({"KVCR_CPU_CACHE_GB": text})


def test_a_graph_takes_the_size_from_the_environment_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "3")
    graph, notes = load_graph(AGG)
    guard = graph.get(Kind.GUARD)
    assert guard is not None
    assert guard.params["pool-bytes"] == 3 * 10**9
    assert any("DYN_KVBM_CPU_CACHE_GB" in note for note in notes)
    graph, _ = load_graph(AGG, [("Guard.pool-bytes", "1GiB")])
    guard = graph.get(Kind.GUARD)
    assert guard is not None
    assert guard.params["pool-bytes"] == "1GiB", "the command line goes over the environment"


def test_the_command_prints_a_table_and_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCR_GUARD_NAME", "from-environment")
    assert main(["config", "show", "--", "--pool-bytes", "2GiB"]) == 0
    assert "KVCR_GUARD_NAME" in capsys.readouterr().out
    assert main(["config", "show", "--json", "--", "--lease-ms", "400"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"setting": "lease_ms", "value": 400, "from": "flag --lease-ms"} in rows
    assert main(["config", "show", "--", "--lease-sm", "400"]) == 2


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "kvcr.toml"
        path.write_text(text)
        return str(path)

    return write


# Each kind of process: a setting; its values in the file, the environment and on the command line, as text;
# and what they become.
KINDS = [
    pytest.param(
        explain_guard,
        "guard",
        "lease_ms",
        ("400", "500", "600"),
        lambda v: ["--lease-ms", v],
        int,
        id="guard",
    ),
    pytest.param(
        explain_router,
        "router",
        "block_size",
        ("16", "32", "64"),
        lambda v: ["--block-size", v],
        int,
        id="router",
    ),
    pytest.param(
        explain_engine,
        "engine",
        "lease_wait_ms",
        ("10.0", "20.0", "30.0"),
        lambda v: [json.dumps({"lease_wait_ms": float(v)})],
        float,
        id="engine",
    ),
]


@pytest.mark.parametrize(("explain", "section", "name", "values", "flags", "kind"), KINDS)
def test_file_then_environment_then_flags(
    write: Callable[[str], str],
    explain: Any,
    section: str,
    name: str,
    values: tuple[str, str, str],
    flags: Any,
    kind: Any,
) -> None:
    in_file, in_environment, on_line = values
    path = write(f"[{section}]\n{name} = {in_file}\n")
    variable = f"KVCR_{section.upper()}_{name.upper()}"
    by_file = {"KVCR_CONFIG": path}
    both = {**by_file, variable: in_environment}
    assert origins([], {}, explain)[name][1] in ("default", "missing: required")
    assert origins([], by_file, explain)[name] == (kind(in_file), f"{path} [{section}]")
    assert origins([], both, explain)[name] == (kind(in_environment), variable)
    value, origin = origins(flags(on_line), both, explain)[name]
    assert value == kind(on_line)
    assert origin.startswith(("flag --", "kv_connector_extra_config"))


@pytest.mark.parametrize(("explain", "section", "name", "values", "flags", "kind"), KINDS)
def test_unknown_settings_are_errors_with_the_nearest_name(
    write: Callable[[str], str],
    explain: Any,
    section: str,
    name: str,
    values: Any,
    flags: Any,
    kind: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    misspelt = name.replace("_", "", 1)
    path = write(f"[{section}]\n{misspelt} = 1\n")
    with pytest.raises(ConfigError, match=f"{section}.{misspelt}; did you mean '{name}'"):
        explain([], {"KVCR_CONFIG": path})
    variable = f"KVCR_{section.upper()}_"
    with pytest.raises(ConfigError, match=f"did you mean '{variable}{name.upper()}'"):
        explain([], {variable + misspelt.upper(): "1"})
    wrong = [
        word.replace(name, misspelt).replace("-ms", "-sm").replace("-size", "-sise") for word in flags("8")
    ]
    with pytest.raises(ConfigError) as refused:
        explain(wrong, {})
    told = str(refused.value) + capsys.readouterr().err
    assert f"did you mean '{name}'" in told or f"did you mean '--{name.replace('_', '-')}'" in told


def test_a_section_that_is_none_is_an_error_with_the_nearest_name(write: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match=r"unknown section \[guards\]; did you mean 'guard'"):
        origins([], {"KVCR_CONFIG": write("[guards]\nlease_ms = 400\n")})


def test_the_flag_names_a_file_over_the_variable(write: Callable[[str], str], tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("[guard]\nlease_ms = 700\n")
    environment = {"KVCR_CONFIG": write("[guard]\nlease_ms = 400\n")}
    assert origins(["--config", str(other)], environment)["lease_ms"][0] == 700
    with pytest.raises(ConfigError, match="cannot be read"):
        origins(["--config", str(tmp_path / "none.toml")], {})


def test_the_namespace_of_dynamo_is_the_routers_unless_it_has_its_own() -> None:
    dynamo = {"DYN_NAMESPACE": "theirs"}
    assert origins([], dynamo, explain_router)["namespace"] == ("theirs", "DYN_NAMESPACE")
    own = {**dynamo, "KVCR_ROUTER_NAMESPACE": "ours"}
    assert origins([], own, explain_router)["namespace"] == ("ours", "KVCR_ROUTER_NAMESPACE")
    assert origins(["--namespace", "given"], own, explain_router)["namespace"][0] == "given"


def test_a_choice_is_checked_wherever_it_comes_from() -> None:
    with pytest.raises(ConfigError, match="KVCR_ROUTER_TOPOLOGY: topology is 'maybe'"):
        origins([], {"KVCR_ROUTER_TOPOLOGY": "maybe"}, explain_router)


def test_the_variable_of_the_command_line_is_no_setting_of_a_router() -> None:
    assert origins([], {"KVCR_ROUTER_URL": "http://127.0.0.1:1"}, explain_router)
