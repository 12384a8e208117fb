/** When a request is made again, and after how long: decided here, waited elsewhere. */

import { APIError, ConnectionFailed } from "./errors.js";
import { RETRYABLE_STATUSES } from "./place.js";

/** A reader waits in the middle of a text: the longest wait between two tries to go on with it. */
const MAX_RETURN_DELAY = 5000;
/** What counts of a try that went on for longer: there was a connection then, on which a stream had to wait. */
const MAX_TRY = 10_000;

/**
 * Times are in milliseconds.
 *
 * @typedef {object} Retries
 * @property {number} maxRetries tries after the first one; 0 for none
 * @property {number} firstDelay wait after the first failure, at most
 * @property {number} maxDelay longest wait; if the server names a longer time, the error is thrown instead
 * @property {number} resume time without anything of a stream, from when it broke off until it is given up; with 0
 *   streams end with their connections, also on the server
 * @property {() => number} chance a number from 0 to 1
 */

/** @type {Retries} */
export const DEFAULT_RETRIES = {
  maxRetries: 5, firstDelay: 500, maxDelay: 60_000, resume: 60_000, chance: Math.random,
};

/** The tries of one request. */
export class Attempts {
  #numFailures = 0;
  #waited = 0;
  /** When the next try to come back begins. @type {number | null} */
  #retryAt = null;
  #numEvents = 0;
  #retries;

  /** @param {Retries} retries */
  constructor(retries) {
    this.#retries = retries;
  }

  /**
   * The wait until the next try after one that failed with `error`, which is thrown if there is none.
   *
   * The wait doubles with each failure and is between half and the whole of that, so that many clients do not
   * come back at the same moment. Where the server names a time (Retry-After), the wait is added to it.
   *
   * @param {unknown} error
   * @returns {number}
   */
  delay(error) {
    const { maxRetries, maxDelay } = this.#retries;
    this.#numFailures += 1;
    if (this.#numFailures > maxRetries || !isPassing(error)) throw error;
    return this.#wait(error, maxDelay, maxDelay);
  }

  /**
   * The same for a stream.
   *
   * @param {unknown} error
   * @param {import("./place.js").Place} place where the stream is
   * @param {boolean} hasBegun something of it has come, and it cannot be begun anew
   * @returns {number}
   */
  streamDelay(error, place, hasBegun) {
    const now = performance.now();
    if (place.numEvents > this.#numEvents) {
      this.#numEvents = place.numEvents;
      this.#numFailures = this.#waited = 0;
    } else if (this.#retryAt !== null) {
      this.#waited += Math.min(Math.max(now - this.#retryAt, 0), MAX_TRY);
    }
    this.#numFailures += 1;
    if (!(hasBegun ? place.canReturn(error) : place.isUnreached(error))) throw error;
    if (!hasBegun && !place.isKeptThere) {
      const { maxRetries, maxDelay } = this.#retries;
      if (this.#numFailures > maxRetries) throw error;
      return this.#wait(error, maxDelay, maxDelay);
    }
    const left = this.#retries.resume - this.#waited;
    if (left <= 0) throw error;
    const delay = this.#wait(error, MAX_RETURN_DELAY, left);
    this.#waited += delay;
    this.#retryAt = now + delay;
    return delay;
  }

  /** @param {unknown} error @param {number} maxBackoff @param {number} limit */
  #wait(error, maxBackoff, limit) {
    const { firstDelay, chance } = this.#retries;
    const backoff = (Math.min(firstDelay * 2 ** (this.#numFailures - 1), maxBackoff) * (1 + chance())) / 2;
    const asked = error instanceof APIError ? error.retryAfter : null;
    if (asked === null) return Math.min(backoff, limit);
    if (asked > limit) throw error;
    return Math.min(asked + backoff, limit);
  }
}

/** @param {unknown} error */
function isPassing(error) {
  if (error instanceof APIError) return error.status !== null && RETRYABLE_STATUSES.includes(error.status);
  return error instanceof ConnectionFailed;
}

/**
 * The milliseconds in a Retry-After header: seconds, or a date as proxies write it. Null if it is neither.
 *
 * @param {string | null} value
 * @param {number} [now]
 */
export function parseRetryAfter(value, now = Date.now()) {
  if (value === null) return null;
  if (/^\s*\d+\s*$/.test(value)) return Number(value) * 1000;
  const date = /[a-z]/i.test(value) ? Date.parse(value) : Number.NaN;
  return Number.isNaN(date) ? null : Math.max(0, date - now);
}
