/** One answer while it is being made: from the request, over all waiting, to its end. */

import { ConnectionLost, Problem, sleep, untilReady } from "./server.js";

/** @typedef {import("./types.js").Body} Body */
/** @typedef {import("./types.js").Chunk} Chunk */
/** @typedef {import("./types.js").Message} Message */

/**
 * Why nothing comes yet.
 *
 * @typedef {{kind: "queue"}
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
  /** @type {Waiting | null} */
  waiting = { kind: "queue" };

  /**
   * @param {object} given
   * @param {Message} given.message  the answer; its text is added to
   * @param {Body} given.body
   * @param {import("./types.js").Transport} given.transport
   * @param {() => Promise<boolean>} given.askKey  whether there is another key now
   * @param {() => void} given.changed  called whenever message or `waiting` have changed
   * @param {() => void} given.save  called now and then, and at the end
   */
  constructor(given) {
    this.message = given.message;
    this.#given = given;
  }

  stop() {
    this.#abort.abort();
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
        const isRetried = message.content === before && !this.#abort.signal.aborted && (await this.#mend(error));
        if (isRetried) continue;
        this.#fail(error);
        break;
      }
    }
    clearInterval(heartbeat);
    this.waiting = null;
    this.#given.save();
    this.#given.changed();
  }

  async #stream() {
    const { message, body, transport, changed } = this.#given;
    const clock = new Clock(message.speed);
    this.waiting = { kind: "queue" };
    message.state = "streaming";
    message.problem = null;
    changed();
    /** @type {string | null} */
    let finish = null;
    for await (const chunk of transport(body, this.#abort.signal)) {
      const choice = chunk.choices[0];
      const text = choice?.delta?.content ?? "";
      if (text) {
        this.waiting = null;
        message.content += text;
      }
      if (choice?.logprobs?.content) addChances(message, choice.logprobs.content);
      finish = choice?.finish_reason ?? finish;
      message.speed = clock.tick(Boolean(text), chunk.usage?.completion_tokens);
      this.#saveSometimes();
      changed();
    }
    message.state = finish === "length" ? "length" : finish === "abort" ? "stopped" : "done";
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
      message.state = error instanceof ConnectionLost ? "lost" : "failed";
      message.problem = error instanceof Error ? error.message : String(error);
    }
  }
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

/** Times one stream, on top of what an answer that is continued took already. */
class Clock {
  #startedMs = performance.now();
  /** @type {{atMs: number, tokens: number} | null} */
  #first = null;
  #numTokens = 0;

  /** @param {import("./types.js").Speed | null} before */
  constructor(before) {
    this.before = before;
  }

  /**
   * @param {boolean} hasText
   * @param {number | undefined} numTokens  of this stream so far, where the server says so
   * @returns {import("./types.js").Speed | null}
   */
  tick(hasText, numTokens) {
    const now = performance.now();
    this.#numTokens = numTokens ?? this.#numTokens;
    if (!this.#first && hasText) this.#first = { atMs: now, tokens: this.#numTokens };
    if (!this.#first) return this.before;
    const gained = this.#numTokens - this.#first.tokens;
    return {
      firstTokenMs: this.before?.firstTokenMs ?? this.#first.atMs - this.#startedMs,
      numTokens: (this.before?.numTokens ?? 0) + this.#numTokens,
      timedTokens: (this.before?.timedTokens ?? 0) + gained,
      timedMs: (this.before?.timedMs ?? 0) + (gained > 0 ? now - this.#first.atMs : 0),
    };
  }
}
