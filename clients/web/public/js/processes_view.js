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
 * Rows and cells stay where they are, so that what is selected, or read aloud, is not taken away every second.
 *
 * @param {HTMLTableSectionElement} body
 * @param {Record<string, Record<string, number | null>>} processes
 */
export function drawProcesses(body, processes) {
  const names = Object.keys(processes);
  while (body.rows.length > names.length) body.deleteRow(-1);
  while (body.rows.length < names.length) {
    body.append(el("tr", {}, el("th", { scope: "row" }), ...COLUMNS.map(() => el("td"))));
  }
  names.forEach((name, index) => {
    const numbers = processes[name] ?? {};
    const texts = COLUMNS.map(([member, unit]) => (member in numbers ? unit(numbers[member] ?? null) : ""));
    [name.replace("-", " "), ...texts].forEach((text, place) => {
      const cell = body.rows[index]?.cells[place];
      if (cell && cell.textContent !== text) cell.textContent = text;
    });
  });
}
