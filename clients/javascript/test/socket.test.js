/** The client over a scripted WebSocket: what is lost, what is silent, what is left. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { Client, textOf } from "streamserve-client";
import { HEAD, patient, refused, serve } from "./scripted.js";

const piece = (text, reason = null) => ({ ...HEAD, choices: [{ index: 0, text, logprobs: null, finish_reason: reason }] });

/** A WebSocket of which the test is the server: `script(message, socket)` gets each message of the client. */
function scripted(script) {
  return class extends EventTarget {
    static sockets = [];
    OPEN = 1;
    sent = [];

    constructor(url, protocols) {
      super();
      Object.assign(this, { url, protocols });
      this.constructor.sockets.push(this);
      queueMicrotask(() => script({ type: "opening" }, this));
    }

    open() {
      this.isOpen = true;
      this.dispatchEvent(new Event("open"));
    }

    get readyState() {
      return this.isOpen ? this.OPEN : 0;
    }

    fail() {
      this.dispatchEvent(new Event("error"));
    }

    send(text) {
      const message = JSON.parse(text);
      this.sent.push(message);
      script(message, this);
    }

    say(message) {
      this.dispatchEvent(Object.assign(new Event("message"), { data: JSON.stringify(message) }));
    }

    lose(code = 1006) {
      if (this.isClosed) return;
      this.isClosed = true;
      this.dispatchEvent(Object.assign(new Event("close"), { code, reason: "" }));
    }

    close() {
      // As Node does it where there is no connection yet.
      if (!this.isOpen) this.fail();
      else queueMicrotask(() => this.lose(1000));
    }
  };
}

test("a stream over a WebSocket, with a key", async () => {
  const WebSocket = scripted((message, socket) => {
    if (message.type === "opening") socket.open();
    if (message.type !== "create") return;
    for (const text of ["On", "ce"]) socket.say({ id: message.id, type: "chunk", chunk: piece(text) });
    socket.say({ id: message.id, type: "done" });
  });
  const client = new Client("https://server.example/v1", { transport: "websocket", WebSocket, apiKey: "sesame" });
  assert.equal(textOf(await client.completions.stream({ prompt: "" }).result()), "Once");
  assert.equal(textOf(await client.completions.stream({ prompt: "" }).result()), "Once");
  const [{ url, protocols, sent }, ...others] = WebSocket.sockets;
  assert.deepEqual(others, []);
  assert.equal(url, "wss://server.example/v1/ws");
  assert.deepEqual(protocols, ["streamserve", "openai-insecure-api-key.sesame"]);
  assert.deepEqual(sent.map(({ type }) => type), ["create", "ping", "create", "ping"]);
  client.close();
});

test("a lost connection interrupts what has begun and repeats what has not", async () => {
  let numCreated = 0;
  const WebSocket = scripted((message, socket) => {
    if (message.type === "opening") socket.open();
    if (message.type !== "create") return;
    numCreated += 1;
    if (message.body.prompt === "begun") socket.say({ id: message.id, type: "chunk", chunk: piece("On") });
    if (numCreated === 2) setImmediate(() => socket.lose());
    if (numCreated === 3) {
      socket.say({ id: message.id, type: "result", result: piece("Twice") });
      socket.say({ id: message.id, type: "done" });
    }
  });
  const { delays, options } = patient({ transport: "websocket", WebSocket });
  const client = new Client("http://server.example", options);
  const begun = assert.rejects(client.completions.stream({ prompt: "begun" }).result(), {
    name: "StreamInterrupted", partialText: "On",
  });
  assert.equal(textOf(await client.completions.create({ prompt: "waiting" })), "Twice");
  await begun;
  assert.deepEqual(delays, [500]);
  client.close();
});

test("a server that does not answer a ping is lost", async () => {
  const WebSocket = scripted((message, socket) => {
    if (message.type === "opening") socket.open();
    if (message.type === "create") socket.say({ id: message.id, type: "chunk", chunk: piece("On") });
  });
  const client = new Client("http://server.example", { transport: "websocket", WebSocket, timeouts: { idle: 50 } });
  await assert.rejects(client.completions.stream({ prompt: "" }).result(), /StreamInterrupted.*idle/);
  assert.deepEqual(WebSocket.sockets[0].sent.map(({ type }) => type), ["create", "ping", "ping"]);
});

test("a slow answer of a server that answers pings is waited for", async () => {
  let numPings = 0;
  const WebSocket = scripted((message, socket) => {
    if (message.type === "opening") socket.open();
    if (message.type !== "ping") return;
    numPings += 1;
    // The first one belongs to the request; then come three times the silence that would be too long.
    if (numPings < 8) socket.say({ type: "pong" });
    else for (const type of ["result", "done"]) socket.say({ id: 1, type, result: piece("Once") });
  });
  const client = new Client("http://server.example", { transport: "websocket", WebSocket, timeouts: { idle: 50 } });
  assert.equal(textOf(await client.completions.create({ prompt: "" })), "Once");
  client.close();
});

for (const [runtime, refuse] of [
  ["a browser", (socket) => {
    socket.fail();
    socket.lose();
  }],
  ["Node", (socket) => socket.fail()],
]) test(`a refused connection asks over HTTP why, as ${runtime} tells it`, async (t) => {
  const WebSocket = scripted((message, socket) => refuse(socket));
  const { url } = await serve(t, refused(503, "engine_unavailable", { "Retry-After": "5" }), refused(401, "invalid_api_key"));
  const { delays, options } = patient({ transport: "websocket", WebSocket });
  await assert.rejects(new Client(url, options).completions.create({ prompt: "" }), {
    name: "AuthenticationFailed", code: "invalid_api_key",
  });
  assert.deepEqual(delays, [5500]);
});

test("a client that is closed ends its streams and begins no more", async () => {
  const WebSocket = scripted((message, socket) => {
    if (message.type === "opening") socket.open();
    if (message.type === "create") socket.say({ id: message.id, type: "chunk", chunk: piece("On") });
  });
  const client = new Client("http://server.example", { transport: "websocket", WebSocket });
  await assert.rejects(async () => {
    for await (const _ of client.completions.stream({ prompt: "" })) client.close();
  }, { name: "StreamInterrupted" });
  await assert.rejects(client.completions.create({ prompt: "" }), { name: "ClientError", message: "the client is closed" });
});

test("a connection that does not open in time", async (t) => {
  const WebSocket = scripted(() => {});
  const { url } = await serve(t);
  const { options } = patient({ transport: "websocket", WebSocket, timeouts: { connect: 10 }, retries: { maxRetries: 0 } });
  await assert.rejects(new Client(url, options).completions.create({ prompt: "" }), { name: "ServerFailed" });
});

test("there must be a WebSocket", () => {
  const known = globalThis.WebSocket;
  try {
    delete globalThis.WebSocket;
    assert.throws(() => new Client("http://server.example", { transport: "websocket" }), /Node has one since version 22/);
  } finally {
    globalThis.WebSocket = known;
  }
});
