/** What a client is told once. */

import { DEFAULT_RETRIES } from "./retries.js";

/**
 * How long to wait, in milliseconds; null is for ever. There is no limit to an answer as a whole.
 *
 * @typedef {object} Timeouts
 * @property {number | null} connect until a WebSocket is open; fetch has no such limit
 * @property {number | null} answer until an answer begins
 * @property {number | null} idle of silence in a stream that has begun; the server fills silence
 */

/** @type {Timeouts} */
const DEFAULT_TIMEOUTS = { connect: 10_000, answer: null, idle: 60_000 };

/** The longest time that a timer can have; with a longer one it fires at once. */
const MAX_TIMER = 2 ** 31 - 1;

/** @param {number | null} limit */
function limitOf(limit) {
  return limit === null || limit > MAX_TIMER ? null : limit;
}

export class Settings {
  /**
   * @param {string} url
   * @param {Partial<import("../types/index.js").ClientOptions>} options
   */
  constructor(url, options) {
    if (!/^https?:\/\/[^/]/.test(url)) {
      throw new TypeError(`url must begin with http:// or https:// and name a host, not ${JSON.stringify(url)}.`);
    }
    this.baseUrl = url.replace(/\/+$/, "").replace(/\/v1$/, "");
    this.socketUrl = `${this.baseUrl.replace(/^http/, "ws")}/v1/ws`;
    if (/[?#]/.test(url)) throw new TypeError("url must end with its path: requests append theirs.");
    if (/^https?:\/\/[^/]*@/.test(url)) throw new TypeError("url must not have a user and a password; give a key as apiKey.");
    this.apiKey = options.apiKey ?? null;
    // Whoever sends it would show it in the error.
    if (this.apiKey !== null && !/^[!-~]+( +[!-~]+)*$/.test(this.apiKey)) {
      throw new TypeError("apiKey must be printable ASCII, not empty, and without spaces or line ends around it.");
    }
    if (this.apiKey !== null && options.transport === "websocket" && !/^[\w!#$%&'*+\-.^`|~]+$/.test(this.apiKey)) {
      throw new TypeError('apiKey has characters that a WebSocket cannot carry; use the transport "sse".');
    }
    const { connect, answer, idle } = { ...DEFAULT_TIMEOUTS, ...options.timeouts };
    this.timeouts = { connect: limitOf(connect), answer: limitOf(answer), idle: limitOf(idle) };
    this.retries = { ...DEFAULT_RETRIES, ...options.retries };
  }

  /** @returns {Record<string, string>} */
  get headers() {
    return this.apiKey === null ? {} : { Authorization: `Bearer ${this.apiKey}` };
  }

  /** How a browser, which cannot set headers on a WebSocket, brings the key. */
  get subprotocols() {
    return this.apiKey === null ? [] : ["streamserve", `openai-insecure-api-key.${this.apiKey}`];
  }
}
