/** Requests over HTTP, and streams over SSE. */

import { AnswerTimeout, apiError, ConnectionFailed, InvalidAnswer } from "./errors.js";
import { Life } from "./life.js";
import { parseRetryAfter } from "./retries.js";
import { EventDecoder } from "./sse.js";

const DONE = "[DONE]";

/** For word that nobody wants the rest of a stream. */
const ABANDON_MS = 2000;

/** @typedef {import("./endpoints.js").Call} Call */
/** @typedef {import("./place.js").Place} Place */

/** A connection for each request that is being answered; a stream that is left early closes its own. */
export class HttpTransport {
  #settings;
  #fetch;

  /** @param {import("./settings.js").Settings} settings @param {(request: Request) => Promise<Response>} fetch */
  constructor(settings, fetch) {
    this.#settings = settings;
    this.#fetch = fetch;
  }

  /** The answer in one piece. @param {Call} call @param {AbortSignal} signal */
  answer(call, signal) {
    return this.#whole("POST", call.path, { body: call.body }, signal);
  }

  /** Ends what is at `path`. @param {string} path */
  async delete(path) {
    await this.#whole("DELETE", path, {}, new AbortController().signal);
  }

  /**
   * Ends the stream at `path` if that takes no time, also when the page goes; throws nothing. A server that cannot be
   * reached ends it by itself, later.
   *
   * @param {string} path
   */
  async abandon(path) {
    try {
      await this.#whole("DELETE", path, { keepalive: true }, AbortSignal.timeout(ABANDON_MS));
    } catch {
      // Said above.
    }
  }

  /** Throws what the server says if it lets nobody in. @param {AbortSignal} signal */
  async check(signal) {
    await this.#whole("GET", "/v1/models", {}, signal);
  }

  /**
   * The JSON objects of a stream, and null where it says that they are all. Hot: one turn a chunk.
   *
   * @param {Call} call
   * @param {Place} place where the stream is; moves on with it
   * @param {AbortSignal} signal
   * @returns {AsyncGenerator<any, void, void>}
   */
  async *events(call, place, signal) {
    const life = new Life(signal);
    try {
      const asking = place.hasComeBack ? this.#return(place, life) : this.#create(call, place, life);
      place.sent();
      const response = await asking;
      if (!response.ok) throw await errorOf(response, life);
      const type = response.headers.get("Content-Type") ?? "";
      if (!/^text\/event-stream\s*(;|$)/i.test(type) || response.body === null) {
        throw new InvalidAnswer(`the server sent ${JSON.stringify(type)} instead of a stream`);
      }
      place.attach(place.isKept ? response.headers.get("X-Stream-Id") : null);
      yield* this.#read(response.body.getReader(), place, life);
    } finally {
      life.end();
    }
  }

  /**
   * @param {ReadableStreamDefaultReader<Uint8Array>} reader
   * @param {Place} place
   * @param {Life} life
   */
  async *#read(reader, place, life) {
    const decoder = new EventDecoder();
    let isFirst = place.numEvents === 0;
    try {
      for (;;) {
        const next = network(reader.read(), "the connection broke");
        const { done, value } = await life.during(next, this.#settings.timeouts.idle, silence);
        if (done) return;
        for (const { id, data } of decoder.decode(value)) {
          if (!place.takes(id)) continue;
          const chunk = data === DONE ? null : parseObject(data);
          if (isFirst) checkFirst(chunk, place);
          isFirst = false;
          yield chunk;
        }
      }
    } finally {
      // Closes the connection if there is more; of one that broke it tells nothing new.
      reader.cancel().catch(() => {});
    }
  }

  /** @param {Call} call @param {Place} place @param {Life} life */
  #create(call, place, life) {
    /** @type {Record<string, string>} */
    const headers = place.isKept ? { "X-Stream-Resume": "1" } : {};
    // What the caller has chosen is in the body, and the server says whether it can be one.
    if (place.isKept && call.body.request_id === undefined) headers["X-Request-Id"] = place.requestId;
    return this.#begin("POST", call.path, { body: call.body, headers }, life);
  }

  /** The server answers with the next event, or not at all. @param {Place} place @param {Life} life */
  #return(place, life) {
    const headers = { Accept: "text/event-stream" };
    if (place.numEvents === 0) return this.#begin("GET", place.path, { headers }, life);
    const options = { headers: { ...headers, "Last-Event-ID": `${place.name}:${place.numEvents}` } };
    return this.#begin("GET", place.path, { ...options, limit: this.#settings.timeouts.idle, late: silence }, life);
  }

  /** @param {string} method @param {string} path @param {Options} options @param {AbortSignal} signal */
  async #whole(method, path, options, signal) {
    const life = new Life(signal);
    try {
      const response = await this.#begin(method, path, options, life);
      if (!response.ok) throw await errorOf(response, life);
      return parseObject(await textOf(response, life));
    } finally {
      life.end();
    }
  }

  /** @param {string} method @param {string} path @param {Options} options @param {Life} life */
  #begin(method, path, { body, headers, keepalive = false, limit = this.#settings.timeouts.answer, late = tooLate }, life) {
    // fetch itself would tell of a header that is none as it does of a lost connection.
    const request = new Request(this.#settings.baseUrl + path, {
      method,
      keepalive,
      headers: {
        ...this.#settings.headers, ...headers, ...(body === undefined ? {} : { "Content-Type": "application/json" }),
      },
      body: body === undefined ? null : JSON.stringify(body),
      signal: life.signal,
    });
    life.hold(request);
    return life.during(network(this.#fetch(request), "no connection"), limit, late);
  }
}

/**
 * What a request is made with.
 *
 * @typedef {object} Options
 * @property {any} [body] JSON
 * @property {Record<string, string>} [headers]
 * @property {boolean} [keepalive] it outlives the page
 * @property {number | null} [limit] until the answer begins
 * @property {() => Error} [late] what it is when that is over
 */

const tooLate = () => new AnswerTimeout("the answer did not begin in time (timeouts.answer)");
const silence = () => new ConnectionFailed("nothing came for longer than timeouts.idle");

/**
 * What `wait` gives; what fetch and its streams throw becomes an error of ours.
 *
 * @template T
 * @param {Promise<T>} wait
 * @param {string} what happened
 * @returns {Promise<T>}
 */
function network(wait, what) {
  return wait.catch((error) => {
    throw new ConnectionFailed(`${what}: ${reasonOf(error)}`, { cause: error });
  });
}

/** @param {any} error */
function reasonOf(error) {
  return String(error?.cause?.message || error?.message || error);
}

/** @param {Response} response @param {Life} life */
function textOf(response, life) {
  return life.during(network(response.text(), "the connection broke"));
}

/**
 * The error in an answer that need not be one of this API's: proxies answer as well.
 *
 * @param {Response} response
 * @param {Life} life
 */
async function errorOf(response, life) {
  const body = await textOf(response, life);
  let error;
  try {
    error = JSON.parse(body).error;
  } catch {
    // Told below.
  }
  error ??= body.trim().slice(0, 200);
  if (response.redirected) error = `${response.url}, to which the server redirects, answered ${response.status}`;
  const retryAfter = parseRetryAfter(response.headers.get("Retry-After"));
  return apiError(error, { status: response.status, retryAfter, requestId: response.headers.get("X-Request-Id") });
}

/**
 * Throws where the first event of a stream says that this, which had to wait for it, has come to nothing: what the answer
 * would have been, had its headers not been on their way.
 *
 * @param {any} event @param {Place} place
 */
function checkFirst(event, place) {
  const status = event?.error?.status;
  if (typeof status !== "number") return;
  place.refused();
  const { retry_after: seconds = null } = event.error;
  throw apiError(event.error, { status, retryAfter: parseRetryAfter(seconds === null ? null : String(seconds)) });
}

/** The JSON object in `text`. Hot: once a chunk. @param {string} text @returns {any} */
export function parseObject(text) {
  let value = null;
  try {
    value = JSON.parse(text);
  } catch {
    // Told below.
  }
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new InvalidAnswer(`the server sent something else than a JSON object: ${JSON.stringify(text.slice(0, 200))}`);
  }
  return value;
}
