/** Chunks of a chat completion over server-sent events. */

import { eventsOf } from "./event_stream.js";
import { ConnectionLost, post, Problem } from "./server.js";

/** @typedef {import("./types.js").Chunk} Chunk */

/** @type {import("./types.js").Transport} */
export async function* streamOverSse(body, signal) {
  for await (const data of eventsOf(await post("v1/chat/completions", body, signal), signal)) {
    if (data === "[DONE]") return;
    /** @type {Chunk} */
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Problem(500, chunk.error);
    yield chunk;
  }
  // A stream that ends well says so.
  throw new ConnectionLost();
}
