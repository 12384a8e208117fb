/** Chunks of chat completions over one WebSocket, which is opened when it is first needed. */

import { Queue } from "./queue.js";
import { address, ConnectionLost, key, models, Problem } from "./server.js";

/** @typedef {import("./types.js").Chunk} Chunk */
/** @typedef {import("./types.js").StreamEvent} StreamEvent */

const SUBPROTOCOL = "streamserve";
const KEY_SUBPROTOCOL = "openai-insecure-api-key.";
// The characters of a token in HTTP: browsers take no other subprotocol.
const SUITABLE_KEY = /^[\w!#$%&'*+.^`|~-]*$/;
const UNSUITABLE = "Browsers cannot send this key over a WebSocket, for its special characters. Stream over server-sent events (in the settings).";

// The server's own pings are not seen here. The page asks before it takes silence for the end.
const PING_MS = 20_000;
const SILENCE_MS = 60_000;

/**
 * @typedef {object} Told  what the server says
 * @property {number} [id]
 * @property {number} [n]
 * @property {"accepted" | "chunk" | "done" | "error" | "pong"} type
 * @property {string} [stream]
 * @property {Chunk} [chunk]
 * @property {{message: string, code: string, status: number, retry_after?: number}} [error]
 */

class Connection {
  /** @type {Map<number, Queue<StreamEvent>>} */
  #streams = new Map();
  /** @type {Map<number, string>} */
  #names = new Map();
  #lastId = 0;
  #heardMs = performance.now();
  #socket;
  /** @type {Promise<void>} */
  isOpen;

  /** @param {string} withKey */
  constructor(withKey) {
    this.key = withKey;
    const url = address("v1/ws");
    url.protocol = url.protocol.replace("http", "ws");
    const subprotocols = withKey ? [SUBPROTOCOL, KEY_SUBPROTOCOL + withKey] : [];
    const socket = (this.#socket = new WebSocket(url, subprotocols));
    const watch = setInterval(() => this.#watch(), PING_MS);
    this.isOpen = new Promise((resolve, reject) => {
      socket.onopen = () => resolve();
      socket.onclose = () => {
        clearInterval(watch);
        reject(new ConnectionLost());
        this.#lose();
      };
    });
    socket.onmessage = (event) => this.#hear(JSON.parse(event.data));
  }

  get isUsable() {
    return this.#socket.readyState <= WebSocket.OPEN;
  }

  close() {
    this.#socket.close();
  }

  #watch() {
    if (this.#streams.size === 0 || this.#socket.readyState !== WebSocket.OPEN) {
      this.#heardMs = performance.now();
    } else if (performance.now() - this.#heardMs > SILENCE_MS) {
      // The closing handshake will not be answered either.
      this.#lose();
      this.close();
    } else {
      this.#say({ type: "ping" });
    }
  }

  #lose() {
    for (const queue of this.#streams.values()) queue.close(new ConnectionLost());
  }

  /** @param {Told} told */
  #hear(told) {
    this.#heardMs = performance.now();
    const { id = 0, n: number = 0 } = told;
    const queue = this.#streams.get(id);
    if (!queue) return;
    if (told.type === "accepted" && told.stream) this.#names.set(id, told.stream);
    const stream = this.#names.get(id) ?? null;
    if (told.type === "accepted") queue.put({ stream, number, chunk: null });
    else if (told.type === "chunk" && told.chunk) queue.put({ stream, number, chunk: told.chunk });
    else if (told.type === "done") queue.close();
    else if (told.error) {
      const problem = new Problem(told.error.status, told.error, told.error.retry_after);
      queue.close(Object.assign(problem, { endsStream: number > 0 }));
    }
  }

  /**
   * @param {object} message  that asks for a stream
   * @param {string | null} name  of the stream, where it is known before
   * @param {AbortSignal} signal
   * @returns {AsyncGenerator<StreamEvent, void>}
   */
  async *stream(message, name, signal) {
    if (this.#socket.readyState !== WebSocket.OPEN) throw new ConnectionLost();
    const id = ++this.#lastId;
    /** @type {Queue<StreamEvent>} */
    const queue = new Queue();
    this.#streams.set(id, queue);
    if (name) this.#names.set(id, name);
    const cancel = () => {
      this.#say({ type: "cancel", id });
      queue.close(signal.reason);
    };
    signal.addEventListener("abort", cancel, { once: true });
    this.#say({ ...message, id });
    try {
      yield* queue.items();
    } finally {
      signal.removeEventListener("abort", cancel);
      this.#streams.delete(id);
      this.#names.delete(id);
    }
  }

  /** @param {object} message */
  #say(message) {
    if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }
}

/**
 * @template T
 * @param {Promise<T>} promise
 * @param {AbortSignal} signal
 * @returns {Promise<T>} rejects as soon as the signal says so, however long the other takes
 */
async function unlessAborted(promise, signal) {
  const done = new AbortController();
  /** @type {Promise<never>} */
  const aborted = new Promise((_, reject) => {
    signal.addEventListener("abort", () => reject(signal.reason), { once: true, signal: done.signal });
  });
  try {
    return await Promise.race([promise, aborted]);
  } finally {
    done.abort();
  }
}

/** @returns {import("./types.js").Transport} */
export function webSocketTransport() {
  /** @type {Connection | null} */
  let connection = null;

  /** @param {AbortSignal} signal */
  async function connected(signal) {
    if (!SUITABLE_KEY.test(key.value)) throw new Problem(400, { message: UNSUITABLE });
    if (!connection?.isUsable || connection.key !== key.value) {
      connection?.close();
      connection = new Connection(key.value);
    }
    const opened = connection;
    try {
      await unlessAborted(opened.isOpen, signal);
    } catch (error) {
      signal.throwIfAborted();
      // A browser does not say why a WebSocket was turned down; the same server will, over HTTP.
      await models();
      throw error;
    }
    signal.throwIfAborted();
    return opened;
  }

  return {
    async *begin(body, requestId, signal) {
      const options = { .../** @type {object} */ (body.stream_options), resumable: true };
      const asked = { ...body, request_id: requestId, stream_options: options };
      const message = { type: "create", endpoint: "chat.completions", body: asked };
      yield* (await connected(signal)).stream(message, null, signal);
    },

    async *resume({ id, after }, signal) {
      yield* (await connected(signal)).stream({ type: "resume", stream: id, after }, id, signal);
    },
  };
}
