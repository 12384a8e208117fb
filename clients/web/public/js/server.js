/** The server that this page came from: its address, the key for it, and what its errors mean. */

import { ofBrowser, ofTab } from "./browser_storage.js";

const KEY = "streamserve.key";
const READY_POLL_MS = 1000;
// A request is on its way for so long at most, as a rule.
const REMOVE_AGAIN_MS = [250, 500, 1000, 2000, 4000, 8000];

/** An error that the server tells of. */
export class Problem extends Error {
  /**
   * @param {number} status
   * @param {{message?: string, code?: string}} error
   * @param {number | null} retryAfterS
   */
  constructor(status, error, retryAfterS = null) {
    super(error.message || `The server answered ${status}.`);
    this.name = "Problem";
    this.status = status;
    this.code = error.code ?? "";
    this.retryAfterS = retryAfterS;
    /** Whether it is the last event of a stream, and not the answer to a request. */
    this.endsStream = false;
  }

  /** Whether the same request is likely to be taken later. */
  get isPassing() {
    return this.status === 429 || this.status === 503;
  }
}

/** The connection broke, or there was none. */
export class ConnectionLost extends Error {
  constructor() {
    super("The connection to the server was lost.");
    this.name = "ConnectionLost";
  }
}

/**
 * @param {string} path  without a slash at its start: a proxy may have put the page under a prefix
 * @returns {URL}
 */
export function address(path) {
  return new URL(path, document.baseURI);
}

/** The key, kept for this tab or, if the user wants it, in this browser. */
export const key = {
  get value() {
    const kept = ofTab.get(KEY) ?? ofBrowser.get(KEY) ?? "";
    // Others cannot be sent.
    return /^[\x21-\x7e]*$/.test(kept) ? kept : "";
  },
  /**
   * @param {string} value
   * @param {boolean} isRemembered
   */
  set(value, isRemembered) {
    ofTab.set(KEY, value);
    ofBrowser.set(KEY, isRemembered ? value : null);
  },
};

/**
 * @param {string} path
 * @param {RequestInit} options
 * @returns {Promise<Response>} a good one
 * @throws {Problem | ConnectionLost}
 */
async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key.value) headers.set("Authorization", `Bearer ${key.value}`);
  let response;
  try {
    response = await fetch(address(path), { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ConnectionLost();
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

/** @param {Response} response */
async function problemOf(response) {
  const body = await response.json().catch(() => ({}));
  const after = Number(response.headers.get("Retry-After") ?? NaN);
  return new Problem(response.status, body.error ?? {}, Number.isFinite(after) ? after : null);
}

/**
 * @param {string} path
 * @param {unknown} body
 * @param {AbortSignal} signal
 * @param {Record<string, string>} [headers]
 */
export function post(path, body, signal, headers = {}) {
  const all = { ...headers, "Content-Type": "application/json" };
  return request(path, { method: "POST", headers: all, body: JSON.stringify(body), signal });
}

/**
 * @param {string} path
 * @param {AbortSignal} signal
 * @param {Record<string, string>} [headers]
 */
export function get(path, signal, headers = {}) {
  return request(path, { signal, headers });
}

/**
 * Requested even if the page goes away meanwhile; what comes of it is not told.
 *
 * @param {string} path
 * @param {boolean} isThere  if it is not known to be, it may come: it is asked for again for a while
 */
export async function remove(path, isThere) {
  for (const ms of isThere ? [] : REMOVE_AGAIN_MS) {
    if (await isRemoved(path)) return;
    await sleep(ms, new AbortController().signal);
  }
  await isRemoved(path);
}

/** @param {string} path  @returns {Promise<boolean>} false if it is not there, or the server is not */
function isRemoved(path) {
  return request(path, { method: "DELETE", keepalive: true }).then(
    () => true,
    (error) => error instanceof Problem && error.status !== 404,
  );
}

/** @returns {Promise<{id: string, maxLength: number | null}[]>} what can be talked to */
export async function models() {
  const list = await (await request("v1/models")).json();
  return list.data.map((/** @type {{id: string, max_model_len?: number}} */ model) => ({
    id: model.id,
    maxLength: model.max_model_len ?? null,
  }));
}

/**
 * What the server is doing: `ok`, or why it takes no requests and how far it is.
 *
 * @typedef {{status: string, progress?: {stage?: string, fraction?: number | null} | null}} Status
 * @returns {Promise<Status>}
 */
export async function status() {
  try {
    return await (await fetch(address("ready"), { cache: "no-store" })).json();
  } catch {
    return { status: "unreachable" };
  }
}

/**
 * Resolves once the server takes requests.
 *
 * @param {(status: Status) => void} tell
 * @param {AbortSignal} signal
 */
export async function untilReady(tell, signal) {
  for (;;) {
    const now = await status();
    signal.throwIfAborted();
    if (now.status === "ok") return;
    tell(now);
    await sleep(READY_POLL_MS, signal);
  }
}

/**
 * @param {number} ms
 * @param {AbortSignal} signal
 * @returns {Promise<void>}
 */
export function sleep(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", abort);
      resolve();
    }, ms);
    const abort = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    if (signal.aborted) abort();
    else signal.addEventListener("abort", abort, { once: true });
  });
}
