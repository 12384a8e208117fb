/** Servers, proxies and networks that do not behave. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { Client } from "streamserve-client";
import { Departures } from "../src/departures.js";
import { Place } from "../src/place.js";
import {
  begin, chunk, collect, dropped, event, MESSAGES, patient, refused, serve, streamed, WHOLE_STREAM,
} from "./scripted.js";

const STREAM = "chatcmpl-r1";
const ASKED = { messages: MESSAGES, request_id: "r1" };
const WHOLE_TEXT = WHOLE_STREAM.join("");

/** The event with this number. */
const numbered = (number, data) => `id: ${STREAM}:${number}\n${event(data)}`;

/** A stream that is kept; its connection ends after these events. */
function kept(...events) {
  return (response) => {
    response.writeHead(200, { "Content-Type": "text/event-stream", "X-Stream-Id": STREAM });
    response.end(events.join(""));
  };
}

/** An answer that need not be one of the API's. */
function answered(status, body, headers = {}) {
  return (response) => response.writeHead(status, headers).end(body);
}

async function reading(t, ...answers) {
  const served = await serve(t, ...answers);
  const { delays, options } = patient();
  return { ...served, delays, stream: new Client(served.url, options).chat.stream(ASKED) };
}

const methods = (requests) => requests.map(({ method }) => method);

for (const [name, text] of Object.entries({
  "a mark at the beginning": `\uFEFF${WHOLE_TEXT}`,
  CRLF: WHOLE_TEXT.replaceAll("\n", "\r\n"),
  CR: WHOLE_TEXT.replaceAll("\n", "\r"),
  "other lines": `:\n: comment\nretry: 5\nunknown: x\nnothing\n\n${WHOLE_TEXT}`,
  "several lines": WHOLE_TEXT.replaceAll('data: {"id"', 'data: {\ndata: "id"'),
})) {
  test(`events of all forms: ${name}`, async (t) => {
    const { stream } = await reading(t, streamed(text));
    await collect(stream);
    assert.equal(stream.text, "Hello");
  });
}

test("a large event comes in many pieces", async (t) => {
  const text = "x".repeat(8_000_000);
  const { stream } = await reading(t, streamed(event(chunk(text)), event("[DONE]")));
  await collect(stream);
  assert.equal(stream.text.length, text.length);
});

for (const [name, unknown] of Object.entries({
  404: answered(404, '{"detail": "Not Found"}'),
  405: answered(405, "Method Not Allowed"),
  501: answered(501, ""),
  "another document": answered(200, '{"object": "stream"}', { "Content-Type": "application/json" }),
})) {
  test(`a server that keeps no streams is asked again (${name})`, async (t) => {
    const { stream, requests } = await reading(t, dropped, unknown, streamed(...WHOLE_STREAM));
    await collect(stream);
    assert.equal(stream.text, "Hello");
    assert.deepEqual(methods(requests), ["POST", "GET", "POST"]);
  });
}

for (const [kind, answer] of [
  ["ServerFailed", answered(504, "<html>")],
  ["InvalidAnswer", kept(numbered(1, chunk("a")), numbered(2, "nonsense"))],
]) {
  test(`what the client gives up ends on the server (${kind})`, async (t) => {
    const { stream, ended } = await reading(t, answer);
    await assert.rejects(collect(stream), { name: kind });
    assert.equal(await ended(), `/v1/streams/${STREAM}`);
  });
}

test("and so does what is late", async (t) => {
  const { url, ended } = await serve(t, () => {});
  const client = new Client(url, { timeouts: { answer: 50 } });
  await assert.rejects(collect(client.chat.stream(ASKED)), { name: "AnswerTimeout" });
  assert.equal(await ended(), `/v1/streams/${STREAM}`);
});

test("whoever leaves does not wait for the server", async () => {
  let isEnding = false;
  const fetching = async (request) => {
    if (request.method !== "DELETE") {
      return new Response(`${numbered(1, chunk("a"))}${numbered(2, chunk("b"))}`, {
        headers: { "Content-Type": "text/event-stream", "X-Stream-Id": STREAM },
      });
    }
    isEnding = true;
    assert.equal(request.keepalive, true);
    return new Promise(() => {});
  };
  for await (const _ of new Client("http://server.example", { fetch: fetching }).chat.stream(ASKED)) break;
  assert.equal(isEnding, true);
});

test("events without numbers are not asked for twice", async (t) => {
  const { stream, requests } = await reading(t, kept(event(chunk("a"))));
  await assert.rejects(collect(stream), { name: "StreamInterrupted", partialText: "a" });
  assert.equal(requests.length, 1);
});

test("events that come again are passed over, and missing ones fetched", async (t) => {
  const [a, b, c, d, end] = ["a", "b", "c", "d"].map((text, index) => numbered(index + 1, chunk(text)));
  const { stream, requests } = await reading(t, kept(a, b, b, d), kept(a, b, c, numbered(4, "[DONE]"), end));
  await collect(stream);
  assert.equal(stream.text, "abc");
  assert.equal(requests[1].headers["last-event-id"], `${STREAM}:2`);
});

for (const status of [429, 502, 503, 504]) {
  test(`who comes back too early comes again (${status})`, async (t) => {
    const [a, end] = [numbered(1, chunk("a")), numbered(2, "[DONE]")];
    for (const [first, rest] of [[dropped, kept(a, end)], [kept(a), kept(end)]]) {
      const { stream, requests } = await reading(t, first, answered(status, "<html>"), rest);
      await collect(stream);
      assert.equal(stream.text, "a");
      assert.deepEqual(methods(requests), ["POST", "GET", "GET"]);
    }
  });
}

test("another reader is left alone", async (t) => {
  const { url, stream, ended } = await reading(t, kept(numbered(1, chunk("a"))), refused(409, "stream_taken"));
  await assert.rejects(collect(stream), { name: "StreamInterrupted", partialText: "a" });
  await new Client(url).cancel("mark");
  assert.equal(await ended(), "/v1/streams/mark");
});

test("a redirect is told of", async (t) => {
  const { url, stream } = await reading(t, answered(307, "", { Location: "/elsewhere" }), refused(405, "method_not_allowed"));
  await assert.rejects(collect(stream), (error) => error.status === 405 && error.message.includes(`${url}/elsewhere`));
});

test("a time limit that is too long for a timer is none", async (t) => {
  const { url } = await serve(t, (response) => {
    begin(response);
    setTimeout(() => response.end(WHOLE_TEXT), 50);
  });
  const timeouts = { idle: Infinity, answer: 1e12 };
  const stream = new Client(url, { timeouts }).chat.stream(ASKED);
  await collect(stream);
  assert.equal(stream.text, "Hello");
});

test("a stream goes on whatever byte it broke off at", async () => {
  const texts = ["a", "größe", " 你好"].map((text, index) => numbered(index + 1, chunk(text)));
  const events = [...texts, numbered(4, "[DONE]")].map((text) => new TextEncoder().encode(text));
  const all = new Uint8Array(events.flatMap((bytes) => [...bytes]));
  const headers = { "Content-Type": "text/event-stream", "X-Stream-Id": STREAM };
  for (let size = 0; size < all.length; size += 1) {
    const fetching = async (request) => {
      if (request.method === "POST") return new Response(all.slice(0, size), { headers });
      const after = Number((request.headers.get("Last-Event-ID") ?? ":0").split(":").pop());
      return new Response(new Blob(events.slice(after)), { headers });
    };
    const { options } = patient({ fetch: fetching });
    const stream = new Client("http://server.example", options).chat.stream(ASKED);
    assert.equal((await collect(stream)).length, 3, String(size));
    assert.equal(stream.text, "agröße 你好");
  }
});

test("a page that goes leaves its streams, one that is put aside does not", (t) => {
  const page = new EventTarget();
  globalThis.addEventListener = page.addEventListener.bind(page);
  globalThis.removeEventListener = page.removeEventListener.bind(page);
  t.after(() => {
    delete globalThis.addEventListener;
    delete globalThis.removeEventListener;
  });
  const left = [];
  const departures = new Departures((place) => left.push(place));
  const place = new Place({ endpoint: "", path: "", idPrefix: "", body: {} }, true);
  departures.add(place);
  page.dispatchEvent(Object.assign(new Event("pagehide"), { persisted: true }));
  assert.deepEqual(left, []);
  page.dispatchEvent(Object.assign(new Event("pagehide"), { persisted: false }));
  assert.deepEqual(left, [place]);
  departures.delete(place);
  page.dispatchEvent(Object.assign(new Event("pagehide"), { persisted: false }));
  assert.equal(left.length, 1);
});
