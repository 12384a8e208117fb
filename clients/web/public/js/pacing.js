/** When to come back to a server that was lost, and until when. */

import { sleep } from "./server.js";

const FIRST_MS = 250;
const LONGEST_MS = 5000;
const LIMIT_MS = 60_000;

/**
 * @param {number} numTries  that have failed
 * @param {number} random  from 0 to 1, so that not all clients come back at once
 * @returns {number} milliseconds
 */
export function backOffMs(numTries, random) {
  return Math.min(LONGEST_MS, FIRST_MS * 2 ** numTries) * (0.5 + random / 2);
}

/** Tries since there was progress last. */
export class Pacing {
  #numTries = 0;
  /** @type {number | null} */
  #lostMs = null;

  constructor(nowMs = () => performance.now()) {
    this.nowMs = nowMs;
  }

  progress() {
    this.#numTries = 0;
    this.#lostMs = null;
  }

  /** @returns {boolean} whether another try is worth it */
  get isWorthIt() {
    this.#lostMs ??= this.nowMs();
    return this.nowMs() - this.#lostMs < LIMIT_MS;
  }

  /**
   * Waits until the next try: not any longer once the browser has found its network again.
   *
   * @param {number} retryAfterS  the least that the server has asked for; 0 if it has not
   * @param {AbortSignal} signal
   */
  async pause(retryAfterS, signal) {
    const ms = Math.max(backOffMs(this.#numTries, Math.random()), retryAfterS * 1000);
    this.#numTries += 1;
    const found = new AbortController();
    const wake = () => found.abort();
    if (!retryAfterS) addEventListener("online", wake, { once: true });
    try {
      await sleep(ms, AbortSignal.any([signal, found.signal]));
    } catch {
      signal.throwIfAborted();
    } finally {
      removeEventListener("online", wake);
    }
  }
}
