/**
 * The messages of the server's WebSocket /v1/ws: which is for which stream. Knows no socket.
 *
 *     client                                               server
 *     {"type":"create","id":I,"endpoint":E,"body":{…}}     {"id":I,"type":"chunk","chunk":{…}} …, or
 *     {"type":"resume","id":I,"stream":S,"after":N}        {"id":I,"type":"result","result":{…}}, then
 *     {"type":"cancel","id":I}                             {"id":I,"type":"done"}, or in place of any of them
 *                                                          {"id":I,"type":"error","error":{…}}
 *
 * A stream that the server keeps is announced by {"id":I,"type":"accepted","stream":S}, and its messages have a number,
 * "n":N. An error without one is none of the stream.
 */

import { apiError, ConnectionFailed, InvalidAnswer } from "./errors.js";
import { parseObject } from "./http.js";

export const PING = '{"type":"ping"}';
const TOO_LARGE = 1009;

/** A chunk or a result; null for the end of the stream; or an Error, why there is no more. @typedef {any} Item */

/** Where the messages of one stream wait for it. */
export class Inbox {
  /** @type {Item[]} */
  #items = [];
  /** @type {(() => void) | null} */
  #wake = null;

  /** @param {Item} item */
  put(item) {
    this.#items.push(item);
    this.#wake?.();
  }

  /** The next item, once there is one. @returns {Promise<Item>} */
  async next() {
    while (this.#items.length === 0) await new Promise((resolve) => { this.#wake = () => resolve(null); });
    return this.#items.shift();
  }
}

/**
 * The streams of one connection.
 *
 * Errors that name no stream (a message that is too large or nested too deeply to be looked at) belong to the
 * `create` that the server is just looking at. Messages are looked at in order and a ping is answered at once, so
 * with a ping behind each `create` it is the one after the last pong.
 */
export class Multiplexer {
  isLost = false;
  #lastId = 0;
  /** @type {Map<unknown, Inbox>} */
  #inboxes = new Map();
  /** @type {Map<unknown, import("./place.js").Place>} */
  #places = new Map();
  /** Their ids, and null for each ping of another kind. @type {(number | null)[]} */
  #unconfirmed = [];

  get hasStreams() {
    return this.#inboxes.size > 0;
  }

  /**
   * A new stream of this connection: its id, and the messages that begin it or come back to it.
   *
   * @param {import("./endpoints.js").Call} call
   * @param {import("./place.js").Place} place
   * @param {Inbox} inbox
   */
  open(call, place, inbox) {
    const id = ++this.#lastId;
    const message = place.hasComeBack ? returnOf(place) : creationOf(call, place);
    place.sent();
    this.#places.set(id, place);
    this.#inboxes.set(id, inbox);
    if (this.isLost) this.#end(id, new ConnectionFailed("the connection is over"));
    this.#unconfirmed.push(id);
    return { id, messages: [JSON.stringify({ ...message, id }), PING] };
  }

  /** A message that the server must answer. */
  ping() {
    this.#unconfirmed.push(null);
    return PING;
  }

  /** Gives a message to the stream that it is for; those who have left get none. Hot: once a chunk. @param {string} text */
  take(text) {
    const message = parseObject(text);
    const { type, id } = message;
    if (!this.#pass(message)) return;
    if (type === "pong") {
      this.#unconfirmed.shift();
    } else if (type === "chunk" || type === "result") {
      if (typeof message[type] !== "object" || message[type] === null) {
        throw new InvalidAnswer(`the server sent a message without an object: ${text.slice(0, 200)}`);
      }
      this.#inboxes.get(id)?.put(message[type]);
    } else if (type === "done") {
      this.#end(id, null);
    } else if (type === "error") {
      const { status = null, retry_after: seconds } = message.error ?? {};
      const retryAfter = typeof seconds === "number" ? seconds * 1000 : null;
      this.#end(id === undefined ? this.#unconfirmed[0] : id, apiError(message.error, { status, retryAfter }));
    }
  }

  /** Nobody wants the rest of a stream: the message that says so, unless it is over. @param {number} id */
  leave(id) {
    const place = this.#places.get(id);
    this.#places.delete(id);
    if (!this.#inboxes.delete(id) || this.isLost) return null;
    place?.forget();
    return JSON.stringify({ type: "cancel", id });
  }

  /** Nobody wants the rest of any stream: the messages that say so. */
  leaveAll() {
    return [...this.#inboxes].flatMap(([id, inbox]) => {
      const cancel = this.leave(/** @type {number} */ (id));
      inbox.put(new ConnectionFailed("the client was closed"));
      return cancel ?? [];
    });
  }

  /** The connection is over, and all its streams with it. @param {string} reason @param {number} [closeCode] */
  lose(reason, closeCode) {
    this.isLost = true;
    if (closeCode === TOO_LARGE) {
      const error = { message: "The request is too large.", code: "body_too_large" };
      this.#end(this.#unconfirmed[0], apiError(error, { status: 413 }));
    }
    for (const id of [...this.#inboxes.keys()]) this.#end(id, new ConnectionFailed(reason));
  }

  /** Whether the message is none that its stream has had already. Hot: once a chunk. @param {any} message */
  #pass({ type, id, n, stream }) {
    const place = this.#places.get(id);
    if (place === undefined) return true;
    if (type === "accepted") {
      if (typeof stream === "string") place.attach(stream);
    } else if (typeof n === "number") {
      // Whoever comes back is not told the name again.
      if (!place.isAttached) place.attach(place.name);
      try {
        return place.takesNumber(n);
      } catch (error) {
        this.#end(id, error);
        return false;
      }
    } else if (type === "error") {
      place.leftAlone();
    } else {
      place.attach(null);
    }
    return true;
  }

  /** @param {unknown} id @param {Item} item */
  #end(id, item) {
    this.#inboxes.get(id)?.put(item);
    this.#inboxes.delete(id);
  }
}

/** @param {import("./endpoints.js").Call} call @param {import("./place.js").Place} place */
function creationOf({ endpoint, body }, place) {
  if (!place.isKept) return { type: "create", endpoint, body };
  const options = { ...body.stream_options, resumable: true };
  return { type: "create", endpoint, body: { ...body, request_id: place.requestId, stream_options: options } };
}

/** @param {import("./place.js").Place} place */
function returnOf({ name, numEvents }) {
  return { type: "resume", stream: name, after: numEvents };
}
