/** Keeps a stream of snapshots open, whatever happens to the server. */

import { eventsOf } from "./event_stream.js";
import { ConnectionLost, get, Problem, sleep, untilReady } from "./server.js";

const PATH = "dashboard/events";
const AGAIN_MS = 500;

/**
 * @typedef {object} Watcher
 * @property {(snapshot: import("./history.js").Snapshot) => void} show
 * @property {(status: import("./server.js").Status) => void} wait  the server sends nothing at the moment
 * @property {() => Promise<void>} askKey  resolves when there is another key to try
 */

/**
 * @param {Watcher} watcher
 * @param {AbortSignal} signal  ends it
 * @returns {Promise<never>}
 */
export async function watch(watcher, signal) {
  for (;;) {
    try {
      for await (const { data } of eventsOf(await get(PATH, signal), signal)) {
        if (data === "[DONE]") break;
        watcher.show(JSON.parse(data));
      }
    } catch (error) {
      signal.throwIfAborted();
      if (error instanceof Problem && error.status === 401) {
        await watcher.askKey();
        continue;
      }
      const isPassing = error instanceof ConnectionLost || (error instanceof Problem && error.status >= 500);
      if (!isPassing) throw error;
    }
    await untilReady(watcher.wait, signal);
    await sleep(AGAIN_MS, signal);
  }
}
