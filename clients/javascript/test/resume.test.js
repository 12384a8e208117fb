/** A server that keeps streams: what is lost on the way is fetched. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Client } from "../src/index.js";
import { broken, chunk, collect, dropped, event, HEAD, MESSAGES, patient, refused, serve, USAGE } from "./scripted.js";

const STREAM = "chatcmpl-r1";
const CHUNKS = [
  ...["", "Hel", "lo", "!"].map((text) => chunk(text)),
  chunk(undefined, { finish_reason: "stop" }),
  { ...HEAD, object: "chat.completion.chunk", choices: [], usage: USAGE },
];
const EVENTS = [...CHUNKS.map(event), event("[DONE]")].map((text, index) => `id: ${STREAM}:${index + 1}\n${text}`);
const ASKED = { messages: MESSAGES, request_id: "r1" };

function begin(response) {
  response.writeHead(200, { "Content-Type": "text/event-stream", "X-Stream-Id": STREAM });
}

/** The events behind number `after` up to number `last`; then the connection is gone, or the stream is over. */
function part(after, last = EVENTS.length) {
  const text = EVENTS.slice(after, last).join("");
  return (response) => {
    begin(response);
    if (last === EVENTS.length) response.end(text);
    else response.write(text, () => response.socket.destroy());
  };
}

async function reading(t, answers, more) {
  const { url, requests, ended } = await serve(t, ...answers);
  const { delays, options } = patient(more);
  const stream = new Client(url, options).chat.stream(ASKED);
  return { stream, requests, delays, ended };
}

const methods = (requests) => requests.map(({ method }) => method);

for (let last = 1; last < EVENTS.length; last += 1) {
  test(`a stream goes on behind event ${last}`, async (t) => {
    const { stream, requests, delays } = await reading(t, [part(0, last), part(last)]);
    assert.deepEqual(await collect(stream), CHUNKS);
    assert.equal(stream.text, "Hello!");
    assert.deepEqual(methods(requests), ["POST", "GET"]);
    assert.equal(requests[0].headers["x-stream-resume"], "1");
    assert.equal(requests[0].body.request_id, "r1");
    assert.equal(requests[1].path, `/v1/streams/${STREAM}`);
    assert.equal(requests[1].headers["last-event-id"], `${STREAM}:${last}`);
    assert.equal(requests[1].headers.accept, "text/event-stream");
    assert.deepEqual(delays, [500]);
  });
}

test("and again as often as it breaks", async (t) => {
  const answers = EVENTS.map((_, index) => part(index, index + 1));
  const { stream, delays } = await reading(t, answers);
  assert.deepEqual(await collect(stream), CHUNKS);
  assert.deepEqual(delays, Array(EVENTS.length - 1).fill(500));
});

test("a request of unknown fate is not made twice", async (t) => {
  const { stream, requests } = await reading(t, [dropped, part(0)]);
  assert.deepEqual(await collect(stream), CHUNKS);
  assert.deepEqual(methods(requests), ["POST", "GET"]);
  assert.equal(requests[1].headers["last-event-id"], undefined);
});

test("one that never arrived is made again at once", async (t) => {
  const { stream, requests, delays } = await reading(t, [dropped, refused(404, "stream_not_found"), part(0)]);
  assert.deepEqual(await collect(stream), CHUNKS);
  assert.deepEqual(methods(requests), ["POST", "GET", "POST"]);
  assert.deepEqual(delays, [500]);
});

test("one that arrived late", async (t) => {
  const answers = [dropped, refused(404, "stream_not_found"), refused(409, "stream_exists"), part(0)];
  const { stream, requests } = await reading(t, answers);
  assert.deepEqual(await collect(stream), CHUNKS);
  assert.deepEqual(methods(requests), ["POST", "GET", "POST", "GET"]);
});

test("a server that contradicts itself is given up", async (t) => {
  const turns = Array(20).fill([refused(404, "stream_not_found"), refused(409, "stream_exists")]).flat();
  const { stream, requests } = await reading(t, [dropped, ...turns]);
  await assert.rejects(stream.result(), { code: /^stream_(exists|not_found)$/ });
  assert.ok(requests.length < 10);
});

for (const [status, code] of [[404, "stream_not_found"], [410, "events_gone"], [401, "invalid_api_key"]]) {
  test(`a stream that is gone (${status}) tells what had come`, async (t) => {
    const { stream } = await reading(t, [part(0, 3), refused(status, code)]);
    await assert.rejects(stream.result(), (error) => {
      assert.deepEqual([error.name, error.partialText], ["StreamInterrupted", "Hello"]);
      assert.equal(error.cause.status, status);
      return true;
    });
  });
}

test("a busy server says when to come back, and the wait ends", async (t) => {
  const busy = refused(503, "engine_unavailable", { "Retry-After": "3" });
  const { stream, delays } = await reading(t, [part(0, 3), busy, part(3)]);
  assert.deepEqual(await collect(stream), CHUNKS);
  assert.deepEqual(delays, [500, 4000]);
  const lost = await reading(t, [part(0, 3), ...Array(40).fill(dropped)], { retries: { resume: 20_000 } });
  await assert.rejects(lost.stream.result(), { name: "StreamInterrupted", partialText: "Hello" });
  assert.equal(lost.delays.reduce((sum, delay) => sum + delay), 20_000);
  assert.equal(Math.max(...lost.delays), 5000);
});

test("the stream's own failure is final", async (t) => {
  const failed = event({ error: { message: "No.", type: "server_error", param: null, code: "failed" } });
  const { stream, requests } = await reading(t, [(response) => {
    begin(response);
    response.end(`${EVENTS[0]}id: ${STREAM}:2\n${failed}`);
  }]);
  await assert.rejects(stream.result(), { name: "ServerFailed", code: "failed" });
  assert.deepEqual(methods(requests), ["POST"]);
});

test("leaving ends it on the server", async (t) => {
  const { stream, ended } = await reading(t, [part(0)]);
  for await (const _ of stream) break;
  assert.equal(await ended(), `/v1/streams/${STREAM}`);
});

test("it can be turned off", async (t) => {
  const { stream, requests } = await reading(t, [broken(...CHUNKS.slice(0, 2).map(event))], { retries: { resume: 0 } });
  await assert.rejects(stream.result(), { name: "StreamInterrupted", partialText: "Hel" });
  assert.deepEqual(methods(requests), ["POST"]);
  assert.equal(requests[0].headers["x-stream-resume"], undefined);
  assert.equal(requests[0].headers["x-request-id"], undefined);
});

test("a server that keeps no streams", async (t) => {
  const { stream, requests } = await reading(t, [broken(...CHUNKS.slice(0, 2).map(event))]);
  await assert.rejects(stream.result(), { name: "StreamInterrupted", partialText: "Hel" });
  assert.deepEqual(methods(requests), ["POST"]);
});

/** A stream that had to wait for its first event, and has come to nothing. */
function late(error) {
  return (response) => {
    begin(response);
    response.end(`: ping\n\n${event({ error: { message: "too late", type: "server_error", param: null, code: "x", ...error } })}`);
  };
}

test("a refusal after a wait is one", async (t) => {
  const { stream, requests, delays } = await reading(t, [late({ status: 503, retry_after: 7 }), part(0)]);
  assert.deepEqual(await collect(stream), CHUNKS);
  assert.deepEqual(methods(requests), ["POST", "POST"]);
  assert.deepEqual(delays, [7500]);
});

for (const status of [400, 500]) {
  test(`an error ${status} after a wait has its status`, async (t) => {
    const { stream, requests } = await reading(t, [late({ status })]);
    await assert.rejects(collect(stream), { status, code: "x" });
    assert.deepEqual(methods(requests), ["POST"]);
  });
}

test("a refusal after coming back and a wait is one", async (t) => {
  const { stream, requests } = await reading(t, [dropped, late({ status: 503, retry_after: 1 }), part(0)]);
  assert.deepEqual(await collect(stream), CHUNKS);
  assert.deepEqual(methods(requests), ["POST", "GET", "POST"]);
});
