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

test("whoever was held up itself asks before it gives up", async () => {
  const WebSocket = scripted((message, socket) => {
    if (message.type === "opening") socket.open();
    if (message.type === "ping") socket.say({ type: "pong" });
    if (message.type !== "create") return;
    socket.say({ id: message.id, type: "chunk", chunk: piece("On") });
    // No timer fires meanwhile.
    setImmediate(() => Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 120));
    setTimeout(() => {
      socket.say({ id: message.id, type: "chunk", chunk: piece("ce") });
      socket.say({ id: message.id, type: "done" });
    }, 160);
  });
  const client = new Client("http://server.example", { transport: "websocket", WebSocket, timeouts: { idle: 50 } });
  assert.equal(textOf(await client.completions.stream({ prompt: "" }).result()), "Once");
  client.close();
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

test("a stream that the server keeps goes on over another connection", async () => {
  const asked = [];
  const WebSocket = scripted((message, socket) => {
    if (message.type === "opening") socket.open();
    if (message.type !== "create" && message.type !== "resume") return;
    const { id, after = 0 } = message;
    asked.push(message);
    if (message.type === "create") socket.say({ id, type: "accepted", stream: "cmpl-r1" });
    // The next one, and one that has come already.
    if (after) socket.say({ id, type: "chunk", n: after, chunk: piece("again") });
    if (after === 3) {
      socket.say({ id, type: "done", n: 4 });
    } else {
      socket.say({ id, type: "chunk", n: after + 1, chunk: piece(String(after + 1)) });
      setImmediate(() => socket.lose());
    }
  });
  const { delays, options } = patient({ transport: "websocket", WebSocket });
  const client = new Client("http://server.example", options);
  const stream = client.completions.stream({ prompt: "", request_id: "r1" });
  assert.equal(textOf(await stream.result()), "123");
  assert.deepEqual(asked[0].body.stream_options, { include_usage: true, resumable: true });
  assert.deepEqual(asked.slice(1).map(({ stream: name, after }) => [name, after]), [["cmpl-r1", 1], ["cmpl-r1", 2], ["cmpl-r1", 3]]);
  assert.deepEqual(delays, [500, 500, 500]);
  client.close();
});

test("a connection that is lost before the server has named the stream", async () => {
  let numConnections = 0;
  const WebSocket = scripted((message, socket) => {
    if (message.type === "opening") socket.open();
    if (message.type !== "create" && message.type !== "resume") return;
    numConnections += 1;
    const { id, after = 0 } = message;
    if (after) socket.say({ id, type: "done", n: after + 1 });
    else if (numConnections > 8) socket.say({ id, type: "chunk", n: 1, chunk: piece("a") });
    setImmediate(() => socket.lose());
  });
  const { options } = patient({ transport: "websocket", WebSocket, retries: { maxRetries: 10 } });
  assert.equal(textOf(await new Client("http://server.example", options).completions.stream({ prompt: "" }).result()), "a");
});

test("a client that is closed ends what the server would keep", async () => {
  const WebSocket = scripted((message, socket) => {
    if (message.type === "opening") socket.open();
    if (message.type !== "create") return;
    socket.say({ id: message.id, type: "accepted", stream: "cmpl-r1" });
    socket.say({ id: message.id, type: "chunk", n: 1, chunk: piece("On") });
  });
  const client = new Client("http://server.example", { transport: "websocket", WebSocket });
  await assert.rejects(async () => {
    for await (const _ of client.completions.stream({ prompt: "" })) client.close();
  }, { name: "StreamInterrupted", partialText: "On" });
  assert.deepEqual(WebSocket.sockets[0].sent.map(({ type }) => type), ["create", "ping", "cancel"]);
});

test("messages that are none end the connection", async () => {
  for (const wrong of [{ type: "chunk" }, { type: "chunk", chunk: null }, { type: "result", result: "text" }]) {
    const WebSocket = scripted((message, socket) => {
      if (message.type === "opening") socket.open();
      if (message.type === "create") socket.say({ id: message.id, ...wrong });
    });
    const { options } = patient({ transport: "websocket", WebSocket, retries: { maxRetries: 1 } });
    await assert.rejects(new Client("http://server.example", options).completions.stream({ prompt: "" }).result(), {
      name: "ConnectionFailed", message: /without an object/,
    });
  }
});

test("a key that a WebSocket cannot carry is named, not shown", () => {
  const make = (transport) => new Client("http://server.example", { transport, apiKey: "sesame/+=", WebSocket: class {} });
  assert.throws(() => make("websocket"), (error) => /apiKey/.test(error.message) && !/sesame/.test(error.message));
  make("sse");
});
