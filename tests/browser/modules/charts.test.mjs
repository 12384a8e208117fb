import assert from "node:assert/strict";
import test from "node:test";
import { CHARTS } from "../../../clients/web/public/js/charts.js";
import { History } from "../../../clients/web/public/js/history.js";
import { niceTop, path, runs } from "../../../clients/web/public/js/lines.js";
import { ago, bytes, count, seconds, share } from "../../../clients/web/public/js/units.js";

const point = (ageS, value) => ({ ageS, value });

test("the upper edge is a round number that nothing exceeds", () => {
  assert.deepEqual([0, 0.3, 1, 1.1, 5, 7, 10, 101, 2001].map(niceTop), [1, 0.5, 1, 2, 5, 10, 10, 200, 5000]);
  for (let value = 0.0007; value < 1e6; value *= 1.37) {
    const top = niceTop(value);
    assert.ok(top >= value * (1 - 1e-9) && top < value * 2.6, `${value}: ${top}`);
  }
});

test("a line is broken where nothing is known and where time is missing", () => {
  const found = runs([point(20, 1), point(19, 2), point(18, null), point(17, 3), point(9, 4), point(8, 5)]);
  assert.deepEqual(found.map((run) => run.map(({ value }) => value)), [[1, 2], [3], [4, 5]]);
  assert.deepEqual(runs([]), []);
});

test("paths", () => {
  const points = [point(60, 0), point(30, 5), point(0, 20)];
  assert.equal(path(points.map((each) => ({ ...each, ageS: each.ageS / 30 })), 2, 10, false), "M0 100L150 50L300 0");
  assert.equal(path([point(1, 5), point(0, 10)], 2, 10, true), "M150 100L150 50L300 0L300 100Z");
  assert.equal(path([point(0, 5)], 60, 10, false), "M300 50L300 50");
  assert.equal(path([], 60, 10, false), "");
});

test("a history keeps its minutes, and shows as many as it has", () => {
  const history = new History(300);
  assert.deepEqual([history.newest, history.spanS, history.near(0)], [null, 60, null]);
  for (let at = 1000; at <= 1400; at += 1) {
    history.add({ at });
    if (at === 1030) assert.equal(history.spanS, 60);
    if (at === 1061) assert.equal(history.spanS, 120);
  }
  assert.equal(history.spanS, 300);
  const points = history.points(({ at }) => at);
  assert.deepEqual([points.length, points[0].ageS, points.at(-1).value], [301, 300, 1400]);
  assert.equal(history.near(10.4).at, 1390);
});

test("there is nothing near a moment in a gap", () => {
  const history = new History(300);
  for (const at of [10, 11, 50]) history.add({ at });
  assert.deepEqual([history.near(20), history.near(38)?.at, history.near(0)?.at], [null, 11, 50]);
});

test("a clock that begins anew begins a new history", () => {
  const history = new History(300);
  history.add({ at: 5000 });
  history.add({ at: 3 });
  assert.deepEqual(history.points(() => 0).length, 1);
});

test("another frontend may begin with what was a moment ago", () => {
  const history = new History(300);
  for (const at of [100, 101, 102]) history.add({ at });
  assert.equal(history.add({ at: 101.4 }), false);
  assert.equal(history.add({ at: 102.4 }), true);
  assert.deepEqual(history.points(({ at }) => at).map(({ value }) => value), [100, 101, 102, 102.4]);
});

test("units", () => {
  assert.deepEqual([null, 0, 0.126, 20.25, 128, 4096, 120_000].map(count), ["–", "0", "0.13", "20.3", "128", "4096", "120k"]);
  assert.deepEqual([null, 0, 0.00042, 0.0835, 0.25, 1.5, 75].map(seconds), ["–", "0 ms", "0.42 ms", "83.5 ms", "250 ms", "1.5 s", "75 s"]);
  assert.deepEqual([null, 0, 0.8342, 1].map(share), ["–", "0 %", "83.4 %", "100 %"]);
  assert.deepEqual([null, 38_200_000, 614e6, 1e9, 2.5e9].map(bytes), ["–", "38.2 MB", "614 MB", "1 GB", "2.5 GB"]);
  assert.deepEqual([0, 42, 60, 125].map(ago), ["now", "42 s ago", "1 min ago", "2 min 5 s ago"]);
});

test("processes are added up by their kind", () => {
  const memory = CHARTS.find(({ title }) => title === "Memory");
  const processes = { engine: { memory_bytes: 5 }, "frontend-0": { memory_bytes: 2 }, "frontend-1": { memory_bytes: 3 } };
  assert.deepEqual(memory.lines.map(({ value }) => value({ at: 0, processes })), [5, 5, null]);
});
