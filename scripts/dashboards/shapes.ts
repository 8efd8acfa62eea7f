// SPDX-License-Identifier: Apache-2.0
// A dashboard file in the words of Grafana's published schema (@grafana/schema).
import type * as schema from "@grafana/schema";
import type * as stat from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen.d.ts";
import type * as states from "@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen.d.ts";
import type * as table from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen.d.ts";
import type * as time from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen.d.ts";

/** What JSON can hold of T: the value of an enum, not its name. */
type Json<T> = T extends string
  ? `${T}`
  : T extends number | boolean | null | undefined
    ? T
    : T extends object
      ? { [K in keyof T]: Json<T[K]> }
      : T;

/** Grafana fills in what a file leaves out of a panel's own options. */
type Some<T> = T extends readonly unknown[] ? T : T extends object ? { [K in keyof T]?: Some<T[K]> } : T;

/** The schema has no query of Prometheus; its documented fields, beside the ones of every query. */
type Query = Json<Omit<schema.DataQuery, "datasource">> & {
  datasource: Source;
  expr: string;
  legendFormat?: string;
  instant?: boolean;
  range?: boolean;
  format?: "table" | "time_series" | "heatmap";
};
type Source = { type: "prometheus"; uid: "${datasource}" };

type PanelOf<Kind extends string, Options, Custom> = Json<
  Omit<schema.Panel, "type" | "options" | "fieldConfig" | "targets" | "datasource">
> & {
  type: Kind;
  title: string;
  datasource: Source;
  options: Some<Json<Options>>;
  fieldConfig: {
    defaults: Json<Omit<schema.FieldConfig, "custom">> & { custom?: Some<Json<Custom>> };
    overrides: Json<schema.FieldConfigSource["overrides"]>;
  };
  targets: Query[];
};

export type TimeSeries = PanelOf<"timeseries", time.Options, time.FieldConfig>;
export type Stat = PanelOf<"stat", stat.Options, Record<string, never>>;
export type States = PanelOf<"state-timeline", states.Options, states.FieldConfig>;
export type Table = PanelOf<"table", table.Options, table.FieldConfig>;
export type Row = Json<schema.RowPanel> & { options: Record<string, never> };

/** The schema leaves the query of an annotation open. */
type Annotation = Json<Omit<schema.AnnotationQuery, "target" | "datasource">> & {
  datasource: Source;
  expr: string;
  step: string;
  tagKeys: string;
  titleFormat: string;
};

export type Dashboard = Json<Omit<schema.Dashboard, "panels" | "annotations">> & {
  uid: string;
  title: string;
  annotations: { list: Annotation[] };
  panels: (TimeSeries | Stat | States | Table | Row)[];
};
