/** The client over HTTP, with scripted answers. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import * as library from "streamserve-client";
import {
  begin, broken, chunk, collect, dropped, event, HEAD, MESSAGES, patient, refused, serve, streamed, USAGE, whole, WHOLE_STREAM,
} from "./scripted.js";

const { Client, ClientError, InvalidAnswer, RateLimited, ServiceUnavailable, StreamInterrupted, textOf } = library;

test("a stream adds up to a whole answer", async (t) => {
  const { url, requests } = await serve(t, streamed(...WHOLE_STREAM));
  const client = new Client(`${url}/v1/`, { apiKey: "sesame" });
  const stream = client.chat.stream({ messages: MESSAGES, max_tokens: 5 });
  assert.equal((await collect(stream)).length, 5);
  assert.equal(stream.text, "Hello");
  const answer = await stream.result();
  assert.deepEqual(answer.choices, [
    { index: 0, logprobs: null, finish_reason: "stop", message: { role: "assistant", content: "Hello" } },
  ]);
  assert.deepEqual(answer.usage, USAGE);
  assert.equal(textOf(answer), "Hello");
  const [{ path, headers, body }] = requests;
  assert.equal(path, "/v1/chat/completions");
  assert.equal(headers.authorization, "Bearer sesame");
  assert.deepEqual(body, {
    messages: MESSAGES, max_tokens: 5, stream: true, stream_options: { include_usage: true },
  });
});

test("whole answers, and token counts as the caller wants them", async (t) => {
  const { url, requests } = await serve(t, whole({ choices: [] }), streamed(event("[DONE]")), whole({ output: [] }));
  const client = new Client(url);
  assert.deepEqual(await client.completions.create({ prompt: "Once", future: 1 }), { choices: [] });
  await collect(client.completions.stream({ prompt: "Once", stream_options: {} }));
  assert.deepEqual(await client.responses.create({ input: "Hello" }), { output: [] });
  assert.deepEqual(requests.map(({ body }) => body), [
    { prompt: "Once", future: 1 }, { prompt: "Once", stream_options: {}, stream: true }, { input: "Hello" },
  ]);
});

for (const [status, kind] of [
  [400, "BadRequest"], [401, "AuthenticationFailed"], [403, "PermissionDenied"], [404, "NotFound"],
  [413, "BadRequest"], [500, "ServerFailed"], [502, "ServerFailed"],
]) {
  test(`an error with status ${status}`, async (t) => {
    const answer = refused(status, "some_code", { "X-Request-Id": "r1" });
    const { url, requests } = await serve(t, answer, answer);
    const client = new Client(url);
    for (const ask of [() => client.chat.create({ messages: MESSAGES }), () => client.chat.stream({ messages: MESSAGES }).result()]) {
      await assert.rejects(ask, {
        name: kind, message: "No.", status, type: "some_error", code: "some_code", param: "top_k", requestId: "r1",
      });
    }
    assert.equal(requests.length, 2);
  });
}

test("errors of others than the server", async (t) => {
  const texts = ["<html>Bad gateway</html>", "", "[]", '{"error": "No."}'];
  const answers = texts.map((text) => (response) => response.writeHead(502).end(text));
  const { url } = await serve(t, ...answers);
  for (const _ of texts) {
    await assert.rejects(new Client(url).chat.create({ messages: MESSAGES }), (error) => {
      assert.equal(error.name, "ServerFailed");
      assert.ok(error.message);
      return true;
    });
  }
});

test("what passes is tried again", async (t) => {
  const passing = () => [
    refused(429, "overloaded", { "Retry-After": "3" }), refused(503, "engine_unavailable"), dropped, dropped,
  ];
  const { url, requests } = await serve(t, ...passing(), streamed(...WHOLE_STREAM), ...passing(), whole({ n: 1 }));
  for (const ask of [
    (client) => client.chat.stream({ messages: MESSAGES }).result(),
    (client) => client.chat.create({ messages: MESSAGES }),
  ]) {
    const { delays, options } = patient();
    await ask(new Client(url, options));
    assert.deepEqual(delays, [3500, 1000, 2000, 4000]);
  }
  assert.equal(requests.length, 10);
});

test("tries are limited", async (t) => {
  const { url, requests } = await serve(t, ...Array(5).fill(refused(503, "engine_unavailable")));
  const { delays, options } = patient({ retries: { maxRetries: 2 } });
  await assert.rejects(new Client(url, options).chat.create({ messages: MESSAGES }), ServiceUnavailable);
  assert.deepEqual(delays, [500, 1000]);
  assert.equal(requests.length, 3);
});

test("a server that names a long time is believed", async (t) => {
  const { url } = await serve(t, refused(429, "overloaded", { "Retry-After": "3600" }));
  const { delays, options } = patient();
  await assert.rejects(new Client(url, options).chat.create({ messages: MESSAGES }), (error) => {
    assert.ok(error instanceof RateLimited);
    assert.equal(error.retryAfter, 3_600_000);
    return true;
  });
  assert.deepEqual(delays, []);
});

test("nobody listens", async () => {
  const { delays, options } = patient();
  await assert.rejects(new Client("http://127.0.0.1:9", options).chat.create({ messages: MESSAGES }), { name: "ConnectionFailed" });
  assert.equal(delays.length, 5);
});

test("a broken stream tells what had come and is not begun anew", async (t) => {
  for (const answer of [broken(...WHOLE_STREAM.slice(0, 3)), streamed(...WHOLE_STREAM.slice(0, 3))]) {
    const { url, requests } = await serve(t, answer);
    const { options } = patient();
    const stream = new Client(url, options).chat.stream({ messages: MESSAGES });
    await assert.rejects(collect(stream), (error) => {
      assert.ok(error instanceof StreamInterrupted);
      assert.equal(error.partialText, "Hel");
      assert.equal(error.partialAnswer.choices[0].finish_reason, null);
      assert.equal(error.cause.name, "ConnectionFailed");
      return true;
    });
    assert.equal(requests.length, 1);
  }
});

test("a stream that breaks before its first chunk is begun again", async (t) => {
  const { url } = await serve(t, broken(), streamed(), streamed(...WHOLE_STREAM));
  const { delays, options } = patient();
  assert.equal(textOf(await new Client(url, options).chat.stream({ messages: MESSAGES }).result()), "Hello");
  assert.deepEqual(delays, [500, 1000]);
});

test("an error in a stream", async (t) => {
  const error = { message: "The engine died.", type: "service_unavailable_error", param: null, code: "c" };
  const { url } = await serve(t, streamed(...WHOLE_STREAM.slice(0, 3), event({ error })));
  const stream = new Client(url).chat.stream({ messages: MESSAGES });
  await assert.rejects(collect(stream), { name: "ServiceUnavailable", status: null, code: "c" });
  assert.equal(stream.text, "Hel");
});

test("what is no stream", async (t) => {
  const html = (response) => response.writeHead(200, { "Content-Type": "text/html" }).end("<html>");
  const answers = [html, ...["{", "[]", { hello: 1 }, { ...HEAD, choices: [{ index: 0 }] }].map((data) => streamed(event(data)))];
  const { url, requests } = await serve(t, ...answers);
  for (const _ of answers) await assert.rejects(new Client(url).chat.stream({ messages: MESSAGES }).result(), InvalidAnswer);
  assert.equal(requests.length, answers.length);
});

/** Answers with a stream that does not end, and tells when its connection is closed. */
function endless() {
  let onClosed;
  const closed = new Promise((resolve) => { onClosed = resolve; });
  const answer = (response) => {
    begin(response);
    response.write(event(chunk("x")));
    response.on("close", onClosed);
  };
  return { closed, answer };
}

test("leaving a loop closes the connection", async (t) => {
  const { closed, answer } = endless();
  const { url } = await serve(t, answer);
  const stream = new Client(url).chat.stream({ messages: MESSAGES });
  for await (const _ of stream) break;
  await closed;
  assert.equal((await stream.result()).choices[0].finish_reason, null);
});

test("close ends who waits for a chunk", async (t) => {
  const { closed, answer } = endless();
  const { url } = await serve(t, answer);
  const stream = new Client(url).chat.stream({ messages: MESSAGES });
  const texts = [];
  for await (const text of stream.texts()) {
    texts.push(text);
    setImmediate(() => stream.close());
  }
  assert.deepEqual(texts, ["x"]);
  await closed;
});

test("a stream that was closed before it began asks nothing", async () => {
  const stream = new Client("http://127.0.0.1:9").chat.stream({ messages: MESSAGES });
  stream.close();
  assert.deepEqual(await collect(stream), []);
  await assert.rejects(stream.result(), ClientError);
});

test("a signal ends a stream, an answer, and the wait between two tries", async (t) => {
  const { closed, answer } = endless();
  let onAsked;
  const asked = new Promise((resolve) => { onAsked = resolve; });
  const { url } = await serve(t, answer, () => onAsked(), refused(429, "overloaded", { "Retry-After": "50" }));
  const client = new Client(url);

  const first = new AbortController();
  const stream = client.chat.stream({ messages: MESSAGES }, { signal: first.signal });
  await assert.rejects(async () => {
    for await (const _ of stream) first.abort();
  }, { name: "AbortError" });
  await closed;

  const second = new AbortController();
  const waiting = client.chat.create({ messages: MESSAGES }, { signal: second.signal });
  await asked;
  second.abort(new Error("enough"));
  await assert.rejects(waiting, { message: "enough" });

  const third = new AbortController();
  const sleep = (_, signal) => new Promise((_resolve, reject) => {
    signal.addEventListener("abort", () => reject(signal.reason));
    third.abort();
  });
  const busy = new Client(url, { sleep }).chat.create({ messages: MESSAGES }, { signal: third.signal });
  await assert.rejects(busy, { name: "AbortError" });
});

test("what garbage collection took can still be ended", async (t) => {
  setFlagsFromString("--expose-gc");
  const collectGarbage = runInNewContext("gc");
  const settle = async () => {
    for (let turn = 0; turn < 5; turn += 1) {
      collectGarbage();
      await new Promise(setImmediate);
    }
  };
  const { closed, answer } = endless();
  let onGone;
  const gone = new Promise((resolve) => { onGone = resolve; });
  let onAsked;
  const asked = new Promise((resolve) => { onAsked = resolve; });
  const silent = (response) => {
    response.on("close", onGone);
    onAsked();
  };
  const { url } = await serve(t, answer, silent);
  const client = new Client(url);
  for await (const _ of client.chat.stream({ messages: MESSAGES })) {
    await settle();
    break;
  }
  await closed;
  const controller = new AbortController();
  const refused = assert.rejects(client.chat.create({ messages: MESSAGES }, { signal: controller.signal }));
  await asked;
  await settle();
  controller.abort();
  await refused;
  await gone;
});

test("silence before an answer is waiting, in the middle of it a lost connection", async (t) => {
  const late = (response) => setTimeout(() => streamed(...WHOLE_STREAM)(response), 200);
  const { url } = await serve(t, late, endless().answer, () => {});
  const client = new Client(url, { timeouts: { idle: 50 } });
  assert.equal(textOf(await client.chat.stream({ messages: MESSAGES }).result()), "Hello");
  await assert.rejects(client.chat.stream({ messages: MESSAGES }).result(), { name: "StreamInterrupted", partialText: "x" });
  const impatient = new Client(url, { timeouts: { answer: 50 } });
  await assert.rejects(impatient.chat.create({ messages: MESSAGES }), { name: "AnswerTimeout" });
});

test("cancel by id", async (t) => {
  const { url, ended } = await serve(t);
  const client = new Client(url, { apiKey: "sesame" });
  await client.cancel("a/b");
  assert.equal(await ended(), "/v1/streams/a%2Fb");
  await assert.rejects(client.cancel("over"), { name: "NotFound" });
});

test("a URL must be one, and so must a key, which no error shows", () => {
  const strange = ["http://host/v1?key=1", "http://host/#top", "http://user:sesame@host"];
  for (const url of ["server.example", "ftp://server.example", "http://", "", ...strange]) {
    assert.throws(() => new Client(url), (error) => error instanceof TypeError && !/same/.test(error.message));
  }
  for (const apiKey of ["sesame\n", "sésame", "line\nend", ""]) {
    assert.throws(() => new Client("http://host", { apiKey }), (error) => error instanceof TypeError && !/same/.test(error.message));
  }
});

test("every error is one of the tree", () => {
  const errors = Object.values(library).filter((kind) => kind.prototype instanceof Error);
  assert.equal(errors.length, 13);
  for (const kind of errors) assert.ok(kind === ClientError || kind.prototype instanceof ClientError);
});
