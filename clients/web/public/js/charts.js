/** Which charts the dashboard has, and where their numbers are in a snapshot. */

import { bytes, count, seconds, share } from "./units.js";

/** @typedef {import("./history.js").Snapshot} Snapshot */

/**
 * @typedef {object} Line
 * @property {string} name
 * @property {(snapshot: Snapshot) => number | null} value
 * @property {boolean} [isOptional]  not shown where nothing is known of it
 *
 * @typedef {object} Chart
 * @property {string} title
 * @property {string} note  what it shows, in a few words
 * @property {import("./units.js").Unit} unit
 * @property {number} least  the upper edge is not below this value
 * @property {number} [most]  nor above this one
 * @property {Line[]} lines
 */

/**
 * @param {string} group
 * @param {string} member
 * @returns {Line["value"]}
 */
function at(group, member) {
  return (snapshot) => snapshot[group]?.[member] ?? null;
}

/** @param {string} group @returns {Line[]} */
function quantiles(group) {
  return ["p50", "p95", "p99"].map((name) => ({ name, value: at(group, name) }));
}

/**
 * @param {string} member
 * @returns {Line[]} a line for each kind of process; those of frontends are added up
 */
function byProcess(member) {
  return ["engine", "frontend", "supervisor"].map((kind) => ({
    name: kind === "frontend" ? "frontends" : kind,
    isOptional: kind !== "frontend",
    value: ({ processes }) => {
      const found = Object.entries(processes).filter(([name]) => name.split("-")[0] === kind);
      const known = found.map(([, numbers]) => numbers[member]).filter((value) => value !== null);
      return known.length ? known.reduce((sum, value) => sum + value, 0) : null;
    },
  }));
}

/** @type {readonly Chart[]} */
export const CHARTS = [
  {
    title: "Requests",
    note: "in the engine",
    unit: count,
    least: 5,
    lines: [
      { name: "running", value: at("requests", "running") },
      { name: "waiting", value: at("requests", "waiting") },
    ],
  },
  {
    title: "Tokens per second",
    note: "mean of 3 s",
    unit: count,
    least: 10,
    lines: [
      { name: "generated", value: at("tokens_per_s", "generated") },
      { name: "prompt", value: at("tokens_per_s", "prompt") },
    ],
  },
  { title: "Time to first token", note: "of the last 30 s", unit: seconds, least: 0.01, lines: quantiles("first_token_s") },
  { title: "Time between tokens", note: "of the last 30 s", unit: seconds, least: 0.01, lines: quantiles("between_tokens_s") },
  { title: "KV cache", note: "share of its blocks", unit: share, least: 0.1, most: 1, lines: [{ name: "in use", value: at("cache", "used") }] },
  {
    title: "Prefix cache",
    note: "of the last 30 s",
    unit: share,
    least: 1,
    most: 1,
    lines: [{ name: "prompt tokens found", value: at("cache", "hits") }],
  },
  {
    title: "Time of a step",
    note: "mean of 3 s",
    unit: seconds,
    least: 0.001,
    lines: [
      { name: "model", value: at("steps", "model_s") },
      { name: "host", value: at("steps", "host_s") },
      { name: "GPU idle", value: at("steps", "device_idle_s"), isOptional: true },
    ],
  },
  {
    title: "Steps",
    note: "mean of 3 s",
    unit: count,
    least: 10,
    lines: [
      { name: "per second", value: at("steps", "per_s") },
      { name: "tokens in one", value: at("steps", "tokens") },
    ],
  },
  {
    title: "Rings",
    note: "how full the fullest is",
    unit: share,
    least: 0.01,
    most: 1,
    lines: [
      { name: "requests", value: at("rings", "request") },
      { name: "deltas", value: at("rings", "delta") },
    ],
  },
  {
    title: "Errors",
    note: "in the last 30 s",
    unit: count,
    least: 5,
    lines: [
      { name: "failed", value: at("errors", "failed") },
      { name: "turned away", value: at("errors", "rejected") },
      { name: "HTTP 5xx", value: at("errors", "http_5xx") },
    ],
  },
  { title: "Processor", note: "processors kept busy", unit: count, least: 1, lines: byProcess("cpu") },
  { title: "Memory", note: "resident", unit: bytes, least: 1e6, lines: byProcess("memory_bytes") },
];
