/** One answer while it is being made: from the request, over all waiting, to its end. */

import { Clock } from "./clock.js";
import { Pacing } from "./pacing.js";
import { ConnectionLost, Problem, remove, sleep, untilReady } from "./server.js";
import { newId } from "./store.js";
import { streamPath } from "./transport_sse.js";

/** @typedef {import("./types.js").Body} Body */
/** @typedef {import("./types.js").Chunk} Chunk */
/** @typedef {import("./types.js").Message} Message */

/**
 * Why nothing comes yet.
 *
 * @typedef {{kind: "queue"}
 *   | {kind: "reconnecting"}
 *   | {kind: "busy", secondsLeft: number}
 *   | {kind: "unready", status: import("./server.js").Status}} Waiting
 */

const SAVE_MS = 1000;
const FIRST_RETRY_S = 2;
const LONGEST_RETRY_S = 60;

export class Answering {
  #given;
  #abort = new AbortController();
  /** @type {AbortController | null} */
  #pause = null;
  #savedMs = 0;
  #numTries = 0;
  #pacing = new Pacing();
  #requestId = newId();
  /** @type {Waiting | null} */
  waiting = { kind: "queue" };

  /**
   * @param {object} given
   * @param {Message} given.message  the answer; its text is added to
   * @param {Body | null} given.body  none if the answer is taken up where another page has left it
   * @param {import("./types.js").Transport} given.transport
   * @param {() => Promise<boolean>} given.askKey  whether there is another key now
   * @param {() => void} given.changed  called whenever message or `waiting` have changed
   * @param {() => void} given.save  called now and then, and at the end
   */
  constructor(given) {
    this.message = given.message;
    this.#given = given;
  }

  /**
   * Closing the connection would not end a stream that is kept, so it is ended by name too. Its request may reach the
   * server after that: a proxy that has it sends it on, whether or not somebody waits for its answer.
   */
  stop() {
    const { stream } = this.message;
    this.#abort.abort();
    if (stream) remove(streamPath(stream.id), stream.isKept);
  }

  /** Ends a pause before the next try. */
  retryNow() {
    this.#pause?.abort();
  }

  /** Runs to the end, which is in the message's state. */
  async run() {
    const { message } = this.#given;
    const before = message.content;
    // Other tabs take an answer that is not saved for long for one that nobody writes any more.
    const heartbeat = setInterval(() => this.#saveSometimes(), SAVE_MS);
    for (;;) {
      try {
        await this.#stream();
        break;
      } catch (error) {
        if (!this.#abort.signal.aborted && (await this.#goOn(error, message.content === before))) continue;
        this.#fail(error);
        break;
      }
    }
    clearInterval(heartbeat);
    this.waiting = null;
    message.stream = null;
    this.#given.save();
    this.#given.changed();
  }

  async #stream() {
    const { message, changed } = this.#given;
    const clock = new Clock(message.speed, message.stream?.numTokens ?? 0);
    if (this.waiting?.kind !== "reconnecting") this.waiting = { kind: "queue" };
    message.state = "streaming";
    message.problem = null;
    /** @type {string | null} */
    let finish = null;
    const events = this.#events();
    changed();
    for await (const { stream, number, chunk } of events) {
      this.#pacing.progress();
      // Text and mark change together, so that what is saved fits.
      const numTokens = chunk?.usage?.completion_tokens ?? message.stream?.numTokens ?? 0;
      message.stream = stream ? { id: stream, after: number, numTokens, isKept: true } : null;
      if (this.waiting?.kind === "reconnecting") this.waiting = message.content ? null : { kind: "queue" };
      const choice = chunk?.choices[0];
      const text = choice?.delta?.content ?? "";
      if (text) {
        this.waiting = null;
        message.content += text;
      }
      if (choice?.logprobs?.content) addChances(message, choice.logprobs.content);
      finish = choice?.finish_reason ?? finish;
      message.speed = clock.tick(Boolean(text), chunk?.usage?.completion_tokens);
      this.#saveSometimes();
      changed();
    }
    message.state = finish === "length" ? "length" : finish === "abort" ? "stopped" : "done";
  }

  /** @returns {AsyncGenerator<import("./types.js").StreamEvent, void>} of a new stream, or the rest of one */
  #events() {
    const { message, body, transport } = this.#given;
    const { signal } = this.#abort;
    if (message.stream) return transport.resume(message.stream, signal);
    if (!body) throw new ConnectionLost();
    // Its name is known before its answer comes, and if that never comes.
    message.stream = { id: `chatcmpl-${this.#requestId}`, after: 0, numTokens: 0, isKept: false };
    return transport.begin(body, this.#requestId, signal);
  }

  /**
   * @param {unknown} error
   * @param {boolean} isUntouched  nothing of the answer has come
   * @returns {Promise<boolean>} whether to try again, as the message's `stream` says
   */
  async #goOn(error, isUntouched) {
    const { message, body } = this.#given;
    const { stream } = message;
    const problem = error instanceof Problem ? error : null;
    if (problem?.code === "stream_exists" && stream) {
      // The request had come before, and what was lost was its answer.
      stream.isKept = true;
      return true;
    }
    if (stream?.isKept) {
      if (problem?.status === 401) return this.#mend(error);
      const mayBeThere = problem ? isTransient(problem) : error instanceof ConnectionLost;
      if (mayBeThere && this.#pacing.isWorthIt) return this.#comeBack(problem?.retryAfterS ?? 0);
    }
    if (problem) message.stream = null;
    if (!isUntouched || !body) return false;
    if (!problem || !isGone(problem)) return this.#mend(error);
    // A stream whose beginning is gone has used its name up.
    if (problem.code !== "stream_not_found") this.#requestId = newId();
    return true;
  }

  /** @param {number} retryAfterS  @returns {Promise<boolean>} false if it is stopped meanwhile */
  async #comeBack(retryAfterS) {
    this.#wait({ kind: "reconnecting" });
    return this.#pacing.pause(retryAfterS, this.#abort.signal).then(
      () => true,
      () => false,
    );
  }

  #saveSometimes() {
    const now = Date.now();
    if (now - this.#savedMs < SAVE_MS / 2) return;
    this.#savedMs = now;
    this.#given.save();
  }

  /**
   * Waits until another try makes sense.
   *
   * @param {unknown} error
   * @returns {Promise<boolean>} false if none does
   */
  async #mend(error) {
    try {
      if (error instanceof Problem && error.status === 401) return await this.#given.askKey();
      if (error instanceof Problem && error.isPassing && error.code !== "engine_unavailable") {
        await this.#sitOut(error.retryAfterS ?? Math.min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** this.#numTries));
      } else if (error instanceof ConnectionLost || (error instanceof Problem && error.isPassing)) {
        await this.#awaitServer();
      } else {
        return false;
      }
      this.#numTries += 1;
      return true;
    } catch {
      return false;
    }
  }

  /** @param {number} seconds */
  async #sitOut(seconds) {
    this.#pause = new AbortController();
    const either = AbortSignal.any([this.#abort.signal, this.#pause.signal]);
    for (let left = Math.max(1, Math.ceil(seconds)); left > 0 && !this.#pause.signal.aborted; left -= 1) {
      this.#wait({ kind: "busy", secondsLeft: left });
      await sleep(1000, either).catch(() => this.#abort.signal.throwIfAborted());
    }
  }

  async #awaitServer() {
    // At first it may still call itself ready, or not have begun to answer.
    this.#wait({ kind: "unready", status: { status: "unreachable" } });
    await sleep(1000, this.#abort.signal);
    await untilReady((status) => this.#wait({ kind: "unready", status }), this.#abort.signal);
  }

  /** @param {Waiting} waiting */
  #wait(waiting) {
    this.waiting = waiting;
    this.#given.changed();
  }

  /** @param {unknown} error */
  #fail(error) {
    const { message } = this.#given;
    if (this.#abort.signal.aborted) {
      message.state = "stopped";
    } else {
      const isLost = error instanceof ConnectionLost || (error instanceof Problem && isGone(error));
      message.state = isLost ? "lost" : "failed";
      message.problem = error instanceof Error ? error.message : String(error);
    }
  }
}

/** @param {Problem} problem  @returns {boolean} whether the stream may be there all the same */
function isTransient({ status, endsStream }) {
  return !endsStream && (status === 429 || (status >= 502 && status <= 504));
}

/** @param {Problem} problem  @returns {boolean} whether the stream cannot be come back to */
function isGone({ code }) {
  return code === "stream_not_found" || code === "events_gone" || code === "stream_taken";
}

/**
 * @param {Message} message
 * @param {{token: string, logprob: number, top_logprobs: {token: string, logprob: number}[]}[]} tokens
 */
function addChances(message, tokens) {
  message.chances ??= [];
  for (const { token, logprob, top_logprobs } of tokens) {
    message.chances.push({ token, logprob, top: top_logprobs.map((each) => ({ token: each.token, logprob: each.logprob })) });
  }
}
