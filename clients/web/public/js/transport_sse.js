/** Chunks of a chat completion over server-sent events. */

import { eventsOf } from "./event_stream.js";
import { ConnectionLost, get, post, Problem } from "./server.js";

/** @typedef {import("./types.js").StreamEvent} StreamEvent */

/** @type {import("./types.js").Transport} */
export const overSse = {
  async *begin(body, requestId, signal) {
    const headers = { "X-Stream-Resume": "1", "X-Request-Id": requestId };
    yield* chunks(await post("v1/chat/completions", body, signal, headers), signal);
  },

  async *resume({ id, after }, signal) {
    const headers = { Accept: "text/event-stream", ...(after ? { "Last-Event-ID": `${id}:${after}` } : {}) };
    const response = await get(streamPath(id), signal, headers);
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
 * @param {Response} response
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<StreamEvent, void>}
 */
async function* chunks(response, signal) {
  const stream = response.headers.get("X-Stream-Id");
  for await (const { data, id } of eventsOf(response, signal)) {
    if (data === "[DONE]") return;
    /** @type {import("./types.js").Chunk} */
    const chunk = JSON.parse(data);
    if (chunk.error) throw Object.assign(new Problem(500, chunk.error), { endsStream: true });
    yield { stream, number: stream ? Number(id.slice(id.lastIndexOf(":") + 1)) : 0, chunk };
  }
  // A stream that ends well says so.
  throw new ConnectionLost();
}
