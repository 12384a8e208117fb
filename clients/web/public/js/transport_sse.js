/** Chunks of a chat completion over server-sent events. */

import { ConnectionLost, post, Problem } from "./server.js";
import { EventParser } from "./sse.js";

/** @typedef {import("./types.js").Chunk} Chunk */

/** @type {import("./types.js").Transport} */
export async function* streamOverSse(body, signal) {
  const response = await post("v1/chat/completions", body, signal);
  if (!response.body) throw new ConnectionLost();
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw signal.aborted ? error : new ConnectionLost();
      });
      // A stream that ends well says so.
      if (done) throw new ConnectionLost();
      for (const data of parser.push(decoder.decode(value, { stream: true }))) {
        if (data === "[DONE]") return;
        /** @type {Chunk} */
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Problem(500, chunk.error);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
