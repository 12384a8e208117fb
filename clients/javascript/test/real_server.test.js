/** Both transports against a real server, whose URL is in STREAMSERVE_URL. */

import assert from "node:assert/strict";
import { connect, createServer } from "node:net";
import { test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { Client, textOf } from "streamserve-client";
import { collect, MESSAGES, patient } from "./scripted.js";

const url = process.env.STREAMSERVE_URL;
const skip = url ? false : "STREAMSERVE_URL names no server";
const LONG = { prompt: "Once", max_tokens: 20_000, ignore_eos: true };
const ASKED = {
  chat: { messages: MESSAGES, max_tokens: 20, temperature: 0 },
  completions: { prompt: "Once", max_tokens: 20, temperature: 0 },
  responses: { input: "Hello", max_output_tokens: 20, temperature: 0 },
};

/** The server's own gauge. */
async function numRunning() {
  const metrics = await (await fetch(`${url}/metrics`)).text();
  return [...metrics.matchAll(/^vllm:num_requests_running\S* (\S+)$/gm)].reduce((sum, [, value]) => sum + Number(value), 0);
}

/** Waits for what another process does. */
async function until(condition) {
  while (!(await condition())) await pause(20);
}

/** The URL of a way to the server on which each connection breaks after so many bytes of its own, then none any more. */
async function cutting(t, limits) {
  const { hostname, port } = new URL(url);
  const proxy = createServer((client) => {
    const server = connect(Number(port), hostname);
    let left = limits.shift() ?? Infinity;
    // A reset would take with it what the client has not read yet, and so perhaps all of it each time.
    const cut = () => {
      client.end();
      server.destroy();
    };
    server.on("data", (data) => {
      client.write(data.subarray(0, Math.min(left, data.length)), () => { if (left <= 0) cut(); });
      left -= data.length;
    });
    client.on("data", (data) => server.write(data));
    for (const end of [client, server]) end.on("error", () => {}).on("close", cut);
  });
  await new Promise((resolve) => proxy.listen(0, "127.0.0.1", resolve));
  t.after(() => proxy.close());
  return `http://127.0.0.1:${proxy.address().port}`;
}

const stopped = () => until(async () => (await numRunning()) === 0);

for (const transport of ["sse", "websocket"]) {
  const over = (name, body) => test(`${transport}: ${name}`, { skip, timeout: 60_000 }, async (t) => {
    const client = new Client(url, { transport });
    t.after(() => client.close());
    await body(client, t);
  });

  for (const [endpoint, asked] of Object.entries(ASKED)) {
    over(`a stream of ${endpoint} says what comes in one piece`, async (client) => {
      const whole = await client[endpoint].create(asked);
      const stream = client[endpoint].stream(asked);
      const texts = await collect(stream.texts());
      const result = await stream.result();
      assert.ok(texts.length >= 1);
      assert.equal(texts.join(""), textOf(whole));
      assert.equal(textOf(result), textOf(whole));
      assert.equal(result.usage.total_tokens, whole.usage.total_tokens);
      assert.deepEqual(Object.keys(result).sort(), Object.keys(whole).sort());
    });
  }

  for (const [endpoint, asked] of Object.entries(ASKED)) {
    over(`lost connections lose nothing of a stream of ${endpoint}`, async (client, t) => {
      const limits = Array.from({ length: 8 }, (_, number) => 1500 + 137 * number);
      const { options } = patient({ transport });
      const cut = new Client(await cutting(t, limits), options);
      t.after(() => cut.close());
      const whole = await client[endpoint].stream(asked).result();
      const result = await cut[endpoint].stream(asked).result();
      assert.ok(limits.length < 7);
      assert.equal(textOf(result), textOf(whole));
      assert.equal(result.usage.total_tokens, whole.usage.total_tokens);
    });
  }

  over("many streams at once", async (client) => {
    const ask = (number) => client.completions.stream({ ...ASKED.completions, prompt: `Number ${number % 4}` }).result();
    const texts = (await Promise.all([...Array(32).keys()].map(ask))).map(textOf);
    texts.forEach((text, number) => assert.equal(text, texts[number % 4]));
  });

  over("leaving a loop stops the generation", async (client) => {
    for await (const _ of client.completions.stream(LONG)) {
      await until(async () => (await numRunning()) === 1);
      break;
    }
    await stopped();
  });

  over("close and signals stop it too", async (client) => {
    const stream = client.completions.stream(LONG);
    for await (const _ of stream) stream.close();
    await stopped();
    const controller = new AbortController();
    const waiting = client.completions.create(LONG, { signal: controller.signal });
    const refused = assert.rejects(waiting, { name: "AbortError" });
    await until(async () => (await numRunning()) === 1);
    controller.abort();
    await refused;
    await stopped();
  });

  over("an answer is ended by its id", async (client) => {
    const stream = client.completions.stream(LONG);
    let id;
    for await (const chunk of stream) {
      if (id === undefined) await client.cancel(chunk.id);
      id = chunk.id;
    }
    assert.equal((await stream.result()).choices[0].finish_reason, "abort");
    await stopped();
    await assert.rejects(client.cancel(id), { name: "NotFound", code: "stream_not_found" });
  });

  over("refusals name the field", async (client) => {
    const wrong = { ...ASKED.chat, temperature: 9 };
    await assert.rejects(client.chat.create(wrong), { name: "BadRequest", status: 400, param: "temperature" });
    await assert.rejects(client.chat.stream(wrong).result(), { name: "BadRequest", param: "temperature" });
    await assert.rejects(client.completions.create({ prompt: "Once", model: "other" }), { name: "NotFound", status: 404 });
  });

  test(`${transport}: keys`, { skip: skip || !process.env.STREAMSERVE_KEYED_URL, timeout: 60_000 }, async (t) => {
    const keyed = process.env.STREAMSERVE_KEYED_URL;
    const { delays, options } = patient({ transport });
    const client = new Client(keyed, { ...options, apiKey: process.env.STREAMSERVE_KEY });
    const stranger = new Client(keyed, { ...options, apiKey: "wrong" });
    t.after(() => {
      client.close();
      stranger.close();
    });
    assert.ok(textOf(await client.completions.create({ ...ASKED.completions })));
    await assert.rejects(stranger.completions.stream({ ...ASKED.completions }).result(), {
      name: "AuthenticationFailed", code: "invalid_api_key",
    });
    assert.deepEqual(delays, []);
  });
}
