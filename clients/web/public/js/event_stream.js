/** Server-sent events of a response. */

import { ConnectionLost } from "./server.js";
import { EventParser } from "./sse.js";

/**
 * @param {Response} response
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<string, void>} the data of each event
 * @throws {ConnectionLost}
 */
export async function* eventsOf(response, signal) {
  if (!response.body) throw new ConnectionLost();
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw signal.aborted ? error : new ConnectionLost();
      });
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
