import assert from "node:assert/strict";
import test from "node:test";
import { backOffMs, Pacing } from "../../../clients/web/public/js/pacing.js";

// As of a browser.
const page = new EventTarget();
globalThis.addEventListener = page.addEventListener.bind(page);
globalThis.removeEventListener = page.removeEventListener.bind(page);

test("tries are further and further apart, up to five seconds, and spread", () => {
  const least = [0, 1, 2, 3, 4, 5, 20].map((numTries) => backOffMs(numTries, 0));
  const most = [0, 1, 2, 3, 4, 5, 20].map((numTries) => backOffMs(numTries, 1));
  assert.deepEqual(least, [125, 250, 500, 1000, 2000, 2500, 2500]);
  assert.deepEqual(most, [250, 500, 1000, 2000, 4000, 5000, 5000]);
});

test("a minute without progress is enough", () => {
  let nowMs = 0;
  const pacing = new Pacing(() => nowMs);
  assert.ok(pacing.isWorthIt);
  nowMs = 59_999;
  assert.ok(pacing.isWorthIt);
  nowMs = 60_000;
  assert.ok(!pacing.isWorthIt);
  pacing.progress();
  assert.ok(pacing.isWorthIt);
});

test("a pause ends when the network is found again, unless the server has set it", async () => {
  const { signal } = new AbortController();
  const pacing = new Pacing();
  for (let numTries = 0; numTries < 8; numTries += 1) {
    const paused = pacing.pause(0, signal);
    page.dispatchEvent(new Event("online"));
    await paused;
  }
  const stop = new AbortController();
  const paused = pacing.pause(1000, stop.signal);
  page.dispatchEvent(new Event("online"));
  assert.equal(await Promise.race([paused, new Promise((done) => setTimeout(done, 20, "paused"))]), "paused");
  stop.abort();
  await assert.rejects(paused);
});
