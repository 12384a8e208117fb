/** Lines of charts, as numbers: nothing here knows of the page. */

/** @typedef {import("./history.js").Point} Point */

import { GAP_S } from "./history.js";

/** A chart is this wide and high in its own units. */
export const WIDTH = 300;
export const HEIGHT = 100;

/**
 * @param {number} value
 * @returns {number} the least of 1, 2, 5, 10, 20 … (and so on, downwards too) that is not less
 */
export function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  for (const digit of [1, 2, 5]) {
    // Powers of ten are not exact below one.
    if (value <= digit * power * (1 + 1e-9)) return digit * power;
  }
  return 10 * power;
}

/**
 * @param {Point[]} points
 * @returns {Point[][]} the runs in which something is known and no time is missing
 */
export function runs(points) {
  /** @type {Point[][]} */
  const found = [];
  let lastAgeS = Infinity;
  for (const point of points) {
    if (point.value === null) {
      lastAgeS = Infinity;
      continue;
    }
    if (lastAgeS - point.ageS > GAP_S) found.push([]);
    found.at(-1)?.push(point);
    lastAgeS = point.ageS;
  }
  return found;
}

/**
 * @param {Point[]} points
 * @param {number} spanS  time from the left to the right edge
 * @param {number} top  the value at the upper edge
 * @param {boolean} isArea  the line, or what is below it
 * @returns {string} as the `d` of an SVG path
 */
export function path(points, spanS, top, isArea) {
  return runs(points)
    .map((run) => {
      const places = run.map(({ ageS, value }) => [across(ageS, spanS), up(value ?? 0, top)]);
      const [first, last] = [places[0]?.[0], places.at(-1)?.[0]];
      const line = places.map(([x, y]) => `${x} ${y}`).join("L");
      // A single point is a dot: a line without length, whose ends are round.
      if (!isArea) return `M${line}${places.length === 1 ? `L${line}` : ""}`;
      return `M${first} ${HEIGHT}L${line}L${last} ${HEIGHT}Z`;
    })
    .join("");
}

/** @param {number} ageS @param {number} spanS */
export function across(ageS, spanS) {
  return round(WIDTH * (1 - ageS / spanS));
}

/** @param {number} value @param {number} top */
function up(value, top) {
  return round(HEIGHT * (1 - Math.min(1, Math.max(0, value / top))));
}

/** @param {number} value */
function round(value) {
  return Math.round(value * 10) / 10;
}
