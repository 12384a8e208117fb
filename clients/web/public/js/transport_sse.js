/** Chunks of a chat completion over server-sent events. */

import { eventsOf } from "./event_stream.js";
import { ConnectionLost, get, post, Problem } from "./server.js";

// Whether there is such a stream is known at once, whatever comes of it.
const RETURN_MS = 20_000;

/** @typedef {import("./types.js").StreamEvent} StreamEvent */

/** @type {import("./types.js").Transport} */
export const overSse = {
  async *begin(body, requestId, signal) {
    const headers = { "X-Stream-Resume": "1", "X-Request-Id": requestId };
    yield* chunks(await post("v1/chat/completions", body, signal, headers), signal);
  },

  async *resume({ id, after }, signal) {
    const headers = { Accept: "text/event-stream", ...(after ? { "Last-Event-ID": `${id}:${after}` } : {}) };
    const response = await within(RETURN_MS, signal, (limit) => get(streamPath(id), limit, headers));
    if (!response.headers.get("Content-Type")?.startsWith("text/event-stream")) {
      // A server that keeps no streams says what the answer is doing.
      throw new Problem(404, { code: "stream_not_found" });
    }
    yield* chunks(response, signal);
  },
};

/** @param {string} id  of a stream */
export function streamPath(id) {
  return `v1/streams/${encodeURIComponent(id)}`;
}

/**
 * @param {number} ms
 * @param {AbortSignal} signal
 * @param {(limit: AbortSignal) => Promise<Response>} ask
 * @returns {Promise<Response>} which may go on for longer, once it has begun
 * @throws {ConnectionLost}
 */
async function within(ms, signal, ask) {
  const late = new AbortController();
  const timer = setTimeout(() => late.abort(), ms);
  try {
    return await ask(AbortSignal.any([signal, late.signal]));
  } catch (error) {
    throw late.signal.aborted && !signal.aborted ? new ConnectionLost() : error;
  } finally {
    clearTimeout(timer);
  }
}

/**
 * @param {Response} response
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<StreamEvent, void>}
 */
async function* chunks(response, signal) {
  const stream = response.headers.get("X-Stream-Id");
  let isFirst = true;
  for await (const { data, id } of eventsOf(response, signal)) {
    if (data === "[DONE]") return;
    /** @type {import("./types.js").Chunk} */
    const chunk = JSON.parse(data);
    if (chunk.error) throw problemOf(chunk.error, isFirst);
    isFirst = false;
    yield { stream, number: stream ? Number(id.slice(id.lastIndexOf(":") + 1)) : 0, chunk };
  }
  // A stream that ends well says so.
  throw new ConnectionLost();
}

/**
 * @param {NonNullable<import("./types.js").Chunk["error"]>} error
 * @param {boolean} isFirst
 */
function problemOf(error, isFirst) {
  // A stream that had to wait for its first event says what its status would have been without the wait.
  if (isFirst && error.status) return new Problem(error.status, error, error.retry_after);
  return Object.assign(new Problem(500, error), { endsStream: true });
}
