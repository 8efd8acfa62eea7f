# SPDX-License-Identifier: Apache-2.0
"""Write deploy/grafana/dashboards/*.json. `--check` only says whether they are current."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders.common import StackingConfig
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, Row
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    ValueMap,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FOLDER = Path(__file__).parents[1] / "deploy/grafana/dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
STATES = ("empty", "standby", "checking", "active")
COLORS = ("text", "green", "yellow", "red")
STATE_NAMES = {
    str(code): ValueMappingResult(text=state.upper(), color=COLORS[code]) for code, state in enumerate(STATES)
}
EVENTS = (
    (
        "Engine died",
        "red",
        "sum by (instance) (changes(kvcr_failovers_total[20s])) > 0",
    ),
    (
        "Engine is back",
        "green",
        'max by (instance) (kvcr_guard_state{state="standby"}) == 1 and on (instance) '
        'max by (instance) (max_over_time(kvcr_guard_state{state="active"}[20s])) == 1',
    ),
)
"""Marked on every panel of every dashboard: what fell or rose, around which death."""


@dataclass(frozen=True)
class Panel:
    """One panel. ``queries`` are pairs of a legend and an expression."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str
    kind: str = "time"
    """``time``, ``stat``, ``states``, ``matrix`` (of two labels) or ``ranks`` (one row a rank)."""
    span: int = 8
    height: int = 8
    stack: bool = False
    """Areas on top of each other: parts of a whole."""


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Per second, summed."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{where}}}[$__rate_interval]))"


def or_none(expression: str, label: str) -> str:
    """Zero, by a name, beside what there is: a panel without data would look broken."""
    return f'{expression} or label_replace(vector(0), "{label}", "none", "", "")'


def quantile(q: float, histogram: str, by: str = "") -> str:
    """Of a histogram's observations in the interval."""
    grouped = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({grouped}) (rate({histogram}_bucket[$__rate_interval])))"


def quantiles(histogram: str, *qs: float, by: str = "") -> tuple[tuple[str, str], ...]:
    label = f" {{{{{by}}}}}" if by else ""
    return tuple((f"p{round(q * 100)}{label}", quantile(q, histogram, by)) for q in qs)


TTFT = "dynamo_frontend_time_to_first_token_seconds"
LOCAL = rate("vllm:kvcr_local_blocks_total")
FETCHED = rate("vllm:kvcr_fetched_blocks_total")
QUERIED = rate("vllm:kvcr_queried_blocks_total")

TRANSFERS: dict[str, tuple[Panel, ...]] = {
    "Peer to peer (G2 to G2)": (
        Panel(
            "Pulled from peers",
            units.BytesPerSecondSI,
            (("{{transport}}", rate("kvcr_pulled_bytes_total", "transport")),),
            "Bytes that guards copied from other guards, as the reader counts them.",
        ),
        Panel(
            "Served to peers",
            units.BytesPerSecondSI,
            (("{{instance}} {{transport}}", rate("kvcr_served_bytes_total", "instance, transport")),),
            "The same bytes, as the source counts them: who carries the load.",
        ),
        Panel(
            "Duration of a pull",
            units.Seconds,
            quantiles("kvcr_pull_seconds", 0.5, 0.9, 0.99),
            "Pulls that moved something, from the request to the last committed block.",
        ),
        Panel(
            "Fetches by result",
            units.OpsPerSecond,
            (("{{result}}", rate("kvcr_fetches_total", "result")),),
            "ok: all blocks arrived; partial: some; none.",
        ),
        Panel(
            "Blocks that did not arrive",
            units.OpsPerSecond,
            (("{{status}}", or_none(rate("kvcr_failed_blocks_total", "status"), "status")),),
            "miss: nobody has it; gone: evicted meanwhile; too_slow: recomputing is faster; failed.",
        ),
        Panel(
            "Speed of links",
            units.BytesPerSecondSI,
            (("{{instance}} from {{peer}} ({{transport}})", "kvcr_peer_bytes_per_second"),),
            "How fast a block was read from each peer when the link was opened.",
        ),
    ),
    "Offload (G1 to G2)": (
        Panel(
            "Stored by engines",
            units.BytesPerSecondSI,
            (("{{instance}}", rate("kvcr_deposited_bytes_total", "instance")),),
            "Blocks that engines copied from G1 into their pools.",
            span=12,
        ),
        Panel(
            "Evictions by reason",
            units.OpsPerSecond,
            (("{{reason}}", or_none(rate("kvcr_evicted_blocks_total", "reason"), "reason")),),
            "Blocks that made room.",
            span=12,
        ),
    ),
    "Onboard (G2 to G1)": (
        Panel(
            "Loaded by engines",
            units.BytesPerSecondSI,
            (("{{instance}}", rate("kvcr_loaded_bytes_total", "instance")),),
            "Blocks that engines copied from their pools into G1 instead of computing them.",
            span=12,
        ),
        Panel(
            "Blocks of prompts, by where they came from",
            units.OpsPerSecond,
            (("own pool", LOCAL), ("peer", FETCHED), ("asked for", QUERIED)),
            "What the connector was asked for is the denominator of the hit ratio.",
            span=12,
        ),
    ),
    "Pools": (
        Panel(
            "Slots by state",
            units.Short,
            (("{{state}}", "sum by (state) (kvcr_pool_slots)"),),
            "Of all pools. free + granted + ready + cooling + quarantined is their size.",
            stack=True,
        ),
        Panel(
            "Corrupt blocks",
            units.Short,
            (
                (
                    "{{where}}",
                    or_none("sum by (where) (increase(kvcr_corrupt_blocks_total[$__range]))", "where"),
                ),
            ),
            "Blocks that failed their checksum, by who found out. They are recomputed.",
        ),
        Panel(
            "Verified in the background",
            units.BytesPerSecondSI,
            (("{{instance}}", rate("kvcr_scrubbed_bytes_total", "instance")),),
            "The scrubber hashes resident blocks at a limited rate.",
        ),
    ),
    "Actions of the router": (
        Panel(
            "Actions by kind and result",
            units.OpsPerSecond,
            (("{{action}} {{code}}", or_none(rate("kvcr_actions_total", "action, code"), "action")),),
            "What guards were told to do, and how it ended.",
            span=12,
        ),
        Panel(
            "Blocks moved, dropped in G1, dead on arrival",
            units.OpsPerSecond,
            (
                ("moved", f"{rate('kvcr_moved_blocks_total')} or vector(0)"),
                ("dropped in G1", f"{rate('kvcr_g1_dropped_blocks_total')} or vector(0)"),
                ("filled after their end", f"{rate('kvcr_dead_fills_total')} or vector(0)"),
            ),
            "What moves and invalidations did besides evicting.",
            span=12,
        ),
    ),
}

FAILOVER: dict[str, tuple[Panel, ...]] = {
    "State": (
        Panel(
            "State of each guard",
            units.NoUnit,
            (
                (
                    "{{instance}}",
                    " + ".join(
                        f'max by (instance) (kvcr_guard_state{{state="{state}"}}) * {code}'
                        for code, state in enumerate(STATES)
                    ),
                ),
            ),
            "STANDBY: a live engine. CHECKING: it is missing. ACTIVE: its death is proven.",
            kind="states",
            span=24,
            height=6,
        ),
        Panel(
            "Engines that died",
            units.Short,
            (("deaths", "sum(increase(kvcr_failovers_total[$__range]))"),),
            "By proof, in the time shown.",
            kind="stat",
            span=6,
        ),
        Panel(
            "Time to ACTIVE",
            units.Seconds,
            (
                (
                    "p90",
                    "histogram_quantile(0.9, sum by (le) (increase(kvcr_failover_seconds_bucket[$__range])))",
                ),
            ),
            "From the first sign of a death to its proof.",
            kind="stat",
            span=6,
        ),
        Panel(
            "Epoch of the pool",
            units.Short,
            (("{{instance}}", "max by (instance) (kvcr_pool_epoch)"),),
            "Raised at each take-over and each hand-off.",
            span=6,
        ),
        Panel(
            "Workers known to the router",
            units.Short,
            (("{{state}}", "sum by (state) (kvcr_router_workers)"),),
            "down: it failed a dispatch, or its guard says that it died.",
            span=6,
        ),
    ),
    "What users see": (
        Panel(
            "Time to first token",
            units.Seconds,
            quantiles(TTFT, 0.5, 0.9, 0.95),
            "At the frontend.",
        ),
        Panel(
            "Output tokens",
            "tok/s",
            (("tokens per second", rate("dynamo_frontend_output_tokens_total")),),
            "At the frontend.",
        ),
        Panel(
            "Requests by how they ended",
            units.RequestsPerSecond,
            (("{{outcome}}", rate("kvcr_router_requests_total", "outcome")),),
            "At the router: unreachable ones were planned again.",
        ),
    ),
    "The surviving pool": (
        Panel(
            "Served to peers",
            units.BytesPerSecondSI,
            (("{{instance}}", rate("kvcr_served_bytes_total", "instance")),),
            "Look at the guard that is ACTIVE: blocks of a dead engine that others go on using.",
            span=12,
        ),
        Panel(
            "Loaded after coming back",
            units.BytesPerSecondSI,
            (("{{instance}}", rate("kvcr_loaded_bytes_total", "instance")),),
            "An engine that came back refills from its own pool.",
            span=12,
        ),
    ),
    "Protection": (
        Panel(
            "Messages of a past epoch",
            units.Short,
            (
                (
                    "{{message}}",
                    or_none("sum by (message) (increase(kvcr_stale_messages_total[$__range]))", "message"),
                ),
            ),
            "Refused, as the engine that sent them had been declared dead.",
        ),
        Panel(
            "Engines fenced",
            units.Short,
            (("fenced", "sum(increase(kvcr_fences_total[$__range])) or vector(0)"),),
            "Silent engines that were sent SIGKILL (fence_after_s).",
        ),
        Panel(
            "Self-checks",
            units.Short,
            (("{{result}}", or_none("sum by (result) (kvcr_self_checks_total)", "result")),),
            "Idle comparisons of the directory with what the guard believes.",
        ),
    ),
}

FLEET: dict[str, tuple[Panel, ...]] = {
    "Reuse": (
        Panel(
            "Hit ratio",
            units.PercentUnit,
            (("own pool", f"{LOCAL} / {QUERIED}"), ("with peers", f"({LOCAL} + {FETCHED}) / {QUERIED}")),
            "Of the blocks that G1 did not have: how many came from a pool instead of being computed.",
        ),
        Panel(
            "Prompt tokens by where the plan expects them",
            "tok/s",
            (("{{tier}}", rate("kvcr_router_planned_tokens_total", "tier")),),
            "g1: in the engine; g2: in its pool; peer: copied; compute.",
        ),
        Panel(
            "Tokens not computed",
            units.Short,
            (
                (
                    "saved",
                    'sum(increase(kvcr_router_planned_tokens_total{tier=~"g2|peer"}[$__range]))',
                ),
            ),
            "Prompt tokens that came from a pool, in the time shown.",
            kind="stat",
        ),
    ),
    "Requests": (
        Panel(
            "Requests by guard",
            units.RequestsPerSecond,
            (("beside {{guard}}", rate("kvcr_router_requests_total", "guard")),),
            "Of the worker beside each guard, whose instance id is new at each restart.",
        ),
        Panel("Time to first token", units.Seconds, quantiles(TTFT, 0.5, 0.9, 0.99), "At the frontend."),
        Panel(
            "Plans by reason",
            units.OpsPerSecond,
            (("{{reason}}", rate("kvcr_router_plans_total", "reason")),),
            "Why requests went where they did.",
        ),
        Panel(
            "Hints",
            units.OpsPerSecond,
            (("{{action}}", or_none(rate("kvcr_router_hints_total", "action"), "action")),),
            "By primitive.",
        ),
        Panel(
            "Time to plan",
            units.Seconds,
            quantiles("kvcr_router_plan_seconds", 0.5, 0.99),
            "Of one request, in the router.",
        ),
        Panel(
            "Index",
            units.Short,
            (("{{guard}}", "sum by (guard) (kvcr_router_index_blocks)"),),
            "Blocks the router knows of, by guard.",
        ),
    ),
    "Hot prefixes": (
        Panel(
            "Prefixes asked for most",
            units.Short,
            (
                ("Key, first 6 bytes", "sum by (instance, rank) (kvcr_router_hot_prefix_key)"),
                ("Requests/s", "sum by (instance, rank) (kvcr_router_hot_prefix_requests_per_second)"),
                ("Blocks", "sum by (instance, rank) (kvcr_router_hot_prefix_blocks)"),
                ("Guards that hold it", "sum by (instance, rank) (kvcr_router_hot_prefix_guards)"),
            ),
            "By router. `kvcr top --hot` shows the whole keys, and who holds them.",
            kind="ranks",
            span=12,
        ),
        Panel(
            "Requests for the hottest prefixes",
            units.RequestsPerSecond,
            (
                (
                    "{{instance}} {{rank}}",
                    "sum by (instance, rank) (kvcr_router_hot_prefix_requests_per_second)",
                ),
            ),
            "By rank. One line far above the others is a prefix that more guards should hold.",
            span=12,
        ),
    ),
    "Who pulls from whom": (
        Panel(
            "Bytes in the time shown",
            units.BytesSI,
            (
                (
                    "",
                    "sum by (instance, peer) (increase(kvcr_peer_pulled_bytes_total[$__range]))",
                ),
            ),
            "Rows read, columns were read from. Sources outside the reader's RDMA domain should be rare.",
            kind="matrix",
            span=12,
        ),
        Panel(
            "Links",
            units.Short,
            (("", "max by (instance, peer) (kvcr_peer_ready)"),),
            "1: a canary block was read from the peer and verified. 0: no plan copies over it.",
            kind="matrix",
            span=12,
        ),
    ),
    "Streams and leases": (
        Panel(
            "Lag of streams",
            units.Short,
            (
                ("inventory of {{guard}}", "max by (guard) (kvcr_router_inventory_lag_batches)"),
                ("states of {{instance}}", "max by (instance) (kvcr_failover_events_waiting)"),
                ("actions for {{instance}}", "max by (instance) (kvcr_cluster_actions_waiting)"),
            ),
            "Batches that a router has not applied, changes of state that a guard has not published, and "
            "actions that it has not read.",
            span=6,
        ),
        Panel(
            "Events dropped",
            units.Short,
            (
                ("inventory", "sum(increase(kvcr_cluster_batches_dropped_total[$__range]))"),
                ("states", "sum(increase(kvcr_failover_events_dropped_total[$__range]))"),
                ("router", "sum(increase(kvcr_router_bus_dropped_total[$__range]))"),
            ),
            "While NATS was away for long. Routers ask guards for what they missed.",
            span=6,
        ),
        Panel(
            "Connections made",
            units.Short,
            (
                (
                    "{{instance}} to NATS",
                    "sum by (instance) (kvcr_router_bus_connects_total) "
                    "or sum by (instance) (kvcr_cluster_nats_connects_total)",
                ),
                ("{{instance}} to Dynamo", "sum by (instance) (kvcr_cluster_runtimes_total)"),
            ),
            "Since the process started; more than one is a reconnect.",
            span=6,
        ),
        Panel(
            "Leases of peers",
            units.Short,
            (
                ("held at {{instance}}", "sum by (instance) (kvcr_leases)"),
                ("{{how}}, per second", or_none(rate("kvcr_leases_ended_total", "how"), "how")),
            ),
            "released: the reader said that it was done. expired: it did not in time.",
            span=6,
        ),
    ),
}

DASHBOARDS = {
    "transfers": ("KVCR transfers", TRANSFERS),
    "failover": ("KVCR failover", FAILOVER),
    "fleet": ("KVCR fleet", FLEET),
}


def render(name: str) -> str:
    """The JSON of one dashboard."""
    title, rows = DASHBOARDS[name]
    builder = (
        Dashboard(title)
        .uid(f"kvcr-{name}")
        .tags(["kvcr"])
        .refresh("10s")
        .time("now-15m", "now")
        .timezone("browser")
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for row, panels in rows.items():
        builder = builder.with_row(Row(row))
        for panel in panels:
            builder = builder.with_panel(_panel(panel))
    document = json.loads(JSONEncoder(sort_keys=True, indent=2).encode(builder.build()))
    return json.dumps(_tidy(document), indent=2, sort_keys=True) + "\n"


def _panel(panel: Panel) -> Any:
    kinds = {
        "time": timeseries.Panel,
        "stat": stat.Panel,
        "states": statetimeline.Panel,
        "matrix": table.Panel,
        "ranks": table.Panel,
    }
    built = (
        kinds[panel.kind]()
        .title(panel.title)
        .description(panel.about)
        .datasource(SOURCE)
        .unit(panel.unit)
        .span(panel.span)
        .height(panel.height)
    )
    if panel.kind == "states":
        built = built.mappings([ValueMap(options=STATE_NAMES)])
    if panel.stack:
        built = built.stacking(StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(25)
    if panel.kind == "matrix":
        grouped = {"columnField": "peer", "rowField": "instance", "valueField": "Value"}
        built = built.with_transformation(DataTransformerConfig(id_val="groupingToMatrix", options=grouped))
    if panel.kind == "ranks":
        built = built.with_transformation(DataTransformerConfig(id_val="merge"))
    for letter, (legend, expression) in zip("ABCDEF", panel.queries, strict=False):
        query = prometheus.Dataquery().datasource(SOURCE).expr(expression).ref_id(letter)
        if panel.kind in ("matrix", "ranks"):
            query = query.instant().format(PromQueryFormat.TABLE)
        if panel.kind == "ranks":
            # After the merge, the values of query A are a column of this name.
            column: dict[str, Any] = {"displayName": legend}
            if legend.startswith("Key"):
                column["unit"] = "hex"
            built = built.override_by_name(
                f"Value #{letter}", [DynamicConfigValue(key, value) for key, value in column.items()]
            )
        built = built.with_target(query.legend_format(legend))
    if panel.kind == "ranks":
        built = built.override_by_name("Time", [DynamicConfigValue("custom.hidden", True)])
    return built


def _tidy(document: dict[str, Any]) -> dict[str, Any]:
    """What the SDK leaves out or gets wrong: ids of panels, and keys that Grafana's own types do not know."""
    for number, panel in enumerate(document["panels"], 1):
        panel["id"] = number
        if panel.get("options") is None:
            panel["options"] = {}
        for change in panel.get("transformations", ()):
            change["options"] = change.get("options") or {}
    for variable in document["templating"]["list"]:
        for key in [key for key in variable if key.startswith("auto")]:
            del variable[key]
    document["schemaVersion"] = 41
    document["annotations"] = {
        "list": [
            {
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "enable": True,
                "expr": expression,
                "iconColor": color,
                "name": name,
                "step": "5s",
                "tagKeys": "instance",
                "titleFormat": name,
            }
            for name, color, expression in EVENTS
        ]
    }
    return document


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for name in DASHBOARDS:
        path, text = FOLDER / f"{name}.json", render(name)
        if not path.exists() or path.read_text() != text:
            stale.append(path.name)
            if not check:
                path.write_text(text)
    words = "stale: " + ", ".join(stale) if stale else "current"
    print(f"dashboards: {words}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
