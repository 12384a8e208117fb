/** The processes of the server, as a table. */

import { el } from "./dom.js";
import { bytes, count, seconds, share } from "./units.js";

/** @type {[string, import("./units.js").Unit][]} */
const COLUMNS = [
  ["pid", (value) => String(value ?? "–")],
  ["cpu", count],
  ["memory_bytes", bytes],
  ["streams", count],
  ["loop_lag_s", seconds],
  ["request_ring", share],
  ["delta_ring", share],
];

/**
 * @param {HTMLTableSectionElement} body
 * @param {Record<string, Record<string, number | null>>} processes
 */
export function drawProcesses(body, processes) {
  const rows = Object.entries(processes).map(([name, numbers]) => {
    const cells = COLUMNS.map(([member, unit]) => el("td", {}, member in numbers ? unit(numbers[member] ?? null) : ""));
    return el("tr", {}, el("th", { scope: "row" }, name.replace("-", " ")), ...cells);
  });
  body.replaceChildren(...rows);
}
