/**
 * Where a stream is, over all its connections, so that it can be gone on with after one of them is lost.
 *
 * The server keeps a stream that is asked for as resumable for a while without a connection, numbers its events, and
 * gives those after any number to whoever comes back. It names the stream at its first sign of life. Until then the
 * name is known all the same, for the client chooses the id of the request.
 */

import { APIError, ConnectionFailed, InvalidAnswer, NotFound } from "./errors.js";

const STREAM_EXISTS = "stream_exists";
const STREAM_TAKEN = "stream_taken";
/** A proxy that has no answer of the server: the request may have reached it. */
const GATEWAY_STATUSES = [502, 504];
/** How servers that keep no streams answer who looks for one. */
const NEVER_HEARD_STATUSES = [400, 404, 405, 501];
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
  /** This try is not for the request, but for what it has begun. */
  hasComeBack = false;
  #isNamed = false;
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

  /** The next try begins: to come back to the stream, or else to make the request. */
  turn() {
    this.isAttached = false;
    this.hasComeBack = this.mayExist;
  }

  /** The server is being asked. */
  sent() {
    if (this.hasComeBack) return;
    this.mayExist = this.isKept;
    this.#numRequests += 1;
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

  /**
   * Whether an event with this id is the next one, and none that has come already; throws ConnectionFailed if there is
   * one missing. Hot: once a chunk.
   *
   * @param {string} eventId
   */
  takes(eventId) {
    const number = eventId.slice(eventId.lastIndexOf(":") + 1);
    return /^\d+$/.test(number) ? this.takesNumber(Number(number)) : true;
  }

  /** The same by its number. Hot: once a chunk. @param {number} number */
  takesNumber(number) {
    if (!this.#isNamed) return true;
    if (number > this.numEvents + 1) {
      throw new ConnectionFailed(`event ${this.numEvents + 1} of the stream did not come`);
    }
    const isNew = number > this.numEvents;
    if (isNew) this.numEvents = number;
    return isNew;
  }

  /** The server says that the stream, whose first event it was waiting for, has come to nothing. */
  refused() {
    this.isAttached = false;
    this.forget();
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
    if (this.isAttached) return false;
    if (this.hasComeBack) {
      if (this.numEvents || !this.#isUnknown(error)) return false;
      this.forget();
    } else {
      if (!(error instanceof APIError)) return false;
      const doesExist = error.code === STREAM_EXISTS && this.#numRequests > 1;
      this.mayExist = doesExist || (this.isKept && isOneOf(error, GATEWAY_STATUSES));
      if (!doesExist) return false;
    }
    this.#numTurns += 1;
    return this.#numTurns <= MAX_TURNS;
  }

  /** Whether `error` says only that the stream could not be reached just now. @param {unknown} error */
  isUnreached(error) {
    if (error instanceof ConnectionFailed) return true;
    if (this.isAttached) return false;
    return isOneOf(error, RETRYABLE_STATUSES) || (this.hasComeBack && isOneOf(error, GATEWAY_STATUSES));
  }

  /** The server has said that it keeps the stream. */
  get isKeptThere() {
    return this.#isNamed;
  }

  /** Whether a stream of which something has come may still be there after `error`. @param {unknown} error */
  canReturn(error) {
    // Without numbers it would come from the beginning again.
    return this.#isNamed && this.numEvents > 0 && this.isUnreached(error);
  }

  /**
   * There is no other try after `error`. What may go on nevertheless is left for whoever ends it.
   *
   * @param {unknown} error
   */
  settle(error) {
    if (error instanceof APIError && !this.#mayOutlive(error)) this.forget();
  }

  /** @param {APIError} error */
  #mayOutlive(error) {
    if (this.isAttached || error.code === STREAM_TAKEN) return false;
    return this.hasComeBack ? error.status !== 404 : isOneOf(error, GATEWAY_STATUSES);
  }

  /** Whether `error` says that there is no such stream. @param {unknown} error */
  #isUnknown(error) {
    if (this.#isNamed) return error instanceof NotFound;
    return error instanceof InvalidAnswer || isOneOf(error, NEVER_HEARD_STATUSES);
  }
}

/** @param {unknown} error @param {number[]} statuses */
function isOneOf(error, statuses) {
  return error instanceof APIError && error.status !== null && statuses.includes(error.status);
}

/** Also on pages without TLS, which have no crypto.randomUUID. */
function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
