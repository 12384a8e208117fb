/** Measures for people: each is written as short as it can be, and null is a dash. */

/** @typedef {(value: number | null) => string} Unit */

const NONE = "–";

/** @param {number} value @returns {string} with about three digits */
function short(value) {
  if (value >= 99_950) return `${digits(value / 1000)}k`;
  return value >= 1000 ? String(Math.round(value)) : digits(value);
}

/** @param {number} value @returns {string} */
function digits(value) {
  if (value >= 99.95 || Number.isInteger(value)) return String(Math.round(value));
  return value.toFixed(value < 9.995 ? 2 : 1).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/** @type {Unit} */
export const count = (value) => (value === null ? NONE : short(value));

/** @type {Unit} */
export function seconds(value) {
  if (value === null) return NONE;
  if (value === 0) return "0 ms";
  if (value < 0.9995) return `${digits(value * 1000)} ms`;
  return `${digits(value)} s`;
}

/** @type {Unit} */
export const share = (value) => (value === null ? NONE : `${digits(Math.round(value * 1000) / 10)} %`);

/** @type {Unit} */
export function bytes(value) {
  if (value === null) return NONE;
  return value < 0.9995e9 ? `${digits(value / 1e6)} MB` : `${digits(value / 1e9)} GB`;
}

/** @param {number} ageS @returns {string} how long ago, in words */
export function ago(ageS) {
  const whole = Math.round(ageS);
  if (whole === 0) return "now";
  const [minutes, rest] = [Math.floor(whole / 60), whole % 60];
  return `${[minutes ? `${minutes} min` : "", rest ? `${rest} s` : ""].filter(Boolean).join(" ")} ago`;
}
