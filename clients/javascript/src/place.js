/**
 * Where a stream is, over all its connections, so that it can be gone on with after one of them is lost.
 *
 * The server keeps a stream that is asked for as resumable for a while without a connection, numbers its events, and
 * gives those after any number to whoever comes back. It names the stream at its first sign of life. Until then the
 * name is known all the same, for the client chooses the id of the request.
 */

import { APIError, ConnectionFailed, NotFound } from "./errors.js";

const STREAM_EXISTS = "stream_exists";
/** Between asking for the stream and making the request, without a wait. */
const MAX_TURNS = 4;
export const RETRYABLE_STATUSES = [429, 503];

export class Place {
  /** Of the request, however often it is made. @type {string} */
  requestId;
  /** Of the stream. */
  name;
  /** The request was sent, and nothing says that there is no such stream. */
  mayExist = false;
  /** This connection has given something of the stream: errors are its own from here on. */
  isAttached = false;
  /** How many have come. */
  numEvents = 0;
  #isNamed = false;
  #hasComeBack = false;
  #numRequests = 0;
  #numTurns = 0;

  /**
   * @param {import("./endpoints.js").Call} call what begins it
   * @param {boolean} isKept it is to outlive its connections, if the server can do that
   */
  constructor(call, isKept) {
    this.isKept = isKept;
    this.requestId = String(call.body.request_id || randomId());
    this.name = call.idPrefix + this.requestId;
  }

  /** Over HTTP. */
  get path() {
    return `/v1/streams/${encodeURIComponent(this.name)}`;
  }

  /** A connection begins: whether to come back to the stream on it, or to make the request. */
  connect() {
    this.#hasComeBack = this.mayExist;
    if (!this.mayExist) {
      this.mayExist = this.isKept;
      this.#numRequests += 1;
    }
    return this.#hasComeBack;
  }

  /** The server gives the stream on this connection. @param {string | null} name null if it does not keep it */
  attach(name) {
    this.isAttached = true;
    if (name === null) this.forget();
    else {
      this.name = name;
      this.#isNamed = true;
    }
  }

  /** An event with this id has come. Hot: once a chunk. @param {string} eventId */
  passed(eventId) {
    const number = Number(eventId.slice(eventId.lastIndexOf(":") + 1));
    if (eventId && Number.isInteger(number)) this.numEvents = number;
  }

  /** The server says that it does not give more of a stream that it keeps on this connection. */
  leftAlone() {
    if (this.#isNamed) this.isAttached = false;
  }

  /** There is nothing to come back to, or to end. */
  forget() {
    this.mayExist = this.#isNamed = false;
  }

  /**
   * Whether `error` says to do the other thing at once: to make the request because it has never arrived, or to
   * come back to the stream because it did.
   *
   * @param {unknown} error
   */
  takesTurn(error) {
    if (this.isAttached || !(error instanceof APIError)) return false;
    if (this.#hasComeBack) {
      if (!(error instanceof NotFound) || this.numEvents) return false;
      this.forget();
    } else {
      this.mayExist = error.code === STREAM_EXISTS && this.#numRequests > 1;
      if (!this.mayExist) return false;
    }
    this.#numTurns += 1;
    return this.#numTurns <= MAX_TURNS;
  }

  /** Whether a stream of which something has come may still be there after `error`. @param {unknown} error */
  canReturn(error) {
    if (!this.#isNamed) return false;
    const isBusy = error instanceof APIError && error.status !== null && RETRYABLE_STATUSES.includes(error.status);
    return error instanceof ConnectionFailed || (isBusy && !this.isAttached);
  }
}

/** Also on pages without TLS, which have no crypto.randomUUID. */
function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
