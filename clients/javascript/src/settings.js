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
    this.apiKey = options.apiKey ?? null;
    this.timeouts = { ...DEFAULT_TIMEOUTS, ...options.timeouts };
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
