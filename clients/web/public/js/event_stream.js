/** Server-sent events of a response. */

import { ConnectionLost } from "./server.js";
import { EventParser } from "./sse.js";

// The server sends something, a comment if need be, far more often than that: a longer silence is that of a server
// or a network that went away without a word.
const SILENCE_MS = 60_000;

/**
 * @param {Response} response
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<import("./sse.js").ServerEvent, void>} ends with the response, or when it falls silent
 * @throws {ConnectionLost}
 */
export async function* eventsOf(response, signal) {
  if (!response.body) throw new ConnectionLost();
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const silence = setTimeout(() => reader.cancel().catch(() => {}), SILENCE_MS);
      const { done, value } = await reader
        .read()
        .catch((error) => {
          throw signal.aborted ? error : new ConnectionLost();
        })
        .finally(() => clearTimeout(silence));
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
