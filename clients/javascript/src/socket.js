/** Many requests and streams over one WebSocket. */

import { AnswerTimeout, ClientError, ConnectionFailed, InvalidAnswer } from "./errors.js";
import { abortable, Life } from "./life.js";
import { Place } from "./place.js";
import { Inbox, Multiplexer } from "./socket_messages.js";

/** @typedef {import("./endpoints.js").Call} Call */

/** Opens a connection for the first request, and another one when that is lost. */
export class SocketTransport {
  #settings;
  #WebSocket;
  #check;
  /** @type {Connection | null} */
  #connection = null;
  #isClosed = false;

  /**
   * @param {import("./settings.js").Settings} settings
   * @param {typeof globalThis.WebSocket} WebSocket
   * @param {(signal: AbortSignal) => Promise<void>} check throws what the server says over HTTP if it lets nobody in
   */
  constructor(settings, WebSocket, check) {
    this.#settings = settings;
    this.#WebSocket = WebSocket;
    this.#check = check;
  }

  /** The answer in one piece. @param {Call} call @param {AbortSignal} signal */
  async answer(call, signal) {
    let answer = null;
    for await (const event of this.events(call, new Place(call, false), signal)) answer = event ?? answer;
    if (answer === null) throw new InvalidAnswer("the server ended a request without an answer");
    return answer;
  }

  /**
   * The JSON objects of an answer, and null behind the last one. Hot: one turn a chunk.
   *
   * @param {Call} call
   * @param {Place} place where the stream is; moves on with it
   * @param {AbortSignal} signal
   * @returns {AsyncGenerator<any, void, void>}
   */
  async *events(call, place, signal) {
    const connection = await this.#connected(signal);
    const life = new Life(signal);
    const inbox = new Inbox();
    const id = connection.begin(call, place, inbox);
    const late = () => new AnswerTimeout("the answer did not begin in time (timeouts.answer)");
    try {
      let limit = this.#settings.timeouts.answer;
      for (;;) {
        const item = await life.during(inbox.next(), limit, late);
        if (item instanceof ClientError) throw item;
        yield item;
        if (item === null) return;
        limit = null;
      }
    } finally {
      life.end();
      connection.leave(id);
    }
  }

  /** Closes the connection, and so ends all streams. */
  close() {
    this.#isClosed = true;
    this.#connection?.close();
  }

  /** @param {AbortSignal} signal */
  async #connected(signal) {
    if (this.#isClosed) throw new ClientError("the client is closed");
    if (this.#connection === null || this.#connection.isLost) {
      this.#connection = new Connection(this.#settings, this.#WebSocket);
    }
    const connection = this.#connection;
    try {
      await abortable(connection.opened, signal);
    } catch (error) {
      // A WebSocket does not tell why it was refused.
      if (error instanceof ConnectionFailed && !this.#isClosed) await this.#check(signal);
      throw error;
    }
    return connection;
  }
}

/**
 * One WebSocket. Messages wait for their streams without a limit: one that is read slowly does not hold up the
 * others, and no answer is longer than the model's context.
 */
class Connection {
  #socket;
  #streams = new Multiplexer();
  #lastHeard = Date.now();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  #idle;

  /** @param {import("./settings.js").Settings} settings @param {typeof globalThis.WebSocket} WebSocket */
  constructor(settings, WebSocket) {
    const { connect, idle } = settings.timeouts;
    this.#idle = idle;
    const socket = (this.#socket = new WebSocket(settings.socketUrl, settings.subprotocols));
    if (connect !== null) this.#timer = setTimeout(() => this.#lose("no WebSocket connection in time"), connect);
    /** Settles once it is known whether there is a connection. @type {Promise<void>} */
    this.opened = new Promise((resolve, reject) => {
      socket.addEventListener("open", () => {
        clearTimeout(this.#timer);
        resolve();
      });
      socket.addEventListener("close", ({ code, reason }) => {
        this.#lose(code === 1006 ? "the connection broke" : `the connection was closed (${code} ${reason})`, code);
        reject(new ConnectionFailed("no WebSocket connection"));
      });
      // What went wrong is not told. Where there was no connection yet, Node tells of no close either.
      socket.addEventListener("error", () => {
        if (socket.readyState !== socket.OPEN) this.#lose("the connection broke");
        reject(new ConnectionFailed("no WebSocket connection"));
      });
    });
    // Those who wait for it hear of it; there may be none any more.
    this.opened.catch(() => {});
    socket.addEventListener("message", ({ data }) => this.#take(data));
  }

  /** No more can be asked over it. */
  get isLost() {
    return this.#streams.isLost;
  }

  /** Asks for an answer; returns the id of its stream. @param {Call} call @param {Place} place @param {Inbox} inbox */
  begin(call, place, inbox) {
    if (!this.#streams.hasStreams) this.#watch();
    const { id, messages } = this.#streams.open(call, place, inbox);
    for (const message of messages) this.#send(message);
    return id;
  }

  /** Nobody wants the rest of a stream. @param {number} id */
  leave(id) {
    const cancel = this.#streams.leave(id);
    if (cancel !== null) this.#send(cancel);
    if (!this.#streams.hasStreams) clearTimeout(this.#timer);
  }

  /** Ends it and all its streams. */
  close() {
    // Streams that the server keeps would go on without the connection.
    const cancels = this.#streams.leaveAll();
    if (this.#socket.readyState === this.#socket.OPEN) for (const cancel of cancels) this.#send(cancel);
    this.#lose("the client was closed");
  }

  /** @param {string} message */
  #send(message) {
    // A socket that is closing throws nothing and sends nothing; its streams hear of it.
    this.#socket.send(message);
  }

  /** @param {unknown} data */
  #take(data) {
    this.#lastHeard = Date.now();
    try {
      this.#streams.take(typeof data === "string" ? data : "");
    } catch (error) {
      this.#lose(String(/** @type {Error} */ (error).message));
    }
  }

  /** @param {string} reason @param {number} [code] */
  #lose(reason, code) {
    // Closing a socket that is not open yet may come back here as its error.
    if (this.#streams.isLost) return;
    clearTimeout(this.#timer);
    this.#streams.lose(reason, code);
    this.#socket.close();
  }

  /** While streams live, the server is asked now and then whether it is there: its own pings cannot be seen. */
  #watch() {
    if (this.#idle === null) return;
    const idle = this.#idle;
    // Of streams that are over, and that nobody has left yet.
    clearTimeout(this.#timer);
    this.#lastHeard = Date.now();
    let isAsked = false;
    const look = () => {
      const silence = Date.now() - this.#lastHeard;
      if (silence < idle / 2) {
        isAsked = false;
        this.#timer = setTimeout(look, idle / 2 - silence);
      } else if (!isAsked) {
        // Also where this comes late, as on a page that was put aside: the server has not been silent for that.
        isAsked = true;
        this.#send(this.#streams.ping());
        this.#timer = setTimeout(look, idle / 2);
      } else if (silence < idle) {
        this.#timer = setTimeout(look, idle - silence);
      } else {
        this.#lose("nothing came for longer than timeouts.idle");
      }
    };
    this.#timer = setTimeout(look, idle / 2);
  }
}
