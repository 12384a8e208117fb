/** What needs no connection: decoding, adding up, retries, and which message is for which stream. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { textOf } from "streamserve-client";
import { ChoicesAccumulator, ResponseAccumulator } from "../src/accumulators.js";
import { ConnectionFailed } from "../src/errors.js";
import { Attempts, DEFAULT_RETRIES, parseRetryAfter } from "../src/retries.js";
import { Inbox, Multiplexer } from "../src/socket_messages.js";
import { Place } from "../src/place.js";
import { EventDecoder } from "../src/sse.js";

const SPLITS = [
  ["data: a\n\ndata:b\r\n\r\ndata: c\r\rdata: d\n\n", ["a", "b", "c", "d"]],
  [": ping\n\nevent: x\nid: 1\ndata: größe \u2028 你好\n\n", ["größe \u2028 你好"]],
  ["data: one\ndata: two\n\n\n\n", ["one\ntwo"]],
  ["data\n\ndata: cut", []],
];

for (const [index, [text, expected]] of SPLITS.entries()) {
  test(`events may be cut anywhere (${index})`, () => {
    const bytes = new TextEncoder().encode(text);
    for (let size = 1; size <= bytes.length; size += 1) {
      const decoder = new EventDecoder();
      const found = [];
      for (let at = 0; at < bytes.length; at += size) {
        found.push(...decoder.decode(bytes.subarray(at, at + size)).map(({ data }) => data));
      }
      assert.deepEqual(found, expected);
    }
  });
}

test("choices that take turns", () => {
  const accumulator = new ChoicesAccumulator(true);
  const logprobs = (token) => ({ content: [{ token }] });
  for (const [index, content, more] of [
    [1, "b", {}], [0, "a", { logprobs: logprobs("a"), token_ids: [1] }], [1, "B", { finish_reason: "length" }],
    [0, "A", { logprobs: logprobs("A"), token_ids: [2, 3], finish_reason: null }],
    [0, undefined, { finish_reason: "stop", stop_reason: 7 }],
  ]) {
    accumulator.add({ id: "1", created: 1, model: "m", choices: [{ index, delta: { content }, ...more }] });
  }
  accumulator.add({ choices: [], usage: { total_tokens: 9 } });
  const answer = accumulator.answer();
  assert.deepEqual(answer, {
    id: "1", created: 1, model: "m", object: "chat.completion", usage: { total_tokens: 9 },
    choices: [
      {
        index: 0, logprobs: { content: [{ token: "a" }, { token: "A" }] }, token_ids: [1, 2, 3], stop_reason: 7,
        finish_reason: "stop", message: { role: "assistant", content: "aA" },
      },
      { index: 1, logprobs: null, finish_reason: "length", message: { role: "assistant", content: "bB" } },
    ],
  });
  assert.equal(textOf(answer), "aA");
});

test("a response so far, whole, and failed", () => {
  const response = { id: "r", object: "response", status: "in_progress", output: [], error: null };
  const accumulator = new ResponseAccumulator();
  accumulator.add({ type: "response.created", response });
  accumulator.add({ type: "response.output_item.added", item: { id: "m", content: [] } });
  accumulator.add({ type: "response.output_text.delta", delta: "Hel" });
  accumulator.add({ type: "response.future_event" });
  accumulator.end();
  assert.equal(accumulator.isComplete, false);
  assert.equal(textOf(accumulator.answer()), "Hel");
  const error = { code: "c", message: "The engine died." };
  assert.throws(() => accumulator.add({ type: "error", ...error }), { name: "ServerFailed", ...error });
  assert.throws(() => accumulator.add({ type: "response.failed", response: { ...response, error } }), error);
  assert.throws(() => accumulator.add({}), { name: "InvalidAnswer" });
  accumulator.add({ type: "response.incomplete", response: { ...response, status: "incomplete" } });
  assert.equal(accumulator.isComplete, true);
  assert.equal(accumulator.answer().status, "incomplete");
});

test("waits double up to a limit and differ by chance", () => {
  for (const [chance, expected] of [[1, [1, 2, 4, 8, 8]], [0, [0.5, 1, 2, 4, 4]]]) {
    const attempts = new Attempts({ ...DEFAULT_RETRIES, firstDelay: 1, maxDelay: 8, chance: () => chance });
    const error = new ConnectionFailed("gone");
    assert.deepEqual(expected.map(() => attempts.delay(error)), expected);
    assert.throws(() => attempts.delay(error), error);
  }
});

test("coming back ends by the clock too", (t) => {
  let now = 100;
  t.mock.method(performance, "now", () => now);
  const place = new Place({ endpoint: "", path: "", idPrefix: "", body: {} }, true);
  place.attach("chatcmpl-x");
  place.takesNumber(1);
  const attempts = new Attempts({ ...DEFAULT_RETRIES, chance: () => 1 });
  const error = new ConnectionFailed("gone");
  const waits = [];
  for (let number = 0; number < 6; number += 1) {
    waits.push(attempts.streamDelay(error, place, true));
    now += 25_000;
    if (number === 0) place.takesNumber(2);
  }
  assert.deepEqual(waits, [500, 500, 1000, 2000, 4000, 5000]);
  assert.throws(() => attempts.streamDelay(error, place, true), error);
});

test("Retry-After", () => {
  const now = Date.UTC(2015, 9, 21, 7, 28);
  for (const [header, expected] of [
    [null, null], ["3", 3000], [" 12 ", 12_000], ["soon", null], ["-1", null],
    ["Wed, 21 Oct 2015 07:28:30 GMT", 30_000], ["Wed, 21 Oct 2015 07:27:00 GMT", 0],
  ]) assert.equal(parseRetryAfter(header, now), expected, header);
});

/** A multiplexer with so many streams, and what each of them has heard so far. */
function opened(count) {
  const streams = new Multiplexer();
  const heard = [];
  const ids = [];
  for (let number = 0; number < count; number += 1) {
    const inbox = new Inbox();
    const items = [];
    inbox.put = (item) => items.push(item);
    heard.push(items);
    const call = { endpoint: "completions", path: "", idPrefix: "cmpl-", body: { prompt: "x" } };
    const { id, messages } = streams.open(call, new Place(call, false), inbox);
    assert.deepEqual(JSON.parse(messages[0]), { type: "create", id, endpoint: "completions", body: { prompt: "x" } });
    ids.push(id);
  }
  const hear = (message) => streams.take(JSON.stringify(message));
  return { streams, ids, heard, hear };
}

test("each stream gets its own", () => {
  const { streams, ids: [one, two], heard, hear } = opened(2);
  hear({ id: two, type: "chunk", chunk: { n: 2 } });
  hear({ id: one, type: "result", result: { n: 1 } });
  hear({ id: one, type: "done" });
  hear({ id: two, type: "error", error: { message: "Busy.", status: 429, retry_after: 3 } });
  assert.deepEqual(heard[0], [{ n: 1 }, null]);
  assert.deepEqual([heard[1][1].name, heard[1][1].retryAfter], ["RateLimited", 3000]);
  assert.equal(streams.leave(one), null);
  assert.equal(streams.hasStreams, false);
});

test("who leaves early says so and hears no more", () => {
  const { streams, ids: [id], heard, hear } = opened(1);
  assert.deepEqual(JSON.parse(streams.leave(id)), { type: "cancel", id });
  hear({ id, type: "chunk", chunk: {} });
  assert.deepEqual(heard, [[]]);
});

test("an error without an id is for the request that is looked at", () => {
  for (const numPongs of [0, 1, 2]) {
    const { streams, heard, hear } = opened(3);
    streams.ping();
    for (let number = 0; number < numPongs; number += 1) hear({ type: "pong" });
    hear({ type: "error", error: { message: "Too deep.", status: 400 } });
    assert.deepEqual(heard.map((items) => items.length), [0, 1, 2].map((number) => Number(number === numPongs)));
  }
});

test("a connection that is lost, by the fault of one or of none", () => {
  const { streams, heard, hear } = opened(2);
  hear({ type: "pong" });
  streams.lose("closed", 1009);
  assert.deepEqual(heard.map(([error]) => [error.name, error.status]), [["ConnectionFailed", undefined], ["BadRequest", 413]]);
  const inbox = new Inbox();
  const call = { endpoint: "completions", path: "", idPrefix: "cmpl-", body: {} };
  streams.open(call, new Place(call, false), inbox);
  return assert.doesNotReject(inbox.next());
});
