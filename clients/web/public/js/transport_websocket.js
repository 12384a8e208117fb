/** Chunks of chat completions over one WebSocket, which is opened when it is first needed. */

import { Queue } from "./queue.js";
import { address, ConnectionLost, key, models, Problem } from "./server.js";

/** @typedef {import("./types.js").Chunk} Chunk */

const SUBPROTOCOL = "streamserve";
const KEY_SUBPROTOCOL = "openai-insecure-api-key.";

/**
 * @typedef {object} Told  what the server says
 * @property {number} [id]
 * @property {"chunk" | "done" | "error" | "pong"} type
 * @property {Chunk} [chunk]
 * @property {{message: string, code: string, status: number, retry_after?: number}} [error]
 */

class Connection {
  /** @type {Map<number, Queue<Chunk>>} */
  #streams = new Map();
  #lastId = 0;
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
    this.isOpen = new Promise((resolve, reject) => {
      socket.onopen = () => resolve();
      socket.onclose = () => {
        const lost = new ConnectionLost();
        reject(lost);
        for (const queue of this.#streams.values()) queue.close(lost);
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

  /** @param {Told} told */
  #hear(told) {
    const queue = this.#streams.get(told.id ?? 0);
    if (!queue) return;
    if (told.type === "chunk" && told.chunk) queue.put(told.chunk);
    else if (told.type === "done") queue.close();
    else if (told.error) queue.close(new Problem(told.error.status, told.error, told.error.retry_after));
  }

  /** @type {import("./types.js").Transport} */
  async *stream(body, signal) {
    if (this.#socket.readyState !== WebSocket.OPEN) throw new ConnectionLost();
    const id = ++this.#lastId;
    /** @type {Queue<Chunk>} */
    const queue = new Queue();
    this.#streams.set(id, queue);
    const cancel = () => {
      this.#say({ type: "cancel", id });
      queue.close(signal.reason);
    };
    signal.addEventListener("abort", cancel, { once: true });
    this.#say({ type: "create", id, endpoint: "chat.completions", body });
    try {
      yield* queue.items();
    } finally {
      signal.removeEventListener("abort", cancel);
      this.#streams.delete(id);
    }
  }

  /** @param {object} message */
  #say(message) {
    if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }
}

/** @returns {import("./types.js").Transport} */
export function webSocketTransport() {
  /** @type {Connection | null} */
  let connection = null;

  return async function* stream(body, signal) {
    if (!connection?.isUsable || connection.key !== key.value) {
      connection?.close();
      connection = new Connection(key.value);
    }
    const opened = connection;
    try {
      await opened.isOpen;
    } catch (error) {
      // A browser does not say why a WebSocket was turned down; the same server will, over HTTP.
      await models();
      throw error;
    }
    signal.throwIfAborted();
    yield* opened.stream(body, signal);
  };
}
