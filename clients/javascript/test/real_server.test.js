/** Both transports against a real server, whose URL is in STREAMSERVE_URL. */

import assert from "node:assert/strict";
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
