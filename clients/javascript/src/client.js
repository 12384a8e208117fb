/** The client, and the streams that it gives. */

import { CHAT, COMPLETIONS, RESPONSES, streamCall, wholeCall } from "./endpoints.js";
import { ClientError, ConnectionFailed, StreamInterrupted } from "./errors.js";
import { HttpTransport } from "./http.js";
import { sleep } from "./life.js";
import { Departures } from "./departures.js";
import { Place } from "./place.js";
import { Attempts } from "./retries.js";
import { Settings } from "./settings.js";
import { SocketTransport } from "./socket.js";


/** @typedef {import("./accumulators.js").Accumulator} Accumulator */
/** @typedef {import("./endpoints.js").Call} Call */
/** @typedef {import("./endpoints.js").Endpoint} Endpoint */
/** @typedef {{ signal?: AbortSignal }} RequestOptions */

/**
 * What carries requests.
 *
 * @typedef {object} Transport
 * @property {(call: Call, signal: AbortSignal) => Promise<any>} answer
 * @property {(call: Call, place: Place, signal: AbortSignal) => AsyncGenerator<any, void, void>} events
 */

/** Makes requests, again where that makes sense. */
class Caller {
  #transport;
  #retries;
  #sleep;
  #abandon;
  #departures = new Departures((place) => this.#leave(place));

  /**
   * @param {Transport} transport
   * @param {import("./retries.js").Retries} retries
   * @param {(milliseconds: number, signal: AbortSignal) => Promise<void>} sleep
   * @param {(path: string) => Promise<void>} abandon ends the stream at a path; throws nothing
   */
  constructor(transport, retries, sleep, abandon) {
    this.#transport = transport;
    this.#retries = retries;
    this.#sleep = sleep;
    this.#abandon = abandon;
  }

  /** The answer in one piece. @param {Call} call @param {AbortSignal} signal @returns {Promise<any>} */
  async answer(call, signal) {
    const attempts = new Attempts(this.#retries);
    for (;;) {
      let delay;
      try {
        signal.throwIfAborted();
        return await this.#transport.answer(call, signal);
      } catch (error) {
        delay = attempts.delay(error);
      }
      await this.#sleep(delay, signal);
    }
  }

  /**
   * The chunks of a stream, which `progress` keeps as well. Hot: one turn a chunk.
   *
   * @param {Call} call
   * @param {Accumulator} progress
   * @param {AbortSignal} signal
   * @returns {AsyncGenerator<any, void, void>}
   */
  async *chunks(call, progress, signal) {
    const attempts = new Attempts(this.#retries);
    const place = new Place(call, this.#retries.resume > 0);
    this.#departures.add(place);
    try {
      for (;;) {
        let delay;
        place.turn();
        try {
          signal.throwIfAborted();
          for await (const event of this.#transport.events(call, place, signal)) {
            if (event === null) progress.end();
            else yield progress.add(event);
          }
          if (!progress.isComplete) throw new ConnectionFailed("the connection ended before the answer did");
          return;
        } catch (error) {
          if (progress.isComplete) return;
          if (place.takesTurn(error)) continue;
          delay = nextDelay(attempts, error, progress, place);
        }
        await this.#sleep(delay, signal);
      }
    } finally {
      this.#departures.delete(place);
      if (!progress.isComplete) this.#leave(place);
    }
  }

  /** Nobody waits for it: where it takes long, that is no reason for whoever leaves to stay. @param {Place} place */
  #leave(place) {
    if (!place.mayExist) return;
    // The server would wait for somebody to come back.
    place.forget();
    void this.#abandon(place.path);
  }
}

/**
 * The wait until the next try. Throws what `error` means to the caller if there is none.
 *
 * @param {Attempts} attempts
 * @param {any} error
 * @param {Accumulator} progress
 * @param {Place} place
 */
function nextDelay(attempts, error, progress, place) {
  try {
    // After the first chunk the request cannot be made again, for the text would begin anew.
    return attempts.streamDelay(error, place, progress.hasBegun);
  } catch {
    // Anything else says that nobody wants it any more.
    if (!(error instanceof ClientError)) throw error;
    place.settle(error);
    if (!progress.hasBegun || (place.isAttached && !(error instanceof ConnectionFailed))) throw error;
    throw new StreamInterrupted(error.message, progress.text, progress.answer(), { cause: error });
  }
}

/** An answer as it is made. */
export class Stream {
  #progress;
  #chunks;
  #closing = new AbortController();

  /** @param {Caller} caller @param {Endpoint} endpoint @param {object} body @param {RequestOptions} options */
  constructor(caller, endpoint, body, { signal }) {
    this.#progress = endpoint.accumulator();
    this.#chunks = this.#read(caller, streamCall(endpoint, body), signal);
  }

  [Symbol.asyncIterator]() {
    return this.#chunks;
  }

  get text() {
    return this.#progress.text;
  }

  async *texts() {
    for await (const chunk of this) {
      const text = this.#progress.textOf(chunk);
      if (text) yield text;
    }
  }

  async result() {
    for await (const _ of this);
    if (!this.#progress.hasBegun) throw new ClientError("nothing of the answer has come");
    return this.#progress.answer();
  }

  close() {
    this.#closing.abort();
  }

  /** @param {Caller} caller @param {Call} call @param {AbortSignal | undefined} signal */
  async *#read(caller, call, signal) {
    const closing = this.#closing;
    const onAbort = () => closing.abort(signal?.reason);
    if (signal?.aborted) onAbort();
    signal?.addEventListener("abort", onAbort);
    try {
      yield* caller.chunks(call, this.#progress, closing.signal);
    } catch (error) {
      // close() ends the stream, the caller's own signal is told as an error.
      if (!closing.signal.aborted || signal?.aborted) throw error;
    } finally {
      signal?.removeEventListener("abort", onAbort);
    }
  }
}

/** One of the endpoints. */
class Resource {
  #caller;
  #endpoint;

  /** @param {Caller} caller @param {Endpoint} endpoint */
  constructor(caller, endpoint) {
    this.#caller = caller;
    this.#endpoint = endpoint;
  }

  /** @param {object} body @param {RequestOptions} [options] */
  create(body, { signal = new AbortController().signal } = {}) {
    return this.#caller.answer(wholeCall(this.#endpoint, body), signal);
  }

  /** @param {object} body @param {RequestOptions} [options] */
  stream(body, options = {}) {
    return new Stream(this.#caller, this.#endpoint, body, options);
  }
}

/** A streamserve server. */
export class Client {
  #http;
  /** @type {SocketTransport | null} */
  #socket = null;

  /** @param {string} url @param {import("../types/index.js").ClientOptions} [options] */
  constructor(url, options = {}) {
    const settings = new Settings(url, options);
    const http = (this.#http = new HttpTransport(settings, options.fetch ?? ((/** @type {Request} */ request) => fetch(request))));
    if (options.transport === "websocket") {
      const implementation = options.WebSocket ?? globalThis.WebSocket;
      if (!implementation) {
        throw new TypeError("There is no WebSocket here (Node has one since version 22): give one as an option.");
      }
      this.#socket = new SocketTransport(settings, implementation, (signal) => http.check(signal));
    }
    const caller = new Caller(
      this.#socket ?? http, settings.retries, options.sleep ?? sleep, (path) => http.abandon(path),
    );
    this.chat = new Resource(caller, CHAT);
    this.completions = new Resource(caller, COMPLETIONS);
    this.responses = new Resource(caller, RESPONSES);
  }

  /** @param {string} answerId */
  async cancel(answerId) {
    await this.#http.delete(`/v1/streams/${encodeURIComponent(answerId)}`);
  }

  close() {
    this.#socket?.close();
  }
}
