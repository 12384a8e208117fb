import assert from "node:assert/strict";
import test from "node:test";
import { dayName, duration, percent, speedParts } from "../../../clients/web/public/js/numbers.js";
import { Queue } from "../../../clients/web/public/js/queue.js";

test("durations", () => {
  assert.deepEqual([0, 84.2, 1350, 12_340, 120_000].map(duration), ["1 ms", "84 ms", "1.35 s", "12.3 s", "2 min"]);
});

test("probabilities", () => {
  assert.deepEqual([0, Math.log(0.5), Math.log(0.045), -9999].map(percent), ["100 %", "50 %", "4.5 %", "< 0.1 %"]);
});

test("the speed is that of the tokens after the first", () => {
  const speed = { firstTokenMs: 84, numTokens: 21, timedTokens: 20, timedMs: 1000 };
  assert.deepEqual(speedParts(speed), ["21 tokens", "20.0 tokens/s", "first after 84 ms"]);
  assert.deepEqual(speedParts({ ...speed, numTokens: 1, timedTokens: 0, timedMs: 0 }), ["1 token", "first after 84 ms"]);
});

test("days", () => {
  const now = new Date(2026, 4, 20, 12);
  const hours = (count) => now.getTime() - count * 3_600_000;
  assert.deepEqual([1, 13, 60, 24 * 30].map((count) => dayName(hours(count), now)), ["Today", "Yesterday", "Last 7 days", "Earlier"]);
});

test("a queue gives what was put in, in order, and then its end", async () => {
  const queue = new Queue();
  queue.put(1);
  setTimeout(() => {
    queue.put(2);
    queue.put(3);
    queue.close();
    queue.close(new Error("the first end counts"));
  });
  assert.deepEqual(await collect(queue), [1, 2, 3]);
  const broken = new Queue();
  broken.put(1);
  broken.close(new Error("lost"));
  await assert.rejects(collect(broken), /lost/);
});

async function collect(queue) {
  const items = [];
  for await (const item of queue.items()) items.push(item);
  return items;
}
