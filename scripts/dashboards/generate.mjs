// SPDX-License-Identifier: Apache-2.0
// generate.mjs FOLDER_OF_JSON FOLDER: writes a .ts file for each dashboard, one constant for each panel.
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { basename, join } from "node:path";

const KINDS = { timeseries: "TimeSeries", stat: "Stat", "state-timeline": "States", table: "Table", row: "Row" };
const [from, to] = process.argv.slice(2);

for (const file of readdirSync(from).filter((name) => name.endsWith(".json"))) {
  const { panels, ...rest } = JSON.parse(readFileSync(join(from, file), "utf8"));
  const lines = [`import type { Dashboard, ${Object.values(KINDS).join(", ")} } from "./shapes";`];
  panels.forEach((panel, index) => {
    const kind = KINDS[panel.type];
    if (kind === undefined) throw new Error(`${file}: panel ${panel.title}: no shape for type ${panel.type}`);
    lines.push(`// ${file}, panel ${JSON.stringify(panel.title)}`);
    lines.push(`const panel${index}: ${kind} = ${JSON.stringify(panel, null, 1)};`);
  });
  const named = panels.map((_, index) => `panel${index}`).join(", ");
  const body = JSON.stringify(rest, null, 1).replace(/\n?\}$/, "");
  lines.push(`export const dashboard: Dashboard = ${body},\n "panels": [${named}]\n};`);
  writeFileSync(join(to, `${basename(file, ".json")}.ts`), lines.join("\n") + "\n");
}
